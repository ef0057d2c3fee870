"""Modes of torch: those that would change what a program computes are refused, where it is compiled and where it runs;
tracing is left for a moment where a value is needed now.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch

from shardc.errors import Errors

T = TypeVar("T")


def check(where: str, device: str = "cpu", *, training: bool = True) -> None:
    """Raises ShardcError, at `where`, inside torch.autocast (for this type of device), and inside torch.inference_mode
    if gradients are needed.
    """
    errors = Errors()
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        what = "torch.autocast is on: ops would run in other dtypes than the program has"
        errors.add(what, where=where, fix="leave it out, and write `precision: {compute: bfloat16}` in the spec")
    if training and torch.is_inference_mode_enabled():
        errors.add(
            "torch.inference_mode is on: nothing can be trained in it",
            where=where,
            fix="leave it out; engine.evaluate needs none",
        )
    errors.raise_any()


def untraced(function: Callable[..., T], *args: Any) -> T:
    """Call a function outside of the trace in progress: tracing modes belong to a thread, so a new thread has none."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *args).result()
