"""The tape of what a model's constructor did to its tensors, and the replay of any one of them: running, in order, just
the ops that its storage depends on.

Random ops draw from torch's generator of the CPU, each from the state that the one before it left: values are those of
`torch.manual_seed(seed); builder()`. Draws of other tensors in between are made, and thrown away.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.runtime.state.sliced_tensors import Cast, Joined, Sliced, whole
from shardc.torch_private import OpOverload, pytree

#: Held while something is recorded or replayed: both change what all threads see, such as the generator's state.
RECORDING = threading.RLock()
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default, aten.clone.default)
_JOINS = (aten.cat.default, aten.stack.default)
#: Ops in place that leave nothing of what was there.
_FILLS = ("normal_", "uniform_", "trunc_normal_", "zero_", "fill_")


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

    def empty(self) -> Tensor:
        """Memory for it."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(self.offset if 0 in self.shape else self.offset + last + 1, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Entry:
    """One op, with Refs for tensors in args and kwargs. func: None where created[0] is read from args[0], a `Sliced`.

    created: for each result, its Ref if the op made its storage. writes, reads: storages. line: the user's line.
    random: ordinal among the random ops, else -1. start: the ordinal of the random op after which it draws (-1: it is
    the first after the seed), or the state of a generator that the builder seeded.
    """

    func: OpOverload | Callable[..., Any] | None
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    created: tuple[Ref | None, ...]
    writes: frozenset[int]
    reads: frozenset[int]
    line: source.Source
    random: int = -1
    start: int | Tensor = -1

    @property
    def name(self) -> str:
        return getattr(getattr(self.func, "overloadpacket", self.func), "__name__", "a file")

    @property
    def overwrites(self) -> int | None:
        """The storage that this op gives new values throughout, whatever was in it."""
        if self.name not in _FILLS and self.func is not aten.copy_.default:
            return None
        into, given = self.args[0], self.args[1] if len(self.args) > 1 else None
        return into.storage if into.whole and getattr(given, "storage", None) != into.storage else None


@dataclass
class Tape:
    """Entries in order. Positions in `writers` are those of the entries that make or change a storage."""

    entries: list[Entry] = field(default_factory=list)
    writers: dict[int, list[int]] = field(default_factory=dict)
    randoms: list[int] = field(default_factory=list)  # positions of random ops
    _states: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # after (seed, ordinal)

    def add(self, entry: Entry) -> None:
        for s in entry.writes:
            self.writers.setdefault(s, []).append(len(self.entries))
        if entry.random >= 0:
            self.randoms.append(len(self.entries))
        self.entries.append(entry)

    def source(self, ref: Ref, before: int | None = None) -> Sliced | None:
        """What a tensor can be read from by slice: it was copied, cast and joined of others at most. None: it is
        computed."""
        at = self.last_writer(ref.storage, before)
        if at is None:
            return None
        entry = self.entries[at]
        if entry.func is aten.copy_.default:
            into, given = entry.args[:2] if entry.overwrites is not None else (None, None)
        else:
            into, given = entry.created[0], next(iter(entry.args), None)
        found: Sliced | None = None
        if into == ref and entry.func is None:
            found = given
        elif into == ref and entry.func in _COPIES and given.shape == ref.shape:
            found = self.source(given, at)
        elif into == ref and entry.func in _JOINS:
            members = [self.source(x, at) for x in given]
            dim = entry.args[1] if len(entry.args) > 1 else 0
            if len({x and x.dtype for x in members}) == 1 and members[0] is not None:
                found = Joined(members, dim % len(ref.shape), new=entry.func is aten.stack.default)
        return found if found is None or found.dtype == ref.dtype else Cast(found, ref.dtype)

    def closure(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Positions of all entries that the values of these storages depend on, in order: at the end, or before one of
        the entries."""
        needed: set[int] = set()
        todo: list[tuple[int, int | None]] = [(s, before) for s in storages]
        while todo:
            position = self.last_writer(*todo.pop())
            if position is None or position in needed:
                continue
            needed.add(position)
            entry = self.entries[position]
            todo += [(s, position) for s in {*entry.reads, *entry.writes} if s != entry.overwrites]
        return sorted(needed)

    def last_writer(self, storage: int, before: int | None) -> int | None:
        """Position of the last entry (before this position) that makes or changes a storage."""
        positions = self.writers.get(storage, [])
        i = bisect_left(positions, len(self.entries) if before is None else before)
        return positions[i - 1] if i else None

    def replay(self, refs: Iterable[Ref], seed: int | None, before: int | None = None) -> list[Tensor]:
        """The values of these tensors; they share memory where they did, and may be what they are read from. seed None:
        no random ops."""
        wanted = list(refs)
        needed = self.closure((r.storage for r in wanted), before)
        memory = _Memory(self.entries[position] for position in needed)
        with _own_generator(), torch.no_grad():
            for position in needed:
                self._run(self.entries[position], memory, seed)
            return [memory.real(r) for r in wanted]

    def _run(self, e: Entry, memory: _Memory, seed: int | None) -> None:
        if e.func is None:
            results: Any = e.args[0].read(whole(e.args[0].shape))
        elif e.random < 0:
            results = memory.call(e)
        elif seed is None:
            raise RandomValue(e)
        else:
            torch.set_rng_state(self._state(e.start, seed))
            results = memory.call(e)
            self._states[seed, e.random] = torch.get_rng_state()
        for ref, x in zip(e.created, pytree.tree_flatten(results)[0], strict=True):
            if ref is not None:
                memory.add(ref, x, own=e.func is not None)

    def _state(self, start: int | Tensor, seed: int) -> Tensor:
        """The generator's state after the random op of this ordinal, and after those before it."""
        todo: list[int] = []
        while isinstance(start, int) and start >= 0 and (seed, start) not in self._states:
            todo.append(self.randoms[start])
            start = self.entries[todo[-1]].start
        for position in reversed(todo):
            e = self.entries[position]
            memory = _Memory([e])
            refs = [r for r in pytree.tree_flatten((e.args, e.kwargs))[0] if isinstance(r, Ref)]
            for r in refs:  # what it fills may be anything
                value = r.empty() if r.storage in e.writes else self.replay([r], seed, position)[0]
                memory.add(r, value)
            self._run(replace(e, created=(None,) * len(e.created)), memory, seed)
            start = e.random
        if isinstance(start, Tensor):
            return start
        return self._states[seed, start] if start >= 0 else torch.Generator().manual_seed(seed).get_state()


class _Memory:
    """The storages of a replay of these entries."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._held: dict[int, torch.UntypedStorage] = {}
        self._writes = Counter(s for e in entries for s in e.writes)

    def call(self, e: Entry) -> Any:
        assert e.func is not None
        return e.func(*pytree.tree_map(self._argument, e.args), **pytree.tree_map(self._argument, dict(e.kwargs)))

    def _argument(self, x: Any) -> Any:
        if isinstance(x, torch.Generator):
            return None  # the default one has its state
        return self.real(x) if isinstance(x, Ref) else torch.device("cpu") if isinstance(x, torch.device) else x

    def real(self, ref: Ref) -> Tensor:
        if ref.storage not in self._held:
            if ref.storage not in self._writes or not ref.whole:
                what = "a tensor was made on the meta device, which keeps no values"
                raise ShardcError(what, fix="build the model without torch.device('meta')")
            self._held[ref.storage] = ref.empty().untyped_storage()
        return torch.empty(0, dtype=ref.dtype).set_(self._held[ref.storage], ref.offset, ref.shape, ref.stride)

    def add(self, ref: Ref, x: Tensor, *, own: bool = True) -> None:
        """own: it may be written to. Windows assume the strides of the recorded result."""
        shared = not own and self._writes[ref.storage] > 1
        if shared or x.stride() != ref.stride or x.storage_offset() != ref.offset:
            x = ref.empty().copy_(x)
        self._held[ref.storage] = x.untyped_storage()


@contextmanager
def _own_generator() -> Iterator[None]:
    """Leave torch's generator as it was."""
    with RECORDING:
        state = torch.get_rng_state()
        try:
            yield
        finally:
            torch.set_rng_state(state)


class RandomValue(Exception):
    """A value that Python reads depends on this random op."""

    def __init__(self, entry: Entry) -> None:
        super().__init__(entry.name)
        self.entry = entry
