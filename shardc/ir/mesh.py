"""Define axis names and sizes of a device mesh, and rank <-> coordinates. Needs no process group."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

#: The axis of microbatches, which run in turn (shardc.passes.accumulate). Values are summed, never gathered.
MICROBATCH = "microbatch"
#: Between the names of axes that are one axis together: "dp+tp".
JOIN = "+"
#: Ten times the ranks of the largest clusters.
MAX_RANKS = 1 << 20


def is_axis(name: str) -> bool:
    """Return whether an axis of a spec may have this name. MICROBATCH is an axis of the compiler."""
    return re.fullmatch(r"[A-Za-z_]\w{0,63}", name, re.ASCII) is not None and name != MICROBATCH


def is_data_axis(name: str) -> bool:
    """Return whether an axis splits the batch unless the spec says otherwise: dp and dp_*."""
    return name == "dp" or name.startswith("dp_")


def axes_of_spec(axis: str) -> list[str]:
    """Return the axes of the spec that an axis is, or is a part of: of "dp+tp.0" dp and tp, of "pp[0,3]" pp."""
    return [one.partition("[")[0].partition(".")[0] for one in axis.split(JOIN)]


@dataclass(frozen=True)
class Mesh:
    """A mesh of ranks. axes: (name, size) pairs, outermost first: the last axis holds neighbouring ranks.

    >>> m = Mesh((("dp", 2), ("tp", 4)))
    >>> m.world, m.size("tp"), m.coords(5), m.rank({"dp": 1, "tp": 1})
    (8, 4, {'dp': 1, 'tp': 1}, 5)

    An axis may be seen as several digits ("tp" as "tp.0" × "tp.1", outermost first; see `refine`). The axis's name then
    means all of its digits.

    >>> m.refine("tp", 2).axes
    (('dp', 2), ('tp.0', 2), ('tp.1', 2))

    Several axes are one axis together; its coordinates are in the mesh's order.

    >>> m.size("dp+tp"), m.group(5, ("dp+tp",))
    (8, (0, 1, 2, 3, 4, 5, 6, 7))

    Some coordinates of an axis form an axis too: their ranks, in order. Other ranks have no coordinate on it.

    >>> m.subaxis("tp", (0, 3)), m.size("tp[0,3]"), m.group(1 * 4 + 3, ("tp[0,3]",))
    ('tp[0,3]', 2, (4, 7))
    """

    axes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        return cls(tuple(sizes.items()))

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @cached_property
    def _strides(self) -> dict[str, int]:
        return {name: math.prod(size for _, size in self.axes[i + 1 :]) for i, name in enumerate(self.names)}

    @property
    def world(self) -> int:
        return math.prod(size for _, size in self.axes)

    def fitting(self, world: int) -> dict[str, int]:
        """Return the sizes with the first axis changed that allows `world` ranks; {} if none does.

        >>> Mesh((("dp", 2), ("tp", 4))).fitting(4)
        {'dp': 1, 'tp': 4}
        """
        for axis, size in self.axes:
            others = self.world // size
            if world % others == 0:
                return {**dict(self.axes), axis: world // others}
        return {}

    def digits(self, *axes: str) -> tuple[str, ...]:
        """Return the digits of axes; an axis without digits is its own. Raises KeyError for an unknown axis."""
        return tuple(
            digit for a in axes for one in a.split(JOIN) for digit in ((one,) if "[" in one else self._digits[one])
        )

    def has(self, axis: str) -> bool:
        """Return whether the mesh has an axis or a digit of this name."""
        return axis in self._digits

    def coarser(self, digits: Iterable[str]) -> frozenset[str]:
        """Return the axes of this mesh that the digits of a finer one are, or are a part of.

        >>> sorted(Mesh.of({"dp": 2, "cp": 4}).coarser(["dp", "cp.1"]))
        ['cp', 'dp']
        """
        levels = {d: [d.rsplit(".", i)[0] for i in range(d.count(".") + 1)] for d in digits}
        return frozenset(next(name for name in some if name in self.names) for some in levels.values())

    @cached_property
    def _digits(self) -> dict[str, tuple[str, ...]]:
        digits: dict[str, tuple[str, ...]] = {}
        for name in self.names:
            levels = name.split(".")
            for i in range(1, len(levels) + 1):
                axis = ".".join(levels[:i])
                digits[axis] = (*digits.get(axis, ()), name)
        return digits

    @staticmethod
    def subaxis(axis: str, coordinates: Iterable[int]) -> str:
        """Return the name of the axis that has only these coordinates of `axis`: "pp[0,3]"."""
        return f"{axis}[{','.join(map(str, coordinates))}]"

    def coords_of(self, axis: str) -> tuple[str, tuple[int, ...]]:
        """Return the underlying mesh axis and the coordinates on it: those of a subaxis, else all.

        >>> Mesh.of({"pp": 4}).coords_of("pp[0,3]"), Mesh.of({"pp": 2}).coords_of("pp")
        (('pp', (0, 3)), ('pp', (0, 1)))
        """
        whole, bracket, inside = axis.partition("[")
        return whole, tuple(map(int, inside[:-1].split(","))) if bracket else tuple(range(self.size(axis)))

    def refine(self, axis: str, *outer: int) -> Mesh:
        """Return a mesh with `axis` seen as digits: of the `outer` sizes, outermost first, then of the rest."""
        rest = self.size(axis) // math.prod(outer)
        assert math.prod(outer) * rest == self.size(axis), f"{outer} does not divide {axis}={self.size(axis)}"
        digits = [(f"{axis}.{i}", n) for i, n in enumerate((*outer, rest))]
        return Mesh(tuple(new for old in self.axes for new in (digits if old[0] == axis else [old])))

    def merge(self, axes: Iterable[str]) -> tuple[str, ...]:
        """Return the axes in the mesh's order, with digits replaced by their axis where all are present."""
        digits = set(self.digits(*axes))
        whole = {n: n.partition(".")[0] for n in digits}
        names = {n: parent if set(self.digits(parent)) <= digits else n for n, parent in whole.items()}
        return tuple(dict.fromkeys(names[n] for n in self.names if n in digits))

    def size(self, axis: str) -> int:
        sizes = dict(self.axes)
        if "[" in axis:
            return len(self.coords_of(axis)[1])
        return sizes[axis] if axis in sizes else math.prod(sizes[digit] for digit in self.digits(axis))

    def stride(self, axis: str) -> int:
        """Return the distance in ranks between neighbours along `axis`."""
        return self._strides[axis]

    def coords(self, rank: int) -> dict[str, int]:
        coords = []
        for name, size in reversed(self.axes):
            rank, coordinate = divmod(rank, size)
            coords.append((name, coordinate))
        return dict(reversed(coords))

    def named(self, *ranks: int, shown: int = 8) -> str:
        """Describe ranks for a message; of many, only the first `shown`.

        >>> Mesh.of({"dp": 2, "tp": 2}).named(1), Mesh.of({"dp": 4}).named(0, 2, 3, shown=2)
        ('rank 1 (dp=0, tp=1)', 'ranks 0 (dp=0), 2 (dp=2) and 1 more')
        """
        texts = [f"{r} ({', '.join(f'{a}={c}' for a, c in self.coords(r).items())})" for r in ranks[:shown]]
        more = f" and {len(ranks) - shown} more" if len(ranks) > shown else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts).replace(' ()', '')}{more}"

    def rank(self, coords: Mapping[str, int]) -> int:
        return sum(coords[name] * self.stride(name) for name in self.names)

    def on(self, rank: int, axes: Iterable[str]) -> bool:
        """Return whether the rank has a coordinate on all these axes."""
        coords = self.coords(rank)
        return all(coords[whole] in members for whole, members in map(self.coords_of, self.digits(*axes)))

    def group(self, rank: int, axes: Iterable[str]) -> tuple[int, ...]:
        """Return `rank` and the ranks that differ from it only in `axes`, in the mesh's order of axes."""
        ranges = dict(map(self.coords_of, self.digits(*axes)))
        coords = self.coords(rank)
        first = rank - sum(coords[a] * self.stride(a) for a in ranges)
        return tuple(first + offset for offset in self._offsets(ranges))

    def groups(self, axes: Iterable[str]) -> list[tuple[int, ...]]:
        """Return every group over `axes`, in the order of their first ranks.

        A rank without a coordinate on the axes is in no group. The time is linear in the world size.

        >>> mesh = Mesh.of({"dp": 2, "tp": 3})
        >>> mesh.groups(("tp",)), mesh.groups(("dp",)), mesh.groups(("tp[0,2]",))
        ([(0, 1, 2), (3, 4, 5)], [(0, 3), (1, 4), (2, 5)], [(0, 2), (3, 5)])
        """
        ranges = dict(map(self.coords_of, self.digits(*axes)))
        offsets = self._offsets(ranges)
        firsts = self._offsets({name: range(size) for name, size in self.axes if name not in ranges})
        return [tuple(first + offset for offset in offsets) for first in firsts]

    def _offsets(self, coordinates: Mapping[str, Iterable[int]]) -> list[int]:
        """Return the ranks with one of these coordinates on each axis, and 0 on the other axes, in rank order."""
        ranks = [0]
        for axis in self.names:
            if axis in coordinates:
                ranks = [r + i * self.stride(axis) for r in ranks for i in coordinates[axis]]
        return ranks

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes) or "one device"
