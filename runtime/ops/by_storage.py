"""What is known of memory that tensors share."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

V = TypeVar("V")


class ByStorage(Generic[V]):
    """One value for all tensors that are views of each other by size, stride and offset. It does not keep their
    memory, and new memory at the same address is not taken for it. Of strided tensors alone.

    Asked of every tensor that autograd saves, so a reference that does not keep memory is made once for each memory
    that has a value, and asking takes no more than its address: that address is in use as long as there is a reference.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, torch.dtype, bool, bool], V] = {}
        self._references: dict[int, StorageWeakRef] = {}

    def __len__(self) -> int:
        return len(self._known)

    def get(self, x: Tensor) -> V | None:
        return self._known.get((x.untyped_storage()._cdata, x.dtype, x.is_conj(), x.is_neg()))

    def put(self, x: Tensor, value: V) -> None:
        storage = x.untyped_storage()
        if storage._cdata not in self._references:
            self._references[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
        self._known[storage._cdata, x.dtype, x.is_conj(), x.is_neg()] = value

    def first(self, x: Tensor, value: V) -> V:
        """The value that is known, or this one from now on."""
        known = self.get(x)
        if known is None:
            self.put(x, value)
            return value
        return known

    def clear(self) -> None:
        self._known.clear()
        self._references.clear()
