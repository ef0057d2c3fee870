"""Keep tensors outside of a rank's device while they are not used.

    optimizer     the optimizer's state, and at zero 1-2 the master copy of parameters that are computed in another
                  dtype. The optimizer steps page by page (shardc.runtime.zero.paged_optimizer)
    parameters    at zero 3, this rank's parts of the parameters; they are read ahead of gathers, but for a step's first

    storage       the places: the machine's memory, files of a directory
    copies        copies between the device and a place, in the background

Only copies are made: the step is the same, bit for bit. (Rajbhandari et al. 2021, "ZeRO-Infinity")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from shardc.runtime.mesh.allocator import return_freed
from shardc.runtime.offload.copies import Home, Mover
from shardc.runtime.offload.storage import Files, Memory, Place

if TYPE_CHECKING:
    from shardc.spec.data_section import Data

#: How many homes a gather may still read: one now, one ahead.
HELD = 2

_Read = tuple[Home, str]  # (what is read, for which direction)


class Offload:
    """The places of one rank outside of its device, as the spec's `data` names them.

    .homes: where each offloaded parameter of the optimizer is kept. At rest such a parameter's data is its home; on a
    GPU it is a placeholder without memory, so that gradients on the device match it.
    """

    def __init__(self, section: Data, mesh: Any) -> None:
        self.device: torch.device = mesh.device
        self._mover: Mover | None = None
        self.page_bytes = int(section.bucket_bytes())
        self.places: dict[str, Place] = {}
        by_name: dict[str, Place] = {}
        for kind, name in section.offload.used.items():
            by_name[name] = by_name.get(name) or self._place(name, mesh, f"data.offload.{kind}")
            self.places[kind] = by_name[name]
        self.homes: dict[nn.Parameter, Home] = {}
        self._after: dict[_Read, tuple[_Read, torch.dtype | None]] = {}
        self._last: _Read | None = None
        self._coming: tuple[_Read, Future[Any]] | None = None
        self._read: list[Home] = []  # homes that may still be read

    def _place(self, name: str, mesh: Any, where: str) -> Place:
        if name == "cpu":
            return Memory(self.device)
        if self.device.type == "cpu":
            return_freed()
        return Files(name, mesh.rank, where)

    @property
    def mover(self) -> Mover:
        if self._mover is None:
            self._mover = Mover(self.device)
        return self._mover

    # --- parameters

    def room(self, kind: str, n: int, dtype: torch.dtype) -> Home | None:
        """Return a flat tensor of n zeros outside of the device, if `kind` is kept there."""
        if kind not in self.places:
            return None
        like = torch.empty(n, dtype=dtype, device="meta")
        slot = self.places[kind].slot(n * dtype.itemsize)
        return Home(slot.take(like), slot)

    def keep(self, params: Iterable[nn.Parameter], home: Home) -> None:
        """Register filled parameters that are views of `home`."""
        for p in params:
            self.homes[p] = Home(p.data, home.slot)
            self.rest(p)
        home.slot.release()

    def rest(self, p: nn.Parameter) -> None:
        """Let a parameter that is not used point to its home, or on a GPU to no memory."""
        home = self.homes[p].tensor
        p.data = (
            home if self.device.type == "cpu" else torch.zeros((), dtype=p.dtype, device=self.device).expand(home.shape)
        )

    @contextmanager
    def params_on_host(self) -> Iterator[None]:
        """Let parameters' data be their homes, on the CPU, for checkpoints; gradients are set aside."""
        grads = {p: p.grad for p in self.homes}
        for p, home in self.homes.items():
            p.grad, p.data = None, home.tensor
        try:
            yield
        finally:
            for p, grad in grads.items():
                self.rest(p)
                p.grad = grad
            for slot in {h.slot for h in self.homes.values()}:
                slot.release()

    # --- reading ahead of gathers

    def read(self, home: Home, direction: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a home's contents on the device, and start to read what followed it in the last step.

        A forward after a backward is not read ahead: the parameters may change in between.
        """
        key = (home, direction)
        begun = self._coming
        coming = begun[1] if begun is not None and begun[0] == key else self.mover.fetch([home], dtype)
        if self._last is not None and (self._last[1], direction) != ("backward", "forward"):
            self._after[self._last] = key, dtype
        self._last, self._coming = key, None
        (tensor,) = self.mover.taken(coming)
        self._read.append(home)
        if len(self._read) > HELD:  # earlier gathers have ended, or read it again
            self._read.pop(0).slot.release()
        if key in self._after:
            following, as_dtype = self._after[key]
            self._coming = following, self.mover.fetch([following[0]], as_dtype)
        return tensor

    def changed(self) -> None:
        """Drop what was read ahead, as parameters have changed."""
        self._coming = self._last = None
        while self._read:
            self._read.pop().slot.release()

    def close(self) -> None:
        """Remove the files. Tensors in them stay readable as long as they are referenced."""
        for place in self.places.values():
            place.close()
