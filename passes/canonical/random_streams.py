"""Assign a stream of random numbers to each random op (shardc.runtime.rng)."""

from __future__ import annotations

from typing import Any

from torch import fx

from shardc.runtime import ops

#: Random ops -> the position of their index.
_INDEX: dict[Any, int] = {ops.dropout: 3, ops.random: 5, ops.attention: 9}


def number_random(graph: fx.Graph) -> None:
    """Set each random op's stream to its ordinal in the finished graph: the same for every mesh.

    Attention without dropout draws nothing and is not counted: `sequence:` writes it for any p.
    """
    random = (n for n in graph.nodes if n.target in _INDEX and (n.target is not ops.attention or n.args[4] > 0))
    for i, node in enumerate(random):
        node.update_arg(_INDEX[node.target], i)
