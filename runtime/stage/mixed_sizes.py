"""Add up values of microbatches of several sizes, whose programs may have summands of it on other ranks.

    i64[] +a        counted by the ranks of a, after a gather over b: equal on the ranks of b
    i64[] +a +b     counted by the ranks of both

Of the first the ranks with coordinate 0 on b add their summand, so the sum over a and b is whole for both.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardc.ir.placement import Layout, Partial

if TYPE_CHECKING:
    from shardc.runtime.stage.interpreter import Interpreter


class MixedSum:
    """A sum over microbatches of several sizes. layouts: of its summand in each program, the first as compiled.

    axes: of the mesh of the first, over which any program has summands.
    """

    def __init__(self, layouts: Mapping[Interpreter, Layout]) -> None:
        first = next(iter(layouts)).program.mesh
        self._over = {one: {a for a, p in x.items if isinstance(p, Partial)} for one, x in layouts.items()}
        axes = {a for one, over in self._over.items() for a in first.coarser(one.program.mesh.digits(*over))}
        self.axes = tuple(a for a in first.names if a in axes)

    def summand(self, x: Tensor, one: Interpreter) -> Tensor:
        """Return what this rank adds of a program's value: nothing where another rank adds the same."""
        return _first(x, one, set(one.program.mesh.digits(*self.axes)) - self._over[one])

    def taken(self, whole: Tensor, one: Interpreter, reduced: Collection[str]) -> Tensor:
        """Return a program's form of the sum. reduced: axes over which it has summed before."""
        return _first(whole, one, self._over[one] - set(one.program.mesh.digits(*reduced)))


def _first(x: Tensor, one: Interpreter, axes: Collection[str]) -> Tensor:
    """Return x on the first rank along axes, and zeros on the others."""
    return torch.zeros_like(x) if any(one.mesh.coordinate(a) for a in axes) else x
