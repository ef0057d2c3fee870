"""Placement: for every mesh axis, what every value is and by which strategy every op runs (DESIGN 2.4).

One axis at a time; the digits of shards are the only thing that axes share. Per axis: a greedy forward sweep, then
others, until nothing changes, with the placements that users asked for fed back. A strategy costs the bytes that its
operands' conversions move, forward and backward, plus the work it repeats on every rank. The result stands on the
nodes:

    node.meta["call"]        Call
    node.meta["strategies"]  {axis: Strategy}
    node.meta["why"]         {axis: the annotation that led to it}
and in the layouts of parameters, buffers and inputs.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from torch import fx

from shardc.ir.graph import copy_graph, operands_of, producer_of, values_of
from shardc.ir.machine import FLOPS_PER_LINK_BYTE
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, Partial, Placement, Shard
from shardc.ir.program import Program
from shardc.passes.base import Pass
from shardc.passes.place.refuse import refuse_pins, refuse_uneven
from shardc.passes.place.transfer_cost import TOUCH, UNDO, transfer
from shardc.rules.calls import choices_of
from shardc.rules.registry import Choices, Strategy, needs_sum_grad

#: Demands go one op with a choice of its own further up in every sweep; few models change after the second.
SWEEPS = 4

Key = tuple[fx.Node, int]  # an op's result: (node, index)
_shown = lru_cache(maxsize=1024)(repr)  # placements sort by their text


@dataclass
class Axis:
    """Placement on one axis."""

    program: Program
    name: str
    n: int
    mesh: Mesh
    choices: dict[fx.Node, Choices]
    operands: dict[fx.Node, list[Key]]  # of every op and of the output, in order
    chosen: dict[fx.Node, Strategy] = field(default_factory=dict)
    have: dict[Key, list[Placement]] = field(default_factory=dict)
    before: dict[Key, list[Placement]] = field(default_factory=dict)  # `have` in the sweep before
    want: dict[Key, dict[Placement, set[fx.Node]]] = field(default_factory=dict)  # and by whom
    stored: dict[fx.Node, Placement] = field(default_factory=dict)
    derived: set[fx.Node] = field(default_factory=set)  # from parameters alone
    weights: set[fx.Node] = field(
        default_factory=set
    )  # of those, what is no larger than its parameter, and may be stored split
    pinned: set[fx.Node] = field(default_factory=set)
    shared: set[fx.Node] = field(default_factory=set)
    nbytes: dict[Key, float] = field(default_factory=dict)  # what `_bytes` has found
    making: dict[tuple[Key, Placement], tuple[int, float]] = field(
        default_factory=dict
    )  # how deep `_made` looked in this sweep, and found

    def run(self) -> None:
        self._leaves()
        for _ in range(SWEEPS):
            before = self.chosen
            self._forward()
            if self.chosen == before:
                break
            self._demand()
        self._hoist()
        for node, strategy in self.chosen.items():
            node.meta["strategies"][self.name] = strategy
        self._explain()

    # --- preparation

    def _leaves(self) -> None:
        """Stored placements of placeholders, and which values derive from parameters alone."""
        by_name = {p.name: p for p in self.program.stored}
        params, buffers = {p.name for p in self.program.params}, {b.name for b in self.program.buffers}
        constant: set[fx.Node] = set()
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name in by_name:
                self.stored[node] = by_name[node.name].layout[self.name]
                if node.name in params:
                    self.derived.add(node)
                    self.weights.add(node)
                elif node.name in buffers:
                    constant.add(node)
                if self.stored[node] != REPLICATE:
                    self.pinned.add(node)
                if self.name in node.meta.get("shared", ()):
                    self.shared.add(node)
            elif node.op == "call_function":
                sources = (
                    [source for source, _ in self.operands[node]] if node in self.operands else [producer_of(node)[0]]
                )
                if all(s in constant for s in sources):
                    constant.add(node)
                elif all(s in constant or s in self.derived for s in sources):
                    self.derived.add(node)
                    if all(s in constant or s in self.weights for s in sources) and not self._grows(node):
                        self.weights.add(node)
                    if any(s in self.pinned for s in sources):
                        self.pinned.add(node)
                    if any(s in self.shared for s in sources):
                        self.shared.add(node)

    def _grows(self, node: fx.Node) -> bool:
        """Whether an op makes more of weights than there is of them: a product, or copies."""
        if node.target is operator.getitem:
            return False
        call = self.choices[node].call
        largest = max((math.prod(v.shape) for v in call.operands), default=0)
        return self.choices[node].rule.flops is not None or any(math.prod(v.shape) > largest for v in call.results)

    # --- sweeps

    def _nodes(self) -> Iterator[fx.Node]:
        return (n for n in self.program.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)

    def _forward(self) -> None:
        self.before, self.have = self.have, {(n, 0): [p] for n, p in self.stored.items()}
        self.chosen = {}
        for node in self._nodes():
            operands = self.operands[node]
            best, lowest = None, float("inf")
            for strategy in self._candidates(node, operands):
                if not self._fits(node, strategy):
                    continue
                cost = self._cost(node, operands, strategy)
                if cost < lowest * (1 - 1e-9):
                    best, lowest = strategy, cost
                if cost == 0:  # at equal cost the first
                    break
            assert best is not None, f"{node} cannot even be replicated"
            self.chosen[node] = best
            for operand, need in zip(operands, best.inputs, strict=True):
                if need not in self.have[operand]:
                    # a partial value becomes whole on its way to anything but a shard: others may use that too
                    if (
                        PARTIAL in self.have[operand][:1]
                        and not isinstance(need, Shard)
                        and REPLICATE not in self.have[operand]
                    ):
                        self.have[operand].append(REPLICATE)
                    if need not in self.have[operand]:
                        self.have[operand].append(need)
            for i, placement in enumerate(best.outputs):
                self.have[node, i] = [placement]

    def _candidates(self, node: fx.Node, operands: list[Key]) -> Iterator[Strategy]:
        pin: Placement = node.meta["pin"][self.name] if "pin" in node.meta else REPLICATE
        if pin != REPLICATE:  # on axes that the annotation does not name a pin is an ordinary identity
            pin = self._below(node, pin)
            yield Strategy("pin", (pin,), (pin,))
            return
        choices = self.choices[node]
        if any(o[0] in self.shared for o in operands) and node not in self.shared:
            # every rank computes the heads it shares, as a part of its own work: what is split otherwise would have to
            # be gathered
            yield choices.partial_grad
            return
        seen: list[Strategy] = []  # few, and mostly the same objects: hashing them all takes longer
        for i, operand in enumerate(operands):
            # weights, and sums that are still to be done, may as well become what others need them to be
            open_still = operand[0] in self.derived or isinstance(self.have[operand][0], Partial)
            for placement in (
                *self.have[operand],
                *(sorted(self.want.get(operand, ()), key=_shown) if open_still else ()),
            ):
                s = choices.from_operand(i, placement, self.n)
                if s is not None and s not in seen:
                    seen.append(s)
                    yield s
        for i in range(len(choices.call.results)):
            for placement in self.want.get((node, i), ()):
                s = choices.from_result(i, placement, self.n)
                if s is not None and s not in seen:
                    seen.append(s)
                    yield s
        if choices.rule.extra:
            yield from choices.rule.extra(choices.call, self.n, [frozenset(self.have[o]) for o in operands])
        # at equal cost a value goes on as it is
        varies = any(self.have[o][0] == PARTIAL_GRAD for o in operands)
        if varies:
            yield choices.partial_grad
        yield choices.replicate
        if not varies and any(PARTIAL_GRAD in self.have[o] for o in operands):
            yield choices.partial_grad
        if any(isinstance(p, Partial) for o in operands for p in self.have[o]):
            yield from choices.partials

    def _below(self, node: fx.Node, pin: Placement) -> Placement:
        """A pin's shard as the digit below those of the axes that split its dim already: an annotation names dims, not
        digits.

        But for axes that it names itself, and other digits of its own: those it has counted.
        """
        if not isinstance(pin, Shard) or pin.sections:
            return pin
        own = {a for a, _ in node.meta["pin"].shards(pin.dim)}
        others = [
            a
            for a, s in node.meta["strategies"].items()
            if isinstance(p := s.outputs[0], Shard) and p.dim == pin.dim and a not in own
        ]
        return replace(pin, split=pin.split * math.prod(map(self.mesh.size, others)))

    def _fits(self, node: fx.Node, strategy: Strategy) -> bool:
        """Whether the digits that other axes took leave room, on every operand and result."""
        others: dict[str, Strategy] = {a: s for a, s in node.meta["strategies"].items() if a != self.name}
        if not others or strategy.kind in ("replicate", "partial_grad", "partial", "pin"):
            return True
        call = self.choices[node].call
        for side, placements, vals in ((0, strategy.inputs, call.operands), (1, strategy.outputs, call.results)):
            for i, (placement, v) in enumerate(zip(placements, vals, strict=True)):
                if isinstance(placement, Shard):
                    theirs = {
                        a: p
                        for a, s in others.items()
                        if isinstance(p := (s.inputs, s.outputs)[side][i], Shard) and p.dim == placement.dim
                    }
                    if theirs and Layout.of({**theirs, self.name: placement}, self.mesh).fits(v.shape, self.mesh):
                        return False
        return True

    def _bytes(self, operand: Key) -> float:
        """Bytes of a value as cut by the axes that were placed before. float64 counts as float32: what is cheap must
        not
        depend on whether a check runs in double precision."""
        if (known := self.nbytes.get(operand)) is not None:
            return known
        node, i = operand
        v = values_of(node)[i]
        cut = 1
        for axis, s in node.meta.get("strategies", {}).items():
            if i < len(s.outputs) and isinstance(s.outputs[i], Shard):
                cut *= self.mesh.size(axis)
        self.nbytes[operand] = found = v.nbytes() / cut * min(4 / v.dtype.itemsize, 1)
        return found

    def _convert(self, operand: Key, need: Placement, user: fx.Node | None = None, *, fresh: bool = False) -> float:
        """Bytes of making a value what `user` needs, from the nearest of what there is (fresh: from how it is
        produced).
        """
        have = self.have[operand][: 1 if fresh else None]
        if need in have:
            return 0.0
        node, i = operand
        v, nbytes = values_of(node)[i], self._bytes(operand)
        free = need == PARTIAL_GRAD or (isinstance(need, Shard) and node in self.weights)
        if node in self.derived and have[0] in (REPLICATE, PARTIAL_GRAD) and free:
            return (
                0.0  # the gradient's reduction has to be done anyway; a weight that is only used split is stored split
            )
        cost = min(transfer(v, p, need, self.n, nbytes) for p in have)
        if isinstance(have[0], Partial) and not isinstance(need, Partial):
            others = self.want.get(operand, {}).get(need, set()) - {user}
            cost = 0.0 if others and not fresh else cost / len(node.users)  # one sum does for all users
        kept = node in self.pinned or self.name == MICROBATCH
        return cost * UNDO if kept and isinstance(have[0], Shard) else cost

    def _cost(self, node: fx.Node, operands: list[Key], strategy: Strategy) -> float:
        joins = PARTIAL in strategy.outputs and self._joins(node)
        pairs = dict.fromkeys(zip(operands, strategy.inputs, strict=True))
        # a part that becomes a summand moves nothing; what it costs is its sum, which here is done anyway
        cost = sum(self._convert(o, need, node) for o, need in pairs if not joins or need != PARTIAL)
        if strategy.kind == "pin":
            return cost
        choices = self.choices[node]
        if strategy.kind in ("replicate", "partial_grad", "partial"):
            cost += (3 * choices.flops / FLOPS_PER_LINK_BYTE + TOUCH * choices.touched) * (self.n - 1) / self.n
        for i, (v, out) in enumerate(zip(choices.call.results, strategy.outputs, strict=True)):
            if joins:
                continue  # it is added to another value that has to be summed anyway
            later = [need for need in self.want.get((node, i), ()) if need != out]
            nbytes = self._bytes((node, i))
            there: list[Placement] = [out]
            for need in sorted(later, key=lambda p: p != REPLICATE):  # what is made for one user serves the next
                cost += min(transfer(v, p, need, self.n, nbytes) for p in there)
                there.append(need)
            if isinstance(out, Partial) and not later:  # handing a partial value on only puts its sum off
                cost += transfer(v, out, REPLICATE, self.n, nbytes)
        return cost

    def _joins(self, node: fx.Node) -> bool:
        """Whether all that uses a result can add it to another partial value, which nothing else needs whole."""

        def only_summed(o: Key, user: fx.Node) -> bool:
            others = {p for p, users in self.want.get(o, {}).items() if users - {user}}
            return PARTIAL in self.have.get(o, self.before.get(o, ())) and others <= {PARTIAL}

        def joint(user: fx.Node) -> bool:
            if user.op != "call_function" or user not in self.choices:
                return False
            operands = self.operands[user]
            mine = {i for i, (op, _) in enumerate(operands) if op is node}
            groups = map(set, self.choices[user].rule.groups(self.choices[user].call))
            return any(mine < group and any(only_summed(operands[i], user) for i in group - mine) for group in groups)

        return all(joint(user) for user in node.users)

    def _demand(self) -> None:
        """What users need of every value. Ops that would be free to hand a demand on to their operands do."""
        self.want, self.making = {}, {}
        output = next(n for n in reversed(self.program.graph.nodes) if n.op == "output")
        loss, *_ = self.operands[output]  # new values of buffers may lie as they come: see `_hoist`
        self.want.setdefault(loss, {}).setdefault(REPLICATE, set()).add(output)
        for node in reversed(list(self._nodes())):
            strategy = self.chosen[node]
            wanted = self.want.get((node, 0), {})
            if len(strategy.outputs) == 1 and len(wanted) == 1:
                strategy = self._obliging(node, strategy, next(iter(wanted)))
            for operand, need in zip(self.operands[node], strategy.inputs, strict=True):
                self.want.setdefault(operand, {}).setdefault(need, set()).add(node)

    def _obliging(self, node: fx.Node, chosen: Strategy, wanted: Placement) -> Strategy:
        """The strategy that makes the result as users want it, if that costs no more than converting it; else the
        chosen one.
        """
        if wanted == chosen.outputs[0] or (other := self._making(node, wanted)) is None:
            return chosen
        now = transfer(values_of(node)[0], chosen.outputs[0], wanted, self.n, self._bytes((node, 0)))
        return other if self._change(node, other, chosen, depth=8) <= now else chosen

    def _change(self, node: fx.Node, other: Strategy, chosen: Strategy, depth: int) -> float:
        """What more an op's operands cost with another strategy; the ops that make them may change theirs as well."""
        operands = self.operands[node]
        before = sum(self._convert(o, need, fresh=True) for o, need in zip(operands, chosen.inputs, strict=True))
        return sum(self._made(o, need, depth) for o, need in zip(operands, other.inputs, strict=True)) - before

    def _made(self, operand: Key, need: Placement, depth: int) -> float:
        """Bytes of having a value as an op needs it: by converting it, or by another
        strategy of the op that makes it.
        """
        deep, known = self.making.get((operand, need), (-1, 0.0))
        if deep >= depth:
            return known
        node, _ = operand
        cost = self._convert(operand, need, fresh=True)
        if cost > 0 and depth > 0 and node in self.chosen and len(self.chosen[node].outputs) == 1:
            other = self._making(node, need)
            if other is not None:
                cost = min(cost, max(0.0, self._change(node, other, self.chosen[node], depth - 1)))
        self.making[operand, need] = depth, cost
        return cost

    def _making(self, node: fx.Node, wanted: Placement) -> Strategy | None:
        """A strategy by which an op would make its result as wanted, instead of the chosen one. None if it does more
        work.
        """
        choices, chosen = self.choices[node], self.chosen[node]
        works = choices.rule.flops is not None
        if chosen.kind != "replicate" and (works or chosen.kind != "split"):
            return None
        other = (
            (None if works else choices.partial_grad)
            if wanted == PARTIAL_GRAD
            else choices.from_result(0, wanted, self.n)
        )
        return other if other is not None and self._fits(node, other) else None

    # --- after the sweeps

    def _needs(self, node: fx.Node, i: int = 0) -> set[Placement]:
        """What the users of a result need, looking through getitem."""
        users = {
            u
            for x in (node, *(u for u in node.users if u.target is operator.getitem))
            for u in x.users
            if u in self.operands
        }
        every = ((o, need) for u in users for o, need in zip(self.operands[u], self._inputs(u), strict=True))
        return {need for o, need in every if o == (node, i)}

    def _inputs(self, user: fx.Node) -> tuple[Placement, ...]:
        return (REPLICATE,) * len(self.operands[user]) if user.op == "output" else self.chosen[user].inputs

    def _hoist(self) -> None:
        """Move `sum_grad` from the uses of what derives from parameters up to the parameters: their gradients' sum."""
        for node in reversed(list(self._nodes())):
            plain = node in self.derived and self.chosen[node].kind == "replicate"
            if plain and any(PARTIAL_GRAD in self._needs(node, i) for i in range(len(values_of(node)))):
                self.chosen[node] = self.choices[node].partial_grad
        for node, placement in self.stored.items():
            if node in self.derived and placement == REPLICATE:
                needs = self._needs(node)
                v = values_of(node)[0]
                if len(needs) == 1 and isinstance(p := next(iter(needs)), Shard) and not self._collides(node, p):
                    self.stored[node] = p
                elif PARTIAL_GRAD in needs and needs_sum_grad(v):
                    self.stored[node] = PARTIAL_GRAD
        for node, new in self._updated():  # statistics of split channels: stored split, if they are used and made so
            p = self.have[new][0]
            if (
                self.stored[node] == REPLICATE
                and isinstance(p, Shard)
                and self._needs(node) == {p}
                and not self._collides(node, p)
            ):
                self.stored[node] = p

    def _updated(self) -> Iterator[tuple[fx.Node, Key]]:
        """Every buffer that the step updates, and its new value."""
        nodes = {n.name: n for n in self.stored}
        _, *news = self.operands[next(n for n in reversed(self.program.graph.nodes) if n.op == "output")]
        return zip((nodes[b.name] for b in self.program.buffers if b.updated), news, strict=True)

    def _collides(self, node: fx.Node, placement: Shard) -> bool:
        layout = {p.name: p.layout for p in self.program.stored}[node.name]
        return bool(layout.replace(self.name, placement, self.mesh).fits(values_of(node)[0].shape, self.mesh))

    def _explain(self) -> None:
        """For every op the annotation that its strategy goes back to: a weight's first, else that of the operand it
        follows.
        """
        for node in self.program.graph.nodes:
            why = node.meta.setdefault("why", {})
            if node.op == "placeholder":
                cause = node.meta.get("cause", {}).get(self.name, "")
                if cause:
                    why[self.name] = cause
            elif node in self.chosen:
                if self.chosen[node].kind == "pin":
                    why[self.name] = node.meta["cause"].get(self.name, "")
                    continue
                every = zip(self.operands[node], self.chosen[node].inputs, strict=True)
                sharded = [source for (source, _), need in every if isinstance(need, Shard | Partial)]
                found = [
                    s.meta["why"][self.name]
                    for s in sorted(sharded, key=lambda s: s not in self.derived)
                    if self.name in s.meta["why"]
                ]
                if found:
                    why[self.name] = found[0]


@dataclass(frozen=True)
class Place(Pass):
    """Chooses strategies on every axis of size > 1. Nodes get their strategies; parameters their layouts."""

    def run(self, program: Program) -> Program:
        mesh, program = program.mesh, replace(program, graph=copy_graph(program.graph))
        cache: dict[Any, Choices] = {}
        choices = {
            node: choices_of(node, cache)
            for node in program.graph.nodes
            if node.op == "call_function" and node.target is not operator.getitem
        }
        operands = {
            node: [producer_of(t) for t in operands_of(node)]
            for node in program.graph.nodes
            if node in choices or node.op == "output"
        }
        for node in program.graph.nodes:
            node.meta["strategies"] = {}
        # the batch first: what other axes leave of a dim cannot be padded, and annotations split what the batch's axes
        # leave
        batch = {a for x in program.inputs for a, p in x.layout.items if isinstance(p, Shard)}
        for axis, n in sorted(mesh.axes, key=lambda a: a[0] not in batch):
            if n == 1:
                continue
            one = Axis(program, axis, n, mesh, choices, operands)
            one.run()
            layouts = {p.name: p.layout for p in program.stored}
            program = program.with_layouts(
                {node.name: layouts[node.name].replace(axis, p, mesh) for node, p in one.stored.items()}
            )
        refuse_pins(program, mesh)
        refuse_uneven(program, mesh, choices)
        return program
