"""Make other calls from a sample: transposed in memory, dims of size one, other dtypes.

A variant is a sample too. It is run whole first, and left out where the op refuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, fx

from shardc.rules.core.user_ops import Arguments, Sample
from shardc.verify.rules.case import MISFIT, Case

#: Floating dtypes in which rules are proven, widest first.
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def changed(sample: Sample, change: Callable[[int, Tensor], Tensor]) -> Sample:
    """Return the sample with every tensor replaced by change(its index, the tensor)."""

    def replaced(constants: list[Tensor]) -> Arguments:
        numbers = count()

        def one(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            y = change(next(numbers), x)
            if any(x is c for c in constants):
                constants.append(y)
            return y

        return fx.node.map_aggregate(sample(constants), one)

    return replaced


def strided(_: int, x: Tensor) -> Tensor:
    """Return the same numbers with the dims in reverse order in memory."""
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order)


def cast(old: torch.dtype, new: torch.dtype) -> Callable[[int, Tensor], Tensor]:
    return lambda _, x: x.to(new) if x.dtype == old else x


def exact(op: Any, sample: Sample) -> Sample:
    """Return a float32 sample in float64 if the op takes that: then differences are not rounding."""
    wide = changed(sample, cast(torch.float32, torch.float64))
    dtypes = {x.dtype for x in tensors_of(sample)}
    return wide if torch.float32 in dtypes and torch.float64 not in dtypes and runs(op, wide) else sample


def tensors_of(sample: Sample) -> list[Tensor]:
    tensors: list[Tensor] = []
    changed(sample, lambda _, x: tensors.append(x) or x)([])  # type: ignore[func-returns-value]
    return tensors


def of_size_one(op: Any, case: Case, sample: Sample, places: Sequence[tuple[int, int]]) -> Sample:
    """Return the sample with dims of operands, (operand, dim), cut to size one; zeros for indices if it must be."""

    def narrowed(*, zeros: bool) -> Callable[[int, Tensor], Tensor]:
        def change(i: int, x: Tensor) -> Tensor:
            for d in (d for operand, d in places if operand == i):
                x = x.narrow(d, 0, 1)
            return torch.zeros_like(x) if zeros and x.dtype == torch.int64 else x.contiguous()

        return change

    narrower = changed(sample, narrowed(zeros=False))
    indices = any(x.dtype == torch.int64 for x in case.tensors)
    return changed(sample, narrowed(zeros=True)) if indices and not runs(op, narrower) else narrower


def runs(op: Any, sample: Sample) -> bool:
    """Return whether the whole op takes the sample."""
    args, kwargs = sample([])
    try:
        op(*args, **kwargs)
    except MISFIT:
        return False
    return True


def variants(op: Any, sample: Sample, case: Case) -> Iterator[tuple[str, Sample]]:
    """Yield (what is different, the call) for every variant, also if the op refuses it."""
    if any(x.ndim > 1 for x in case.tensors):
        yield "transposed in memory", changed(sample, strided)
    signature = case.choices.signature
    for factor in signature.splittable():  # on a rank, a part may have size one
        if signature.sizes[factor] > 1 and (places := places_of(case, factor)):
            yield f"{factor} of size 1", of_size_one(op, case, sample, places)
    yield from other_dtypes(sample, case)


def places_of(case: Case, factor: str) -> tuple[tuple[int, int], ...]:
    """Return each (operand, dim) in which a factor occurs."""
    inputs = case.choices.signature.inputs
    return tuple((i, d) for i, dims in enumerate(inputs) for d, dim in enumerate(dims) if factor in dim)


def other_dtypes(sample: Sample, case: Case) -> Iterator[tuple[str, Sample]]:
    """Yield the sample in every dtype that is narrower than its widest."""
    if floating := [DTYPES.index(x.dtype) for x in case.tensors if x.dtype in DTYPES]:
        widest = min(floating)
        for new in DTYPES[widest + 1 :]:
            yield str(new).removeprefix("torch."), changed(sample, cast(DTYPES[widest], new))
