"""Refuse modes of torch that change what a program computes, or record only one rank's part of it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shardc.errors import Errors
from shardc.torch_private import tracing, transforming

T = TypeVar("T")


def check(where: str, device: str = "cpu", *, training: bool = True) -> None:
    """Raise ShardcError, at `where`, if a mode of torch is on in which a program would be wrong.

    That is autocast (for this device), inference_mode if gradients are needed, a torch.func transform, or a recorder.
    """
    errors = Errors()
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        fault = "torch.autocast is on: ops would run in other dtypes than the program has"
        errors.add(fault, where=where, fix="leave it out, and write `precision: {compute: bfloat16}` in the spec")
    if training and torch.is_inference_mode_enabled():
        fix = "leave it out; engine.evaluate needs none"
        errors.add("torch.inference_mode is on: nothing can be trained in it", where=where, fix=fix)
    if transforming():
        errors.add(
            "a transform of torch.func (grad, vmap, jvp) or torch.autograd.forward_ad is under way: it knows nothing of"
            " sums over ranks, and what it gave would be wrong",
            where=where,
            fix="call loss.backward() and read each p.grad; a derivative that the loss needs belongs into the loss"
            " function: shardc.compile(model, batch, spec, loss=...)",
        )
    elif recorder := _recorder():
        fault = f"{recorder} records what runs, and would get one rank's part, with parts of the weights"
        fix = "record the plain model: model.load_state_dict(...) of full_state_dict(), which every rank calls"
        errors.add(fault, where=where, fix=fix)
    errors.raise_any()


def _recorder() -> str:
    """Return the name of the tool that records ops now; "" if there is none."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace"
    return "make_fx" if tracing() else ""


def untraced(function: Callable[..., T], *args: Any) -> T:
    """Call a function outside of the current trace, in a new thread: tracing modes belong to a thread."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()
