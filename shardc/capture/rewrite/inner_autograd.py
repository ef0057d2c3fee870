"""Write gradients that a model computes inside its forward as ops of the graph.

Examples: gradient penalties, physics-informed losses, forces of energies, inner steps.

    u = net(x); du, = torch.autograd.grad(u.sum(), x, create_graph=True); loss = du.square().mean()

    traced      du = shardc.gradient([sum], [x], [ones], True)[0]
    expanded    the ops of backward, node by node, in reverse: tanh_backward(g, tanh), mm(g, w), ...

Autograd's engine runs below the trace: its result would be a constant of the graph. So the graph has a
call of one op. When the graph is functional the call becomes ordinary ops: each op's own backward, as torch traces it.
Those are differentiable themselves, and are split like all others.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardc.capture.rewrite import replace_results
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.graph import is_call
from shardc.passes.canonical.decompose import plain
from shardc.torch_private import (
    FakeTensor,
    OpOverload,
    backward_decompositions,
    decompositions,
    traced_functional,
    traced_node,
)

aten = torch.ops.aten

torch.library.define(
    "shardc::gradient", "(Tensor[] outputs, Tensor[] inputs, Tensor[] weights, bool differentiable) -> Tensor[]"
)
torch.library.impl(
    "shardc::gradient",
    "CompositeExplicitAutograd",
    lambda outputs, inputs, weights, differentiable: [torch.empty_like(x) for x in inputs],
)
GRADIENT = torch.ops.shardc.gradient.default


# --- while a model is traced


def recorded(
    original: Callable[..., Any], outputs: Sequence[Any], *args: Any, **kwargs: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradient of every input, as autograd's engine does; None if nothing depends on it.

    On traced tensors it is one op in the graph.
    """
    if not any(isinstance(x, FakeTensor) for x in outputs):
        return original(outputs, *args, **kwargs)  # type: ignore[no-any-return]
    if kwargs.get("accumulate_grad"):
        fix = "use torch.autograd.grad(y, x, create_graph=True), which returns a tensor"
        raise source.of_call().error("backward() is called inside forward", fix)
    weights, _retain, differentiable, inputs, allow_unused = args
    sources = [traced_node(x) for x in outputs]
    if any(n is None for n in sources):
        fault = "a gradient is computed inside a transform of torch.func, where tracing does not see it"
        fix = "use torch.autograd.grad(y, x, create_graph=True) outside of vmap and the like"
        raise source.of_call().error(fault, fix)
    above = values.behind([n for n in sources if n is not None], _carries)
    used = [x for x in inputs if traced_node(x) in above]
    if len(used) < len(inputs) and not allow_unused:
        fault = "the result does not depend on the tensor with respect to which a gradient is taken"
        raise source.of_call().error(fault, "differentiate a result of that very tensor, or pass allow_unused=True")
    seeds = [torch.ones_like(y) if w is None else w for y, w in zip(outputs, weights, strict=True)]
    grads = iter(GRADIENT(list(outputs), used, seeds, bool(differentiable)) if used else [])
    return tuple(next(grads) if traced_node(x) in above else None for x in inputs)


def _carries(node: fx.Node) -> bool:
    """Return whether the gradient of a node's result flows on to its operands."""
    name = values.op_name(node.target)
    return name != "detach" and not name.endswith("_like") and not name.startswith("new_") and _real(node)


# --- in the functional graph


def expand(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """Replace, in place, every gradient by the ops that compute it. Returns {old node: new node}.

    Raises ShardcError for ops whose backward cannot be written down.
    """
    new_of: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        if node.target is GRADIENT:
            with graph.inserting_before(node):
                grads = _Backward(graph, node).run()
            new_of |= {user: grads[int(user.args[1])] for user in node.users}
            replace_results(node, grads)
    return new_of


class _Backward:
    """The reverse pass of one gradient, written before its node. at: that node."""

    def __init__(self, graph: fx.Graph, at: fx.Node) -> None:
        self.graph, self.at = graph, at
        before = itertools.takewhile(lambda n: n is not at, graph.nodes)
        self.same: dict[Any, fx.Node] = {
            key: n for n in before if (key := _key(n.target, n.args, n.kwargs)) is not None
        }
        self.found: dict[fx.Node, fx.Node] = {}  # value -> its gradient so far
        self.parts: dict[fx.Node, dict[int, fx.Node]] = {}  # op of several results -> index -> gradient

    def run(self) -> list[fx.Node]:
        outputs, inputs, weights, differentiable = self.at.args
        assert isinstance(outputs, Sequence) and isinstance(inputs, Sequence) and isinstance(weights, Sequence)  # noqa: PT018
        above = values.behind(outputs, _carries)  # type: ignore[arg-type]
        reached: set[fx.Node] = set(inputs)  # type: ignore[arg-type]
        order: list[fx.Node] = []
        for n in self.graph.nodes:
            if n is self.at:
                break
            if n in above and (n in reached or (_carries(n) and not reached.isdisjoint(n.all_input_nodes))):
                reached.add(n)
                order.append(n)
        for y, w in zip(outputs, weights, strict=True):
            self._add(y, w)  # type: ignore[arg-type]
        for n in reversed(order):
            if n.op == "call_function" and (n in self.found or n in self.parts):
                self._step(n, [x for x in n.all_input_nodes if x in reached and _real(x)])
        results = [self.found.get(x) or self._emit(aten.zeros_like.default, (x,), {}, x.meta["val"]) for x in inputs]  # type: ignore[arg-type,union-attr]
        return (
            results if differentiable else [self._emit(aten.detach.default, (g,), {}, g.meta["val"]) for g in results]
        )

    def _step(self, node: fx.Node, wanted: list[fx.Node]) -> None:
        """Add what one op's result passes on to its operands."""
        if not wanted:
            return
        if node.target is operator.getitem:
            parent, i = node.args
            parts = self.parts.setdefault(parent, {})  # type: ignore[arg-type]
            parts[i] = self._sum(parts.get(i), self.found[node])  # type: ignore[arg-type,index]
            return
        seeds = self.parts.get(node) or {0: self.found[node]}
        operands = node.all_input_nodes
        module = _traced(node, operands, wanted, sorted(seeds))
        if module is None:
            raise ShardcError(
                f"a gradient inside forward goes through {node.target}, whose backward has no form that does not depend"
                " on the mesh",
                where=source.place(node),
                fix="compute that part without the op, or under detach()",
            )
        inputs = iter([*(seeds[i] for i in sorted(seeds)), *operands])
        env: dict[fx.Node, Any] = {}
        for n in module.graph.nodes:
            if n.op == "placeholder":
                env[n] = next(inputs)
            elif n.op == "output":
                for x, g in zip(wanted, n.args[0], strict=True):
                    if g is not None:
                        self._add(x, env[g])
            elif n.op == "get_attr":
                x = getattr(module, str(n.target))
                env[n] = self._emit(aten.full.default, (list(x.shape), x.item()), {"dtype": x.dtype}, x)
            elif n.target is aten.detach.default:  # a saved value: part of the function, which is differentiated again
                env[n] = env[n.args[0]]
            else:
                args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: env[m])
                env[n] = self._emit(n.target, args, kwargs, n.meta["val"])

    def _add(self, x: fx.Node, gradient: fx.Node) -> None:
        self.found[x] = self._sum(self.found.get(x), gradient)

    def _sum(self, a: fx.Node | None, b: fx.Node) -> fx.Node:
        return b if a is None else self._emit(aten.add.Tensor, (a, b), {}, b.meta["val"])

    def _emit(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], val: Any) -> fx.Node:
        """Emit a call, or return the equal node of forward if it exists."""
        key = _key(target, args, kwargs)
        if key is not None and key in self.same:
            return self.same[key]
        new = self.graph.call_function(target, args, kwargs)
        new.meta = {k: v for k, v in self.at.meta.items() if k in ("stack_trace", "nn_module_stack")} | {"val": val}
        if key is not None:
            self.same[key] = new
        return new


def _traced(
    node: fx.Node, operands: Sequence[fx.Node], wanted: Sequence[fx.Node], results: Sequence[int]
) -> fx.GraphModule | None:
    """Return the graph of an op's backward, or None if it has none.

    It maps (gradients of some results, operands) to gradients of the wanted operands.
    """
    vals = node.meta["val"]
    outs = list(vals) if isinstance(vals, (tuple, list)) else [vals]

    def of(function: Callable[..., Any]) -> Callable[..., Any]:
        def backward(*tensors: Tensor) -> list[Tensor | None]:
            seeds, leaves = tensors[: len(results)], dict(zip(operands, tensors[len(results) :], strict=True))
            args, kwargs = plain(fx.map_arg((node.args, node.kwargs), lambda n: leaves[n]))
            with sdpa_kernel(SDPBackend.MATH):
                output = function(*args, **kwargs)
            ys = output if isinstance(output, (tuple, list)) else [output]
            return list(
                torch.autograd.grad(
                    [ys[i] for i in results], [leaves[x] for x in wanted], seeds, create_graph=True, allow_unused=True
                )
            )

        return backward

    types = [(tuple(outs[i].shape), outs[i].dtype, False) for i in results]
    types += [(tuple(x.meta["val"].shape), x.meta["val"].dtype, x in wanted) for x in operands]
    assert isinstance(node.target, OpOverload)
    best = None
    ways: list[Callable[..., Any]] = [node.target, *decompositions(node.target)]
    for function in ways:  # decompositions too, if the op's own backward stays an opaque backward op
        module = traced_functional(of(function), types, _apart())
        if module is not None and not any(_unfit(n, module) for n in module.graph.nodes):
            module.graph.eliminate_dead_code()
            if not any("_backward" in values.op_name(n.target) for n in module.graph.nodes if n.op == "call_function"):
                return module
            best = best or module
    return best


@cache
def _apart() -> dict[OpOverload, Callable[..., Any]]:
    return {**backward_decompositions(), aten.convolution_backward.default: convolution_backward}


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    _bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    _output_padding: Sequence[int],
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of a convolution's input, weight and bias, as convolutions."""
    n = x.dim() - 2
    stride, padding, dilation = (list(v) * n if len(v) == 1 else list(v) for v in (stride, padding, dilation))
    of_x = of_w = of_b = None
    if wanted[0]:
        kernel = [d * (k - 1) + 1 for d, k in zip(dilation, w.shape[2:], strict=True)]
        full = [(g - 1) * s - 2 * p + k for g, s, p, k in zip(grad.shape[2:], stride, padding, kernel, strict=True)]
        rest = [0] * n if transposed else [i - f for i, f in zip(x.shape[2:], full, strict=True)]
        of_x = aten.convolution.default(grad, w, None, stride, padding, dilation, not transposed, rest, groups)
    if wanted[1]:
        small, large = (x, grad) if transposed else (grad, x)  # w: [channels of small, channels of large / groups, ...]
        pairs = zip(large.chunk(groups, 1), small.chunk(groups, 1), strict=True)
        per_group = [
            aten.convolution.default(
                a.transpose(0, 1), b.transpose(0, 1), None, dilation, padding, stride, False, [0] * n, 1
            )
            for a, b in pairs
        ]
        of_w = torch.cat([m.transpose(0, 1) for m in per_group])
        for d, size in enumerate(w.shape[2:], 2):  # the strides left out the rest
            of_w = of_w.narrow(d, 0, size)
    if wanted[2]:
        of_b = grad.sum([0, *range(2, grad.dim())])
    return of_x, of_w, of_b


def _unfit(node: fx.Node, module: fx.GraphModule) -> bool:
    """Return whether a call is random or not an op, or a constant is more than a number."""
    if node.op == "get_attr":
        return bool(getattr(module, str(node.target)).numel() != 1)
    if not is_call(node):
        return False
    return not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags


def _real(node: fx.Node) -> bool:
    val = node.meta.get("val")
    return not isinstance(val, Tensor) or values.continuous(val)


def _key(target: Any, args: Any, kwargs: Any) -> Any:
    """Return a key that is equal for calls with equal results; None if results vary or it is no op."""
    if (
        not isinstance(target, OpOverload)
        or torch.Tag.nondeterministic_seeded in target.tags
        or target._schema.is_mutable
    ):
        return None
    return target, values.typed_key((args, kwargs), lambda n: n)
