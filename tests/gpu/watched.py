"""A device on which the host's waits are seen: the made-up one, or a GPU in torch's mode that forbids them."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from tests.second_device import SecondDevice, second_device


class Gpu:
    name = "cuda"

    def __init__(self) -> None:
        self.syncs: list[str] = []


@contextmanager
def watched_device(name: str) -> Iterator[SecondDevice | Gpu]:
    """name: "second" or "cuda"."""
    if name == "cuda":
        yield Gpu()
        return
    with second_device() as device:
        yield device


@contextmanager
def watching(device: SecondDevice | Gpu) -> Iterator[None]:
    """Into device.syncs, the functions in which the host waits, each at the end of its line. A GPU raises for all but
    events, with which the product waits on purpose.
    """
    device.syncs.clear()
    if not isinstance(device, Gpu):
        yield
        return
    wait = torch.cuda.Event.synchronize

    def counted(event: Any) -> None:
        device.syncs.append(f"Event.synchronize: {sys._getframe(1).f_code.co_name}")
        wait(event)

    with warnings.catch_warnings(), mock.patch.object(torch.cuda.Event, "synchronize", counted):
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
