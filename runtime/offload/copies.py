"""Copies between the device and places outside of it, in the background: read ahead of their use, written behind it."""

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
    """Where a tensor is kept while it is not worked with. tensor: on the CPU, in `slot`."""

    tensor: Tensor
    slot: Slot


def _in_place(x: Tensor, home: Tensor) -> bool:
    one, other = ((t.untyped_storage()._cdata, t.storage_offset()) for t in (x, home))
    return one == other


class Mover:
    """One thread, which carries out requests in order: what is put is there for every fetch that comes
    after.

    On CUDA the copies run on a stream of their own. device: where tensors are worked with. .in_place: on the CPU
    nothing is copied that need not be: a home is as good a place to work in as any other, and the system pages it in
    and out."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.in_place = device, device.type == "cpu"
        on_gpu = device.type == "cuda"
        # a thread begins on GPU 0, whoever's that is, and what it touches there takes memory
        start: Any = {"initializer": torch.cuda.set_device, "initargs": (device,)} if on_gpu else {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offload", **start)
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._puts: list[Future[None]] = []

    def fetch(self, homes: Sequence[Home], dtype: torch.dtype | None = None) -> Future[tuple[list[Tensor], Any]]:
        """Begin to bring to the device, as `dtype` if given; `taken` of the result has them. When they are done with:
        `put`.
        """
        return self._thread.submit(self._fetch, list(homes), dtype)

    def taken(self, coming: Future[tuple[list[Tensor], Any]]) -> list[Tensor]:
        """What `fetch` began, once it is there. Raises what went wrong on the way."""
        tensors, ready = coming.result()
        if ready is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(ready)
            for x in tensors:
                x.record_stream(here)
        return tensors

    def put(self, moves: Iterable[tuple[Tensor, Home]]) -> None:
        """Begin to bring back from the device, or to let go what is in place. The tensors
        may not be changed any more.
        """
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
        self._puts.append(self._thread.submit(self._put, list(moves), ready))

    def drain(self) -> None:
        """Wait until all that was put is there. Raises what went wrong on the way."""
        puts, self._puts = self._puts, []
        for done in puts:
            done.result()

    # --- in the thread

    def _aside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._stream is not None else nullcontext()

    @torch.no_grad()
    def _fetch(self, homes: list[Home], dtype: torch.dtype | None) -> tuple[list[Tensor], Any]:
        slots = dict.fromkeys(h.slot for h in homes)
        for slot in slots:
            slot.ahead()
        if self.in_place and all(dtype in (None, h.tensor.dtype) for h in homes):
            return [h.tensor for h in homes], None
        with self._aside():
            tensors = [
                torch.empty_like(h.tensor, dtype=dtype, device=self.device).copy_(h.tensor, non_blocking=True)
                for h in homes
            ]
            ready = self._stream.record_event() if self._stream is not None else None
        self._let_go(slots)
        return tensors, ready

    @torch.no_grad()
    def _put(self, moves: list[tuple[Tensor, Home]], ready: Any) -> None:
        with self._aside():
            if ready is not None:
                self._stream.wait_event(ready)
            for x, home in moves:
                if not _in_place(x, home.tensor):
                    home.tensor.copy_(x, non_blocking=True)
        slots = dict.fromkeys(home.slot for _, home in moves)
        if self._stream is not None:
            self._stream.synchronize()  # before the tensors are freed, and the copies are read
        self._let_go(slots)

    def _let_go(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            slot.behind()
