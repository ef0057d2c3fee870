"""Check lines that read parameters from buckets: which bucket, at which ZeRO stage, in which dtype.

    g = ops.gather_start([w, b], 'bucket0', mesh)    ZeRO 3: the parts of all ranks
    t = ops.gather_wait(g)
    w_whole = t[0]                                   holds what w does, whole on the data axis

If a parameter is rounded before it is gathered, all its readers in the model must round it in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import fx

from shardc.ir.graph import operands_of, producer_of
from shardc.ir.stored import Bucket, Rounded
from shardc.runtime import ops
from shardc.runtime.ops.fp8.recipe import RECIPES
from shardc.verify.static.statement import Claim

if TYPE_CHECKING:
    from shardc.verify.static.text import Text


def fetch(text: Text, node: fx.Node) -> bool:
    """Check a line that makes a bucket's parameters whole on the data axis. Return whether it is one."""
    first, name, *_ = (*node.args, None, None)
    if node.target is ops.gather_wait:
        if not isinstance(first, fx.Node) or first not in text.fetched:
            return False
        names = text.fetched[first]
    else:
        names = tuple(getattr(x, "name", "") for x in first) if isinstance(first, tuple | list) else ()
        bucket = _bucket(text, name)
        if bucket is None or bucket.params != names:
            members = ", ".join(bucket.params) if bucket else "none"
            text.wrong[node] = f"{name} has other parameters: {members}"
            return False
        if node.target is not (ops.gather_start if bucket.zero == 3 else ops.updated):
            text.wrong[node] = f"{name} is at zero {bucket.zero}"
            return False
    text.fetched[node] = names
    text.explained.add(node)
    return True


def _bucket(text: Text, name: Any) -> Bucket | None:
    return {f"bucket{i}": b for i, b in enumerate(text.model.program.buckets)}.get(name)


def parameter(text: Text, node: fx.Node) -> None:
    """Claim a line that reads one parameter of a bucket, in the bucket's compute dtype."""
    behind, index = producer_of(node)
    if behind.target is ops.gather_start:
        text.wrong[node] = "it reads a bucket that is still on its way"
        return
    started: Any = behind.args[0] if behind.target is ops.gather_wait else behind
    bucket = _bucket(text, started.args[1])
    assert bucket is not None
    source = started.args[0][index]
    for claim in text.given.get(source, ()):
        of = claim.of if bucket.compute is None else text.model.cast(claim.of, bucket.compute)
        if of is None:
            text.wrong[node] = f"the model has no cast of {source.name} to {bucket.compute}"
        elif not bucket.rounded:
            text.claim(node, replace(claim, of=of))
        else:
            _rounded(text, node, replace(claim, of=of), bucket.rounded[index])


def _rounded(text: Text, node: fx.Node, claim: Claim, how: Rounded) -> None:
    """Claim a parameter that is rounded before it is gathered.

    Every op of the model that reads it must round it in this way, or compute its scale (rounding changes no scale).
    """
    readers = [n for n in text.model.graph.nodes if n.op == "call_function" and claim.of in operands_of(n)]
    rounds = [n for n in readers if rounds_so(n, claim.of, how)]
    scales = [n for n in readers if n.target is ops.fp8_amax and tuple(n.args[1]) == how.granule]
    other = [n for n in readers if n not in rounds and n not in scales]
    split = {a for a, s in claim.layout.shards() if how.granule[s.dim] == 0}
    if other or not rounds:
        fault = f"{other[0].name} reads it otherwise" if other else "the model does not round it"
        text.wrong[node] = f"it is rounded to float8 before it is gathered, and {fault}"
    elif split != set(text.mesh.digits(*how.axes)):
        over = ", ".join(sorted(split)) or "no axis"
        text.wrong[node] = f"its scales are compared over {how.axes}, and what has one scale is split over {over}"
    else:
        text.claim(node, claim)


def rounds_so(reader: fx.Node, x: fx.Node, how: Rounded) -> bool:
    """Return whether an op of the model rounds x in this way, and does nothing else with it."""
    if reader.target is ops.fp8_experts:
        granule = (1, 0, 1) if reader.args[8] else (1, 1, 0)
        weight = x in reader.args[3:5] and sum(a is x for a in reader.args) == 1
        return weight and (how.format, how.granule) == ("e4m3", granule)
    if reader.target is ops.fp8_linear:
        recipe, transposed = RECIPES[str(reader.args[3])], len(reader.args) > 4 and bool(reader.args[4])
        return reader.args[1] is x is not reader.args[0] and (how.format, how.granule) == (
            "e4m3",
            recipe.of_weight(transposed),
        )
    return False
