"""Define the two formats of float8, and how linear layers multiply them for each `precision: {products: ...}`."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """A format. top: numbers of at least this size have no float8 (`even`: only larger ones)."""

    dtype: torch.dtype
    top: float
    even: bool


#: e4m3 has numbers to 448, the next would be 480: above 464 there is no float8, and the tie rounds to even. e5m2 has
#: numbers to 57344, the next would be 65536, which is the even one.
FORMATS = {"e4m3": Format(torch.float8_e4m3fn, 464.0, True), "e5m2": Format(torch.float8_e5m2, 61440.0, False)}
#: Largest exponent of a scale: the least float8 number times such a scale still exists in bfloat16 and float32.
EXPONENTS = 110
#: The exponent that e8m0 stores as nan; also its negative.
NAN = 128

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

    @property
    def multiple(self) -> int:
        """The number of which sizes have to be multiples."""
        return BLOCK if self.blocks else ALIGNED

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
