"""Decompose ops without a rule by torch's own decompositions: the last resort before an op is refused.

    pixel_shuffle(x, 2)    ->    reshape(permute(reshape(x, [8, 4, 2, 2, 6, 6]), [0, 1, 4, 2, 5, 3]), [8, 4, 12, 12])

An op is decomposed by its entry in torch's table of decompositions, or, if it is composed of other ops by definition,
by its own code; one that `torch.library.custom_op` made of a Python function, by that function. The result goes
through the canonical pass again, so that it may be rewritten, have a rule, or be decomposed further.

torch's tables are made for inference and for compilers that differentiate first: some of them cut gradients or skip
special cases. So every decomposition is proven where it is used: on random operands it must have the op's own results
and gradients. Else it is not used. (The function of a custom op may have another gradient than the registered one.)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir import types as values
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Emit, Result
from shardc.rules.core import registry
from shardc.torch_private import OpOverload, body_of, decompositions, pytree, traced_functional

#: For calls on more elements than this, torch's decompositions are used without proof, which would cost more than the
#: compilation. Functions of custom ops are then proven on smaller operands.
PROOF_LIMIT = 1 << 18
#: Smaller operands have sizes above this one, a different one for each larger size.
SMALL = 8
#: Relative error of a decomposition's results and gradients in float64.
RTOL = 1e-8

#: Adds one call to the new graph, in canonical form: (target, args, kwargs, its type) -> its result in the new graph.
Add = Callable[[Any, tuple[Any, ...], dict[str, Any], Any], Any]


class NoDecomposition(Exception):
    """Some part of a decomposition has neither a rule nor a decomposition."""


def needed(op: OpOverload) -> bool:
    """Return whether an op has no rule, but a decomposition."""
    return registry.find(op) is None and bool(decompositions(op))


def decompose(emit: Emit, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], add: Add) -> Result | None:
    """Write a decomposition of `op(*args, **kwargs)` at the end of the graph, and return its result.

    Returns None, and leaves the graph unchanged, if there is none.
    """
    operands = list(dict.fromkeys(values.nodes_in((args, kwargs))))
    if not all(isinstance(n.meta.get("value"), Value) for n in operands):
        return None
    types: list[Value] = [n.meta["value"] for n in operands]
    marks = dict(zip(operands, range(len(operands)), strict=True))
    key = repr((str(op), fx.node.map_arg((args, kwargs), lambda n: f"%{marks[n]}"), types))
    if key not in emit.decomposed:
        emit.decomposed[key] = _traced(op, args, kwargs, operands, types)
    module, before = emit.decomposed[key], list(emit.graph.nodes)[-1]
    if module is None:
        return None
    try:
        result = _copy(module, operands, add)
        if any(
            n.op == "call_function" and n.target is not operator.getitem and registry.find(n.target) is None
            for n in _after(before)
        ):
            raise NoDecomposition
    except NoDecomposition:
        emit.decomposed[key] = None
        for node in reversed(list(_after(before))):
            emit.graph.erase_node(node)
        return None
    return result


def _after(node: fx.Node) -> Iterator[fx.Node]:
    while (node := node.next).op != "root":
        yield node


# --- tracing ----------------------------------------------------------------------------------------------------------


def _traced(
    op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], operands: list[fx.Node], types: list[Value]
) -> fx.GraphModule | None:
    """Return a proven graph of aten ops that computes the call from its operands; None if there is none."""

    def on_operands(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor) -> Any:
            values_by_node = dict(zip(operands, tensors, strict=True))
            a, k = plain(fx.node.map_arg((args, kwargs), lambda n: values_by_node[n]))
            result = function(*a, **k)
            return tuple(result) if isinstance(result, (tuple, list)) else result

        return call

    for way in decompositions(op):
        module = traced_functional(on_operands(way), [(v.shape, v.dtype, v.requires_grad) for v in types])
        if (
            module is not None
            and all(n.target is not op for n in module.graph.nodes)
            and _proven(on_operands(op), on_operands(way), module, types, everywhere=body_of(op) is not None)
        ):
            return module
    return None


def plain(x: Any) -> Any:
    """Return arguments with plain lists: some decompositions change lists, and fx's may not be changed."""
    if isinstance(x, (tuple, list)):
        return (tuple if isinstance(x, tuple) else list)(map(plain, x))
    return {k: plain(v) for k, v in x.items()} if isinstance(x, dict) else x


def _copy(module: fx.GraphModule, operands: list[fx.Node], add: Add) -> Result:
    """Add the calls of a decomposition one by one. Return its results in the new graph."""
    env: dict[fx.Node, Any] = {}
    remaining = iter(operands)
    for node in module.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(remaining)
        elif node.op == "get_attr":
            env[node] = _constant(getattr(module, node.target), add)
        elif node.op == "call_function":
            if node.target is operator.getitem and isinstance(results := env[node.args[0]], tuple):
                env[node] = results[node.args[1]]
            elif node.target is operator.getitem or isinstance(node.target, OpOverload):
                if node.target is not operator.getitem and not node.users:
                    continue  # checks for errors
                args, kwargs = fx.node.map_arg((tuple(node.args), dict(node.kwargs)), lambda n: env[n])
                env[node] = add(node.target, args, kwargs, values.typed(node.meta["val"], node.target, args, kwargs))
            else:
                raise NoDecomposition
        elif node.op == "output":
            out = fx.node.map_arg(node.args[0], lambda n: env[n])
            return tuple(out) if isinstance(out, (tuple, list)) else out
        else:
            raise NoDecomposition
    raise AssertionError("a graph without output")


def _constant(x: Any, add: Add) -> Any:
    if not isinstance(x, Tensor) or x.numel() != 1:
        raise NoDecomposition
    return add(torch.ops.aten.full.default, (list(x.shape), x.item()), {"dtype": x.dtype}, values.of_tensor(x))


# --- proof ------------------------------------------------------------------------------------------------------------


def _proven(
    op: Callable[..., Any], way: Callable[..., Any], module: fx.GraphModule, types: list[Value], *, everywhere: bool
) -> bool:
    """Return whether the decomposition has the op's results and gradients on random operands.

    everywhere: also above PROOF_LIMIT, on smaller operands.
    """
    if sum(torch.Size(v.shape).numel() for v in types) > PROOF_LIMIT:
        if not everywhere:
            return True
        types = _smaller(types)
        small = traced_functional(way, [(v.shape, v.dtype, v.requires_grad) for v in types])
        if small is None or [n.target for n in small.graph.nodes] != [n.target for n in module.graph.nodes]:
            return False
        module = small
    generator = torch.Generator().manual_seed(0)
    leaves = [_some(v, generator) for v in types]
    try:
        with torch.enable_grad():
            whole = tensors_in(op(*leaves))
            expected = _gradients(whole, leaves)
    except values.OUTSIDE_DOMAIN:
        return True  # the op is not defined on these numbers
    try:
        with torch.enable_grad():
            parts = tensors_in(module(*leaves))
            grads = _gradients(parts, leaves)
    except values.OUTSIDE_DOMAIN:
        return False
    pairs = [*zip(parts, whole, strict=False), *zip(grads, expected, strict=True)]
    return len(parts) == len(whole) and all(close(a, b) for a, b in pairs)


def _smaller(types: list[Value]) -> list[Value]:
    """Return the operands with small sizes in place of large ones, equal ones for equal ones."""
    sizes = sorted({n for v in types for n in v.shape if n > SMALL})
    small = {n: SMALL + i for i, n in enumerate(sizes, 1)}
    return [replace(v, shape=tuple(small.get(n, n) for n in v.shape)) for v in types]


def _some(v: Value, generator: torch.Generator) -> Tensor:
    """Return random numbers in (0.1, 0.9) or truth values; zeros for indices (always in range)."""
    if v.dtype == torch.bool:
        return torch.randint(2, v.shape, generator=generator).bool()
    if not values.continuous(v):
        return torch.zeros(v.shape, dtype=v.dtype)
    dtype = v.dtype if v.dtype.is_complex else torch.float64
    return (
        (0.1 + 0.8 * torch.rand(v.shape, dtype=dtype, generator=generator)).to(v.dtype).requires_grad_(v.requires_grad)
    )


def tensors_in(result: Any) -> list[Tensor]:
    """Return the tensors in nested results."""
    return [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]


def _gradients(results: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    inputs = [x for x in leaves if x.requires_grad]
    terms = [y for y in results if y.requires_grad]
    if not terms or not inputs:
        return [None] * len(inputs)
    # different weights for all elements: a plain sum would not notice results in another order
    weights = [torch.linspace(0.5, 1.5, y.numel(), dtype=torch.float64).reshape(y.shape).to(y.dtype) for y in terms]
    return list(torch.autograd.grad(terms, inputs, weights, allow_unused=True))


def close(a: Tensor | None, b: Tensor | None, rtol: float = 0.0) -> bool:
    """Return whether two results or gradients are equal, up to rounding (rtol; default: of their dtype).

    None: a gradient that is not there, which equals zeros.
    """
    if a is None or b is None:
        only = a if a is not None else b
        return only is None or not bool(only.any())
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not values.continuous(a):
        return torch.equal(a, b)
    rtol = rtol or max(RTOL, 100 * torch.finfo(a.dtype).eps)
    scale = float(b.detach().abs().nan_to_num(0.0, 0.0, 0.0).max()) if b.numel() else 0.0
    return torch.allclose(a, b, rtol=rtol, atol=rtol * max(scale, 1.0), equal_nan=True)
