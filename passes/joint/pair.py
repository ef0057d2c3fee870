"""Join the forward of one microbatch and the backward or forward of another into one graph.

Each line may run while the other half waits for a collective (an overlapped pair):

    def pair_0_3(mesh, rng, up_weight, x, back_mesh, back_h, back_y_grad, ...):
        up_start = ops.start('all_gather', x, mesh, ...)            forward begins to gather
        back_dgrad = aten.mm.default(back_y_grad, down_weight)      backward computes meanwhile
        up = ops.wait(up_start)
        back_sum_start = ops.transpose_start('sum_grad', back_dgrad, back_mesh, ...)
        ...

Both halves are the lines of the stages' graphs. Names of the second microbatch have a prefix (`back_`, for a second
forward `next_`, see shardc.ir.stage); parameters are the same. So are random numbers, and the order of gradients, of
buckets and of collectives within each half: the numbers are equal to those of one half after the other, to the bit.
Each half gathers its own buckets of ZeRO 3; a second forward gathers one when the first one's gather has ended.

The order is the list scheduler's (shardc.passes.joint.overlap), from two starting orders: one half and then the other,
and both at once, equally far in simulated time. Memory never exceeds that of one half and then the other. A forward
alone returns new values of buffers at its end; in a pair they live until the graph ends. Where that is more, backward
comes first.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from torch import fx

from shardc.ir.graph import copy_graph, reorder
from shardc.ir.program import Program
from shardc.ir.stage import Joint, Pair, names_in_both, second_prefix
from shardc.passes.joint.memory import Memory, Sizes
from shardc.passes.joint.overlap import OrderedGraph, ScheduledLine, best_order, within
from shardc.passes.joint.seconds import Seconds
from shardc.runtime import ops
from shardc.torch_private import add_node

#: Tried leads: how many collectives one half may be ahead of the other.
LEADS = (0.0, 1.0, 2.0, 4.0)


def pairs_of(
    program: Program, seconds: Seconds, sizes: Sizes, wanted: Sequence[tuple[str, int, int]]
) -> tuple[Pair, ...]:
    """Return one graph for each requested (kind, first half's stage, second half's stage)."""
    pairs = []
    for kind, f, t in wanted:
        forward, other = program.stages[f].joint, program.stages[t].joint
        assert forward is not None
        assert other is not None
        prefix = second_prefix(kind, forward.forward)
        second = _whole(other, seconds, sizes) if kind == "FB" else other.forward
        graph = _joined(program, forward.forward, second, prefix)
        _overlap(kind, graph, seconds, sizes)
        pairs.append(Pair(kind, f, t, graph))
    return tuple(pairs)


def _joined(program: Program, first: fx.Graph, then: fx.Graph, prefix: str) -> fx.Graph:
    """Return a graph with the lines of both graphs, one after the other."""
    then = copy_graph(then) if then is first else then
    same = names_in_both(program)
    stored = {name: i for i, name in enumerate(("mesh", "rng", *(x.name for x in program.stored)))}
    inputs: dict[str, tuple[fx.Node, fx.Graph]] = {}
    for graph in (first, then):
        for n in graph.find_nodes(op="placeholder"):
            inputs.setdefault(n.name if graph is first or n.name in same else prefix + n.name, (n, graph))
    joined = fx.Graph()
    env: dict[fx.Graph, dict[fx.Node, fx.Node]] = {first: {}, then: {}}
    placed: dict[str, fx.Node] = {}
    for name in sorted(inputs, key=lambda name: stored.get(name, len(stored))):
        n, graph = inputs[name]
        placed[name] = _named(joined.placeholder(name), name)
        placed[name].meta = {**n.meta, **({"value": None, "named": n.name} | n.meta if name != n.name else {})}
    for graph in (first, then):
        mark = "" if graph is first else prefix
        for n in graph.nodes:
            if n.op == "placeholder":
                env[graph][n] = placed[n.name if not mark or n.name in same else mark + n.name]
            elif n.op == "call_function":
                args, kwargs = (fx.map_arg(a, env[graph].__getitem__) for a in (n.args, n.kwargs))
                meta = {k: v for k, v in n.meta.items() if k != "fused"}
                meta |= {"named": n.name, "back": True} if mark else {}
                node = add_node(joined, "call_function", n.target, args, kwargs, name=mark + n.name, meta=meta)
                env[graph][n] = _named(node, mark + n.name)
    returned = (fx.map_arg(graph.output_node().args[0], env[graph].__getitem__) for graph in (first, then))
    joined.output(tuple(returned))
    joined.lint()
    return joined


def _named(node: fx.Node, name: str) -> fx.Node:
    assert node.name == name, f"{name} is taken"
    return node


def _whole(joint: Joint, seconds: Seconds, sizes: Sizes) -> fx.Graph:
    """Return backward as one graph: first half, then second; interleaved if that needs less memory."""
    if joint.weights is None:
        return joint.backward
    as_autograd, separate = (_of_halves(joint, joint.weights, early=early) for early in (True, False))
    ordered_graphs = [OrderedGraph(graph, seconds, sizes) for graph in (as_autograd, separate)]
    least, peak = (ordered.uses.peak(ordered.nodes) for ordered in ordered_graphs)
    return separate if within(peak, least) else as_autograd


def _of_halves(joint: Joint, weights: fx.Graph, *, early: bool) -> fx.Graph:
    """Return both halves of backward as one graph.

    early: lines of the second half come as soon as their operands exist, as under autograd; else after the first half.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    halves = joint.backward, weights
    for half in halves:
        for n in half.find_nodes(op="placeholder"):
            if n.name not in by_name and not (half is weights and n.name in _passed_to_weights(joint)):
                by_name[n.name] = graph.node_copy(n)
    rest = deque(n for n in weights.nodes if n.op == "call_function")
    of_first = [n for n in joint.backward.nodes if n.op == "call_function"]
    uses = Counter(n.args[0].name for n in of_first if n.target is ops.opaque_backward)

    def ready(n: fx.Node) -> bool:
        """Return whether a line can run. A tape is empty after the last line that takes it."""
        shared_tape = n.target is ops.opaque_backward and uses[n.args[0].name] > 0  # type: ignore[union-attr]
        return not shared_tape and all(x in env or x.name in by_name for x in n.all_input_nodes)

    def add(n: fx.Node) -> None:
        for x in n.all_input_nodes:
            env.setdefault(x, by_name[x.name])
        by_name[n.name] = env[n] = graph.node_copy(n, env.__getitem__)

    for n in of_first:
        add(n)
        if n.target is ops.opaque_backward:
            uses[n.args[0].name] -= 1
        while early and rest and ready(rest[0]):
            add(rest.popleft())
    for n in rest:
        add(n)
    env |= {n: by_name[n.name] for n in joint.backward.find_nodes(op="placeholder")}
    received: Any = joint.backward.output_node().args[0]
    graph.output(fx.map_arg(received[0], env.__getitem__))
    return graph


def _passed_to_weights(joint: Joint) -> set[str]:
    """Return the names of the values that the second half of backward gets from the first."""
    returned: Any = joint.backward.output_node().args[0]
    return {n.name for n in returned[1]}


# --- the order


def _overlap(kind: str, graph: fx.Graph, seconds: Seconds, sizes: Sizes) -> None:
    """Move the lines into the fastest order found, with no more memory than one half and then the other."""
    ordered = OrderedGraph(graph, seconds, sizes)
    most = ordered.uses.peak(ordered.nodes)
    if kind == "FB" and (peak := _one_by_one(ordered, graph)) != most:
        most = peak
        reorder(graph, sorted(ordered.nodes, key=lambda n: not n.meta.get("back")))
        ordered = OrderedGraph(graph, seconds, sizes)
    orders = [ordered.nodes, best_order(ordered, most)]
    beside = [order for lead in LEADS if (order := _side_by_side(ordered, most, lead)) is not None]
    if beside:
        reorder(graph, best := min(beside, key=ordered.simulate))
        orders += [best, best_order(OrderedGraph(graph, seconds, sizes), most)]
    reorder(graph, min(orders, key=ordered.simulate))


def _one_by_one(ordered: OrderedGraph, graph: fx.Graph) -> tuple[int, int]:
    """Return the peaks of a forward, then a backward after forward's new buffer values were taken."""
    uses = ordered.uses
    returned: Any = graph.output_node().args[0]
    (loss, news, *stay), _ = returned
    gone, stays = set[fx.Node](), set[fx.Node]()
    fx.map_arg(news, lambda x: gone.add(uses.owner[x]))
    fx.map_arg((loss, stay), lambda x: stays.add(uses.owner[x]))
    nbytes = sum(uses.bytes[x] for x in gone - stays if x.op == "call_function")
    alive = [
        [most - nbytes if n.meta.get("back") else most for most in both]
        for n, both in zip(ordered.nodes, uses.alive(ordered.nodes), strict=True)
    ]
    first, later = zip(*alive, strict=True)
    return max(first), max(later)


class _Half:
    """The lines of one half, in order.

    total, done: seconds of all lines alone, and of those so far. collectives: how many. until_collective: by
    line, seconds of computing until the next one begins.
    """

    def __init__(self, ordered: OrderedGraph, *, back: bool) -> None:
        self.lines = [ordered.lines[i] for i, n in enumerate(ordered.nodes) if bool(n.meta.get("back")) == back]
        self.total = sum(line.seconds + line.sends for line in self.lines) or 1.0
        self.collectives = sum(line.sends > 0 for line in self.lines)
        self.at, self.done = 0, 0.0
        self.until_collective: dict[int, float] = {}
        left = math.inf
        for line in reversed(self.lines):
            left = 0.0 if line.sends else left + line.seconds
            self.until_collective[line.place] = left

    @property
    def ended(self) -> bool:
        return self.at == len(self.lines)

    @property
    def next(self) -> ScheduledLine:
        return self.lines[self.at]

    def run(self) -> None:
        self.done += self.next.seconds + self.next.sends
        self.at += 1


def _side_by_side(ordered: OrderedGraph, most: tuple[int, int], lead: float) -> list[fx.Node] | None:
    """Return the lines of both halves interleaved; None if memory does not suffice.

    If a half would wait for a collective, the other one goes on. Else the half whose next collective is nearer goes on,
    so that one is always under way. No half is further ahead, as a share of its time, than `lead` of its stretches
    between two collectives.
    """
    halves = [_Half(ordered, back=back) for back in (False, True)]
    most_ahead = lead / max(1, *(h.collectives for h in halves))
    memory, clock, order = Memory(ordered.uses), ordered.clock(), list[fx.Node]()
    gathered: set[Any] = set()  # buckets that a forward gathers now: the other half has to wait

    def urgent(h: _Half) -> tuple[float, bool, float]:
        waits = clock.left(h.next.waits)
        ahead = max(h.done / h.total - other.done / other.total for other in halves if other is not h)
        return waits, ahead > most_ahead, h.until_collective[h.next.place]

    def blocked(n: fx.Node) -> bool:
        return n.target is ops.gather_start and n.args[1] in gathered

    while open_ := [h for h in halves if not h.ended]:
        free = [h for h in open_ if not blocked(ordered.nodes[h.next.place])]
        fits = (h for h in sorted(free, key=urgent) if within(memory.would_be(h.next.step), most))
        half = next(fits, None)
        if half is None:
            return None
        n = ordered.nodes[half.next.place]
        if n.target is ops.gather_start:
            gathered.add(n.args[1])
        elif n.target is ops.gather_wait:
            gathered.discard(n.args[0].args[1])  # type: ignore[union-attr]
        memory.run(half.next.step)
        clock.line(half.next)
        order.append(n)
        half.run()
    return order
