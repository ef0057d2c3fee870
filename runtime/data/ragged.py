"""Read rows of several lengths: pad each sample, and give each microbatch of a step a length of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ragged:
    """This rank's part of a step whose microbatches have lengths of their own. `engine.step` handles it.

    parts: this rank's rows of each microbatch, whole along the sequence. lengths: to which each is padded; every: all
    lengths of the step, on any rank, for which all ranks compile together.
    """

    parts: tuple[Any, ...]
    lengths: tuple[int, ...]
    every: tuple[int, ...]


def by_microbatch(collate: Callable[[list[Any]], Any], microbatches: int, samples: list[Any]) -> list[Any]:
    """Collate the samples of each microbatch separately."""
    rows = len(samples) // microbatches
    return [collate(samples[i : i + rows]) for i in range(0, len(samples), rows)]
