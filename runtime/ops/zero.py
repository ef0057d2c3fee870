"""What a program calls to have the parameters of a bucket whole (shardc.passes.gradient_buckets puts it there)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def gather_start(params: Sequence[Any], tag: str = "") -> Any:
    """Begin to gather a bucket, in the background. params: all of the bucket's; only their parts exist. Backward:
    reduce_scatter.
    """
    params[0].bucket.gather()
    return params[0].bucket


def gather_wait(bucket: Any) -> tuple[Tensor, ...]:
    """The bucket's parameters, whole, once `gather_start` is done. They are freed when nothing uses them, and gathered
    again in backward.
    """
    result: tuple[Tensor, ...] = bucket.used()
    return result


def updated(params: Sequence[Any], tag: str = "") -> tuple[Tensor, ...]:
    """The bucket's parameters, whole, once the gather that followed the last update is done."""
    result: tuple[Tensor, ...] = params[0].bucket.updated()
    return result
