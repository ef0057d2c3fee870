"""Modes of torch: those that would change what a program computes, or that would record only one rank's part of it, are
refused, where it is compiled and where it runs; tracing is left for a moment where a value is needed now.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shardc.errors import Errors
from shardc.torch_private import tracing, transforming

T = TypeVar("T")


def check(where: str, device: str = "cpu", *, training: bool = True) -> None:
    """Raises ShardcError, at `where`, inside torch.autocast (for this type of device), inside torch.inference_mode if
    gradients are needed, inside a transform of torch.func, and while something records what runs.
    """
    errors = Errors()
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        fault = "torch.autocast is on: ops would run in other dtypes than the program has"
        errors.add(fault, where=where, fix="leave it out, and write `precision: {compute: bfloat16}` in the spec")
    if training and torch.is_inference_mode_enabled():
        errors.add(
            "torch.inference_mode is on: nothing can be trained in it",
            where=where,
            fix="leave it out; engine.evaluate needs none",
        )
    if transforming():
        errors.add(
            "a transform of torch.func (grad, vmap, jvp) or torch.autograd.forward_ad is under way: it knows nothing of"
            " sums over ranks, and what it gave would be wrong",
            where=where,
            fix="call loss.backward() and read each p.grad; a derivative that the loss needs belongs into the loss"
            " function: shardc.compile(model, batch, spec, loss=...)",
        )
    elif recorder := _recorder():
        errors.add(
            f"{recorder} records what runs, and would get one rank's part, with parts of the weights",
            where=where,
            fix="record the plain model: model.load_state_dict(...) of full_state_dict(), which every rank calls",
        )
    errors.raise_any()


def _recorder() -> str:
    """What records the ops that run now; "" = nothing."""
    if torch.compiler.is_exporting():
        return "torch.export"
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return "torch.jit.trace"
    return "make_fx" if tracing() else ""


def untraced(function: Callable[..., T], *args: Any) -> T:
    """Call a function outside of the trace in progress: tracing modes belong to a thread, so a new thread has none."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()
