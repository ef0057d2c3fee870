"""Lay tensors out as ranks hold them, run graphs on them, and compare with the whole.

Layouts have duals. The gradient of a value has the dual layout:

    shard       a shard in the same way             replicated    every rank's gradient is all of it
    partial     every rank's gradient is all of it  partial grad  the ranks' gradients sum to it

So one function lays values out, and one compares them, in both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.conversions import BY_OP
from shardc.ir.mesh import Mesh
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, Layout, Partial
from shardc.ir.types import continuous
from shardc.passes.joint.derivatives.transposed import CONVERTED
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.ops.with_backward import with_backward

#: Relative error allowed by the coarsest floating dtype of a call: ranks add in another order than the whole op, and
#: round in between. A few roundings of a dozen summands: 2**-52, 2**-23, 2**-10, 2**-7 each.
RTOL = {
    torch.float64: 1e-10,
    torch.complex128: 1e-10,
    torch.float32: 1e-5,
    torch.complex64: 1e-5,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}


def partial_axes(layout: Layout) -> list[str]:
    return [a for a, p in layout.items if isinstance(p, Partial)]


def dual(layout: Layout) -> Layout:
    """Return the layout of the gradient of a value."""
    return Layout(
        tuple((a, PARTIAL if p == PARTIAL_GRAD else p) for a, p in layout.items if not isinstance(p, Partial))
    )


def summands(x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    """Return n random tensors of the shape and dtype of x that sum to it."""
    if continuous(x):
        some = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(n - 1)]
    else:
        some = [torch.randint(-9, 9, x.shape, generator=generator).to(x.dtype) for _ in range(n - 1)]
    return [*some, x - sum(some)] if some else [x]


def spread(
    x: Tensor,
    layout: Layout,
    mesh: Mesh,
    generator: torch.Generator,
    *,
    filled: bool = True,
    padding: float | None = None,
) -> list[Tensor]:
    """Return a global tensor as each rank holds it: its part, a random summand, or all of it.

    Padding holds numbers that must not count: copies of real entries, or `padding`; zeros if not `filled`.
    """
    axes = partial_axes(layout)
    terms = summands(x, len(mesh.group(0, axes)), generator)
    local_terms = [terms[mesh.group(rank, axes).index(rank)] for rank in range(mesh.world)]
    parts = [layout.local(m, mesh, mesh.coords(rank), copies=filled).clone() for rank, m in enumerate(local_terms)]
    if padding is not None and layout.paddings():
        for part, gap in zip(parts, gaps(x, layout, mesh), strict=True):
            part.masked_fill_(gap, padding)
    return parts


def gaps(x: Tensor, layout: Layout, mesh: Mesh) -> list[Tensor]:
    """Return for each rank which elements of its part are padding (bool)."""
    real = torch.ones_like(x, dtype=torch.bool)
    return [~layout.local(real, mesh, mesh.coords(rank)) for rank in range(mesh.world)]


def differs(
    parts: Sequence[Tensor],
    layout: Layout,
    mesh: Mesh,
    expected: Tensor,
    rtol: float | None,
    *,
    gradient: bool = False,
) -> str:
    """Return how parts differ from those of `expected`; "" if they do not. rtol None: compare types only."""
    padding = gaps(expected, layout, mesh) if layout.paddings() and not gradient else None
    axes = partial_axes(layout)
    for rank in range(mesh.world):
        group = mesh.group(rank, axes)
        if rank != group[0]:  # the sum of its group is already compared
            continue
        value, *others = (parts[r] for r in group)
        if any(term.shape != value.shape for term in others):
            return f"rank {rank} and its group have parts of different shapes"
        value = sum(others, value)
        want = layout.local(expected, mesh, mesh.coords(rank))
        if padding is not None:  # a result's padding may be anything finite, a gradient's is zero
            gap = padding[rank]
            if rtol is not None and bool(expected.isfinite().all()) and not bool(value[gap].isfinite().all()):
                return f"rank {rank} has padding that is not finite"
            value = value.masked_fill(gap, 0)
        if value.shape != want.shape or value.dtype != want.dtype:
            return f"rank {rank} has {value.dtype}{list(value.shape)}, not {want.dtype}{list(want.shape)}"
        if rtol is None or value.numel() == 0 or torch.equal(value, want):
            continue
        wide = want if continuous(want) else want.double()
        scale = float(wide[wide.isfinite()].abs().max()) if continuous(want) and bool(wide.isfinite().any()) else 0.0
        if not torch.allclose(value, want, rtol=0, atol=rtol * max(scale, 1.0), equal_nan=True):
            return f"rank {rank} differs by {float((value.to(wide.dtype) - wide).abs().max()):.1e}"
    return ""


def gradients(
    results: Sequence[Tensor], weights: Sequence[Tensor | None], leaves: Sequence[Tensor]
) -> list[Tensor | None]:
    """Return gradients of the weighted sum of results: zeros for unused leaves, None if not required."""
    terms = [(y, w) for y, w in zip(results, weights, strict=True) if w is not None and y.requires_grad]
    inputs = [x for x in leaves if x.requires_grad]
    grads: Sequence[Tensor | None] = [None] * len(inputs)
    if terms and inputs:
        grads = torch.autograd.grad([y for y, _ in terms], inputs, [w for _, w in terms], allow_unused=True)
    rest = iter(grads)
    return [(torch.zeros_like(x) if (g := next(rest)) is None else g) if x.requires_grad else None for x in leaves]


def _converted(x: Tensor, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """Run a conversion inside a rank's call."""
    return getattr(ops, op)(x, *args, **kwargs), (op, args, kwargs)


def _transposed(_: Any, g: Tensor, op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor]:
    """Run the backward that its row of the table names."""
    return (g if BY_OP[op].backward == "identity" else ops.transpose(op, g, *args, **kwargs),)


def run_nodes(graph: fx.Graph, arguments: Iterable[Any]) -> tuple[Tensor, ...]:
    """Run a graph node by node, as `fx.Interpreter` does, in a fifth of its time."""
    values: dict[fx.Node, Any] = {}
    rest = iter(arguments)
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(rest)
        elif node.op == "output":
            break
        else:
            args = fx.node.map_arg(node.args, values.__getitem__)
            kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
            if (op := CONVERTED.get(node.target)) is not None:
                values[node] = with_backward(_converted, _transposed, args[0], op, args[1:], kwargs)
            else:
                values[node] = node.target(*args, **kwargs)
    return fx.node.map_arg(node.args[0], values.__getitem__)


class NeedsOthersError(Exception):
    """A rank that runs alone came to a collective."""


class _ByItself(LoopbackMesh):
    """A rank that knows its coordinates and can reach no other rank."""

    def __init__(self, layout: Mesh, rank: int) -> None:
        super().__init__(layout, rank, self)  # type: ignore[arg-type]

    def exchange(self, *_: Any) -> Any:
        raise NeedsOthersError

    send = post = receive = exchange


def on_ranks(mesh: Mesh, one_rank: Callable[[int, Any], Any]) -> list[Any]:
    """Run one_rank(rank, runtime mesh) on every rank: in turn, or in threads if they communicate."""
    try:
        return [one_rank(rank, _ByItself(mesh, rank)) for rank in range(mesh.world)]
    except NeedsOthersError:
        return loopback(mesh, lambda runtime: one_rank(runtime.rank, runtime))
