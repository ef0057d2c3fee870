"""Define how linear layers multiply numbers of 8 bits, for each `precision: {products: ...}`."""

from __future__ import annotations

from typing import NamedTuple

#: float8 kernels need sizes that are multiples of ALIGNED; a block of mxfp8 has BLOCK numbers.
ALIGNED, BLOCK = 16, 32


class Recipe(NamedTuple):
    """Block sizes of granules along (all but the last dim, the last dim); 0 is the whole dim.

    weight: along (out, in). gradient: its format; rows: the scales of the weight's rows go into the gradient.
    """

    x: tuple[int, int]
    weight: tuple[int, int]
    grad: tuple[int, int]
    gradient: str
    rows: bool = False

    @property
    def blocks(self) -> bool:
        """Whether a row has several scales."""
        return self.x[1] > 0

    def of_weight(self, transposed: bool) -> tuple[int, int]:
        """Return the granule of a weight [out, in]; transposed: [in, out]."""
        return (self.weight[1], self.weight[0]) if transposed else self.weight


RECIPES = {
    "fp8-rowwise": Recipe((1, 0), (1, 0), (1, 0), "e4m3", rows=True),
    "fp8-tensorwise": Recipe((0, 0), (0, 0), (0, 0), "e5m2"),
    "mxfp8": Recipe((1, BLOCK), (BLOCK, BLOCK), (1, BLOCK), "e4m3"),
}


def along(granule: tuple[int, int], dims: int) -> tuple[int, ...]:
    """Return the granule of a tensor of rows with so many dims."""
    return (*[granule[0]] * (dims - 1), granule[1])
