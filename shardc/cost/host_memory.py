"""Offload tensors in a step on the CPU as on a GPU, but with immediate copies.

`host` makes each tensor that is kept outside of the device, so that shardc.cost.dry_run and the tests can count it
separately. In a dry run, copies of activations are collectives on a separate stream, the link to the host.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import Any

import torch
from torch import Tensor

from shardc.cost.ledger import FakeLedger
from shardc.ir.metadata import HOST_LINK, CommRecord
from shardc.machine.work import Sent, Waited
from shardc.runtime.offload import Offload
from shardc.runtime.offload.copies import Mover
from shardc.runtime.offload.storage import Memory, Place, Slot
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.spec.data_section import Data

#: Calls the function that makes a tensor in the machine's memory, or in a file.
Host = Callable[[Callable[[], Tensor]], Tensor]


def offload(host: Host, *, cpu: bool = False) -> Callable[[Data, Any], Offload]:
    """Return a function that makes an engine's `data.offload`. cpu: tensors for the CPU stay in place."""
    return lambda section, mesh: _Offload(section, mesh, host, cpu)


def offloaded_tensors(host: Host, ledger: FakeLedger | None = None) -> type[OffloadedTensors]:
    """Return the class that offloads activations as on a GPU. ledger: counts copies, of fake tensors."""

    class OnHost(OffloadedTensors):
        def host(self, x: Tensor) -> Tensor:
            return host(lambda: torch.empty_like(x))

        @staticmethod
        def useful(x: Tensor) -> bool:
            return True

    if ledger is None:
        return OnHost
    counted, keys = ledger, count(-1, -1)  # keys of a mesh's collectives are not negative

    class Counted(OnHost):
        def to_host(self, x: Tensor, tag: str = "") -> tuple[Tensor, Any]:
            kept = self.host(x)
            return kept, began("offload", kept, "forward", tag)

        def to_device(self, kept: Tensor, *, behind: bool = False, tag: str = "") -> tuple[Tensor, Any]:
            return torch.empty_like(kept), began("reload", kept, "backward", tag)

        def wait(self, copied: Any) -> None:
            if copied is not None:
                counted.parts[-1].work.append(Waited(copied))

    def began(kind: str, x: Tensor, direction: str, tag: str) -> int:
        record = CommRecord(kind, HOST_LINK, x.numel() * x.element_size(), direction, tag)
        counted.parts[-1].work.append(Sent(record, key := next(keys)))
        return key

    return Counted


class _Offload(Offload):
    def __init__(self, section: Data, mesh: Any, host: Host, cpu: bool) -> None:
        self._host, self._cpu = host, cpu
        super().__init__(section, mesh)
        self._mover = _Mover(self.device, in_place=cpu)

    def _place(self, name: str, mesh: Any, where: str) -> Place:
        return _Place((lambda make: make()) if self._cpu and name == "cpu" else self._host)


class _Place(Memory):
    def __init__(self, host: Host) -> None:
        self._host = host

    def slot(self, nbytes: int) -> Slot:
        return Slot(self._host(lambda: torch.zeros(nbytes, dtype=torch.uint8)))


class _AtOnce(ThreadPoolExecutor):
    """Runs each job when it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


class _Mover(Mover):
    def __init__(self, device: torch.device, *, in_place: bool) -> None:
        super().__init__(device)
        self._thread, self.in_place = _AtOnce(1), in_place
