"""A graph that is written when it is first looked at. Of many equal layers the captured graph, and the placed graph of
one device, are read by reports and proofs alone: passes run on fewer layers, and a step runs the stages' graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx


@dataclass(frozen=True)
class FewerLayers:
    """A captured graph without most of its equal layers, and what they would be (shardc.passes.distinct_layers).

    list: the name of the list of layers; period: layers of a unit, which is what repeats. layers: the first one of each
    unit that stays, and of the first one after all units. left_out: how many units are. stored: of the parameters and
    buffers of these: the name of that in the last unit that stays, and how many units later they are; before: of those
    in the units that stay, that of the unit before. more: makes the same with more layers, another one last.
    """

    graph: fx.Graph
    list: str
    period: int
    layers: tuple[int, ...]
    left_out: int
    stored: Mapping[str, tuple[str, int]]
    before: Mapping[str, str]
    more: Callable[[], FewerLayers] | None = None


class DeferredGraph(fx.Graph):
    """write: writes into the graph that it is given, an empty one. like: a graph whose output and inputs have the same
    form. fewer: of a captured graph of many equal layers.

    Once it is written it is an `fx.Graph` as any other.
    """

    def __init__(self, write: Callable[[fx.Graph], object], like: fx.Graph, fewer: FewerLayers | None = None) -> None:
        # a graph's own attributes are missing until they are made
        self.__dict__.update(_write=write, _like=like, _fewer=fewer)

    def __getattr__(self, name: str) -> Any:
        write, fewer = self.__dict__["_write"], self.__dict__["_fewer"]
        self.__dict__.clear()
        self.__class__ = fx.Graph  # type: ignore[assignment]
        fx.Graph.__init__(self)
        self.__dict__["_fewer"] = fewer
        write(self)
        return getattr(self, name)


def output_of(graph: fx.Graph) -> fx.Node | None:
    """The output of a graph, or, of one that is not written yet, one of the same form."""
    found = like(graph).find_nodes(op="output")
    return found[0] if found else None


def like(graph: fx.Graph) -> fx.Graph:
    """A graph, or, of one that is not written yet, one in which inputs and constants are used as in it."""
    return graph._like if type(graph) is DeferredGraph else graph


def fewer_layers(graph: fx.Graph) -> FewerLayers | None:
    """Of a captured graph, as it was captured: the same with fewer layers."""
    return graph.__dict__.get("_fewer")


def is_written(graph: fx.Graph) -> bool:
    """Has anybody looked at it?"""
    return type(graph) is not DeferredGraph
