"""Say which lines of a rank's program are rounded values, their bytes, and products of these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx

from shardc.features.fp8.experts import fp8_experts
from shardc.features.fp8.products import fp8_linear
from shardc.features.fp8.recipe import RECIPES, along
from shardc.features.fp8.rounding import fp8_amax, fp8_pack, fp8_round
from shardc.ir.graph import operands_of
from shardc.ir.stored import Rounded
from shardc.verify.static.same_values import frozen
from shardc.verify.static.statement import Claim

if TYPE_CHECKING:
    from shardc.verify.static.text import Text


def _same_call(args: Any, one: Mapping[fx.Node, fx.Node]) -> Any:
    """Return the arguments of `fp8_linear` without the bytes of its input: the same for each form of it."""
    x, weight, amax, recipe, transposed, kept = (*args, None, None)[:6]
    if not isinstance(kept, fx.Node) or kept.target is not fp8_pack:
        return args
    of: Any
    granule: Any
    of, format, granule = kept.args[:3]
    read = "e4m3", along(RECIPES[recipe].x, len(granule))
    if frozen(of, one) is not frozen(x, one) or (format, tuple(granule)) != read:
        return args  # other bytes
    return (kept if len(kept.args) > 3 else x, weight, amax, recipe, *([transposed] if transposed else []))


def _packed(text: Text, node: fx.Node, claim: Claim) -> None:
    """Explain a line that packs a rounded value. With four arguments it is the model's `fp8_round`: see AS_BYTES."""
    if len(node.args) > 3:
        return
    if claim.of.target is fp8_round and frozen(node.args[1:], {}) == frozen(claim.of.args[2:], {}):
        text.explained.add(node)
    else:
        text.unfit[node] = "it makes 8 bits of what is not rounded to them"


#: What follows from a claim of an op's operand.
FOLLOWED = {fp8_pack: _packed}
#: A call of the model -> the call with the same result as bytes.
AS_BYTES = {fp8_round: lambda x, amax, format, granule: (fp8_pack, (x, format, granule, amax))}
#: Arguments that are equal for calls with one value, by op.
SAME_CALL = {fp8_linear: _same_call}
#: Ops whose results are bytes, with what they are; ops that read them as such, with the place of this argument.
BYTES, READS_BYTES = {fp8_pack: "numbers of 8 bits"}, {fp8_linear: 5}


def rounded(text: Text, node: fx.Node, claim: Claim, how: Rounded) -> None:
    """Claim a parameter that is rounded before it is gathered.

    Every op of the model that reads it must round it in this way, or compute its scale (rounding changes no scale).
    """
    readers = [n for n in text.model.graph.nodes if n.op == "call_function" and claim.of in operands_of(n)]
    rounds = [n for n in readers if _rounds_so(n, claim.of, how)]
    scales = [n for n in readers if n.target is fp8_amax and tuple(n.args[1]) == how.granule]
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


def _rounds_so(reader: fx.Node, x: fx.Node, how: Rounded) -> bool:
    """Return whether an op of the model rounds x in this way, and does nothing else with it.

    The compiler reads the scales' lines instead (passes.how_rounded): a proof does not trust it.
    """
    if reader.target is fp8_experts:
        granule = (1, 0, 1) if reader.args[8] else (1, 1, 0)
        weight = x in reader.args[3:5] and sum(a is x for a in reader.args) == 1
        return weight and (how.format, how.granule) == ("e4m3", granule)
    if reader.target is fp8_linear:
        of_weight = RECIPES[str(reader.args[3])].of_weight(len(reader.args) > 4 and bool(reader.args[4]))
        return reader.args[1] is x is not reader.args[0] and (how.format, how.granule) == ("e4m3", of_weight)
    return False
