"""Functions of torch in ops that tracing can follow: torch.cov and torch.corrcoef look at the number by which they
divide, and torch.combinations picks by a mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _cov(
    input: Tensor, *, correction: int = 1, fweights: Tensor | None = None, aweights: Tensor | None = None
) -> Tensor:
    if fweights is not None or aweights is not None or input.dim() > 2:  # refused: divides by a value
        return torch.cov(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.dim() == 2 else input.reshape(1, -1)
    n = rows.shape[1]
    apart = rows - rows.sum(1, keepdim=True) / n
    return (apart @ apart.mH / max(n - correction, 0)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:
    c = _cov(input)
    if c.dim() == 0:
        return c / c
    deviation = (c.diagonal().real if c.is_complex() else c.diagonal()).sqrt()
    c = c / deviation[:, None] / deviation
    return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1)) if c.is_complex() else c.clamp(-1, 1)


def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Tensor:
    if r == 0:
        return input.new_empty(0)
    chosen = itertools.combinations_with_replacement if with_replacement else itertools.combinations
    places = torch.tensor(list(chosen(range(len(input)), r)), dtype=torch.int64, device=input.device)
    return input[places.reshape(-1, r)]


WRITTEN_OUT: dict[Any, Callable[..., Tensor]] = {
    torch.cov: _cov,
    Tensor.cov: _cov,
    torch.corrcoef: _corrcoef,
    Tensor.corrcoef: _corrcoef,
    torch.combinations: _combinations,
}
