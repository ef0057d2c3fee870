"""Read rows of several lengths: pad each sample, and give each microbatch of a step a length of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple


class Size(NamedTuple):
    """A microbatch's size. length: to which rows are padded; times: how many times the rows of a compiled one.

    With more rows, fewer ranks share each: a rank has as many rows as compiled, and more tokens of each.
    """

    length: int
    times: int = 1


@dataclass(frozen=True)
class Ragged:
    """This rank's part of a step whose microbatches have sizes of their own. `engine.step` handles it.

    parts: this rank's rows of each microbatch, whole along the sequence; there may be fewer microbatches than compiled.
    sizes: of each; every: all sizes of the step, on any rank, for which all ranks compile together.
    """

    parts: tuple[Any, ...]
    sizes: tuple[Size, ...]
    every: tuple[Size, ...]


def by_microbatch(collate: Callable[[list[Any]], Any], rows: int, samples: list[Any]) -> list[Any]:
    """Collate the samples of each microbatch, `rows` of them, separately."""
    return [collate(samples[i : i + rows]) for i in range(0, len(samples), rows)]
