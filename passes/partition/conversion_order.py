"""Find the conversions that lead from one layout of a value to another, and their order.

    f32[8@dp, 64] +tp  ->  f32[8, 64@tp]         reduce_scatter over tp:  f32[8@dp, 64@tp]
                                                 all_gather over dp:      f32[8, 64@tp]
    f32[8@dp, 64@tp]  ->  f32[8@tp, 64@dp]       all_gather over dp:      f32[8, 64@tp]
                                                 all_to_all over tp:      f32[8@tp, 64]
                                                 shard on dp:             f32[8@tp, 64@dp]

A row of shardc.ir.conversions is for one axis; here a value changes on several.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardc.ir import conversions
from shardc.ir.conversions import Conversion
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import REPLICATE, Layout, Shard


@dataclass(frozen=True)
class Routes:
    """Routes between layouts of values on a mesh."""

    mesh: Mesh

    def distance(self, old: Layout, new: Layout) -> int:
        """Return the sum of the distances on all axes (`Conversion.distance`)."""
        return sum(conversions.distance(old[axis], new[axis]) for axis in self.mesh.names)

    def in_order(self, old: Layout, new: Layout, v: Value) -> Iterator[tuple[Conversion, tuple[str, ...]]]:
        """Yield the conversions in an order in which each leads to a possible layout, if there is one.

        A dim is cut after another axis has left it. If two axes change places, one of them is gathered, and cut
        again after the other has moved. If no step is possible, the first is taken; the last always leads to `new`.
        """
        steps, layout = self._steps(old, new), old
        while len(steps) > 1:
            ready = (
                i
                for i, (row, axes) in enumerate(steps)
                if not any({*self.mesh.digits(*axes)} & {*self.mesh.digits(*earlier)} for _, earlier in steps[:i])
                and not self.after(row, axes, layout, new).problem(v.shape, self.mesh)
            )
            exchanges = (i for i, (row, _) in enumerate(steps) if row.source is row.target)
            if (i := next(ready, None)) is None and (k := next(exchanges, None)) is not None:
                _, axes = steps[k]
                steps[k : k + 1] = [(row, axes) for row in conversions.by_way_of_replicate(Shard, Shard)]
                continue
            row, axes = steps.pop(i or 0)
            layout = self.after(row, axes, layout, new)
            yield row, axes
        yield from steps

    def after(self, row: Conversion, axes: tuple[str, ...], old: Layout, need: Layout) -> Layout:
        """Return the layout that a conversion leads to on the way to the one that is needed."""
        digit = self.mesh.digits(axes[0])[0]  # the outermost digit of an axis that is converted as one
        # the first of two conversions always leads to Replicate
        target = need[digit] if isinstance(need[digit], row.target) else REPLICATE
        for axis in axes:
            old = old.replace(axis, target, self.mesh)
        return old

    def _steps(self, old: Layout, new: Layout) -> list[tuple[Conversion, tuple[str, ...]]]:
        """Return the conversions in order, each with the axes of one call: several if the op allows it."""
        paths = {axis: conversions.path(old[axis], new[axis]) for axis in self.mesh.names}
        calls: list[tuple[Conversion, tuple[str, ...]]] = []
        for row, axes in conversions.steps(paths):
            if row.merged:
                calls.append((row, self.mesh.merge(axes)))
            else:
                calls += [(row, (axis,)) for axis in self._merged_digits(axes, old, new)]
        return calls

    def _merged_digits(self, axes: list[str], old: Layout, new: Layout) -> list[str]:
        """Return the axes. Digits that together are a whole axis, before and after, are replaced by that axis."""
        merged: list[str] = []
        for axis in dict.fromkeys(a.partition(".")[0] for a in axes):
            digits = [a for a in axes if a.partition(".")[0] == axis]
            together = digits == list(self.mesh.digits(axis)) and all(
                Layout.of({axis: layout[digits[0]]}, self.mesh)
                == Layout(tuple(i for i in layout.items if i[0] in digits))
                for layout in (old, new)
            )
            merged += [axis] if together else digits
        return merged
