"""Sample the distributions of `normal_`, `uniform_`, `geometric_` ... by the counter-based generator.

A sampler computes the numbers of elements only from the op's key and their indices, so that they are the same on every
mesh and device, for any size of the pieces in which they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from shardc.runtime import rng
from shardc.runtime.rng import Key

CHUNK = 1 << 20  # elements computed at once: bounds the float64 temporaries

#: (key, indices of elements, dtype of the result) -> their numbers, in any dtype
Sampler = Callable[[Key, Tensor, torch.dtype], Tensor]


def normal(mean: float, std: float) -> Sampler:
    return lambda k, i, _: rng.normal(k, i, torch.float64) * std + mean


def log_normal(mean: float, std: float) -> Sampler:
    return lambda k, i, _: (rng.normal(k, i, torch.float64) * std + mean).exp_()


def uniform(low: float, high: float) -> Sampler:
    def sample(k: Key, i: Tensor, dtype: torch.dtype) -> Tensor:
        wide = torch.float64 if dtype == torch.float64 else torch.float32  # a narrower number could round up to 1
        return rng.uniform(k, i, wide) * (high - low) + low

    return sample


def integers(low: int, high: int) -> Sampler:
    return lambda k, i, _: (((rng.bits(k, i).to(torch.int64) + 2**31) * (high - low)) >> 32) + low


def exponential(rate: float) -> Sampler:
    return lambda k, i, _: -torch.log1p(-_open(k, i)) / rate


def geometric(p: float) -> Sampler:
    return lambda k, i, _: torch.ceil(torch.log1p(-_open(k, i)) / math.log1p(-p)).clamp_(min=1)


def cauchy(median: float, sigma: float) -> Sampler:
    return lambda k, i, _: torch.tan(math.pi * (_open(k, i) - 0.5)) * sigma + median


def _open(k: Key, i: Tensor) -> Tensor:
    """Return uniform numbers in (0, 1), for the inverse of a distribution function."""
    u: Tensor = rng.uniform(k, i, torch.float64) + 2.0**-33
    return u
