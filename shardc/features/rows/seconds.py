"""Fit the seconds of a microbatch to its length, from the cost of programs that are compiled for a few lengths.

    seconds = fixed + by_token * length + by_pair * pairs

Linear layers grow with tokens, and attention with pairs of a query and a key: length^2, or fewer where the program's
attention leaves out what the masks of documents hide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardc.errors import ShardcError
from shardc.ir.graph import calls
from shardc.ir.program import Program
from shardc.runtime import ops
from shardc.runtime.data.ragged import Size
from shardc.runtime.schedule.actions import COMPUTE

#: Lengths that a fit needs: the smallest, one between, and the largest.
POINTS = 3


@dataclass(frozen=True)
class Seconds:
    """Seconds of a microbatch. Call it with (length, pairs of a row)."""

    fixed: float
    by_token: float
    by_pair: float

    def __call__(self, length: int, pairs: float) -> float:
        return self.fixed + self.by_token * length + self.by_pair * pairs


@dataclass(frozen=True)
class OfSizes:
    """Seconds of a microbatch, by how many times the compiled rows it has. Call it with (size, pairs of a row)."""

    by_times: Mapping[int, Seconds]

    def __call__(self, size: Size, pairs: float) -> float:
        return self.by_times[size.times](size.length, pairs)


def priced_sizes(sizes: Sequence[Size]) -> list[Size]:
    """Return the sizes, of these in order, at which seconds are computed: a few for each number of rows."""
    by_times = {t: [s.length for s in sizes if s.times == t] for t in dict.fromkeys(s.times for s in sizes)}
    return [Size(n, times) for times, lengths in by_times.items() for n in spread(lengths)]


def of_sizes(seconds: Mapping[Size, float]) -> OfSizes:
    """Return seconds of all sizes, of those at the priced ones."""
    times = dict.fromkeys(size.times for size in seconds)
    return OfSizes({t: fitted({s.length: x for s, x in seconds.items() if s.times == t}) for t in times})


def spread(lengths: list[int]) -> list[int]:
    """Return the lengths, of these in order, at which seconds are computed."""
    if len(lengths) <= POINTS:
        return lengths
    middle = min(lengths[1:-1], key=lambda n: abs(n - (lengths[0] + lengths[-1]) / 2))
    return [lengths[0], middle, lengths[-1]]


def fitted(seconds: Mapping[int, float]) -> Seconds:
    """Return the polynomial through seconds at one, two or three lengths, without negative terms.

    One length: all seconds grow with tokens. Two: a fixed part, and one that grows.
    """
    lengths, values = np.array(sorted(seconds), float), np.array([seconds[n] for n in sorted(seconds)])
    terms = np.stack([np.ones_like(lengths), lengths, lengths**2])
    used = {1: [1], 2: [0, 1]}.get(len(lengths), [0, 1, 2])
    factors = np.zeros(3)
    while used:  # a negative term is noise of a model in which another one is near 0
        scale = terms[used].max(axis=1)
        part = np.linalg.lstsq((terms[used] / scale[:, None]).T, values, rcond=None)[0] / scale
        if (part >= 0).all():
            factors[used] = part
            break
        used = [t for t, x in zip(used, part, strict=True) if x >= 0]
    return Seconds(*map(float, factors))


def of_program(program: Any, device: str | None) -> float:
    """Return `of_cost` of a program. device: a name, if it is known; else the spec's."""
    try:
        return of_cost(program.cost(device))
    except ShardcError:
        return of_cost(program.cost(None))


def of_cost(cost: Any) -> float:
    """Return the seconds of forward and backward of one microbatch, on the rank that takes longest."""
    slots = [[s.end - s.start for s in row if s.action.kind in COMPUTE] for row in cost.timeline.slots]
    return max(float(sum(row)) for row in slots) / float(cost.program.microbatches)


def leaves_out(program: Program) -> bool:
    """Return whether attention leaves out pairs that the masks of documents hide, as a ring does."""
    return any(n.target is ops.attention_reach for s in program.stages for n in calls(s.graph))
