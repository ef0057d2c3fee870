"""Rules of rounding to float8 (rounding), with one scale per granule.

A granule is a block size for each dim; 0 is a whole dim. Blocks stay whole: their number is split. A whole dim may be
split: then the largest values of its parts are compared over ranks (one number a granule), so the scale is that of one
device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch import fx

from shardc.features.fp8.experts import fp8_experts, fp8_experts_apply
from shardc.features.fp8.products import fp8_linear
from shardc.features.fp8.recipe import RECIPES
from shardc.features.fp8.rounding import fp8_amax, fp8_grad, fp8_round, granules
from shardc.ir.metadata import Collective
from shardc.ir.placement import REPLICATE, Layout, Partial, Placement, Shard
from shardc.rules import experts
from shardc.rules.core.notation import Dim, Operand, Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import LocalCall, rule
from shardc.rules.core.strategy import Strategy
from shardc.runtime import ops
from shardc.runtime.ops.experts.activation import read

#: The kind of the strategy by which granules are split.
GRANULE = "granule"
_CAUSE = "the scale of values that are split"


def _operand(shape: Sequence[int], granule: Sequence[int]) -> tuple[Operand, dict[str, int]]:
    """Return a tensor's factors: for dim i the number of blocks di, and the block gi if larger than one."""
    dims: list[Dim] = []
    sizes: dict[str, int] = {}
    for i, (n, g) in enumerate(zip(shape, granule, strict=True)):
        sizes[f"d{i}"] = n // max(g, 1)
        if g > 1:
            sizes[f"g{i}"] = g
        dims.append((f"d{i}", f"g{i}") if g > 1 else (f"d{i}",))
    return tuple(dims), sizes


def _inside(sizes: dict[str, int]) -> frozenset[str]:
    return frozenset(f for f in sizes if f.startswith("g"))


def _scales(granule: Sequence[int]) -> Operand:
    """Return the factors of the scales: one number per granule."""
    return tuple(() if g == 0 else (f"d{i}",) for i, g in enumerate(granule))


def amax(call: Call) -> Signature:
    granule = call.arg("granule")
    x, sizes = _operand(call.operands[0].shape, granule)
    whole = frozenset(f"d{i}" for i, g in enumerate(granule) if g == 0)
    return Signature((x,), (_scales(granule),), sizes, frozenset(), whole | _inside(sizes))


def parts(call: Call, n: int, available: Sequence[frozenset[Placement]]) -> Iterable[Strategy]:
    """Yield strategies that split a granule over ranks."""
    x, granule = call.operands[0].shape, call.arg("granule")
    for p in sorted(available[0], key=repr):
        if isinstance(p, Shard) and granule[p.dim] == 0 and p.padded(x[p.dim]) % (p.split * n) == 0:
            yield Strategy(GRANULE, (p,), (REPLICATE,))


def local_amax(call: LocalCall) -> fx.Node:
    """Compute the largest value of the rank's part, then of all parts."""
    split = call.axes(GRANULE)
    granule, x = call.call.arg("granule"), call.args[0]
    for s in call.inputs[0].paddings():
        if granule[s.dim] == 0:
            x = call.without_padding(x, 0, s.dim, 0.0)
    if not split:
        return call.same(x=x)
    value = call.call.results[0]
    items = {a: Partial("max") for a in split}
    layout = Layout.of({**dict(call.outputs[0].items), **items}, call.mesh)
    local = call.emit(fp8_amax, (x, granule), {}, value=replace(value, layout=layout))
    axes = call.mesh.merge(split)
    whole = replace(value, layout=call.outputs[0])
    collective = Collective("all_reduce", "none", axes, whole.nbytes(call.mesh), _CAUSE)
    return call.emit(ops.all_reduce_max, (local, call.mesh_node, axes), {}, value=whole, collective=collective)


def rounded(call: Call) -> Signature:
    granule = call.arg("granule")
    x, sizes = _operand(call.operands[0].shape, granule)
    return Signature((x, _scales(granule)), (x,), sizes, frozenset(), _inside(sizes))


def gradient(call: Call) -> Signature:
    """Split blocks of y and scales of the weight's rows, where they exist: [out, 1] or [1, out]."""
    granule = call.arg("granule")
    y, sizes = _operand(call.operands[0].shape, granule)
    last = (f"d{len(granule) - 1}",)
    rows = tuple(tuple(last if n > 1 else () for n in v.shape) for v in call.operands[1:])
    return Signature((y, *rows), (y,), sizes, frozenset(), _inside(sizes))


def local_gradient(call: LocalCall) -> fx.Node:
    """Make backward compare the largest values of ranks if granules of the gradient are split."""
    granule, y = call.call.arg("granule"), call.call.operands[0]
    split = [a for i, g in enumerate(granule) if g == 0 for a in call.split(f"d{i}")]
    if not split or not y.requires_grad:
        return call.same()
    axes = call.mesh.merge([a for a in call.mesh.names if a in split])
    nbytes = math.prod(granules(call.local(0), granule)) * max(y.dtype.itemsize, 4)
    collective = Collective("none", "all_reduce", axes, nbytes, _CAUSE)
    return call.emit(fp8_grad, (*call.args[:4], call.mesh_node, axes), {}, collective=collective)


def product(call: Call) -> Signature:
    """Split `... k, n k, [granules of the weight] -> ... n`; transposed: the weight is [k, n]."""
    x, weight = (v.shape for v in call.operands[:2])
    recipe, transposed = RECIPES[call.arg("recipe")], bool(call.arg("transposed"))
    names = ("k", "n") if transposed else ("n", "k")
    dims: dict[str, Dim] = {}
    sizes = {f"e{i}": n for i, n in enumerate(x[:-1])}
    for name, size, g in zip(names, weight, recipe.of_weight(transposed), strict=True):
        dims[name] = (name, f"g{name}") if g > 1 else (name,)
        sizes |= {name: size // max(g, 1)} | ({f"g{name}": g} if g > 1 else {})
    scales = tuple(() if g == 0 else (name,) for name, g in zip(names, recipe.of_weight(transposed), strict=True))
    rows = tuple((f"e{i}",) for i in range(len(x) - 1))
    ins = (*rows, dims["k"]), tuple(dims[name] for name in names), scales
    return Signature(ins, ((*rows, dims["n"]),), sizes, frozenset(dims["k"]), _inside(sizes))


def product_flops(call: Call) -> int:
    return 2 * math.prod(call.results[0].shape) * call.operands[0].shape[-1]


def rounded_experts(call: Call) -> Signature:
    """Split experts whose products round rows; keep `o` whole, and do not pad `i`.

    An activation may turn padding in `i` into a nonzero, which could be the largest value of a row.
    """
    dims = experts.dims_of(call)
    without = ((experts.UP, "h!"), (experts.DOWN, "i+"))
    ups, downs = (["" if d == left_out else d for d in dims[at]] for at, left_out in without)
    parts = read(call.arg("activation")).parts
    return replace(call.fit([*dims, ups, downs], [["t", "o!"]], p=parts), unpadded=frozenset("i"))


def local_experts(call: LocalCall) -> fx.Node:
    """Write experts as core does. If the activation's columns are split, ranks compare the largest values of rows."""
    over = call.mesh.merge(call.split("i"))
    if not over:
        return experts.local(call, fp8_experts_apply)
    index = call.local(experts.INDEX)
    scales = Collective("all_reduce", "all_reduce", over, 4 * math.prod(index), _CAUSE)
    return experts.local(call, fp8_experts_apply, (call.mesh_node, over), collective=scales)


rule(fp8_amax, amax, local=local_amax, extra=parts)
rule(fp8_round, rounded)
rule(fp8_grad, gradient, linear="0", local=local_gradient, whole_grad=True)
rule(fp8_linear, product, flops=product_flops, whole_grad=True)
rule(fp8_experts, rounded_experts, local=local_experts, extra=experts.exchange, flops=experts.flops, whole_grad=True)
