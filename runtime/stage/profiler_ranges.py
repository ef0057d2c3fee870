"""Show each node of a program as a range in torch.profiler, by its name and source module.

Events of backward have no ranges; the profiler links them to forward's by their sequence numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx
from torch.autograd.profiler import record_function

from shardc.ir.graph import source_of
from shardc.runtime.stage.bindings import bound
from shardc.runtime.stage.repeated_lines import repeat

#: Makes a graph a function: (the graph, the graph of the program that it was made from) -> the function.
MakeFunction = Callable[[fx.Graph, fx.Graph], Callable[..., Any]]


def _begin(label: str) -> Any:
    return record_function(label).__enter__()  # type: ignore[no-untyped-call]


def _end(opened: Any) -> None:
    opened.__exit__(None, None, None)


def with_ranges(graph: fx.Graph, source: fx.Graph) -> fx.GraphModule:
    """Make a graph a function with a range around every call (costs some microseconds each)."""
    modules = {n.name: source_of(n).module for n in source.nodes}
    for node in [n for n in graph.nodes if n.op in ("call_function", "call_method") and n.target is not repeat]:
        label = " ".join(filter(None, (node.name, modules.get(node.name, ""))))
        with graph.inserting_before(node):
            opened = graph.call_function(_begin, (label,))
        with graph.inserting_after(node):
            graph.call_function(_end, (opened,))
    return bound(graph)
