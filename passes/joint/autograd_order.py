"""Order backward's rules and sums of gradients as autograd does, so that results have the same bits.

Of the nodes that are ready, autograd runs the one with the greatest number, and numbers grow in forward. So backward is
forward reversed, except for products beside a collective (shardc.runtime.ops.factors). They are split into four tasks,
in this order:

    of data         the gradient of the input x_each
    begin           its sum over ranks begins
    of weights      the gradients of the weight and bias
    wait            the sum is there
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from torch import fx

from shardc.ir.graph import is_call, producer_of
from shardc.ir.program import Program
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.derivatives.record import Type
from shardc.passes.joint.derivatives.rule import Request, Rule
from shardc.passes.joint.derivatives.template import Made
from shardc.runtime import ops
from shardc.runtime.ops.factors import PRODUCTS, factors, of_matrices

Part = Literal["whole", "data", "weights", "begin", "wait"]


@dataclass(eq=False)
class Gradient:
    """A value's gradient so far, at some point of backward."""

    type: Type


@dataclass
class RuleRuns:
    """A rule, or a part of it, runs for a call of forward (node).

    tangents: gradients of its results. before, after: gradients of its operands. None: no gradient.
    """

    node: fx.Node
    rule: Rule
    tangents: tuple[Gradient | None, ...]
    before: tuple[Gradient | None, ...]
    after: tuple[Gradient | None, ...]
    part: Part = "whole"


@dataclass
class Complete:
    """A parameter's gradient of this backward is complete on this rank. param: the value of forward."""

    param: Made
    gradient: Gradient


@dataclass
class BucketComplete:
    """All parameters of a bucket are complete in this backward, also those without a gradient (and a `Complete`)."""

    bucket: int


@dataclass
class GatheredComplete:
    """A gathered bucket has its gradients. wait: the `gather_wait` node. gradients: of its parameters."""

    wait: fx.Node
    gradients: tuple[Gradient | None, ...]


Event = RuleRuns | Complete | BucketComplete | GatheredComplete


class _Task(NamedTuple):
    node: fx.Node
    part: Part


class Backward:
    """Computes the events of a graph's backward, in autograd's order.

    types: of every value of forward. input_gradients: the final gradients of values that no op here made.
    """

    def __init__(self, graph: fx.Graph, program: Program, rules: Rules, types: Mapping[Made, Type | None]) -> None:
        self._program, self._rules, self.types = program, rules, types
        self._nodes = [n for n in graph.nodes if is_call(n)]
        self._place = {n: i for i, n in enumerate(graph.nodes)}
        self.events: list[Event] = []
        self._started_sums: dict[fx.Node, Gradient] = {}  # by conversion: the sum that is under way
        #: By call: the operands that get gradients.
        self._needs = {
            n: [m for m in rules.template(n).operands if (t := types.get(m)) is not None and t.grad]
            for n in self._nodes
        }
        self._bucket_of = {
            name: i
            for i, b in enumerate(program.buckets)
            if (b.each or not b.late) and (b.zero or math.prod(map(program.mesh.size, b.axes)) > 1)
            for name in b.params
        }
        self.input_gradients: dict[Made, Gradient] = {}

    def run(self, roots: Sequence[fx.Node]) -> dict[Made, Gradient]:
        """Fill `events` from the values `roots`. Return the gradients that backward begins with."""
        types = {maker: self._type(maker) for maker in map(producer_of, dict.fromkeys(roots))}
        # stages pass gradients on contiguously, independent of the strides of the values
        begin = {m: Gradient(replace(Type.contiguous(t.shape, t.dtype), ragged=t.ragged)) for m, t in types.items()}
        self._overlapped = {n for n in self._nodes if self._overlaps(n)}
        self._reached = self._reach({maker for maker, _ in begin})
        self._tasks = {n: [_Task(n, part) for part in self._parts(n)] for n in self._reached}
        self._gradients: dict[Made, Gradient | None] = dict(begin)
        # how many gradients are still to come: of a value, of a node, and of a bucket how many of its parameters
        self._pending_values: Counter[Made] = Counter()
        for n in self._reached:
            for task in self._tasks[n]:
                self._pending_values.update(set(self._grads_of(task)))
        self._pending_nodes = Counter(
            {n: sum(self._pending_values[m] for m in self._results(n)) for n in self._reached}
        )
        self._pending_buckets = Counter(i for m in self._pending_values if (i := self._bucket(m)) is not None)
        self._heap: list[tuple[float, int, _Task]] = []
        self._count = itertools.count()  # for equal numbers, the first one pushed comes first
        for maker in dict.fromkeys(n for n, _ in begin):  # once, however many of its results are roots
            if maker.op != "placeholder" and not self._pending_nodes[maker]:
                self._ready(maker)
        while self._heap:
            self._do(heapq.heappop(self._heap)[2])
        self.input_gradients = {m: g for m, g in self._gradients.items() if g is not None and m[0].op == "placeholder"}
        return begin

    # --- the tasks and what they wait for

    def _type(self, made: Made) -> Type:
        result = self.types[made]
        assert result is not None
        return result

    def _results(self, n: fx.Node) -> list[Made]:
        count = len(n.meta["value"]) if isinstance(n.meta["value"], tuple) else 1
        return [(n, i) for i in range(count)]

    def _reach(self, roots: set[fx.Node]) -> dict[fx.Node, None]:
        reached = dict.fromkeys(roots)
        for n in reversed(self._nodes):
            if n in reached and n.target not in (ops.gather_wait, ops.updated):
                reached.update(dict.fromkeys(m for m, _ in self._needs[n]))
        return reached

    def _overlaps(self, n: fx.Node) -> bool:
        over: Any = n.args[2] if len(n.args) > 2 else ()
        axes = (over,) if isinstance(over, str) else over
        return (
            bool(n.kwargs.get("overlap")) and bool(self._needs[n]) and math.prod(map(self._program.mesh.size, axes)) > 1
        )

    def _apart(self, n: fx.Node) -> bool:
        """Return whether this is a product whose two gradients are computed separately."""
        if n.target not in PRODUCTS or n.kwargs:
            return False
        places = factors(n.target, n.args)
        x, weight, bias = (self.types.get(producer_of(a)) if isinstance(a, fx.Node) else None for a in places)
        if places[0] not in self._overlapped or x is None or weight is None:
            return False
        trained = weight.grad or (bias is not None and bias.grad)
        return trained and of_matrices(len(x.shape), len(weight.shape), None if bias is None else len(bias.shape))

    def _parts(self, n: fx.Node) -> tuple[Part, ...]:
        if n.op == "placeholder" or n.target is ops.updated:
            return ()
        if n in self._overlapped:
            return "begin", "wait"
        return ("data", "weights") if self._apart(n) else ("whole",)

    def _grads_of(self, task: _Task) -> list[Made]:
        """Return the values whose gradients a task adds to."""
        needs = self._needs[task.node]
        if task.part == "begin" or task.node.target is ops.gather_wait:
            return []
        if task.part in ("data", "weights"):
            x, *_ = factors(task.node.target, task.node.args)
            return [m for m in needs if (m == producer_of(x)) == (task.part == "data")]
        return needs

    def _number(self, task: _Task) -> float:
        if task.part == "weights":
            x, *_ = factors(task.node.target, task.node.args)
            return self._place[x] - 0.5
        return self._place[task.node] - (0.75 if task.part == "wait" else 0)

    def _ready(self, n: fx.Node) -> None:
        """Queue a node's first task: its results have all their gradients."""
        if tasks := self._tasks[n]:
            self._push(tasks[0])

    def _push(self, task: _Task) -> None:
        heapq.heappush(self._heap, (-self._number(task), next(self._count), task))

    # --- running them

    def _do(self, task: _Task) -> None:
        """Run a task: record its events, and queue what follows."""
        n = task.node
        tangents = tuple(self._gradients.get(m) for m in self._results(n))
        if n.target is ops.gather_wait:
            self.events.append(GatheredComplete(n, tangents))
        elif any(g is not None for g in tangents):
            self._rule(task, tangents)
        if task.part in ("begin", "data"):
            self._push(self._tasks[n][1])
        self._count_down(set(self._grads_of(task)))

    def _rule(self, task: _Task, tangents: tuple[Gradient | None, ...]) -> None:
        """Record that a rule runs, and update the operands' gradients."""
        n = task.node
        operands = self._rules.template(n).operands
        gives = set(self._grads_of(task))
        before = tuple(self._gradients.get(m) if m in gives else None for m in operands)
        request = Request(
            tuple(self._type(m) for m in operands),
            tuple(None if g is None else g.type for g in tangents),
            tuple(None if g is None else g.type for g in before),
            tuple(m in gives for m in operands),
        )
        rule = self._rules.rule(n, request, task.part)
        if task.part == "begin":
            started = self._started_sums[n] = Gradient(request.operands[0])
            self.events.append(RuleRuns(n, rule, tangents, (None,), (started,)))
            return
        if task.part == "wait":
            tangents = (self._started_sums[n],)
        after = tuple(None if t is None else Gradient(t) for t in rule.types)
        self.events.append(RuleRuns(n, rule, tangents, before, after, task.part))
        for m, g in zip(operands, after, strict=True):
            if m in gives and g is not None:
                self._gradients[m] = g

    def _count_down(self, values: Iterable[Made]) -> None:
        """Note that a task added its gradients to these values; queue what is complete now."""
        for m in sorted(values, key=lambda m: (self._place[m[0]], m[1]), reverse=True):
            n = m[0]
            self._pending_values[m] -= 1
            self._pending_nodes[n] -= 1
            leaf = n.op == "placeholder" or n.target is ops.updated
            if leaf and not self._pending_values[m] and self._is_param(n):
                self._complete(m)
            elif not leaf and not self._pending_nodes[n]:
                self._ready(n)

    def _is_param(self, n: fx.Node) -> bool:
        return n.target is ops.updated or (n.op == "placeholder" and "collective" not in n.meta)

    def _complete(self, param: Made) -> None:
        """Record that a parameter gets no more gradients."""
        if (g := self._gradients.get(param)) is not None:
            self._gradients[param] = None
            self.events.append(Complete(param, g))
        if (bucket := self._bucket(param)) is not None:
            self._pending_buckets[bucket] -= 1
            if not self._pending_buckets[bucket]:
                self.events.append(BucketComplete(bucket))

    def _bucket(self, made: Made) -> int | None:
        """Return the bucket to which a whole parameter's gradient goes; None for other values."""
        node: Any = made[0]
        if node.target is ops.updated:
            node = node.args[0][made[1]]
        return self._bucket_of.get(node.name) if node.op == "placeholder" else None
