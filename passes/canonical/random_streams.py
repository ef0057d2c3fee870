"""Assign a stream of random numbers to each random op (shardc.runtime.rng)."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.runtime import ops

#: Random ops -> the position of their index.
_INDEX: dict[Any, int] = {ops.dropout: 3, ops.random: 5, ops.attention: 9}


def number_random(graph: fx.Graph) -> None:
    """Set each random op's stream to its ordinal in the finished graph: the same for every mesh."""
    for i, node in enumerate(n for n in graph.nodes if n.target in _INDEX):
        node.update_arg(_INDEX[node.target], i)
