"""What a program calls to have the parameters of a bucket whole (shardc.passes.gradient_buckets puts it there)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def gather_start(params: Sequence[Any], tag: str = "") -> Any:
    """Begin to gather a bucket, in the background. params: all of the bucket's; only their parts exist. Backward:
    reduce_scatter.
    """
    params[0].gather()
    return params[0]


def gather_wait(bucket: Any) -> tuple[Tensor, ...]:
    """The bucket's parameters, whole, once `gather_start` is done. They are freed when nothing uses them, and gathered
    again in backward.
    """
    result: tuple[Tensor, ...] = bucket.used()
    return result


def updated(params: Sequence[Any], tag: str = "") -> tuple[Tensor, ...]:
    """The bucket's parameters, whole, once the gather that followed the last update is done."""
    result: tuple[Tensor, ...] = params[0].updated()
    return result


# --- backward, as backward graphs call it (shardc.passes.joint)


@dataclass(frozen=True)
class Gathering:
    """A bucket that is being gathered for backward. wait: the whole bucket, when it is there."""

    bucket: Any
    wait: Callable[[], Tensor]


def regather_start(params: Sequence[Any], tag: str = "") -> Gathering:
    """`gather_start`, for backward."""
    bucket: Any = params[0]
    return Gathering(bucket, bucket.regather())


def regather_wait(gathering: Gathering) -> tuple[Tensor, ...]:
    """The bucket's parameters, whole. Views of one tensor: it is freed when nothing uses one of them."""
    result: tuple[Tensor, ...] = gathering.bucket.parts(gathering.wait())
    return result


def scatter(params: Sequence[Any], grads: Sequence[Tensor | None], tag: str = "") -> None:
    """Backward has all gradients of a gathered bucket: begin their sum over ranks."""
    params[0].arrived(grads)


def launch(mesh: Any, tag: str = "") -> None:
    """Backward has all gradients that it brings to a bucket of whole parameters: begin its sum over ranks. Sums begin
    in the order of the buckets, and not before a bucket's last backward of a step (ZeRO 2: in each).
    """
    mesh.step.launch()


def accumulate(param: Tensor, grad: Tensor, *, own: bool = False) -> None:
    """Backward has a parameter's gradient: what autograd does at a leaf. Where a bucket waits for it, it is copied
    there, and `launch` begins the bucket's sum.

    own: nothing else looks at the gradient's memory. Autograd takes a gradient over if nobody else holds it, and copies
    it otherwise; here the caller holds it, so the graph says. Where a bucket waits for it, which copies it to its own
    place, that would be one copy too many in any case.
    """
    if not param.requires_grad:  # it was frozen since
        return
    arrived: Any = getattr(param, "_post_accumulate_grad_hooks", None)
    plain = param.grad is None and not param._backward_hooks and param.dtype == grad.dtype
    if plain and param.shape == grad.shape and (arrived or (own and param.stride() == grad.stride())):
        param.grad = grad
        for hook in list(arrived.values()) if arrived else ():
            hook(param)
    else:
        torch.autograd.backward((param,), (grad,))


def add_into(x: Tensor, y: Tensor) -> Tensor:
    """x + y, in the memory of x."""
    return x.add_(y)
