"""Values that wait on the host from forward to backward, as backward graphs say it (`checkpoint: {offload: cpu}`).

    gelu_leaving = ops.offload_start(gelu, mesh, tag='h.0')   forward: the copy to the host begins
    gelu_host = ops.offload_wait(gelu_leaving)                it is done: the device's memory is free
    ...
    gelu_coming = ops.reload_start(gelu_host, tag='h.0')     backward: the copy back begins, in new memory
    gelu = ops.reload_wait(gelu_coming)                       it is there

What stands between is a *handle*, which takes no memory of the device. On a GPU copies run on a stream of their own
(shardc.runtime.stage.activation_offload), and the stream that computes waits for them, not the host. The memory that a
value leaves is used anew behind `offload_wait` alone, and that of its copy comes from what backward has freed by
`reload_start`: so a step holds what the graph says. (torchtune's OffloadActivations frees what has left in the same
way, instead of leaving it to the allocator, which would hand the memory out only after it has looked.)
On a CPU, which is its own host, nothing is moved.

A tape (shardc.runtime.ops.opaque) goes as what its op has saved for itself.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from shardc.runtime.ops.by_storage import ByStorage
from shardc.runtime.ops.opaque import Own, Tape


class HostHandle:
    """A value on the host, or on its way there. copies: a shardc.runtime.stage.activation_offload.OffloadedTensors."""

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
        """All copies to the host are done: the device need not hold it any more."""
        for copied in dict.fromkeys(m[1] for m in self._moved if m is not None):
            self._copies.wait(copied)
        for place, moved in zip(self._places, self._moved, strict=True):
            if moved is not None:
                place.tensor = None

    def begin(self, tag: str) -> Coming:
        """Begin to copy it back. More than once, if need be: each time it is another copy."""
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

    def there(self, tensors: list[Tensor]) -> Any:
        """The value, from its tensors."""
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
    """A value on its way back. copies: by tensor, with what is waited for."""

    handle: HostHandle
    copies: list[tuple[Tensor, Any]]

    def wait(self) -> Any:
        """The value, once it is there."""
        for copied in dict.fromkeys(copied for _, copied in self.copies if copied is not None):
            self.handle._copies.wait(copied)
        return self.handle.there([x for x, _ in self.copies])


def offload_start(x: Any, mesh: Any, tag: str = "") -> HostHandle:
    """Begin to copy a value, or what a tape holds, to the host. tag: the region that says so."""
    return HostHandle(x, mesh.step.host_copies, tag)


def offload_wait(handle: HostHandle) -> HostHandle:
    """The handle of a value that has left the device."""
    handle.left()
    return handle


def reload_start(handle: HostHandle, tag: str = "") -> Coming:
    """Begin to copy it back."""
    return handle.begin(tag)


def reload_wait(coming: Coming) -> Any:
    """The value, on the device again."""
    return coming.wait()
