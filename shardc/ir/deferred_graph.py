"""A graph that is written when it is first looked at. Of many equal layers the placed graph of one device is read by
reports and proofs alone: a step runs the stages' graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx


class DeferredGraph(fx.Graph):
    """write: writes into the graph that it is given, an empty one. like: a graph whose output has the same form.

    Once it is written it is an `fx.Graph` as any other.
    """

    def __init__(self, write: Callable[[fx.Graph], None], like: fx.Graph) -> None:
        self.__dict__.update(_write=write, _like=like)  # a graph's own attributes are missing until they are made

    def __getattr__(self, name: str) -> Any:
        write = self.__dict__["_write"]
        self.__dict__.clear()
        self.__class__ = fx.Graph  # type: ignore[assignment]
        fx.Graph.__init__(self)
        write(self)
        return getattr(self, name)


def output_of(graph: fx.Graph) -> fx.Node | None:
    """The output of a graph, or, of one that is not written yet, one of the same form."""
    found = (graph._like if type(graph) is DeferredGraph else graph).find_nodes(op="output")
    return found[0] if found else None


def is_written(graph: fx.Graph) -> bool:
    """Has anybody looked at it?"""
    return type(graph) is not DeferredGraph
