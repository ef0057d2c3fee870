"""An overlapped pair: the forward of one microbatch and the backward of another as one text, each of whose lines may
run while the other waits for a collective.

    def pair_0_3(mesh, rng, up_weight, x, back_mesh, back_h, back_y_grad, ...):
        up_start = ops.start('all_gather', x, mesh, ...)            forward begins to gather
        back_dgrad = aten.mm.default(back_y_grad, down_weight)      backward computes meanwhile
        up = ops.wait(up_start)
        back_sum_start = ops.transpose_start('sum_grad', back_dgrad, back_mesh, ...)
        ...

Both are the lines of the stages' own texts. What belongs to backward's microbatch has a name of its own (`back_`, see
shardc.ir.pairs); parameters are the same. So are random numbers, and the order of gradients, of buckets and of
collectives within each half: the numbers are those of one after the other, to the bit. Buckets of ZeRO 3 that both
want are gathered by each, as one after the other.

The order is the list scheduler's (shardc.passes.lower.overlap), from two beginnings: forward and then backward, and
both at once, each as far along as the other in simulated time. Memory never exceeds that of forward and then backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import fx

from shardc.ir.pairs import Pair, prefix_of, shared
from shardc.ir.program import Lowered, Program
from shardc.passes.lower.memory import WAITS, Memory, Sizes
from shardc.passes.lower.overlap import Text, best_order, within
from shardc.passes.lower.seconds import Seconds


def pairs_of(program: Program, seconds: Seconds, sizes: Sizes, stages: Sequence[tuple[int, int]]) -> tuple[Pair, ...]:
    """A text for each of these (stage of the forward, stage of the backward), where both are lowered."""
    found = []
    for f, b in stages:
        forward, backward = program.stages[f].lowered, program.stages[b].lowered
        if forward is not None and backward is not None:
            graph = _joined(program, forward, backward)
            _overlap(graph, seconds, sizes)
            found.append(Pair(f, b, graph))
    return tuple(found)


def _joined(program: Program, forward: Lowered, backward: Lowered) -> fx.Graph:
    """Both texts, one behind the other."""
    first, then, prefix = forward.forward, _whole(backward), prefix_of(forward.forward)
    same = shared(program)
    stored = {name: i for i, name in enumerate(("mesh", "rng", *(x.name for x in program.stored)))}
    given: dict[str, tuple[fx.Node, fx.Graph]] = {}
    for graph in (first, then):
        for n in graph.find_nodes(op="placeholder"):
            given.setdefault(n.name if graph is first or n.name in same else prefix + n.name, (n, graph))
    made = fx.Graph()
    env: dict[fx.Graph, dict[fx.Node, fx.Node]] = {first: {}, then: {}}
    placed: dict[str, fx.Node] = {}
    for name in sorted(given, key=lambda name: stored.get(name, len(stored))):
        n, graph = given[name]
        placed[name] = _named(made.placeholder(name), name)
        placed[name].meta = {**n.meta, **({"value": None, "named": n.name} | n.meta if name != n.name else {})}
    for graph in (first, then):
        own = "" if graph is first else prefix
        for n in graph.nodes:
            if n.op == "placeholder":
                env[graph][n] = placed[n.name if not own or n.name in same else own + n.name]
            elif n.op == "call_function":
                args, kwargs = (fx.map_arg(a, env[graph].__getitem__) for a in (n.args, n.kwargs))
                node = made.create_node("call_function", n.target, args, kwargs, name=own + n.name)
                node.meta = {k: v for k, v in n.meta.items() if k != "piece"}
                node.meta |= {"named": n.name, "back": True} if own else {}
                env[graph][n] = _named(node, own + n.name)
    returned = (fx.map_arg(graph.output_node().args[0], env[graph].__getitem__) for graph in (first, then))
    made.output(tuple(returned))
    made.lint()
    return made


def _named(node: fx.Node, name: str) -> fx.Node:
    assert node.name == name, f"{name} is taken"
    return node


def _whole(lowered: Lowered) -> fx.Graph:
    """Backward, of which a schedule with zero bubbles has two halves."""
    if lowered.weights is None:
        return lowered.backward
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    by_name: dict[str, fx.Node] = {}
    halves = lowered.backward, lowered.weights
    for half in halves:
        for n in half.find_nodes(op="placeholder"):
            if n.name not in by_name and not (half is lowered.weights and n.name in _handed_on(lowered)):
                by_name[n.name] = graph.node_copy(n)
    for half in halves:
        for n in half.nodes:
            if n.op == "call_function":
                by_name[n.name] = env[n] = graph.node_copy(n, env.__getitem__)
            elif n.op == "placeholder":
                env[n] = by_name[n.name]
    received: Any = lowered.backward.output_node().args[0]
    graph.output(fx.map_arg(received[0], env.__getitem__))
    return graph


def _handed_on(lowered: Lowered) -> set[str]:
    """What the second half of backward gets from the first one."""
    returned: Any = lowered.backward.output_node().args[0]
    return {n.name for n in returned[1]}


# --- the order


def _overlap(graph: fx.Graph, seconds: Seconds, sizes: Sizes) -> None:
    """Move the lines: into the fastest order that is found, with no more memory than forward and then backward."""
    text = Text(graph, seconds, sizes)
    most = text.uses.peak(text.nodes)
    found = [text.nodes, best_order(text, most)]
    side_by_side = _side_by_side(text, most)
    if side_by_side is not None:
        _arrange(graph, side_by_side)
        other = Text(graph, seconds, sizes)
        found += [side_by_side, best_order(other, most)]
    _arrange(graph, min(found, key=text.simulate))


def _arrange(graph: fx.Graph, order: Sequence[fx.Node]) -> None:
    output = graph.output_node()
    for n in order:
        output.prepend(n)


def _side_by_side(text: Text, most: tuple[int, int]) -> list[fx.Node] | None:
    """The lines of both, each half as far along as the other in the time that it takes alone, as far as memory allows;
    None if that leads to where it does not suffice. Where a half has begun a collective, or would wait for one, the
    other may go on.
    """
    halves = [[n for n in text.nodes if bool(n.meta.get("back")) == back] for back in (False, True)]
    takes = [sum(text.work[n].seconds + text.sends[n] for n in half) or 1.0 for half in halves]
    at, done, now = [0, 0], [0.0, 0.0], -1
    memory, order = Memory(text.uses), list[fx.Node]()
    while open_ := [k for k in (0, 1) if at[k] < len(halves[k])]:
        open_.sort(key=lambda k: (k != now, done[k] / takes[k]))
        fits = (k for k in open_ if within(memory.would_be(halves[k][at[k]]), most))
        k = next(fits, -1)
        if k < 0:
            return None
        n = halves[k][at[k]]
        memory.run(n)
        order.append(n)
        at[k] += 1
        done[k] += text.work[n].seconds + text.sends[n]
        further = at[k] < len(halves[k]) and halves[k][at[k]].target not in WAITS
        now = k if further and not text.sends[n] else -1
    return order
