"""Call the buckets of ZeRO from programs (shardc.passes.gradient_buckets inserts these ops)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gather_start(params: Sequence[Any], tag: str = "") -> Any:
    """Start to gather a bucket. params: for each of its parameters, the bucket. Backward: reduce_scatter."""
    params[0].gather()
    return params[0]


def gather_wait(bucket: Any) -> tuple[Tensor, ...]:
    """Wait for `gather_start`; return the whole parameters, freed after use, gathered again in backward."""
    result: tuple[Tensor, ...] = bucket.gathered()
    return result


def updated(params: Sequence[Any], tag: str = "") -> tuple[Tensor, ...]:
    """Wait for the gather after the last update; return the bucket's whole parameters."""
    result: tuple[Tensor, ...] = params[0].updated()
    return result


# --- called by backward graphs (shardc.passes.joint)


def regather_start(params: Sequence[Any], tag: str = "") -> Callable[[], tuple[Tensor, ...]]:
    """Start to gather a bucket for backward; return a function for `regather_wait`."""
    wait: Callable[[], tuple[Tensor, ...]] = params[0].regather()
    return wait


def regather_wait(wait: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Wait; return the bucket's whole parameters, views of a tensor that is freed with the last view."""
    return wait()


def scatter(params: Sequence[Any], grads: Sequence[Tensor | None], tag: str = "") -> None:
    """Start the sum of a gathered bucket's gradients over ranks. Backward has all of them."""
    params[0].arrived(grads)


def launch(mesh: Any, tag: str = "") -> None:
    """Start the sums of due buckets of whole parameters, in their order, as their gradients are complete.

    A bucket is due in a step's last backward, at ZeRO 2 in each.
    """
    mesh.step.launch()


def accumulate(param: Tensor, grad: Tensor, *, own: bool = False) -> None:
    """Accumulate a parameter's gradient, as autograd does at a leaf.

    If a bucket waits for the gradient, it copies it to its place, and `launch` starts the bucket's sum. own: nothing
    else reads the gradient's memory. Autograd takes a gradient over if nothing else holds it, and copies it otherwise.
    Here the caller holds it, so the graph has to declare it. For a waiting bucket, which copies it anyway, no other
    copy is made.
    """
    if not param.requires_grad:  # it was frozen since
        return
    arrived: Any = getattr(param, "_post_accumulate_grad_hooks", None)  # of a bucket: see zero.buckets
    plain = param.grad is None and not param._backward_hooks and param.dtype == grad.dtype
    if plain and param.shape == grad.shape and (arrived or (own and param.stride() == grad.stride())):
        param.grad = grad
        for hook in list(arrived.values()) if arrived else ():
            hook(param)
    else:
        torch.autograd.backward((param,), (grad,))


def add_into(x: Tensor, y: Tensor) -> Tensor:
    """Add y to x in place."""
    return x.add_(y)
