"""Keep the backward of custom autograd Functions, as ordinary ops that rules know.

`torch.export` traces through the forward of a custom `autograd.Function` and forgets its backward. A backward is nearly
always linear in the incoming gradients g: gx = B(g), with B made from what forward saved. Its transpose B' (the
derivative of B, transposed) is a function from x to y, and the derivative of B'(x) is B. So for  y = F(x)  the graph
has

    y = with_gradient_of(F(detach(x)), B'(x))         the value of the first, the gradient of the second

F and B' are traced into aten ops; elementwise functions (GELU by hand, straight-through estimators, gradient reversal)
stay elementwise, matmuls stay matmuls, and placement splits them as it splits everything else. If the backward is
just the derivative of the forward, which is tested on numbers, the graph has only the forward.

A part of the backward that does not depend on g (hidden auxiliary losses: gx = g + c) is a term of the
loss, <c, x>, whose value is left out. It is a term only if the loss uses a result, as autograd calls no backward else.

A gradient that is always zero is zeros, not None: an optimizer decays such weights. So B' depends on every x that has a
gradient, if only by a sum of it times 0, over the dims that x does not share with y: rows stay apart.

A backward that is not linear in g, such as clipping, cannot be kept: it is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.graph import operands_of
from shardc.passes.canonical.decompose import close, tensors_in
from shardc.rules.core import registry
from shardc.rules.core.op_call import call_of
from shardc.runtime.ops.torch_library import with_gradient_of
from shardc.runtime.state.quantized import from_inner_tensors, inner
from shardc.torch_private import FakeTensor, pytree, traced_on

#: Most elements of a call that is run to test whether its backward is the derivative of its forward.
TRY_LIMIT = 1 << 20
#: Largest relative difference, in float64, from the derivative of the forward.
SAME = 1e-13

Untraced = Callable[..., Any]


class Context:
    """The `ctx` of `forward` and `backward`: keeps what they save, as torch's does."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.quiet: tuple[Any, ...] = ()
        self.materializes = True

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Ignore the call: it is for forward-mode derivatives, which training does not use."""

    def mark_dirty(self, *tensors: Any) -> None:
        """Ignore the call: the captured graph is functional and returns what was changed in place."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.quiet = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Record whether a result that the loss does not use has a gradient of zeros.

        While a backward is studied, it gets zeros in any case: it is linear in them.
        """
        self.materializes = value


def forward(cls: type[torch.autograd.Function], ctx: Context, args: Sequence[Any]) -> Any:
    """Run the forward of a Function, written in either of torch's two ways."""
    if cls.setup_context is torch.autograd.Function.setup_context:
        return cls.forward(ctx, *args)
    result = cls.forward(*args)
    cls.setup_context(ctx, tuple(args), result)
    return result


@dataclass
class Study:
    """One call, traced.

    module: (x..., dx..., g...) -> [y...], [B'(dx) for every y], [the part of every gx without g], or None each.
    outputs: what forward returned. own: the backward is the forward's derivative. missing: for every y, the
    places of the x that get zeros, not None, if only y leads to the loss.
    """

    module: fx.GraphModule
    outputs: Any
    own: bool
    missing: list[list[int]]


@dataclass(frozen=True)
class SideTerm:
    """A loss term of which only the gradient counts, if the loss uses one of `results` (autograd nodes)."""

    value: Tensor
    results: tuple[Any, ...]


def with_side_terms(loss: Tensor, side: Sequence[SideTerm]) -> Tensor:
    """Add the gradient of side terms to the loss. Returns the loss itself if there are none."""
    todo, seen = [loss.grad_fn], set[Any]()
    while side and todo:
        if (node := todo.pop()) is not None and node not in seen:
            seen.add(node)
            todo += [before for before, _ in node.next_functions]
    terms = [term.value for term in side if not seen.isdisjoint(term.results)]
    return with_gradient_of(loss.detach(), sum(terms, loss)) if terms else loss


def kept(cls: type[torch.autograd.Function], args: tuple[Any, ...], side: list[SideTerm], untraced: Untraced) -> Any:
    """Run `cls.apply(*args)` in a trace; return its results, with the Function's own gradient.

    side: receives the additional terms of the loss (see the module's docstring). untraced: calls a function outside of
    the trace. Raises ShardcError, with the model's line, for a backward that is not linear, or cannot be traced.
    """
    call = _Call(cls, args)
    if not torch.is_grad_enabled() or not any(call.needs):
        with torch.no_grad():
            return forward(cls, call.fresh(), args)
    study: Study = untraced(call.study)
    constants: Sequence[Tensor | None] = [None] * len(call.tensors)
    if study.own:
        outs = paths = tensors_in(forward(cls, call.fresh(), args))
    else:
        inputs = [*(x.detach() for x in call.tensors), *call.tensors]
        gradients = (torch.zeros(y.shape, dtype=y.dtype, device=y.device) for y in call.outs)  # for their shapes only
        outs, paths, constants = _Replay(study.module).run(*inputs, *gradients)
    results = [
        _with_gradient(y, path, [call.tensors[i] for i in missing])
        for y, path, missing in zip(outs, paths, study.missing, strict=True)
    ]
    nodes = tuple(y.grad_fn for y in results if y.grad_fn is not None)
    side += [
        SideTerm((c.detach() * x).sum(), nodes) for x, c in zip(call.tensors, constants, strict=True) if c is not None
    ]
    values = iter(results)
    return pytree.tree_map(lambda y: next(values) if isinstance(y, Tensor) else y, study.outputs)


def _with_gradient(y: Tensor, path: Tensor | None, missing: Sequence[Tensor]) -> Tensor:
    """Return the value of y with the gradient of path; `missing` get zeros."""
    for x in missing:
        pairs = zip(x.shape, y.shape, strict=False) if x.grad_fn is not None else ()  # a parameter has no rows
        shared = sum(1 for _ in itertools.takewhile(lambda sizes: sizes[0] == sizes[1], pairs))
        real = x.real if x.is_complex() else x
        rows = real.sum(tuple(range(shared, x.dim()))) if shared < x.dim() else real
        rows = rows.reshape(*rows.shape, *[1] * (y.dim() - shared))
        zero = rows.to(y.dtype).expand(y.shape) * 0  # times 0 before the sum in backward, which could overflow
        path = zero if path is None else path + zero
    if path is y:
        return y
    return y.detach() if path is None else with_gradient_of(y.detach(), path)


class _Replay(fx.Interpreter):
    """Runs a traced graph on tensors that are being traced. Tensors that are no arguments get no gradient."""

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        value = super().get_attr(target, args, kwargs)
        return value.detach() if isinstance(value, Tensor) and value.requires_grad else value


class _Call:
    """One call of a custom Function: its tensors, and the ways to run it on others.

    A quantised argument (shardc.runtime.state.quantized) counts as its inner tensors, which get no gradient.
    """

    def __init__(self, cls: type[torch.autograd.Function], args: tuple[Any, ...]) -> None:
        self.cls, self.args, self.at = cls, args, source.of_call()
        self.flat, self.spec = pytree.tree_flatten(args)
        self.parts = [inner(a) if isinstance(a, Tensor) else [] for a in self.flat]
        self.tensors: list[Tensor] = [x for parts in self.parts for x in parts]
        # autograd sees only the tensors that are arguments themselves, not those in lists
        tops = [id(a) for a in args if isinstance(a, Tensor)]
        self.needs = [x.requires_grad and id(x) in tops for x in self.tensors]
        self.needs_input_grad = tuple(isinstance(a, Tensor) and inner(a)[0] is a and a.requires_grad for a in args)
        self.outs: list[Tensor] = []

    def fresh(self) -> Context:
        return Context(self.needs_input_grad)

    def refuse(self, what: str, fix: str) -> ShardcError:
        return ShardcError(f"the custom autograd function {self.cls.__name__} {what}", where=self.at.line, fix=fix)

    # --- runs

    def run(self, xs: Sequence[Tensor]) -> tuple[Context, Any]:
        """Run forward without gradients on other tensors."""
        ctx = self.fresh()
        with torch.no_grad():
            return ctx, forward(self.cls, ctx, self.with_tensors(xs))

    def with_tensors(self, xs: Sequence[Tensor]) -> Any:
        """Return the arguments with other tensors in place of theirs."""
        rest, flat = iter(xs), list[Any]()
        for a, parts in zip(self.flat, self.parts, strict=True):
            some = list(itertools.islice(rest, len(parts)))
            flat.append(a if not parts else some[0] if parts[0] is a else from_inner_tensors(a, some))
        return pytree.tree_unflatten(flat, self.spec)

    def back(self, ctx: Context, gs: Sequence[Tensor]) -> list[Tensor | None]:
        """Run backward; return the gradient of every tensor, in its shape and dtype, or None."""
        # without `once_differentiable`: it is differentiated here
        function = getattr(self.cls.backward, "__wrapped__", self.cls.backward)
        returned = function(ctx, *gs)
        returned = returned if isinstance(returned, tuple) else (returned,)
        by_id = {id(a): g for a, g in zip(self.args, returned, strict=False) if isinstance(a, Tensor)}
        grads: list[Tensor | None] = []
        for x, need in zip(self.tensors, self.needs, strict=True):
            g = by_id.get(id(x)) if need else None
            if g is not None and g.shape != x.shape:
                g = g.sum_to_size(x.shape) if g.dim() >= x.dim() else g.expand(x.shape)
            grads.append(g)
        return grads

    # --- the study, outside of the trace

    def study(self) -> Study:
        xs = [x.detach() for x in self.tensors]
        _, outputs = self.run(xs)
        self.outs = tensors_in(outputs)
        module = traced_on(
            self.traced, [*xs, *(torch.empty_like(x) for x in xs), *(torch.zeros_like(y) for y in self.outs)]
        )
        n = len(xs)
        gs = module.graph.find_nodes(op="placeholder")[2 * n :]
        output: Any = module.graph.output_node()
        ys, paths, grads = output.args[0]
        # a gradient that autograd cannot follow, or a derivative of the backward that still depends on the gradients
        linear = not any(
            g is not None and uses(g, gs) and not smooth for g, smooth in zip(grads, self.differentiable, strict=True)
        )
        linear = linear and not any(t is not None and uses(t, gs) for t in paths)
        zero = zero_with(gs, module)
        constants = [g if g is not None and not zero(g) else None for g in grads]
        heavy = any(map(works, values.behind(n for n in paths if n is not None) - values.behind(ys)))
        missing = self.missing(paths, module.graph.find_nodes(op="placeholder")[n : 2 * n])
        if (not linear or heavy) and self.is_derivative():
            return Study(module, outputs, True, missing)
        if not linear:
            raise self.refuse(
                "has a backward that is not linear in the gradients it gets, and is not the derivative of its forward",
                "clip or change gradients in the optimizer's step, or write the forward in ordinary torch ops",
            )
        output.args = ((ys, paths, constants),)
        module.graph.eliminate_dead_code()
        module.recompile()
        return Study(module, outputs, False, missing)

    def missing(self, paths: Sequence[fx.Node | None], dxs: Sequence[fx.Node]) -> list[list[int]]:
        """Return for every result the places of tensors whose gradient its path does not contain."""
        reached = [[path is not None and uses(path, [dx]) for dx in dxs] for path in paths]
        places = [i for i, given in enumerate(self.given) if given]
        if not self.materializes:  # where a result is not used, a backward may return None
            places = [i for i in places if not any(of_x[i] for of_x in reached)]
        return [
            [i for i in places if smooth and not of_x[i]] for of_x, smooth in zip(reached, self.smooth, strict=True)
        ]

    def traced(self, *tensors: Tensor) -> Any:
        """Compute (x..., dx..., g...) -> (y..., B'(dx)..., B(g)...)."""
        n = len(self.tensors)
        xs, dxs, gs = tensors[:n], tensors[n : 2 * n], tensors[2 * n :]
        ctx, outputs = self.run(xs)
        ys = tensors_in(outputs)
        smooth = [values.continuous(y) and not any(y is q for q in ctx.quiet) for y in ys]
        with torch.enable_grad():
            leaves = [g.detach().requires_grad_() if s else g for g, s in zip(gs, smooth, strict=True)]
            grads = self.back(ctx, leaves)
            self.smooth, self.materializes = smooth, ctx.materializes
            self.given = [g is not None for g in grads]
            self.differentiable = [g is not None and g.requires_grad for g in grads]
            pairs = [(g, dx.to(g.dtype)) for g, dx in zip(grads, dxs, strict=True) if g is not None and g.requires_grad]
            inputs = [g for g, s in zip(leaves, smooth, strict=True) if s]
            back = _gradients(pairs, inputs)
        paths = [next(back, None) if s else None for s in smooth]
        return ys, paths, [None if g is None else g.detach() for g in grads]

    def is_derivative(self) -> bool:
        """Return whether backward is autograd's derivative of the forward, on random float64 numbers.

        Numbers are normal, with 0 for integers, or small and positive, with 1. Numbers outside of the forward's domain
        do not count, nor those with a zero gradient, as with a mask of zeros.
        """
        if sum(x.numel() for x in (*self.tensors, *self.outs)) > TRY_LIMIT:
            return False
        for near in (False, True):
            generator = torch.Generator().manual_seed(0)
            xs = [_random_values(x, generator, near) for x in self.tensors]
            try:
                with torch.random.fork_rng(devices=[]):
                    written, derived = self.both_gradients(xs, generator)
            except Exception:  # the user's code, on random numbers: no result
                continue
            if all(bool(g.isfinite().all() and g.any()) for g in (*written, *derived) if g is not None):
                return all(close(a, b, SAME) for a, b in zip(written, derived, strict=True))
        return False

    def both_gradients(
        self, xs: list[Tensor], generator: torch.Generator
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return gradients for random incoming ones: by backward, and by autograd through the forward."""
        torch.manual_seed(0)  # forward may draw numbers
        ctx, outputs = self.run(xs)
        ys = tensors_in(outputs)
        gs = [_random_values(y, generator).to(y.dtype) if values.continuous(y) else y for y in ys]
        with torch.no_grad():
            written = self.back(ctx, gs)
        torch.manual_seed(0)
        with torch.enable_grad():
            leaves = [x.requires_grad_(need) for x, need in zip(xs, self.needs, strict=True)]
            again = tensors_in(forward(self.cls, self.fresh(), self.with_tensors(leaves)))
        pairs = [(y, g) for y, g in zip(again, gs, strict=True) if y.requires_grad]
        grads = _gradients(pairs, [x for x in leaves if x.requires_grad])
        return written, [next(grads, None) if x.requires_grad else None for x in leaves]


def _gradients(pairs: Sequence[tuple[Tensor, Tensor]], inputs: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """Compute the gradient of each input. pairs: results, each with its gradient."""
    if not pairs:
        return iter(())
    results, seeds = zip(*pairs, strict=True)
    return iter(torch.autograd.grad(results, inputs, seeds, allow_unused=True))


def _random_values(x: Tensor, generator: torch.Generator, near: bool = False) -> Tensor:
    """Make random float64 or complex128 numbers, random bools, zeros for indices.

    near: small and positive numbers, and ones.
    """
    if x.dtype == torch.bool:
        return torch.randint(2, x.shape, generator=generator).bool()
    if not values.continuous(x):
        return torch.full(x.shape, int(near), dtype=x.dtype)
    numbers = torch.randn(x.shape, generator=generator, dtype=torch.complex128 if x.is_complex() else torch.float64)
    return numbers if not near else 0.1 * (numbers if x.is_complex() else numbers.abs())


# --- what values of a traced graph depend on --------------------------------------------------------------------------


def uses(node: fx.Node, sources: Sequence[fx.Node]) -> bool:
    """Return whether a value depends on the numbers (not just on the shapes) of any of the sources."""
    return not values.behind([node], lambda n: not _shape_only(n)).isdisjoint(sources)


def _shape_only(node: fx.Node) -> bool:
    name = values.op_name(node.target)
    return node.op == "call_function" and (name.endswith("_like") or name.startswith("new_"))


def zero_with(sources: Sequence[fx.Node], module: fx.GraphModule) -> Callable[[fx.Node], bool]:
    """Return a test: whether a value of a traced graph is zero if the sources are. Linear ops map zeros to zero."""
    for node in module.graph.nodes:
        val = node.meta.get("val")
        node.meta["value"] = values.of_tensor(val) if isinstance(val, Tensor) else None

    @cache
    def zero(node: fx.Node) -> bool:
        if node in sources:
            return True
        if node.op == "get_attr":
            value = getattr(module, str(node.target), None)
            return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not bool(value.any())
        if node.op != "call_function" or node.meta["value"] is None:
            return False
        name = values.op_name(node.target)
        if name in ("zeros", "zeros_like", "new_zeros"):
            return True
        if name in ("full", "full_like", "new_full"):
            return isinstance(node.args[-1], (int, float)) and node.args[-1] == 0
        rule = registry.find(node.target)
        operands = operands_of(node)
        if rule is None or any(n.meta["value"] is None for n in operands):
            return False
        return any(
            group and all(i < len(operands) and zero(operands[i]) for i in group)
            for group in rule.groups(call_of(node))
        )

    return zero


def works(node: fx.Node) -> bool:
    """Return whether an op's work counts (matmuls, convolutions, attention)."""
    rule = registry.find(node.target) if node.op == "call_function" else None
    return rule is not None and rule.flops is not None
