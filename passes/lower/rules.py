"""The derivative of one call, as lines: found once for every distinct call of a program.

    traced       an op of torch's: what autograd runs for it, read off by running it on tensors without data (record.py)
    transposed   a linear op of ours (conversions, dropout, casts of weights, zeros in padding): its backward is an op
                 of the gradient
    taped        any other: whole, with its backward as one op (shardc.runtime.ops.taped). Ops of ours that look at
                 their rank or at data; those of which torch has a kernel for each kind of device; what cannot be traced

Autograd adds the gradients of a value one after the other, in the order in which it comes to the ops that use it, and
sums of three hang on that order. So a rule is given what an operand already has (p), and adds to it as autograd does.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardc.artifact.emit import target_text
from shardc.ir.conversions import BY_OP
from shardc.ir.graph import operands_of, values_of
from shardc.ir.program import Program
from shardc.passes.lower.record import Line, Recorder, Ref, Type, map_refs
from shardc.runtime import ops
from shardc.runtime.mesh.shapes import ShapeMesh
from shardc.runtime.ops.overlap import PRODUCTS
from shardc.runtime.rng import Rng
from shardc.torch_private import FakeTensorMode, OpOverload

aten = torch.ops.aten

#: Ops of torch's whose derivative hangs on the device.
_BY_DEVICE = {aten.scaled_dot_product_attention.default, aten.rms_norm.default}
#: Those whose derivative hangs on the data: products with and without zeros.
_BY_DATA = {aten.prod.default, aten.prod.dim_int, aten.cumprod.default}
#: Those whose derivative hangs on the device where they are told a dtype.
_BY_DEVICE_AND_DTYPE = {aten.softmax.int, aten.log_softmax.int}
#: Ops of ours that are plain torch inside.
_PLAIN = {ops.nll, ops.nll_join, ops.nll_alone, ops.nll_exp, ops.partial_mean}
#: Those of which only the types say what they give: they look at buckets, or at sums over a step.
_BY_TYPE = {ops.gather_start, ops.gather_wait, ops.updated, ops.total, ops.summed, ops.random}
#: Those whose results have as many rows as the router says.
_RAGGED = {ops.experts_route, ops.experts_send, ops.experts_apply, ops.experts_return}
#: Other ops of ours whose backward is an op of the gradient alone.
_LINEAR = {ops.dropout, ops.cast_once, ops.summed, ops.fill_padding}
_CONVERSIONS = {getattr(ops, op): op for op in BY_OP}


@dataclass(frozen=True)
class Facts:
    """Of a call's forward. types: of the results; views: for each the operand whose memory it is on some rank, or
    -1.
    """

    types: tuple[Type | None, ...]
    views: tuple[int, ...]


@dataclass(frozen=True)
class Rule:
    """forward: what runs in place of the call; None: the call itself. results: where its results are then. backward:
    lines behind those of forward; grads: of each operand all that it has by now; None: nothing. types: of these.
    """

    forward: tuple[Line, ...] | None
    results: tuple[Ref, ...]
    backward: tuple[Line, ...]
    grads: tuple[Ref | None, ...]
    types: tuple[Type | None, ...]
    kind: str = "traced"


@dataclass(frozen=True)
class Ask:
    """What a rule is for. operands, tangents, before: types, of what the operands already have; wanted: which operands
    a gradient is asked for.
    """

    operands: tuple[Type, ...]
    tangents: tuple[Type | None, ...]
    before: tuple[Type | None, ...]
    wanted: tuple[bool, ...]


def takes(node: fx.Node) -> list[fx.Node]:
    """The distinct tensor operands of a node, in order: what Ref("x", i) means."""
    return list(dict.fromkeys(operands_of(node)))


class Rules:
    """The rules of one program's calls."""

    def __init__(self, program: Program) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mesh = ShapeMesh(program.mesh, 0)
        self._mesh.step.set_microbatch(0, program.microbatches)
        self._rng = Rng(0)
        self._program = program
        self._facts: dict[str, Facts] = {}
        self._rules: dict[str, Rule] = {}

    # --- forward

    def facts(self, node: fx.Node, operands: Sequence[Type]) -> Facts:
        if node.target in _BY_TYPE:
            return Facts(self._by_value(node, operands), (-1,) * len(values_of(node)))
        args, kwargs = template(node)
        key = repr((target_text(node.target), args, _untagged(kwargs), operands))
        if key not in self._facts:
            try:
                self._facts[key] = self._run(node, args, kwargs, operands)
            except Exception:  # code that was not written for tensors without data: what is known of its results
                self._facts[key] = Facts(self._by_value(node, operands), (-1,) * len(values_of(node)))
        return self._facts[key]

    def _by_value(self, node: fx.Node, operands: Sequence[Type]) -> tuple[Type | None, ...]:
        grad = any(t.grad for t in operands) or node.target in (ops.gather_wait, ops.updated)
        shapes = [(v.local_shape(self._program.mesh), v.dtype, grad and v.requires_grad) for v in values_of(node)]
        return tuple(Type.contiguous(*each) for each in shapes)

    def _run(self, node: fx.Node, args: Any, kwargs: Any, operands: Sequence[Type]) -> Facts:
        with self._mode, torch.enable_grad():
            xs = [t.empty() for t in operands]
            made = _results(self._call(node.target, args, dict(kwargs), {"x": xs}))
        ragged = node.target in _RAGGED or (node.target is not ops.experts_combine and any(t.ragged for t in operands))
        types = tuple(replace(Type.of(y), ragged=ragged) if isinstance(y, Tensor) else None for y in made)
        memory = {_memory(x): i for i, x in reversed(list(enumerate(xs)))}
        return Facts(types, tuple(memory.get(_memory(y), -1) if isinstance(y, Tensor) else -1 for y in made))

    def _call(self, target: Any, args: Any, kwargs: dict[str, Any], values: dict[str, Any]) -> Any:
        def put(r: Ref) -> Any:
            return self._mesh if r.kind == "mesh" else self._rng if r.kind == "rng" else values[r.kind][r.index]

        return target(*map_refs(args, put), **{k: map_refs(v, put) for k, v in kwargs.items()})

    # --- backward

    def rule(self, node: fx.Node, ask: Ask) -> Rule:
        args, kwargs = template(node)
        if node.target in _CONVERSIONS or node.target in _LINEAR:
            return self._transposed(node, args, dict(kwargs), ask)
        key = repr((target_text(node.target), args, _untagged(kwargs), ask))
        tagged = any(name == "tag" for name, _ in kwargs)
        if key not in self._rules or tagged:
            self._rules[key] = self._derive(node, args, kwargs, ask)
        return self._rules[key]

    def _derive(self, node: fx.Node, args: Any, kwargs: Any, ask: Ask) -> Rule:
        one = node.target in _BY_DEVICE | _BY_DATA or (
            node.target in _BY_DEVICE_AND_DTYPE and len(args) + len(kwargs) > 2
        )
        plain = (isinstance(node.target, OpOverload) and not one) or node.target in _PLAIN
        if plain and not any(t.ragged for t in ask.operands):
            try:
                return self._traced(node.target, args, dict(kwargs), ask)
            except Exception:  # anything that torch's Python, or a user's op, raises on tensors without data
                pass
        return self._taped(node, ask)

    def _traced(self, target: Any, args: Any, kwargs: dict[str, Any], ask: Ask) -> Rule:
        recorder = Recorder()
        with self._mode:
            xs = [replace(t, grad=w).empty() for t, w in zip(ask.operands, _leaves(ask), strict=True)]
            gs = [None if t is None else replace(t, grad=False).empty() for t in ask.tangents]
            ps = [None if t is None else replace(t, grad=False).empty() for t in ask.before]
            for kind, tensors in (("x", xs), ("g", gs), ("p", ps)):
                for i, x in enumerate(tensors):
                    if x is not None:
                        recorder.name(x, Ref(kind, i))
            with recorder, torch.enable_grad():
                made = _results(self._call(target, args, kwargs, {"x": xs}))
                split = len(recorder.lines)
                results = tuple(recorder.ref(y) if isinstance(y, Tensor) else Ref("none") for y in made)
                grads = _grad(xs, made, gs, ps, ask.wanted)
            lines = recorder.lines
            found = tuple(None if x is None else recorder.ref(x) for x in grads)
            types = tuple(None if x is None else Type.of(x) for x in grads)
        ours = {r: Ref("y", i) for i, r in reversed(list(enumerate(results))) if r.kind == "t"}
        backward = [_renamed(line, ours) for line in lines[split:]]
        found = tuple(None if r is None else ours.get(r, r) for r in found)
        moved, own = _split(lines[:split], backward, found, ours)
        backward, found = _tidied([*moved, *backward], found, ask)
        backward = _used(backward, found)
        if not own and (
            len(lines[:split]) == 1 or self._same_without_autograd(target, args, kwargs, ask, lines[:split])
        ):
            return Rule(None, (), tuple(backward), found, types)
        return Rule(tuple(lines[:split]), results, tuple(backward), found, types)

    def _same_without_autograd(self, target: Any, args: Any, kwargs: Any, ask: Ask, lines: list[Line]) -> bool:
        """Whether the call runs the same ops where no gradient is asked for: some of torch's look at that."""
        recorder = Recorder()
        with self._mode:
            xs = [replace(t, grad=False).empty() for t in ask.operands]
            for i, x in enumerate(xs):
                recorder.name(x, Ref("x", i))
            with recorder, torch.no_grad():
                self._call(target, args, kwargs, {"x": xs})
        plain = [(x.target, x.args, x.kwargs) for x in recorder.lines]
        return plain == [(x.target, x.args, x.kwargs) for x in lines]

    # --- by hand

    def _transposed(self, node: fx.Node, args: Any, kwargs: dict[str, Any], ask: Ask) -> Rule:
        w = _Writer(self, ask)
        g: Ref = Ref("g")
        behind = args[1:]
        if node.target is ops.cast_once:
            g = w.call(aten._to_copy.default, g, dtype=ask.operands[0].dtype)
        elif node.target is ops.fill_padding:  # (mesh, dim, digits, size, padding, blocks, fill): zeros there
            blocks = behind[5] if len(behind) > 5 else 1
            x = ask.operands[0]
            g = w.call(ops.fill_padding, g, *behind[:5], blocks, 0.0, type_=Type.contiguous(x.shape, x.dtype))
        elif node.target is ops.dropout:
            g = w.call(ops.dropout, g, *behind, **kwargs)
        elif node.target in _CONVERSIONS and BY_OP[op := _CONVERSIONS[node.target]].backward != "identity":
            kwargs.pop("overlap", None)
            g = w.call(ops.transpose, op, g, *behind, **kwargs)
        return w.rule([g], "transposed")

    def begun(self, node: fx.Node, ask: Ask) -> Rule:
        """Of a conversion whose backward is a sum over ranks: the sum is begun."""
        args, kwargs = template(node)
        w = _Writer(self, replace(ask, before=(None,)))
        op = _CONVERSIONS[node.target]
        options = {k: v for k, v in kwargs if k != "overlap"}
        started = w.call(ops.transpose_start, op, Ref("g"), *args[1:], type_=ask.operands[0], **options)
        return w.rule([started], "begun", types=(ask.operands[0],))

    def waited(self, ask: Ask) -> Rule:
        """Of the same conversion: the sum is there."""
        w = _Writer(self, ask)
        return w.rule([w.call(ops.wait, Ref("g"), type_=ask.operands[0])], "waited")

    def of_data(self, node: fx.Node, ask: Ask) -> Rule:
        """Of a product (shardc.runtime.ops.overlap): the gradient of its input."""
        at, weight, *_ = PRODUCTS[node.target]
        (x, w_), g = (takes(node).index(node.args[i]) for i in (at, weight)), ask.tangents[0]  # type: ignore[arg-type]
        assert g is not None
        w = _Writer(self, ask)
        rows = w.call(aten.reshape.default, Ref("g"), [-1, g.shape[-1]])
        matrix = Ref("x", w_)
        if node.target is not aten.linear.default:
            matrix = w.call(aten.t.default, matrix)
        made = w.call(aten.mm.default, rows, matrix)
        grads: list[Ref | None] = [None] * len(ask.operands)
        grads[x] = w.call(aten.reshape.default, made, list(ask.operands[x].shape))
        return w.rule(grads, "product")

    def of_weights(self, node: fx.Node, ask: Ask) -> Rule:
        """Of a product: the gradients of its weight and bias."""
        places = [node.args[i] if 0 <= i < len(node.args) else None for i in PRODUCTS[node.target]]
        x, weight, bias = (takes(node).index(n) if isinstance(n, fx.Node) else -1 for n in places)
        g = ask.tangents[0]
        assert g is not None
        w = _Writer(self, ask)
        rows = w.call(aten.reshape.default, Ref("x", x), [-1, ask.operands[x].shape[-1]])
        back = w.call(aten.reshape.default, Ref("g"), [-1, g.shape[-1]])
        grads: list[Ref | None] = [None] * len(ask.operands)
        if ask.wanted[weight]:
            one, other = (back, rows) if node.target is aten.linear.default else (rows, back)
            grads[weight] = w.call(aten.mm.default, w.call(aten.t.default, one), other)
        if bias >= 0 and ask.wanted[bias]:
            grads[bias] = w.call(aten.sum.dim_IntList, back, [0])
        return w.rule(grads, "product")

    def _taped(self, node: fx.Node, ask: Ask) -> Rule:
        """Operands are counted by their place here: one that stands in two places is two."""
        order, args = takes(node), template(node)
        places = [order.index(x) for x in operands_of(node)]
        needs = tuple(k for k, i in enumerate(places) if ask.wanted[i])
        again, types, results, known = self._saved(node, places, needs, ask)
        w = _Writer(self, ask)
        first = w.put(Line(0, ops.taped, (target_text(node.target), needs, again, *args[0]), args[1]))
        count = len(results)
        made = [w.put(Line(0, operator.getitem, (first, k), (), t)) for k, t in enumerate(results)]
        tape = w.put(Line(0, operator.getitem, (first, count)))
        split = len(w.lines)
        grads = tuple(Ref("g", i) if t is not None else None for i, t in enumerate(ask.tangents))
        fresh: set[int] = set()
        before: list[Ref | None] = []
        for k in needs:  # what an operand has goes in once
            i = places[k]
            before.append(Ref("p", i) if ask.before[i] is not None and i not in fresh else None)
            fresh.add(i)
        operands = tuple(Ref("x", places[k]) for k in again)
        zeros = () if known else (("zeros", True),)  # else the text would take what is None for a gradient
        back = w.put(Line(0, ops.untaped, (tape, grads, tuple(before), operands), zeros, tuple(types)))
        found: list[Ref | None] = [None] * len(order)
        kinds: list[Type | None] = [None] * len(order)
        for n, k in enumerate(needs):
            i, t = places[k], types[n]
            one = w.put(Line(0, operator.getitem, (back, n), (), t))
            had = found[i]
            found[i] = one if had is None else w.put(Line(0, aten.add.Tensor, (had, one), (), t))
            kinds[i] = t
        return Rule(tuple(w.lines[:split]), tuple(made), tuple(w.lines[split:]), tuple(found), tuple(kinds), "taped")

    def _saved(
        self, node: fx.Node, places: list[int], needs: tuple[int, ...], ask: Ask
    ) -> tuple[tuple[int, ...], list[Type | None], list[Type | None], bool]:
        """(operands that autograd saves, types of their gradients, of the results), as found on tensors without data;
        otherwise all, and as they are known; whether they were found."""
        guess: list[Type | None] = [
            Type.contiguous(ask.operands[places[k]].shape, ask.operands[places[k]].dtype) for k in needs
        ]
        facts = self.facts(node, ask.operands)
        packed: list[StorageWeakRef] = []

        def pack(x: Tensor) -> Tensor:
            packed.append(_memory(x))
            return x.detach() if x.grad_fn is not None else x

        try:
            with self._mode:
                xs = [replace(ask.operands[i], grad=k in needs).empty() for k, i in enumerate(places)]
                count = iter(range(len(xs)))
                args = _by_place(node, count)
                with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
                    made = _results(self._call(node.target, args[0], args[1], {"x": xs}))
                gs = [None if t is None else replace(t, grad=False).empty() for t in ask.tangents]
                pairs = [(y, g) for y, g in zip(made, gs, strict=True) if g is not None]
                found = torch.autograd.grad(
                    [y for y, _ in pairs], [xs[k] for k in needs], [g for _, g in pairs], allow_unused=True
                )
            again = tuple(k for k, x in enumerate(xs) if _memory(x) in packed)
            return again, [None if x is None else Type.of(x) for x in found], list(facts.types), True
        except Exception:
            return tuple(range(len(places))), guess, list(facts.types), False


class _Writer:
    """Writes lines by hand, with the types that they have on tensors without data."""

    def __init__(self, rules: Rules, ask: Ask) -> None:
        self._rules, self._ask = rules, ask
        self.lines: list[Line] = []

    def put(self, line: Line) -> Ref:
        self.lines.append(replace(line, number=len(self.lines)))
        return Ref("t", len(self.lines) - 1)

    def type(self, r: Ref) -> Type | None:
        kinds: dict[str, Sequence[Any]] = {"x": self._ask.operands, "g": self._ask.tangents, "p": self._ask.before}
        found = self.lines[r.index].types if r.kind == "t" else kinds[r.kind][r.index]
        assert not isinstance(found, tuple)
        return found

    def call(self, target: Any, *args: Any, type_: Type | None = None, **kwargs: Any) -> Ref:
        if target is aten.reshape.default and (t := self.type(args[0])) is not None:
            known_size = math.prod(t.shape) // max(-math.prod(args[1]), 1)
            if [known_size if n == -1 else n for n in args[1]] == list(t.shape):
                return args[0]  # type: ignore[no-any-return]
        known = type_
        if known is None:
            with self._rules._mode, torch.no_grad():

                def empty(r: Ref) -> Any:
                    if r.kind in ("mesh", "rng"):
                        return self._rules._mesh if r.kind == "mesh" else self._rules._rng
                    t = self.type(r)
                    assert t is not None
                    return replace(t, grad=False).empty()

                made = target(*map_refs(args, empty), **{k: map_refs(v, empty) for k, v in kwargs.items()})
                known = Type.of(made) if isinstance(made, Tensor) else None
        return self.put(Line(0, target, args, tuple(kwargs.items()), known))

    def rule(self, grads: Sequence[Ref | None], kind: str, types: tuple[Type | None, ...] | None = None) -> Rule:
        """Add what the operands have."""
        found: list[Ref | None] = []
        for i, g in enumerate(grads):
            before = self._ask.before[i] if types is None else None
            found.append(g if g is None or before is None else self.call(aten.add.Tensor, Ref("p", i), g))
        known = types if types is not None else tuple(None if g is None else self.type(g) for g in found)
        return Rule(None, (), tuple(self.lines), tuple(found), known, kind)


def template(node: fx.Node) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """A call's arguments, with Refs in the place of nodes."""
    order = {n: i for i, n in enumerate(takes(node))}
    put: Any = lambda n: Ref("x", order[n]) if n in order else Ref(n.name)  # noqa: E731 (mesh and rng go by name)
    args, kwargs = fx.map_arg(node.args, put), fx.map_arg(dict(node.kwargs), put)
    return _plain(args), tuple((k, _plain(v)) for k, v in kwargs.items())


def _by_place(node: fx.Node, count: Any) -> tuple[Any, dict[str, Any]]:
    """The same, every place an operand of its own."""

    def put(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return Ref("x", next(count)) if a.meta.get("value") is not None else Ref(a.name)
        return type(a)([put(x) for x in a]) if isinstance(a, (tuple, list)) else a

    return _plain(put(tuple(node.args))), {k: _plain(put(node.kwargs[k])) for k in sorted(node.kwargs)}


def _plain(a: Any) -> Any:
    """fx keeps lists in a class of its own."""
    if isinstance(a, tuple):
        return tuple(map(_plain, a))
    return [_plain(x) for x in a] if isinstance(a, list) else a


def _untagged(kwargs: Sequence[tuple[str, Any]]) -> tuple[tuple[str, Any], ...]:
    return tuple((k, v) for k, v in kwargs if k != "tag")


def _leaves(ask: Ask) -> Sequence[bool]:
    return [t.grad and w for t, w in zip(ask.operands, ask.wanted, strict=True)]


def _results(made: Any) -> list[Any]:
    return list(made) if isinstance(made, (tuple, list)) else [made]


def _memory(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]


def _grad(
    xs: list[Tensor], made: list[Any], gs: Sequence[Any], ps: Sequence[Any], wanted: Sequence[bool]
) -> list[Tensor | None]:
    begin = [(x, p) for x, p in zip(xs, ps, strict=True) if p is not None and x.requires_grad]
    begin += [(y, g) for y, g in zip(made, gs, strict=True) if g is not None and y.requires_grad]
    inputs = [x for x in xs if x.requires_grad]
    starts, values = [b for b, _ in begin], [g for _, g in begin]
    found = iter(torch.autograd.grad(starts, inputs, values, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in xs]


def _renamed(line: Line, names: dict[Ref, Ref]) -> Line:
    def put(a: Any) -> Any:
        return map_refs(a, lambda r: names.get(r, r))

    return replace(line, args=put(line.args), kwargs=tuple((k, put(v)) for k, v in line.kwargs))


def _split(
    forward: list[Line], backward: list[Line], grads: Sequence[Ref | None], ours: dict[Ref, Ref]
) -> tuple[list[Line], set[int]]:
    """Of what backward wants of forward: (views of operands and results, which it makes again; what must be kept)."""
    moved: dict[int, Line] = {}
    own: set[int] = set()

    def visit(r: Ref) -> bool:
        """Can backward have it without keeping something of forward's own?"""
        if r.kind != "t" or r.index >= len(forward):
            return True
        if r.index in moved:
            return True
        if r.index in own:
            return False
        line = _renamed(forward[r.index], ours)
        if _views(line) and all(visit(x) for x in line.refs()):
            moved[r.index] = line
            return True
        return False

    for line in backward:
        for r in line.refs():
            if not visit(r):
                own.add(r.index)
    for g in grads:
        if g is not None and not visit(g):
            own.add(g.index)
    return [moved[i] for i in sorted(moved)], own


def _views(line: Line) -> bool:
    target = line.target
    return (
        target is operator.getitem
        or target is aten.reshape.default
        or (isinstance(target, OpOverload) and bool(target.is_view))
    )


def _tidied(lines: list[Line], grads: tuple[Ref | None, ...], ask: Ask) -> tuple[list[Line], tuple[Ref | None, ...]]:
    """Two transposes are none, nor is a view of the same shape one."""
    by_number: dict[int, Line] = {line.number: line for line in lines}
    same: dict[Ref, Ref] = {}
    kept: list[Line] = []
    for each in lines:
        line = _renamed(each, same)
        by_number[line.number] = line
        kept.append(line)
        if line.target not in (aten.t.default, aten.reshape.default):
            continue
        x: Ref = line.args[0]
        maker = by_number.get(x.index) if x.kind == "t" else None
        of: Any = {"x": ask.operands, "g": ask.tangents, "p": ask.before}.get(x.kind)
        type_: Any = maker.types if maker is not None else of[x.index] if of is not None else None
        if line.target is aten.t.default and maker is not None and maker.target is aten.t.default:
            same[Ref("t", line.number)] = maker.args[0]
        elif line.target is aten.reshape.default and type_ is not None and type_.shape == tuple(line.args[1]):
            same[Ref("t", line.number)] = x
    return kept, tuple(None if g is None else same.get(g, g) for g in grads)


def _used(lines: list[Line], grads: Sequence[Ref | None]) -> list[Line]:
    """The lines that the gradients hang on."""
    needed = {g for g in grads if g is not None}
    kept: list[Line] = []
    for line in reversed(lines):
        if Ref("t", line.number) in needed:
            kept.append(line)
            needed.update(line.refs())
    return kept[::-1]
