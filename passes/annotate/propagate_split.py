"""Follow a split through the graph by the op rules: what else is split, and what is communicated.

    fc: linear(x, w1[n k])   ->  gelu  ->  out: linear(y, w2[m n])

    follow w2's dim n:  y is split, so gelu, so fc's result, so w1's dim n. The group is w1 and w2; it reads x whole
    and returns a partial sum.

A `SplitGroup` is this closure: every op that the split reaches, backward and forward through the ops' factors. It ends
where an op reads a value whole (an entry: its gradient is summed) and where the factor is summed away (an exit: the sum
of forward). Names, module classes and the sizes of axes do not matter: a digit is followed, not a number of ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from torch import fx

from shardc.ir.graph import operands_of, placeholders, producer_of, values_of
from shardc.ir.metadata import Value
from shardc.ir.placement import Partial, Placement, Shard
from shardc.ir.program import Program
from shardc.rules import softmax
from shardc.rules.core.choices import Choices, choices_of
from shardc.rules.core.strategy import Strategy, needs_sum_grad
from shardc.rules.views import in_sections

Key = tuple[fx.Node, int]  # an op's result: (node, index)
_ONE_RANK = 1  # strategies are built for one rank: every size divides by one, so the result does not depend on the mesh


@dataclass
class SplitGroup:
    """Values and ops that are split together.

    values: each split value with its split. ops: ops that run on shards. entries: whole values that it reads, whose
    gradients are sums over ranks. exits: partial sums that it returns. gathers: split values that an output needs whole
    (new buffer values). inside: bytes that its ops sum internally, as normalisers of softmaxes.
    """

    values: dict[Key, Shard] = field(default_factory=dict)
    ops: dict[fx.Node, Strategy] = field(default_factory=dict)
    entries: dict[Key, None] = field(default_factory=dict)
    exits: dict[Key, None] = field(default_factory=dict)
    gathers: dict[Key, None] = field(default_factory=dict)
    inside: float = 0.0

    @property
    def params(self) -> dict[fx.Node, Shard]:
        """The split parameters, in the order of the graph's placeholders."""
        return {node: s for (node, _), s in self.values.items() if node.op == "placeholder"}

    def bytes(self) -> float:
        """Return the bytes summed or gathered, forward and backward, up to a factor equal for all groups."""
        total = sum(2 * _value(k).nbytes() for k in self.exits) + sum(_value(k).nbytes() for k in self.gathers)
        return total + sum(2 * _value(k).nbytes() for k in self.entries if needs_sum_grad(_value(k))) + self.inside


@dataclass(frozen=True)
class Blocked:
    """The reason why a split cannot be followed. node: the op that needs a value whole or two ways."""

    node: fx.Node
    why: str


class Follower:
    """Follows splits through one program's global graph, and remembers which are blocked."""

    def __init__(self, program: Program) -> None:
        self.graph = program.graph
        self.placeholders = placeholders(program.graph)
        self.inputs = {i.name for i in program.inputs}
        self.derived, self.constant = origins(program)
        self.blocked: dict[tuple[Key, Shard], Blocked] = {}
        self._choices: dict[fx.Node, Choices] = {}
        self._shared_choices: dict[object, Choices] = {}

    def choices(self, node: fx.Node) -> Choices:
        if node not in self._choices:
            self._choices[node] = choices_of(node, self._shared_choices)
        return self._choices[node]

    def follow(self, start: Key, placement: Shard) -> SplitGroup | Blocked:
        """Return the group of a value with this split, or why there is none."""
        group, todo = SplitGroup(), [(start, placement)]
        postponed: dict[fx.Node, None] = {}
        stopped = None
        while (todo or postponed) and stopped is None:
            if not todo:
                node = max(postponed)
                del postponed[node]
                stopped = self._add_op_by_sections(node, group, todo)
                continue
            key, p = todo.pop()
            if key[0] in self.constant or group.values.get(key) == p:
                continue
            if key in group.values:
                stopped = Blocked(key[0], "would be split in two ways")
            elif (key, p) in self.blocked:
                stopped = self.blocked[key, p]
            else:
                group.values[key] = p
                stopped = self._around(key, p, group, todo, postponed)
        if stopped is None:
            clash = next((k for k in (*group.entries, *group.exits) if k in group.values), None)
            stopped = Blocked(clash[0], "is needed both whole and split") if clash else None
        if stopped is not None:  # all values that lead here are blocked as well
            self.blocked |= dict.fromkeys(group.values.items(), stopped)
            return stopped
        for node, strategy in group.ops.items():
            if strategy.kind == softmax.PARTS:  # the largest element, the sum, and the sum's gradient
                call = self.choices(node).call
                group.inside += 3 * 2 * call.operands[0].nbytes() / softmax.elements(call)
        return group

    def _around(
        self, key: Key, p: Shard, group: SplitGroup, todo: list[tuple[Key, Shard]], postponed: dict[fx.Node, None]
    ) -> Blocked | None:
        """Follow a split from a value to the op that makes it and the ops that use it.

        postponed: ops of several results. All their split results must be known before their operand's split. The last
        one in the graph comes first, because it may make results of others known.
        """
        node = key[0]
        if node.op == "placeholder":
            if node.name in self.inputs:
                return Blocked(node, "is an input, which every rank reads whole")
        else:
            strategy = self.by_result(node, key[1], p)
            if strategy is not None:
                if (stopped := self._add_op(node, strategy, group, todo)) is not None:
                    return stopped
            elif node in group.ops:
                if group.ops[node].outputs[key[1]] != p:
                    return Blocked(node, "would be split in two ways")
            elif len(values_of(node)) > 1:
                postponed[node] = None
            else:
                return Blocked(node, "cannot compute its result in parts")
        for user, i in uses(key):
            if user.op == "output":
                if i == 0:
                    return Blocked(user, "returns it whole")
                group.gathers[key] = None
                continue
            strategy = self.by_operand(user, i, p)
            if strategy is None:
                return Blocked(user, "needs it whole")
            if (stopped := self._add_op(user, strategy, group, todo)) is not None:
                return stopped
        return None

    def _add_op(
        self, node: fx.Node, strategy: Strategy, group: SplitGroup, todo: list[tuple[Key, Shard]]
    ) -> Blocked | None:
        """Add an op with its strategy to the group, and follow the split to its other operands and results."""
        if node in group.ops:
            return None if group.ops[node] == strategy else Blocked(node, "would be split in two ways")
        group.ops[node] = strategy
        for t, need in zip(operands_of(node), strategy.inputs, strict=True):
            key = producer_of(t)
            if isinstance(need, Shard):
                todo.append((key, need))
            elif key[0] not in self.derived and key[0] not in self.constant and not isinstance(need, Partial):
                group.entries[key] = None
        for i, out in enumerate(strategy.outputs):
            if isinstance(out, Shard):
                todo.append(((node, i), out))
            elif isinstance(out, Partial):
                group.exits[node, i] = None
        return None

    def _add_op_by_sections(self, node: fx.Node, group: SplitGroup, todo: list[tuple[Key, Shard]]) -> Blocked | None:
        """Add an op of several results that splits its operand by sections, one for each result or within results."""
        choices = self.choices(node)
        known = {i: p for i in range(len(values_of(node))) if (p := group.values.get((node, i))) is not None}
        dim, *others = {p.dim for p in known.values()}
        sections: tuple[int, ...] = ()
        for i, v in enumerate(choices.call.results):
            if others or dim >= len(v.shape):
                return Blocked(node, "cannot compute its result in parts")
            sections += in_sections(known.get(i, Shard(dim)), v.shape[dim])
        for strategy in self._extra(choices, Shard(dim, 1, sections)):
            if all(strategy.outputs[i] == p for i, p in known.items()):
                return self._add_op(node, strategy, group, todo)
        return Blocked(node, "cannot compute its result in parts")

    def by_result(self, node: fx.Node, i: int, p: Shard) -> Strategy | None:
        """Return the strategy by which an op makes its result i in this placement."""
        choices = self.choices(node)
        extra = (s for s in self._extra(choices, p) if s.outputs[i] == p)
        return choices.from_result(i, p, _ONE_RANK) or next(extra, None)

    def by_operand(self, node: fx.Node, i: int, p: Shard) -> Strategy | None:
        """Return the strategy by which an op takes its operand i in this placement."""
        choices = self.choices(node)
        extra = (s for s in self._extra(choices, p) if s.inputs[i] == p)
        return choices.from_operand(i, p, _ONE_RANK) or next(extra, None)

    def _extra(self, choices: Choices, *placements: Placement) -> Iterable[Strategy]:
        """Return the strategies that no factor expresses, if the operands may have these placements."""
        extra = choices.rule.extra
        return extra(choices.call, _ONE_RANK, [frozenset(placements)] * len(choices.call.operands)) if extra else ()

    def flops(self, group: SplitGroup) -> int:
        """Return the operations of the matrix products that a group splits."""
        return sum(self.choices(node).flops for node in group.ops)


def uses(key: Key) -> Iterator[tuple[fx.Node, int]]:
    """Yield each (op, operand's position) that reads a value; for the output, the result's position."""
    node, index = key
    names = [node]
    if isinstance(node.meta.get("value"), tuple):
        names = [u for u in node.users if u.target is operator.getitem and u.args[1] == index]
    for name in names:
        for user in name.users:
            if user.target is not operator.getitem:
                yield from ((user, i) for i, t in enumerate(operands_of(user)) if t is name)


def _value(key: Key) -> Value:
    return values_of(key[0])[key[1]]


def origins(program: Program) -> tuple[set[fx.Node], set[fx.Node]]:
    """Return the nodes that derive from parameters (and constants) alone, and those from constants alone.

    Constants are buffers, and ops without operands.
    """
    params, buffers = {p.name for p in program.params}, {b.name for b in program.buffers}
    derived: set[fx.Node] = set()
    constant: set[fx.Node] = set()
    for node in program.graph.nodes:
        if node.op == "placeholder":
            if node.name in params:
                derived.add(node)
            elif node.name in buffers:
                constant.add(node)
        elif node.op == "call_function":
            sources = [producer_of(t)[0] for t in operands_of(node)]
            if all(s in constant for s in sources):
                constant.add(node)
            elif all(s in constant or s in derived for s in sources):
                derived.add(node)
    return derived, constant
