"""Run one sample call: whole, and on every rank as a strategy says.

The partition pass writes the local graph of the one op. Operands are laid out as the strategy needs them; results and
gradients must be laid out as it promises.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import ShardcError
from shardc.ir.graph import values_of
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.types import continuous, full_op_name, of_tensor, typed
from shardc.passes.partition.local_program import LocalProgram
from shardc.rules.core.choices import Choices
from shardc.rules.core.op_call import Call, Operand, call_of
from shardc.rules.core.registry import NoSuchCallError, Rule, find
from shardc.rules.core.strategy import Strategy
from shardc.rules.core.user_ops import Sample
from shardc.runtime.rng import Rng
from shardc.verify.rules.compare import RTOL, differs, dual, gradients, on_ranks, run_nodes, spread

aten = torch.ops.aten

#: Ops with undefined elements: only shapes and dtypes are compared.
UNDEFINED = {aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default}
#: Errors of ops for operands that do not fit: a finding, not a fault of the check.
MISFIT = (RuntimeError, ValueError, IndexError, TypeError, AssertionError, ShardcError)
AXIS = "ax"
#: Numbers to try as padding, besides copies of real entries: poles and ends of domains are often here.
PADDED_BY = (0.0, 1.0, -1.0)


@dataclass(frozen=True)
class Finding:
    """A strategy that is wrong (from `prove`), or one that the rule could allow (from `too_strict`).

    strategy: the factor, partial or extra strategy. ranks: how many ranks (parts). what: which result or gradient
    differs, by how much. call: types and arguments of the call.
    """

    op: str
    strategy: str
    ranks: int
    what: str
    call: str = ""

    def __str__(self) -> str:
        on = f", {self.ranks} ranks" if self.ranks > 1 else ""
        text = f"{self.op}, {self.strategy}{on}: {self.what}"
        return f"{text} ({self.call})" if self.call else text


class UnfitError(Exception):
    """The rule raises on a call, or (NoCallError) the whole op does. Its text says which."""


class NoCallError(UnfitError):
    """The whole op refuses the arguments: this is not a call of it."""


def message_of(e: BaseException) -> str:
    """Return an exception as one line."""
    return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"


def call_text(call: Call) -> str:
    """Return arguments as a person writes them, tensors by type: `f64[4, 12], 1, keepdim=True`."""

    def one(x: Any) -> str:
        if isinstance(x, Operand):
            return str(call.operands[x.index])
        if isinstance(x, tuple | list):
            return f"[{', '.join(map(one, x))}]"
        return x if x in ("rng",) else repr(x)

    return ", ".join([*map(one, call.args), *(f"{k}={one(v)}" for k, v in call.kwargs)])


class _OneOp(LocalProgram):
    """Writer of the local graph of one call: operands in their layouts, results as the op returns them."""

    def write(self, node: fx.Node, layouts: Sequence[Layout]) -> fx.Graph:
        operand = iter(layouts)
        for n in node.graph.nodes:
            if n.op == "placeholder":
                self.placeholder(n, Layout() if n.meta.get("value") is None else next(operand))
        self.call(node)
        self.graph.output(tuple(next(iter(self.forms[node, i].values())) for i in range(len(values_of(node)))))
        return self.graph


@dataclass
class Case:
    """A sample call: a node of a global graph, its tensors, results, and gradients.

    weights: random, of the results; the gradients are those of the weighted sum.
    forward_only: why the op has no backward, if it has none: then only results are compared.
    """

    node: fx.Node
    choices: Choices
    tensors: list[Tensor]
    outputs: list[Tensor]
    weights: list[Tensor | None]
    grads: list[Tensor | None]
    rtol: float | None
    forward_only: str
    generator: torch.Generator

    @classmethod
    def of(cls, op: Any, sample: Sample, rule: Rule | None = None) -> Case:
        """Build the global graph of one call and run it whole. rule: replaces the registered one.

        Raises NoCallError if the op refuses the arguments, UnfitError if the rule does.
        """
        constants: list[Tensor] = []
        arguments = sample(constants)
        graph = fx.Graph()
        graph.placeholder("mesh")
        rng = graph.placeholder("rng")
        leaves: list[Tensor] = []

        def leaf(x: Any) -> Any:
            if isinstance(x, Tensor):
                leaves.append(x.clone().requires_grad_(continuous(x) and not any(x is c for c in constants)))
                return leaves[-1]
            return Rng(0) if isinstance(x, Rng) else x

        def placed(x: Any) -> Any:
            if isinstance(x, Tensor):
                node = graph.placeholder(f"x{len(graph.nodes) - 2}")
                node.meta["value"] = of_tensor(x, x.requires_grad)
                return node
            return rng if isinstance(x, Rng) else x

        args, kwargs = fx.node.map_aggregate(arguments, leaf)
        try:
            result = op(*args, **kwargs)
        except MISFIT as e:
            raise NoCallError(f"the sample is not a call of the op: {message_of(e)}") from e
        node = graph.call_function(op, *fx.node.map_aggregate((args, kwargs), placed))
        value = node.meta["value"] = typed(result, op, node.args, node.kwargs)
        for i, v in enumerate(value if isinstance(value, tuple) else ()):
            graph.call_function(operator.getitem, (node, i)).meta["value"] = v
        proven, call = rule or find(op), call_of(node)
        assert proven is not None, f"{op} has no rule"
        try:
            signature = proven.signature(call)
        except MISFIT as e:
            raise UnfitError(f"the rule does not fit the call: {message_of(e)} ({call_text(call)})") from e
        results = list(result) if isinstance(result, tuple | list) else [result]
        generator = torch.Generator().manual_seed(1)
        weights: list[Tensor | None] = [
            torch.randn(y.shape, dtype=y.dtype, generator=generator) if y.requires_grad else None for y in results
        ]
        forward_only = ""
        try:
            grads = gradients(results, weights, leaves)
        except RuntimeError as e:  # the op has no backward, or none for this call
            forward_only, weights, grads = message_of(e), [None] * len(results), [None] * len(leaves)
        rtol: float | None = max((RTOL[x.dtype] for x in (*leaves, *results) if x.dtype in RTOL), default=0.0)
        rtol = None if op in UNDEFINED else rtol
        operands, whole = ([x.detach() for x in each] for each in (leaves, results))
        choices = Choices(proven, call, signature)
        return cls(node, choices, operands, whole, weights, grads, rtol, forward_only, generator)

    def layouts(self, mesh: Mesh, strategies: dict[str, Strategy]) -> tuple[list[Layout], list[Layout], str]:
        """Return the layouts of operands and results, and why one cannot be, "" if all can."""
        call, both = self.choices.call, strategies.items()
        ins = [Layout.of({a: s.inputs[i] for a, s in both}, mesh) for i in range(len(call.operands))]
        outs = [Layout.of({a: s.outputs[i] for a, s in both}, mesh) for i in range(len(call.results))]
        for name, values, layouts in (("operand", call.operands, ins), ("result", call.results, outs)):
            for i, (layout, v) in enumerate(zip(layouts, values, strict=True)):
                if fault := layout.problem(v.shape, mesh):
                    return ins, outs, f"{name} {i} cannot be laid out: {fault}"
        return ins, outs, ""

    def wrong(self, mesh: Mesh, strategies: dict[str, Strategy], padding: float | None = None) -> str:
        """Run the call on every rank with these strategies; return what differs from the whole, "" if nothing.

        padding: the number that padding holds; None: copies of real entries.
        """
        ins, outs, fault = self.layouts(mesh, strategies)
        if fault:
            return fault
        self.node.meta["strategies"] = strategies
        operands = [
            spread(x, layout, mesh, self.generator, padding=padding if continuous(x) else None)
            for x, layout in zip(self.tensors, ins, strict=True)
        ]
        weights = [
            w if w is None else spread(w, dual(o), mesh, self.generator, filled=False)
            for w, o in zip(self.weights, outs, strict=True)
        ]

        def one_rank(rank: int, runtime: Any) -> list[Tensor | None]:
            leaves = [h[rank].requires_grad_(g is not None) for h, g in zip(operands, self.grads, strict=True)]
            results = run_nodes(graph, (runtime, Rng(0), *leaves))
            grads = gradients(results, [w if w is None else w[rank] for w in weights], leaves)
            return [*(y.detach() for y in results), *grads]

        try:
            graph = _OneOp(Program(mesh, self.node.graph, (), (), ()), mesh).write(self.node, ins)
            ranks = on_ranks(mesh, one_rank)
        except NoSuchCallError:
            return ""
        except MISFIT as e:
            return message_of(e)
        wants: list[tuple[str, Tensor | None, Layout]] = [
            *((f"result {i}", x, layout) for i, (x, layout) in enumerate(zip(self.outputs, outs, strict=True))),
            *((f"gradient of operand {i}", g, dual(ins[i])) for i, g in enumerate(self.grads)),
        ]
        for (name, want, layout), *parts in zip(wants, *ranks, strict=True):
            gradient = name.startswith("gradient")
            if want is not None and (fault := differs(parts, layout, mesh, want, self.rtol, gradient=gradient)):
                return f"{name}: {fault}"
        return ""

    def finding(self, strategy: str, ranks: int, what: str) -> Finding:
        return Finding(full_op_name(self.node.target), strategy, ranks, what, call_text(self.choices.call))

    def on_axis(self, n: int, strategy: Strategy) -> str:
        """Run `wrong` on one axis of n ranks; for a padded strategy with several numbers in the padding."""
        padded = any(isinstance(p, Shard) and p.padding for p in strategy.inputs)
        for number in (None, *PADDED_BY) if padded else (None,):
            if fault := self.wrong(Mesh(((AXIS, n),)), {AXIS: strategy}, number):
                return fault if number is None else f"{fault}, where padding holds {number:g}"
        return ""
