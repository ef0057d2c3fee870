"""Define the two formats of float8."""

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
