"""Copy in the background between the device and places outside: read ahead, write behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.offload.storage import Slot


@dataclass(frozen=True, eq=False)
class Home:
    """The place of a tensor while it is not used. tensor: on the CPU, in `slot`."""

    tensor: Tensor
    slot: Slot


def _in_place(x: Tensor, home: Tensor) -> bool:
    one, other = ((t.untyped_storage()._cdata, t.storage_offset()) for t in (x, home))
    return one == other


class Mover:
    """One thread that runs requests in order: a fetch sees every earlier put.

    On CUDA the copies run on a separate stream. device: where tensors are used. .in_place: on the CPU a home is used
    directly instead of a copy, and the system pages it in and out.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.in_place = device, device.type == "cpu"
        on_gpu = device.type == "cuda"
        # a thread starts on GPU 0, which may be another rank's, and would take memory there
        start: Any = {"initializer": torch.cuda.set_device, "initargs": (device,)} if on_gpu else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload", **start)
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._writes: list[Future[None]] = []

    def fetch(self, homes: Sequence[Home], dtype: torch.dtype | None = None) -> Future[tuple[list[Tensor], Any]]:
        """Start to copy to the device, as `dtype` if set. `taken` returns the tensors; `put` them after use."""
        return self._thread.submit(self._fetch, list(homes), dtype)

    def taken(self, coming: Future[tuple[list[Tensor], Any]]) -> list[Tensor]:
        """Wait for the result of `fetch`. Raises its errors."""
        tensors, ready = coming.result()
        if ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(ready)
            for x in tensors:
                x.record_stream(stream)
        return tensors

    def put(self, moves: Iterable[tuple[Tensor, Home]]) -> None:
        """Start to copy back from the device. The tensors may not change any more.

        On the CPU, where homes themselves are used, only let the system page them out.
        """
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
        self._writes.append(self._thread.submit(self._put, list(moves), ready))

    def drain(self) -> None:
        """Wait for all puts. Raises their errors."""
        puts, self._writes = self._writes, []
        for done in puts:
            done.result()

    # --- in the thread

    def _on_stream(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @torch.no_grad()
    def _fetch(self, homes: list[Home], dtype: torch.dtype | None) -> tuple[list[Tensor], Any]:
        slots = dict.fromkeys(h.slot for h in homes)
        for slot in slots:
            slot.prefetch()
        if self.in_place and all(dtype in (None, h.tensor.dtype) for h in homes):
            return [h.tensor for h in homes], None
        with self._on_stream():
            tensors = [
                torch.empty_like(h.tensor, dtype=dtype, device=self.device).copy_(h.tensor, non_blocking=True)
                for h in homes
            ]
            ready = self._stream.record_event() if self._stream is not None else None
        self._free_slots(slots)
        return tensors, ready

    @torch.no_grad()
    def _put(self, moves: list[tuple[Tensor, Home]], ready: Any) -> None:
        with self._on_stream():
            if ready is not None:
                self._stream.wait_event(ready)
            for x, home in moves:
                if not _in_place(x, home.tensor):
                    home.tensor.copy_(x, non_blocking=True)
        slots = dict.fromkeys(home.slot for _, home in moves)
        if self._stream is not None:
            self._stream.synchronize()  # before the tensors are freed, and the copies are read
        self._free_slots(slots)

    def _free_slots(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.release()
