"""Store values for memory that tensors share."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

V = TypeVar("V")


class ByStorage(Generic[V]):
    """One value for all tensors that are views of each other by size, stride and offset.

    It does not keep their memory, and does not confuse new memory at the same address with it. Only for strided
    tensors. It is read for every tensor that autograd saves. So a weak reference is made once for each storage that has
    a value, and a look-up needs only the address: the address stays in use as long as there is a reference.
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
        """Return the known value; if there is none, store this one."""
        known = self.get(x)
        if known is None:
            self.put(x, value)
            return value
        return known

    def clear(self) -> None:
        self._known.clear()
        self._references.clear()
