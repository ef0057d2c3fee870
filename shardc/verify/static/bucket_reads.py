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

from shardc.ir.graph import producer_of
from shardc.ir.stored import Bucket
from shardc.optional import needed
from shardc.runtime import ops

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
            needed("fp8", "proof", "rounded")(text, node, replace(claim, of=of), bucket.rounded[index])
