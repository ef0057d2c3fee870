"""The two formats of float8."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Format(NamedTuple):
    """top: what is this large, or larger, does not round to a number (`even`: larger alone)."""

    dtype: torch.dtype
    top: float
    even: bool


#: e4m3 has numbers to 448, the next would be 480: what is above 464 is none, and the tie goes to the even one. e5m2 has
#: numbers to 57344, the next would be 65536, which is the even one.
FORMATS = {"e4m3": Format(torch.float8_e4m3fn, 464.0, True), "e5m2": Format(torch.float8_e5m2, 61440.0, False)}
#: Of scales: with these, the least number of float8 times its scale is one of bfloat16 and float32.
EXPONENTS = 110
#: What e8m0 holds as nan; its negative too.
NAN = 128
