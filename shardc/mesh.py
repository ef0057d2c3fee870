"""Axis names and sizes of a device mesh, and rank <-> coordinates. Pure arithmetic: needs no process group."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks. axes: (name, size) pairs, outermost first: the last axis holds neighbouring ranks.

    >>> m = Mesh((("dp", 2), ("tp", 4)))
    >>> m.world, m.size("tp"), m.coords(5), m.rank({"dp": 1, "tp": 1})
    (8, 4, {'dp': 1, 'tp': 1}, 5)
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        return cls(tuple(sizes.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        return dict(self.axes)[axis]

    def stride(self, axis: str) -> int:
        """Distance in ranks between neighbours along `axis`."""
        i = self.names.index(axis)
        return math.prod(size for _, size in self.axes[i + 1 :])

    def coords(self, rank: int) -> dict[str, int]:
        return {name: rank // self.stride(name) % size for name, size in self.axes}

    def rank(self, coords: Mapping[str, int]) -> int:
        return sum(coords[name] * self.stride(name) for name in self.names)

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """The ranks that differ from `rank` only in `axes`, in the order of those axes in the mesh."""
        wanted, mine = set(axes), self.coords(rank)
        found = [rank - sum(mine[a] * self.stride(a) for a in self.names if a in wanted)]
        for a in self.names:
            if a in wanted:
                found = [r + i * self.stride(a) for r in found for i in range(self.size(a))]
        return tuple(found)

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes) or "one device"
