"""Choose a strategy for every op on one axis, by the price of conversions. See `Axis`."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial

from torch import fx

from shardc.ir.graph import calls, is_call, producer_of, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.outputs import is_small
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, Partial, Placement, Shard
from shardc.ir.program import Program
from shardc.machine.assumed import LARGE
from shardc.optional import table
from shardc.passes.annotate.propagate_split import origins
from shardc.passes.place.transfer_cost import MESSAGE, REPEATED, UNDO, Prices
from shardc.rules import softmax
from shardc.rules.attention import RING, sent_by_ring
from shardc.rules.core import reduce_parts
from shardc.rules.core.along_split_dim import ALONG_SPLIT_DIM
from shardc.rules.core.choices import Choices
from shardc.rules.core.strategy import Strategy

#: Each sweep carries demands past one more op that has a choice; few models change after the second sweep.
SWEEPS = 4

#: Extra strategies whose ranks communicate, as microbatches cannot. (softmax.PARTS stays: accumulate raises an error.)
_COMMUNICATING = (ALONG_SPLIT_DIM, reduce_parts.PARTS)

Key = tuple[fx.Node, int]  # an op's result: (node, index)
_text = lru_cache(maxsize=1024)(repr)  # sorts demanded placements: their order must not depend on that of the users


@dataclass
class Axis:
    """Placement on one axis. Axes are placed in turn; each sees only the splits of earlier axes.

    The algorithm is greedy, in sweeps over the ops, until a sweep changes nothing (at most `SWEEPS`):

    1. `_choose`, front to back: each op takes its cheapest strategy. Candidates (`_candidates`): those that take an
       operand as it is available (weights and partial sums also as users demand it); those that make a result as a user
       demanded it in the last sweep; the rule's extra ones; replicated (also with partial gradients or sums). The price
       (`_strategy_cost`): bytes sent to convert operands, and to convert results to what users demand, in forward and
       backward; what the op itself sends; and the work that a replicated op repeats on every rank, as bytes
       (shardc.passes.place.transfer_cost).
    2. `_collect_demands`, back to front: what each op needs of its operands. An op that could serve its users'
       demand for no more than the conversion costs passes it on to its own operands. So demands travel up through ops
       that only follow, and the next sweep sees them at an op that has a choice.

    Last, shardc.passes.place.storing moves conversions of values that are computed from parameters alone to the
    parameters. A `sum_grad` there is the reduction of the gradient; a slice means that the parameter is stored split.

    Two linear layers on tp, of which the spec only says `up: column`:

        x [B, D]             Replicate
        h = linear(x, up)    `up` is Shard(0). To split output features needs no gather of it: x becomes PartialGrad (an
                             all_reduce in backward), h Shard(1). To replicate gathers an annotated weight: cost * 1000.
        a = relu(h)          follows: Shard(1) in, Shard(1) out, for nothing
        y = linear(a, down)  a is available as Shard(1). Splitting the input features uses it: `down` becomes Shard(1),
                             free without an annotation; y is Partial. To gather a and repeat the product costs more.
        z = x + y            y becomes Replicate, by an all_reduce. `_collect_demands` notes it, and the second sweep
                             changes nothing; `storing` stores `down` as Shard(1). It is the MLP of Megatron-LM.
    """

    program: Program
    name: str
    n: int
    mesh: Mesh
    choices: dict[fx.Node, Choices]
    operands: dict[fx.Node, list[Key]]  # for every op and the output, in order
    splits_batch: bool = False
    #: Placements that parameters must keep, by name (Options.compatible_with: a program that already runs).
    running: Mapping[str, Placement] = field(default_factory=dict)
    #: Strategies that are fixed, for regions of ops (shardc.features.sequence.scans).
    decided: Mapping[fx.Node, Strategy] = field(default_factory=dict)
    #: Outputs that are summed after the step, on this axis.
    summed_after: set[fx.Node] = field(default_factory=set)
    #: The strategy of every op, in this sweep.
    chosen: dict[fx.Node, Strategy] = field(default_factory=dict)
    #: The placements in which a value exists in this sweep: the produced one, then conversions for users.
    available: dict[Key, list[Placement]] = field(default_factory=dict)
    #: The same for the sweep before.
    available_before: dict[Key, list[Placement]] = field(default_factory=dict)
    #: The placements that users need of a value, with the users, after the last sweep.
    demands: dict[Key, dict[Placement, set[fx.Node]]] = field(default_factory=dict)
    #: The placements in which parameters, buffers and inputs are stored.
    stored: dict[fx.Node, Placement] = field(default_factory=dict)
    #: Values made of parameters (and constants) alone: their gradients are reduced at the parameters anyway.
    from_parameters: set[fx.Node] = field(default_factory=set)
    #: Those made without products, by ops that enlarge nothing: if one is split, the parameter is stored split.
    splittable: set[fx.Node] = field(default_factory=set)
    #: Split inputs, split weights and buffers, and what parameters alone make of these: a gather would undo the split.
    annotated: set[fx.Node] = field(default_factory=set)
    #: Weights with key-value heads that several ranks of the axis share, and what parameters alone make of these.
    shared_heads: set[fx.Node] = field(default_factory=set)
    #: Bytes of a value after the splits of earlier axes (`size`).
    sizes: dict[Key, float] = field(default_factory=dict)
    #: (depth of the search, cost) of a value in a placement (`_cheapest_cost`).
    known_costs: dict[tuple[Key, Placement], tuple[int, float]] = field(default_factory=dict)

    @cached_property
    def prices(self) -> Prices:
        """The prices on this axis. Microbatches send nothing; they are priced as devices of one node."""
        one_node = tuple(range(min(self.n, LARGE.node)))
        return Prices.among(one_node if self.is_microbatch else self.mesh.group(0, (self.name,)))

    @property
    def is_microbatch(self) -> bool:
        """Whether this is the axis of microbatches: its "ranks" run in turn on one rank, with the same storage."""
        return self.name == MICROBATCH

    def choose(self) -> Axis:
        """Choose a strategy for every op. The graph stays the same."""
        self._classify()
        for _ in range(SWEEPS):
            before = self.chosen
            self._choose()
            if self.chosen == before:
                break
            self._collect_demands()
        return self

    def choose_with(self, decided: Mapping[fx.Node, Strategy]) -> Axis:
        """Return the same axis with the strategies of some ops decided, and all others chosen again."""
        same = (self.program, self.name, self.n, self.mesh, self.choices, self.operands, self.splits_batch)
        return Axis(*same, self.running, decided).choose()

    # --- preparation

    def _classify(self) -> None:
        """Find stored placements, values made of parameters alone, and outputs that are summed after the step."""
        if self.splits_batch:
            for o, (node, i) in zip(self.program.outputs, self._outputs(), strict=True):
                if (
                    o.wanted is None
                    and is_small(values_of(node)[i].shape)
                    and all(u.op == "output" for u in node.users)
                ):
                    self.summed_after.add(node)
        by_name = {p.name: p for p in self.program.stored}
        self.from_parameters, constant = origins(self.program)
        for node in self.program.graph.nodes:
            if node.op == "placeholder" and node.name in by_name:
                self.stored[node] = by_name[node.name].layout[self.name]
                if node in self.from_parameters and not self.is_microbatch:
                    self.splittable.add(node)
                if self.stored[node] != REPLICATE:
                    self.annotated.add(node)
                if self.name in node.meta.get("shared", ()):
                    self.shared_heads.add(node)
            elif node in self.from_parameters:
                sources = [source for source, _ in self.operands.get(node, [producer_of(node)])]
                if all(s in constant or s in self.splittable for s in sources) and not self._is_costly(node):
                    self.splittable.add(node)
                if any(s in self.annotated for s in sources):
                    self.annotated.add(node)
                if any(s in self.shared_heads for s in sources):
                    self.shared_heads.add(node)

    def _is_costly(self, node: fx.Node) -> bool:
        """Return whether an op is a product, or a result has more elements than its largest operand."""
        if not is_call(node):
            return False
        call = self.choices[node].call
        largest = max((math.prod(v.shape) for v in call.operands), default=0)
        return self.choices[node].rule.flops is not None or any(math.prod(v.shape) > largest for v in call.results)

    # --- the sweep front to back

    def _choose(self) -> None:
        """Sweep front to back: each op takes its cheapest candidate; at equal cost the first one."""
        self.available_before, self.available = self.available, {(n, 0): [p] for n, p in self.stored.items()}
        self.chosen, self.known_costs = {}, {}
        for node in calls(self.program.graph):
            operands = self.operands[node]
            best, lowest = None, float("inf")
            for strategy in self._candidates(node, operands):
                if not self.fits(node, strategy):
                    continue
                cost = self._strategy_cost(node, operands, strategy)
                if cost < lowest * (1 - 1e-9):
                    best, lowest = strategy, cost
                if cost == 0:
                    break
            assert best is not None, f"{node} cannot even be replicated"
            self.chosen[node] = best
            for operand, need in zip(operands, best.inputs, strict=True):
                forms = self.available[operand]
                if need not in forms:
                    # a partial value becomes whole on its way to anything but a shard: others may use that too
                    if PARTIAL in forms[:1] and not isinstance(need, Shard) and REPLICATE not in forms:
                        forms.append(REPLICATE)
                    if need not in forms:
                        forms.append(need)
            for i, placement in enumerate(best.outputs):
                self.available[node, i] = [placement]

    def _candidates(self, node: fx.Node, operands: list[Key]) -> Iterator[Strategy]:
        """Yield the strategies to compare, in the order in which they win at equal cost."""
        pin: Placement = node.meta["pin"][self.name] if "pin" in node.meta else REPLICATE
        if pin != REPLICATE:  # on other axes a pin (an `alias` of an annotated activation) is an ordinary identity
            pin = self._inner_digit(node, pin)
            yield Strategy("pin", (pin,), (pin,))
            return
        if node in self.decided:
            yield self.decided[node]
            return
        choices = self.choices[node]
        if (method := node.meta.get("method", {}).get(self.name)) is not None:  # of shardc.features.sequence
            available = [self.available[o] for o in operands]
            if method.applies(choices, available):
                room = partial(self.taken, (node, 0)), partial(self.fits, node)
                yield from method.candidates(choices, self.n, available, *room)
                return
        if any(o[0] in self.shared_heads for o in operands) and node not in self.shared_heads:
            # ranks that share key-value heads each compute them whole: a split would have to be gathered
            yield choices.partial_grad
            return
        yield from self._general_candidates(node, operands)

    def _general_candidates(self, node: fx.Node, operands: list[Key]) -> Iterator[Strategy]:
        """Yield the candidates of an op that no annotation, method or decision fixes, best first at equal cost."""
        choices = self.choices[node]
        seen: list[Strategy] = []  # few, and mostly the same objects: hashing would be slower
        for i, operand in enumerate(operands):
            # weights and partial sums may take the placement that others need
            undecided = operand[0] in self.from_parameters or isinstance(self.available[operand][0], Partial)
            for placement in (
                *self.available[operand],
                *(sorted(self.demands.get(operand, ()), key=_text) if undecided else ()),
            ):
                s = choices.from_operand(i, placement, self.n)
                if s is not None and s not in seen:
                    seen.append(s)
                    yield s
        for i in range(len(choices.call.results)):
            for placement in self.demands.get((node, i), ()):
                s = choices.from_result(i, placement, self.n)
                if s is not None and s not in seen:
                    seen.append(s)
                    yield s
        if choices.rule.extra:
            extra = choices.rule.extra(choices.call, self.n, [frozenset(self.available[o]) for o in operands])
            yield from (s for s in extra if s.kind != RING and not (s.kind in _COMMUNICATING and self.is_microbatch))
        # at equal cost a value keeps its placement
        produced_so = any(self.available[o][0] == PARTIAL_GRAD for o in operands)
        if produced_so:
            yield choices.partial_grad
        yield choices.replicate
        if not produced_so and any(PARTIAL_GRAD in self.available[o] for o in operands):
            yield choices.partial_grad
        if any(isinstance(p, Partial) for o in operands for p in self.available[o]):
            yield from choices.partials

    def _inner_digit(self, node: fx.Node, pin: Placement) -> Placement:
        """Return a pin's shard as the digit below those of the axes that already split its dim.

        An annotation names dims, not digits. Axes that the pin names itself are already counted.
        """
        if not isinstance(pin, Shard) or pin.sections:
            return pin
        axes = {a for a, _ in node.meta["pin"].shards(pin.dim)}
        others = [
            p.split * self.mesh.size(a)
            for a, s in node.meta["strategies"].items()
            if isinstance(p := s.outputs[0], Shard) and p.dim == pin.dim and a not in axes
        ]
        return replace(pin, split=pin.split * max(others, default=1))

    def taken(self, value: Key, dim: int) -> int:
        """Return the `Shard.split` of the next free digit of a dim, inside those of other axes; 1 if there are none."""
        node, i = value
        placed = ((a, s.outputs[i]) for a, s in node.meta["strategies"].items() if a != self.name)
        digits = (p.split * self.mesh.size(a) for a, p in placed if isinstance(p, Shard) and p.dim == dim)
        return max(digits, default=1)

    def fits(self, node: fx.Node, strategy: Strategy) -> bool:
        """Return whether the digits that other axes took leave room, on every operand and result."""
        others: dict[str, Strategy] = {a: s for a, s in node.meta["strategies"].items() if a != self.name}
        if not others or strategy.kind in ("replicate", "partial_grad", "partial", "pin"):
            return True
        call = self.choices[node].call
        for side, placements, values in ((0, strategy.inputs, call.operands), (1, strategy.outputs, call.results)):
            for i, (placement, v) in enumerate(zip(placements, values, strict=True)):
                if isinstance(placement, Shard):
                    same_dim = {
                        a: p
                        for a, s in others.items()
                        if isinstance(p := (s.inputs, s.outputs)[side][i], Shard) and p.dim == placement.dim
                    }
                    layout = Layout.of({**same_dim, self.name: placement}, self.mesh)
                    if same_dim and layout.problem(v.shape, self.mesh):
                        return False
        return True

    # --- the sweep back to front

    def _collect_demands(self) -> None:
        """Collect what users need of every value. Ops pass demands on unless a conversion is cheaper."""
        self.demands, self.known_costs = {}, {}
        output = self.program.graph.output_node()
        loss = [] if self.program.forward_only else self.operands[output][:1]
        # buffers' new values may stay as produced; outputs too, on batch axes or `as_made`, unless the spec names them
        demanded: list[tuple[Key, Placement]] = [(value, REPLICATE) for value in loss]
        for o, value in zip(self.program.outputs, self._outputs(), strict=True):
            by_spec = dict(o.wanted.items) if o.wanted is not None and not self.is_microbatch else {}
            if self.name in by_spec or not (self.splits_batch or o.as_made):
                demanded.append((value, by_spec.get(self.name, REPLICATE)))
        for value, need in demanded:
            self.demands.setdefault(value, {}).setdefault(need, set()).add(output)
        for node in reversed(list(calls(self.program.graph))):
            strategy = self.chosen[node]
            demands = self.demands.get((node, 0), {})
            if len(strategy.outputs) == 1 and len(demands) == 1:
                strategy = self._serving(node, strategy, next(iter(demands)))
            for operand, need in zip(self.operands[node], strategy.inputs, strict=True):
                self.demands.setdefault(operand, {}).setdefault(need, set()).add(node)

    def _outputs(self) -> list[Key]:
        """Return the values of `program.outputs`, which the graph returns last."""
        returned = self.operands[self.program.graph.output_node()]
        return returned[len(returned) - len(self.program.outputs) :]

    def _serving(self, node: fx.Node, chosen: Strategy, wanted: Placement) -> Strategy:
        """Return the strategy that makes what users need if it costs no more than a conversion, else `chosen`."""
        if wanted == chosen.outputs[0] or (other := self._alternative(node, wanted)) is None:
            return chosen
        key = node, 0
        size, packed = self.size(key), self._packed(key)
        now = self.prices.transfer(values_of(node)[0], chosen.outputs[0], wanted, size, packed)
        return other if self._extra_cost(node, other, chosen, depth=8) <= now * (1 + 1e-9) else chosen

    def _alternative(self, node: fx.Node, wanted: Placement) -> Strategy | None:
        """Return a strategy that makes the wanted result, for ops that may change; None if there is none."""
        if node in self.decided:
            return None
        choices, chosen = self.choices[node], self.chosen[node]
        is_product = choices.rule.flops is not None
        # a replicated op may become split; a split one may change if it is no product, so that repeating it is cheap
        if chosen.kind != "replicate" and (is_product or chosen.kind != "split"):
            return None
        if wanted == PARTIAL_GRAD:
            other = None if is_product else choices.partial_grad
        else:
            other = choices.from_result(0, wanted, self.n)
        return other if other is not None and self.fits(node, other) else None

    # --- the price of a strategy

    def _strategy_cost(self, node: fx.Node, operands: list[Key], strategy: Strategy) -> float:
        """Return the price of a strategy: of conversions of operands and results, messages, and repeated work."""
        # In `a @ b + c @ d` both products are partial, and one sum serves both. So a result that only joins a sum has
        # no price; nor have conversions of its operands to Partial: their price is that of the later sum.
        joins = PARTIAL in strategy.outputs and self._joins_a_sum(node)
        pairs = dict.fromkeys(zip(operands, strategy.inputs, strict=True))
        cost = sum(self._operand_cost(o, need, node) for o, need in pairs if not joins or need != PARTIAL)
        cost += self._own_cost(node, operands, strategy)
        if strategy.kind == "pin":
            return cost
        for i, (v, out) in enumerate(zip(self.choices[node].call.results, strategy.outputs, strict=True)):
            if joins:
                continue
            later = [need for need in self.demands.get((node, i), ()) if need != out]
            nbytes = self.size((node, i))
            forms: list[Placement] = [out]
            for need in sorted(later, key=lambda p: p != REPLICATE):  # a conversion for one user serves the next
                cost += min(self.prices.transfer(v, p, need, nbytes, self._packed((node, i))) for p in forms)
                forms.append(need)
            # A partial value that nobody demands in another form is summed later, where it is smallest. Outputs are
            # summed after the step, all together: for free.
            if isinstance(out, Partial) and not later and node not in self.summed_after:
                cost += self.prices.transfer(v, out, REPLICATE, self._smallest_sum(node))
        return cost

    def _operand_cost(self, operand: Key, need: Placement, user: fx.Node) -> float:
        """Return the price of converting a value for a user; for its only user, its maker may change instead."""
        cost = self._conversion_cost(operand, need, user)
        if cost == 0 or isinstance(need, Partial) or len(operand[0].users) > 1:
            return cost
        return min(cost, self._cheapest_cost(operand, need, depth=2))

    def _conversion_cost(
        self, operand: Key, need: Placement, user: fx.Node | None = None, *, fresh: bool = False
    ) -> float:
        """Return the price of converting a value to what `user` needs, from its nearest available placement.

        fresh: from the placement in which it is produced.
        """
        forms = self.available[operand][: 1 if fresh else None]
        if need in forms:
            return 0.0
        cost = self._cost_from_nearest(operand, forms, need)
        if isinstance(forms[0], Partial) and not isinstance(need, Partial):
            others = self.demands.get(operand, {}).get(need, set()) - {user}
            # users share one sum: it is free if others demanded it in the last sweep; else each pays an equal part
            cost = 0.0 if others and not fresh else cost / len(operand[0].users)
        return cost

    def _cost_from_nearest(self, operand: Key, forms: list[Placement], need: Placement) -> float:
        """Return the price of converting a value from the nearest of its forms; the first is the produced one."""
        node, i = operand
        free = need == PARTIAL_GRAD or (isinstance(need, Shard) and not need.mirrored and node in self.splittable)
        if node in self.from_parameters and forms[0] in (REPLICATE, PARTIAL_GRAD) and free:
            return 0.0  # its gradient is reduced anyway, and a weight that is only used split is stored split
        v, nbytes = values_of(node)[i], self.size(operand)
        cost = min(self.prices.transfer(v, p, need, nbytes, self._packed(operand)) for p in forms)
        if not isinstance(forms[0], Shard):
            return cost
        kept = node in self.annotated or self.is_microbatch
        return cost * (UNDO if kept else REPEATED if need == REPLICATE else 1.0)

    def _cheapest_cost(self, operand: Key, need: Placement, depth: int) -> float:
        """Return the price of a value as an op needs it: by a conversion, or by another strategy of its maker.

        depth: how many makers in a row may change.
        """
        deep, known = self.known_costs.get((operand, need), (-1, 0.0))
        if deep >= depth:
            return known
        node, _ = operand
        cost = self._conversion_cost(operand, need, fresh=True)
        if cost > 0 and depth > 0 and node in self.chosen and len(self.chosen[node].outputs) == 1:
            other = self._alternative(node, need)
            if other is not None:
                cost = min(cost, max(0.0, self._extra_cost(node, other, self.chosen[node], depth - 1)))
        self.known_costs[operand, need] = depth, cost
        return cost

    def _extra_cost(self, node: fx.Node, other: Strategy, chosen: Strategy, depth: int) -> float:
        """Return how much more an op's operands cost with another strategy; their makers may change too."""
        operands = self.operands[node]
        before = sum(self._conversion_cost(o, p, fresh=True) for o, p in zip(operands, chosen.inputs, strict=True))
        return sum(self._cheapest_cost(o, need, depth) for o, need in zip(operands, other.inputs, strict=True)) - before

    def _own_cost(self, node: fx.Node, operands: list[Key], strategy: Strategy) -> float:
        """Return the price of what an op itself sends, plus that of the work that every rank repeats."""
        if strategy.kind == RING:
            rows, keys, *_ = strategy.inputs
            assert isinstance(rows, Shard)
            assert isinstance(keys, Shard)
            share = sent_by_ring(self.choices[node].call, rows, keys, self.n) / self.n
            # keys and values are sent in forward and again in backward, and their gradients come back
            return sum(3 * share * self.size(o) for o in operands[1:3])
        choices = self.choices[node]
        if strategy.kind == softmax.PARTS:  # the largest element and the sum, of each softmax
            v = choices.call.operands[0]
            nbytes = self.size(operands[0]) / softmax.elements(choices.call)
            return 2 * self.prices.transfer(v, PARTIAL, REPLICATE, nbytes)
        if strategy.kind == reduce_parts.PARTS:  # each rank sends one or two numbers per number of the result
            return 2 * self.prices.transfer(choices.call.results[0], PARTIAL, REPLICATE, self.size((node, 0)))
        if strategy.kind in ("replicate", "partial_grad", "partial"):
            return self.prices.work(3 * choices.flops, choices.touched) * (self.n - 1) / self.n
        return 0.0

    def _joins_a_sum(self, node: fx.Node) -> bool:
        """Return whether each user adds a result to a partial value that no other op needs whole."""

        def only_summed(o: Key, user: fx.Node) -> bool:
            others = {p for p, users in self.demands.get(o, {}).items() if users - {user}}
            return PARTIAL in self.available.get(o, self.available_before.get(o, ())) and others <= {PARTIAL}

        def adds(user: fx.Node) -> bool:
            if user.op != "call_function" or user not in self.choices:
                return False
            operands = self.operands[user]
            reads = {i for i, (op, _) in enumerate(operands) if op is node}
            groups = map(set, self.choices[user].rule.groups(self.choices[user].call))
            return any(reads < group and any(only_summed(operands[i], user) for i in group - reads) for group in groups)

        return all(adds(user) for user in node.users)

    def _smallest_sum(self, node: fx.Node) -> float:
        """Return a partial value's bytes at the smallest point of the chain of linear ops that use it."""
        smallest = self.size((node, 0))
        while len(node.users) == 1:
            (user,) = node.users
            if user not in self.choices or (0,) not in self.choices[user].rule.groups(self.choices[user].call):
                break
            if [i for i, (o, _) in enumerate(self.operands[user]) if o is node] != [0] or len(values_of(user)) > 1:
                break
            node, smallest = user, min(smallest, self.size((user, 0)))
        return smallest

    def size(self, operand: Key) -> float:
        """Return the bytes of a value as cut by the axes that were placed before.

        float64 counts as float32: choices must not depend on whether a check runs in double precision.
        """
        if (known := self.sizes.get(operand)) is not None:
            return known
        node, i = operand
        v = values_of(node)[i]
        cut = 1
        for axis, s in node.meta.get("strategies", {}).items():
            if i < len(s.outputs) and isinstance(s.outputs[i], Shard):
                cut *= self.mesh.size(axis)
        self.sizes[operand] = size = v.nbytes() / cut * min(4 / v.dtype.itemsize, 1)
        return size

    def _packed(self, operand: Key) -> float:
        """Return the share of a value's bytes that a gather sends: 8 bits per number if it is rounded to them."""
        node, i = operand
        return 1 / min(values_of(node)[i].dtype.itemsize, 4) if node.target in table("ops", "PACKED") else 1.0

    # --- the price of all choices

    def price(self, nodes: Collection[fx.Node] | None = None) -> float:
        """Return the price of the choices: of conversions, messages and repeated work; of all ops, or of some.

        Each value is converted once for all users. Each message costs extra, so that one is cheaper than one per token.
        """
        total, needs = 0.0, dict[Key, dict[Placement, None]]()
        for node, strategy in self.chosen.items():
            if nodes is None or node in nodes:
                total += self._own_cost(node, self.operands[node], strategy)
                for operand, need in zip(self.operands[node], strategy.inputs, strict=True):
                    needs.setdefault(operand, {})[need] = None
        for operand, placements in needs.items():
            forms = self.available[operand][:1]
            for need in sorted(placements, key=lambda p: p != REPLICATE):
                if need not in forms:
                    sent = self._cost_from_nearest(operand, forms, need)
                    total += sent + (MESSAGE if sent else 0.0)
                    forms.append(need)
        return total
