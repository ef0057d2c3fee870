"""Split backward in two halves, for schedules that delay the second one (zb-h1, zb-v).

The first half computes the gradients of received values. The second computes the rest, for weights. An op whose
backward is one line (`ops.opaque_backward`) makes gradients for both. Either those for weights are kept until the
second half, or the line runs once in each half, and its operands and tape are kept: the choice that takes fewer bytes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from shardc.ir.types import behind
from shardc.runtime import ops


def _of_received(graph: fx.Graph) -> set[fx.Node]:
    """Return the lines on which the gradients of received values depend."""
    return behind(graph.output_node().all_input_nodes)


def _reload_in_each_half(graph: fx.Graph) -> None:
    """Reload host values separately in each half of backward, so that nothing holds them in between."""
    first = _of_received(graph)
    for wait in [n for n in graph.nodes if n.target is ops.reload_wait and n in first]:
        later = [u for u in wait.users if u not in first]
        if later:
            begun: Any = wait.args[0]
            with graph.inserting_before(begun):
                again = graph.node_copy(begun, lambda x: x)
                other = graph.node_copy(wait, lambda _, again=again: again)  # type: ignore[misc]
            for u in later:
                u.replace_input_with(wait, other)


def _run_opaque_in_each_half(graph: fx.Graph, nbytes: Callable[[fx.Node], int]) -> None:
    """Run an opaque backward in both halves if that keeps fewer bytes than its later results."""
    first = _of_received(graph)
    for n in [n for n in graph.nodes if n.target is ops.opaque_backward and n in first]:
        later = {u: int(u.args[1]) for u in n.users if u not in first}
        now = tuple(int(u.args[1]) for u in n.users if u in first)
        tape: Any = n.args[0]
        taken = [x for x in n.all_input_nodes if x.op == "call_function" and x.target is not ops.reload_wait]
        if sum(map(nbytes, later)) <= sum(map(nbytes, {x for x in taken if all(u in first for u in x.users)} | {tape})):
            continue
        with graph.inserting_before(n.next):
            other = graph.node_copy(n, lambda x: x)
        for u in later:
            u.replace_input_with(n, other)
        for line, wanted in ((n, now), (other, tuple(later.values()))):
            before: Any = line.args[2]
            own = tuple(x if k in wanted else None for k, x in enumerate(before))
            line.args = (*line.args[:2], own, *line.args[3:])
            line.kwargs = {**line.kwargs, "only": wanted, **({"keep": True} if line is n else {})}
            values: Any = line.meta["value"]
            line.meta["value"] = tuple(v if k in wanted else None for k, v in enumerate(values))


def halves_of(graph: fx.Graph, nbytes: Callable[[fx.Node], int]) -> list[fx.Graph]:
    """Split backward into what received values' gradients need, and the rest. nbytes: of a value or tape."""
    _run_opaque_in_each_half(graph, nbytes)
    _reload_in_each_half(graph)
    first = _of_received(graph)
    first |= {n for n in graph.nodes if n.target is operator.getitem and n.args[0] in first}  # others need not wait
    rest = [n for n in graph.nodes if n.op == "call_function" and n not in first]
    crossing = dict.fromkeys(x for n in rest for x in n.all_input_nodes if x in first and x.op == "call_function")
    one, one_env = _part(graph, [n for n in graph.nodes if n in first], {})
    one.output((fx.map_arg(graph.output_node().args[0], one_env.__getitem__), tuple(one_env[n] for n in crossing)))
    other, _ = _part(graph, rest, crossing)
    other.output(())
    return [one, other]


def _part(
    graph: fx.Graph, nodes: Sequence[fx.Node], given: Mapping[fx.Node, None]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Return some of a graph's calls as a graph. given: outside calls that it uses."""
    part, env = fx.Graph(), dict[fx.Node, fx.Node]()
    used = dict.fromkeys(x for n in nodes for x in n.all_input_nodes) | dict.fromkeys(nodes)
    for n in graph.nodes:
        if n in given or (n.op == "placeholder" and n in used):
            env[n] = part.placeholder(n.name)
            env[n].meta = {k: n.meta[k] for k in ("value", "source") if k in n.meta}
    for n in nodes:
        if n.op == "call_function":
            env[n] = part.node_copy(n, env.__getitem__)
    return part, env
