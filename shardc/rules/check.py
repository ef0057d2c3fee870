"""Proof of rules (DESIGN 2.2): run an op per part on every rank, and compare outputs and gradients with the whole op.

A sample call is run whole, and then once for every strategy that its rule allows: the partition pass writes the local graph of
the one op, operands are laid out as the strategy wants them, results must be laid out as it promises. Layouts have duals: where
a value is

    shard       its gradient is cut alike           replicated  every rank's gradient is all of it
    partial     every rank's gradient is all of it  varying     the ranks' gradients sum to it

so one function lays values out, and one compares them, in both directions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, fx

from shardc.calls import call_of, values
from shardc.mesh import Mesh
from shardc.passes.partition import _Writer
from shardc.placement import PARTIAL, VARYING, Layout, Partial, Placement
from shardc.program import Program
from shardc.rules.core import Choices, Rule, Strategy, find, needs_vary
from shardc.rules.notation import Operand, Signature
from shardc.rules.samples import RNG, Sample, Tensors
from shardc.runtime.loopback import loopback
from shardc.runtime.rng import Rng
from shardc.values import of_tensor, typed

aten = torch.ops.aten

#: Relative error allowed by the coarsest floating dtype of a call: ranks add up in another order than the whole op.
RTOL = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.float32: 1e-5, torch.complex64: 1e-5}
#: Their elements are not defined: only shapes and dtypes are compared.
UNDEFINED = {aten.empty_like.default, aten.empty.memory_format, aten.new_empty.default}
#: They do not check that their operands fit together: run on what does not, they may take the process with them.
TRUSTING = {aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input, aten.as_strided.default, aten.put.default}
#: What ops raise for operands that do not fit: a finding, not a fault of the check.
MISFIT = (RuntimeError, ValueError, IndexError, TypeError, AssertionError)
AXIS = "ax"


@dataclass(frozen=True)
class Finding:
    """From `prove`: a strategy that does not give what the whole op gives. From `too_strict`: one that the rule could allow."""

    op: str
    strategy: str
    ranks: int
    what: str

    def __str__(self) -> str:
        return f"{self.op}, {self.strategy}, {self.ranks} ranks: {self.what}"


class Anything(frozenset[Placement]):
    """Holds every placement: `extra` strategies are tried whatever they ask for."""

    def __contains__(self, _: object) -> bool:
        return True


class _OneOp(_Writer):
    """Writes the local graph of a single call: operands as laid out, the results as they come."""

    def write(self, node: fx.Node, layouts: Sequence[Layout]) -> fx.Graph:
        operand = iter(layouts)
        for n in node.graph.nodes:
            if n.op == "placeholder":
                self._placeholder(n, Layout() if n.meta.get("value") is None else next(operand))
        self._call(node)
        self.graph.output(tuple(next(iter(self.made[node, i].values())) for i in range(len(values(node)))))
        self.graph.lint()
        return self.graph


# --- laying out and comparing -----------------------------------------------------------------------------------------


def partial_axes(layout: Layout) -> list[str]:
    return [a for a, p in layout.items if isinstance(p, Partial)]


def dual(layout: Layout) -> Layout:
    """How the gradient of a value lies."""
    return Layout(tuple((a, PARTIAL if p == VARYING else p) for a, p in layout.items if not isinstance(p, Partial)))


def continuous(x: Tensor) -> bool:
    """Whether a gradient may flow through it."""
    return x.is_floating_point() or x.is_complex()


def summands(x: Tensor, n: int, generator: torch.Generator) -> list[Tensor]:
    """n random tensors of the shape and dtype of x that sum to it."""
    if continuous(x):
        some = [torch.randn(x.shape, dtype=x.dtype, generator=generator) for _ in range(n - 1)]
    else:
        some = [torch.randint(-9, 9, x.shape, generator=generator).to(x.dtype) for _ in range(n - 1)]
    return [*some, x - sum(some)] if some else [x]


def spread(x: Tensor, layout: Layout, mesh: Mesh, generator: torch.Generator, *, filled: bool = True) -> list[Tensor]:
    """A global tensor as every rank holds it: its part, or a random summand, or all of it. Padding holds numbers that must not count."""
    axes = partial_axes(layout)
    terms = summands(x, len(mesh.group(0, axes)), generator)
    mine = [terms[mesh.group(rank, axes).index(rank)] for rank in range(mesh.world)]
    return [layout.local(m, mesh, mesh.coords(rank), copies=filled).clone() for rank, m in enumerate(mine)]


def differs(parts: Sequence[Tensor], layout: Layout, mesh: Mesh, expected: Tensor, rtol: float | None, *, gradient: bool = False) -> str:
    """What is wrong with parts that should make up `expected`; "" if nothing. rtol None: only shapes and dtypes count."""
    axes = partial_axes(layout)
    for rank in range(mesh.world):
        found, *more = (parts[r] for r in mesh.group(rank, axes))
        if any(term.shape != found.shape for term in more):
            return f"rank {rank} and its group have parts of different shapes"
        for term in more:
            found = found + term
        want = layout.local(expected, mesh, mesh.coords(rank))
        if not gradient and layout.paddings():  # a result's padding may be anything, a gradient's is zero
            found = found.masked_fill(layout.local(torch.ones_like(expected, dtype=torch.bool), mesh, mesh.coords(rank)).logical_not(), 0)
        if found.shape != want.shape or found.dtype != want.dtype:
            return f"rank {rank} has {found.dtype}{list(found.shape)}, not {want.dtype}{list(want.shape)}"
        if rtol is None or found.numel() == 0:
            continue
        scale = float(want[want.isfinite()].abs().max()) if continuous(want) and bool(want.isfinite().any()) else 0.0
        if not torch.allclose(found, want, rtol=0, atol=rtol * max(scale, 1.0), equal_nan=True):
            return f"rank {rank} differs by {float((found - want if continuous(want) else found.double() - want.double()).abs().max()):.1e}"
    return ""


def gradients(results: Sequence[Tensor], weights: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Gradients of the weighted sum of results, zeros where a leaf has no part in it; None for leaves without gradient."""
    terms = [(y * w).sum().real for y, w in zip(results, weights, strict=True) if w is not None and y.requires_grad]
    wanted = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(torch.stack(terms).sum(), wanted, allow_unused=True) if terms and wanted else [None] * len(wanted)
    each = iter(found)
    return [(torch.zeros_like(x) if (g := next(each)) is None else g) if x.requires_grad else None for x in leaves]


def on_ranks(mesh: Mesh, graph: fx.Graph, one_rank: Callable[[int, Any], Any]) -> list[Any]:
    """one_rank(rank, runtime mesh) on every rank; without threads where the graph never asks the mesh."""
    if not next(iter(graph.nodes)).users:
        return [one_rank(rank, None) for rank in range(mesh.world)]
    return loopback(mesh, lambda runtime: one_rank(runtime.rank, runtime))


# --- one call ---------------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """A sample call: a node of a global graph, its tensors, its results, and its gradients under random weights of the results."""

    node: fx.Node
    choices: Choices
    tensors: list[Tensor]
    outputs: list[Tensor]
    weights: list[Tensor | None]
    grads: list[Tensor | None]
    rtol: float | None
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(1))

    @property
    def name(self) -> str:
        target: Any = self.node.target
        return str(target) if hasattr(target, "_schema") else str(target.__name__)

    @classmethod
    def of(cls, op: Any, sample: Sample, seed: int = 0, rule: Rule | None = None) -> Case:
        """Build the global graph of one call and run it whole. rule: instead of the registered one."""
        tensors = Tensors(seed)
        arguments = sample(tensors)
        graph = fx.Graph()
        graph.placeholder("mesh")
        rng = graph.placeholder("rng")
        leaves: list[Tensor] = []

        def leaf(x: Any) -> Any:
            if isinstance(x, Tensor):
                leaves.append(x.clone().requires_grad_(continuous(x) and not any(x is c for c in tensors.constants)))
                return leaves[-1]
            return Rng(seed) if x is RNG else x

        def placed(x: Any) -> Any:
            if isinstance(x, Tensor):
                node = graph.placeholder(f"x{len(graph.nodes) - 2}")
                node.meta["value"] = of_tensor(x, x.requires_grad)
                return node
            return rng if isinstance(x, Rng) else x

        args, kwargs = fx.node.map_aggregate(arguments, leaf)
        made = op(*args, **kwargs)
        node = graph.call_function(op, *fx.node.map_aggregate((args, kwargs), placed))
        value = node.meta["value"] = typed(made, op, node.args, node.kwargs)
        for i, v in enumerate(value if isinstance(value, tuple) else ()):
            graph.call_function(operator.getitem, (node, i)).meta["value"] = v
        found, call = rule or find(op), call_of(node)
        assert found is not None, f"{op} has no rule"
        results = list(made) if isinstance(made, tuple | list) else [made]
        generator = torch.Generator().manual_seed(seed + 1)
        weights = [torch.randn(y.shape, dtype=y.dtype, generator=generator) if y.requires_grad else None for y in results]
        grads = gradients(results, weights, leaves)
        rtol = max((RTOL[x.dtype] for x in (*leaves, *results) if x.dtype in RTOL), default=0.0)
        return cls(
            node, Choices(found, call, found.signature(call)), [x.detach() for x in leaves], [y.detach() for y in results],
            weights, grads, None if op in UNDEFINED else rtol, generator,
        )  # fmt: skip

    def wrong(self, mesh: Mesh, strategies: dict[str, Strategy]) -> str:
        """Run the call on every rank as the strategies say and compare. Returns what is wrong, "" if nothing."""
        ins, outs = (
            [Layout.of({a: (s.inputs, s.outputs)[side][i] for a, s in strategies.items()}, mesh) for i in range(count)]
            for side, count in ((0, len(self.tensors)), (1, len(self.outputs)))
        )
        self.node.meta["strategies"] = strategies
        held = [spread(x, layout, mesh, self.generator) for x, layout in zip(self.tensors, ins, strict=True)]
        weights = [w if w is None else spread(w, dual(o), mesh, self.generator, filled=False) for w, o in zip(self.weights, outs, strict=True)]

        def one_rank(rank: int, runtime: Any) -> tuple[list[Tensor], list[Tensor | None]]:
            leaves = [h[rank].requires_grad_(g is not None) for h, g in zip(held, self.grads, strict=True)]
            made = fx.Interpreter(torch.nn.Module(), graph=graph).run(runtime, Rng(0), *leaves)
            return [y.detach() for y in made], gradients(made, [w if w is None else w[rank] for w in weights], leaves)

        try:
            graph = _OneOp(Program(mesh, self.node.graph, (), (), ()), mesh).write(self.node, ins)
            ranks = on_ranks(mesh, graph, one_rank)
        except MISFIT as e:
            return f"{type(e).__name__}: {(str(e).splitlines() or [''])[0]}"
        for i, (want, layout) in enumerate(zip(self.outputs, outs, strict=True)):
            if what := differs([outputs[i] for outputs, _ in ranks], layout, mesh, want, self.rtol):
                return f"result {i}: {what}"
        for i, (grad, layout) in enumerate(zip(self.grads, ins, strict=True)):
            if grad is not None and (what := differs([grads[i] for _, grads in ranks], dual(layout), mesh, grad, self.rtol, gradient=True)):
                return f"gradient of operand {i}: {what}"
        return ""

    def on_axis(self, n: int, strategy: Strategy) -> str:
        return self.wrong(Mesh(((AXIS, n),)), {AXIS: strategy})


def summable(strategy: Strategy, choices: Choices) -> bool:
    """Whether everything that would be partial can be added up: truth values cannot."""
    pairs = [*zip(strategy.inputs, choices.call.operands, strict=True), *zip(strategy.outputs, choices.call.results, strict=True)]
    return not any(p == PARTIAL and v.dtype == torch.bool for p, v in pairs)


def strategies(choices: Choices, n: int) -> Iterator[Strategy]:
    """Everything that a rule allows on an axis of n ranks: every factor at every digit and in sections, partials, extras."""
    yield choices.replicate()
    yield choices.varying()
    yield from (s for s in choices.partials() if summable(s, choices))
    for factor in choices.signature.splittable():
        size = choices.signature.sizes[factor]
        digits = [d for d in range(1, size + 1) if size % (d * n) == 0]
        tried = [choices.split(factor, d, n) for d in digits]
        if digits and size > n:
            tried.append(choices.split(factor, 1, n, (n, size - n)))
        if size % n and size > 1:
            tried.append(choices.split(factor, 1, n, (), -size % n))
        yield from (s for s in tried if s is not None)
    if choices.rule.extra:
        yield from choices.rule.extra(choices.call, n, [Anything()] * len(choices.call.operands))


def prove(op: Any, sample: Sample, n: int, seed: int = 0, rule: Rule | None = None) -> list[Finding]:
    """Every strategy of the op's rule on n ranks against the whole op. rule: instead of the registered one."""
    case = Case.of(op, sample, seed, rule)
    found = ((s, case.on_axis(n, s)) for s in dict.fromkeys(strategies(case.choices, n)))
    return [Finding(case.name, str(s), n, what) for s, what in found if what]


def prove_pairs(op: Any, sample: Sample, sizes: tuple[int, int] = (2, 2), seed: int = 0) -> list[Finding]:
    """Two strategies at once, on two axes: what a rule's `local` and the digits of shared dims have to get right."""
    case = Case.of(op, sample, seed)
    mesh = Mesh((("a", sizes[0]), ("b", sizes[1])))
    findings = []
    for first in dict.fromkeys(strategies(case.choices, sizes[0])):
        for second in dict.fromkeys(strategies(case.choices, sizes[1])):
            if fits(case.choices, mesh, first, second) and (what := case.wrong(mesh, {"a": first, "b": second})):
                findings.append(Finding(case.name, f"{first} with {second}", mesh.world, what))
    return findings


def fits(choices: Choices, mesh: Mesh, first: Strategy, second: Strategy) -> bool:
    """Whether two strategies take disjoint digits of every operand and result."""
    sides = ((first.inputs, second.inputs, choices.call.operands), (first.outputs, second.outputs, choices.call.results))
    return not any(
        Layout.of({"a": p, "b": q}, mesh).fits(v.shape, mesh) for ps, qs, vs in sides for p, q, v in zip(ps, qs, vs, strict=True)
    )


# --- rules that could be looser ---------------------------------------------------------------------------------------


def loosened(sig: Signature) -> Iterator[tuple[str, str, Signature]]:
    """(what would be allowed, the factor, the signature that allows it) for every factor that is whole."""
    before = {f for o in sig.inputs for dim in o for f in dim}
    for f in sorted(sig.whole):
        if sig.sizes[f] < 2 or f.startswith("#"):
            continue
        rest = sig.whole - {f}
        yield f"split {f}", f, replace(sig, whole=rest)
        if not all(sig.places(o, f) for o in sig.outputs):
            yield f"split {f}, sum", f, replace(sig, whole=rest, summed=sig.summed | {f})
        for g in sorted(rest - before):  # a dim of operands and one of results that might be the same
            if f in before and sig.sizes[g] == sig.sizes[f]:
                yield f"split {f} = {g}", f, replace(sig, whole=rest - {g}, outputs=tuple(_renamed(o, g, f) for o in sig.outputs))


def _renamed(operand: Operand, old: str, new: str) -> Operand:
    return tuple(tuple(new if f == old else f for f in dim) for dim in operand)


def unlisted(choices: Choices) -> Iterator[tuple[str, Rule]]:
    """(what would be allowed, a rule with only it) for groups of operands that might be jointly linear but are not listed."""
    reals = [i for i, v in enumerate(choices.call.operands) if needs_vary(v)]
    known = {frozenset(g) for g in choices.rule.groups(choices.call)}
    for size in range(1, len(reals) + 1):
        for group in combinations(reals, size):
            if frozenset(group) not in known and all(v.dtype.is_floating_point for v in choices.call.results):
                yield f"linear in {' '.join(map(str, group))}", replace(choices.rule, linear=(group,), linear_of=None)


def too_strict(op: Any, sample: Sample, seed: int = 0, rule: Rule | None = None) -> list[Finding]:
    """What a rule forbids though it comes out right on two and on three ranks, as far as sizes divide. rule: as in `prove`."""
    if op in UNDEFINED or op in TRUSTING:
        return []
    case = Case.of(op, sample, seed, rule)
    call, sig = case.choices.call, case.choices.signature
    trials: list[tuple[str, list[tuple[int, Strategy | None]]]] = []
    for what, factor, looser in loosened(sig):
        choices = Choices(case.choices.rule, call, looser)
        trials.append((what, [(n, choices.split(factor, 1, n)) for n in (2, 3)]))
    for what, more in unlisted(case.choices):
        trials.append((what, [(n, Choices(more, call, sig).partials()[0]) for n in (2, 3)]))
    findings = []
    for what, each in trials:
        tried = [(n, s) for n, s in each if s is not None and summable(s, case.choices)]
        if tried and not any(case.on_axis(n, s) for n, s in tried):
            findings.append(Finding(case.name, what, max(n for n, _ in tried), "comes out right, but the rule forbids it"))
    return findings
