"""Modes of torch's that would make a program another one than it says: refused where it
is compiled and where it runs.
"""

from __future__ import annotations

import torch

from shardc.errors import Errors


def check(where: str, device: str = "cpu", *, training: bool = True) -> None:
    """Raises ShardcError, at `where`, inside of torch.autocast (for this type of device), and of torch.inference_mode
    if gradients are needed.
    """
    errors = Errors()
    if torch.is_autocast_enabled(device):
        what = "torch.autocast is on: ops would run in other dtypes than the program has"
        errors.add(what, where=where, fix="leave it out, and write `precision: {compute: bfloat16}` in the spec")
    if training and torch.is_inference_mode_enabled():
        errors.add(
            "torch.inference_mode is on: nothing can be trained in it",
            where=where,
            fix="leave it out; engine.evaluate needs none",
        )
    errors.raise_any()
