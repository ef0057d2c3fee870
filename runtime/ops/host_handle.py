"""Keep values on the host from forward to backward, in step graphs (`checkpoint: {offload: cpu}`).

    gelu_leaving = ops.offload_start(gelu, mesh, tag='h.0')   forward: the copy to the host begins
    gelu_host = ops.offload_wait(gelu_leaving)                it is done: the device's memory is free
    ...
    gelu_coming = ops.reload_start(gelu_host, tag='h.0')     backward: the copy back begins, in new memory
    gelu = ops.reload_wait(gelu_coming)                       it is there

Between them is a *handle*, which takes no memory of the device. On a GPU copies run on a separate stream
(shardc.runtime.stage.activation_offload), and the computing stream waits for them, not the host. The memory of an
offloaded value is reused only after `offload_wait`, and the memory of its copy comes from what backward has freed by
`reload_start`: so a step holds what the graph shows. (torchtune's OffloadActivations frees in the same way, instead of
leaving it to the allocator, which would reuse the memory only after a check.)
On a CPU, which is its own host, nothing is moved.

Of a tape (shardc.runtime.ops.opaque) the tensors that its op has saved are moved.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardc.runtime.ops.by_storage import ByStorage
from shardc.runtime.ops.opaque import Own, Tape


class HostHandle:
    """A value on the host, or on its way there. copies: a stage.activation_offload.OffloadedTensors."""

    def __init__(self, value: Tensor | Tape, copies: Any, tag: str) -> None:
        self._copies, self._tape = copies, value if isinstance(value, Tape) else None
        self._places = value.own() if isinstance(value, Tape) else [Own(value)]
        self._moved: list[tuple[Tensor, Any] | None] = []  # by place; None: it stays where it is
        known = ByStorage[dict[Any, tuple[Tensor, Any]]]()
        for place in self._places:
            x = place.tensor
            assert x is not None
            if not copies.useful(x):
                self._moved.append(None)
                continue
            views, seen = known.first(x, {}), (x.size(), x.stride(), x.storage_offset())
            if seen not in views:
                views[seen] = copies.to_host(x.detach(), tag)
            self._moved.append(views[seen])

    def left(self) -> None:
        """Wait for all copies to the host, and drop the device's tensors."""
        for copied in dict.fromkeys(m[1] for m in self._moved if m is not None):
            self._copies.wait(copied)
        for place, moved in zip(self._places, self._moved, strict=True):
            if moved is not None:
                place.tensor = None

    def begin(self, tag: str) -> Coming:
        """Start to copy the value back. Each call makes another copy."""
        known: dict[int, tuple[Tensor, Any]] = {}
        coming: list[tuple[Tensor, Any]] = []
        for place, moved in zip(self._places, self._moved, strict=True):
            if moved is None:
                assert place.tensor is not None
                coming.append((place.tensor, None))
                continue
            kept = moved[0]
            if id(kept) not in known:
                known[id(kept)] = self._copies.to_device(kept, behind=True, tag=tag)
            coming.append(known[id(kept)])
        return Coming(self, coming)

    def rebuild(self, tensors: list[Tensor]) -> Any:
        """Build the value from its tensors."""
        if self._tape is None:
            return tensors[0]
        for place, x in zip(self._places, tensors, strict=True):
            place.tensor = x
        self._tape.lent = [
            weakref.ref(place) for place, m in zip(self._places, self._moved, strict=True) if m is not None
        ]
        return self._tape


@dataclass(frozen=True)
class Coming:
    """A value on its way back. copies: by tensor, with the event to wait for."""

    handle: HostHandle
    copies: list[tuple[Tensor, Any]]

    def wait(self) -> Any:
        """Wait for the copies and return the value."""
        for copied in dict.fromkeys(copied for _, copied in self.copies if copied is not None):
            self.handle._copies.wait(copied)
        return self.handle.rebuild([x for x, _ in self.copies])


def offload_start(x: Any, mesh: Any, tag: str = "") -> HostHandle:
    """Start to copy a value, or the tensors of a tape, to the host. tag: the region that requires it."""
    return HostHandle(x, mesh.step.host_copies, tag)


def offload_wait(handle: HostHandle) -> HostHandle:
    """Wait until the value has left the device, and return its handle."""
    handle.left()
    return handle


def reload_start(handle: HostHandle, tag: str = "") -> Coming:
    """Start to copy the value back."""
    return handle.begin(tag)


def reload_wait(coming: Coming) -> Any:
    """Return the value, on the device again."""
    return coming.wait()
