"""The tape of what a model's constructor did to its tensors, and the replay of any one of them: running, in order, just
the ops that its storage depends on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.runtime import random_draws, rng
from shardc.runtime.state.sliced_tensors import whole
from shardc.torch_private import OpOverload, pytree

STREAM = 0x1417  # keeps initial weights apart from dropout's streams of the same seed


@dataclass(frozen=True)
class Ref:
    """A tensor of the tape: a window on a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int  # of the storage

    @property
    def whole(self) -> bool:
        """Is it all of its storage, in order?"""
        size, strides = 1, []
        for n in reversed(self.shape):
            strides.append(size)
            size *= n
        return self.nbytes == size * self.dtype.itemsize and self.stride == tuple(reversed(strides))


@dataclass(frozen=True)
class Entry:
    """One op. name: of a random op or "constant", "stored", "trunc_normal_"; else "". args: with Refs for tensors; by
    schema name if random; of "stored", the `Sliced` that it is read from.

    created: for each result, its Ref if the op made its storage. writes, reads: storages. line: the user's line.
    """

    func: OpOverload | None
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    created: tuple[Ref | None, ...]
    writes: frozenset[int]
    reads: frozenset[int]
    line: source.Source
    random: int = -1  # ordinal among the random ops

    @property
    def overwrites(self) -> int | None:
        """The storage that this op gives new values throughout, whatever was in it."""
        if self.func is not torch.ops.aten.copy_.default:
            return None
        into, source = self.args[:2]
        return into.storage if into.whole and source.storage != into.storage else None


@dataclass
class Tape:
    """Entries in order. Positions in `writers` are those of the entries that make or change a storage."""

    entries: list[Entry] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    randoms: int = 0

    def add(self, entry: Entry) -> None:
        for s in entry.writes:
            self.writers.setdefault(s, []).append(len(self.entries))
        self.entries.append(entry)

    @property
    def stored(self) -> bool:
        """Is anything on it read from files?"""
        return any(e.name == "stored" for e in self.entries)

    def closure(self, storages: Iterable[int]) -> list[int]:
        """Positions of all entries that the present values of these storages depend on, in order."""
        needed: set[int] = set()
        todo = [(s, len(self.entries)) for s in storages]
        while todo:
            storage, before = todo.pop()
            position = self.last_writer(storage, before)
            if position is None or position in needed:
                continue
            needed.add(position)
            entry = self.entries[position]
            todo += [(s, position) for s in {*entry.reads, *entry.writes} if s != entry.overwrites]
        return sorted(needed)

    def last_writer(self, storage: int, before: int) -> int | None:
        """Position of the last entry before this position that makes or changes a storage."""
        positions = self.writers.get(storage, [])
        i = bisect_left(positions, before)
        return positions[i - 1] if i else None

    def replay(self, refs: Iterable[Ref], seed: int | None, device: torch.device | str = "cpu") -> list[Tensor]:
        """The values of these tensors on `device`; they share memory where they did. seed None: no random ops."""
        wanted = list(refs)
        memory: dict[int, torch.UntypedStorage] = {}

        def real(ref: Ref) -> Tensor:
            if ref.storage not in memory and ref.whole and ref.storage in overwritten:
                memory[ref.storage] = torch.empty(ref.shape, dtype=ref.dtype, device=device).untyped_storage()
            if ref.storage not in memory:
                what = "a tensor was made on the meta device, which keeps no values"
                raise ShardcError(what, fix="build the model without torch.device('meta')")
            return torch.empty(0, dtype=ref.dtype, device=device).set_(
                memory[ref.storage], ref.offset, ref.shape, ref.stride
            )

        needed = self.closure(r.storage for r in wanted)
        overwritten = {self.entries[position].overwrites for position in needed}
        with torch.no_grad():
            for position in needed:
                self._run(self.entries[position], memory, real, seed, torch.device(device))
            return [real(r) for r in wanted]

    def _run(
        self,
        e: Entry,
        memory: dict[int, torch.UntypedStorage],
        real: Callable[[Ref], Tensor],
        seed: int | None,
        device: torch.device,
    ) -> None:
        def argument(x: Any) -> Any:
            return real(x) if isinstance(x, Ref) else device if isinstance(x, torch.device) else x

        if e.random >= 0:
            if seed is None:
                raise RandomValue(e)
            (out,) = e.created
            target = e.kwargs.get("self") if out is None else out
            assert isinstance(target, Ref)
            if out is not None:
                memory[out.storage] = _empty(out, device).untyped_storage()
            random_draws.draw(
                e.name, real(target), rng.key(seed, STREAM, e.random), pytree.tree_map(argument, dict(e.kwargs))
            )
            return
        if e.name == "stored":
            (stored,) = e.args
            results: Any = (stored.read(whole(stored.shape)),)
        elif e.func is None:
            results = e.args
        else:
            results = e.func(*pytree.tree_map(argument, e.args), **pytree.tree_map(argument, dict(e.kwargs)))
        for ref, x in zip(e.created, pytree.tree_flatten(results)[0], strict=True):
            if ref is not None:
                if e.func is None or x.stride() != ref.stride or x.storage_offset() != ref.offset:
                    # a constant must not be written to; windows assume the strides of the recorded result
                    x = _empty(ref, device).copy_(x)
                memory[ref.storage] = x.untyped_storage()


def _empty(ref: Ref, device: torch.device) -> Tensor:
    last = sum((n - 1) * s for n, s in zip(ref.shape, ref.stride, strict=True))
    flat = torch.empty(ref.offset if 0 in ref.shape else ref.offset + last + 1, dtype=ref.dtype, device=device)
    return flat.as_strided(ref.shape, ref.stride, ref.offset)


class RandomValue(Exception):
    """A value that Python reads depends on this random op."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.name)
        self.entry = entry
