"""Record a model's constructor on a tape; replay any tensor by the ops that its storage needs.

Random ops draw from torch's generator of the CPU, each from the state after the one before it: values are those of
`torch.manual_seed(seed); builder()`. Draws of other tensors in between are made, and thrown away.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.runtime.mesh.step_context import changed
from shardc.runtime.state.boxes import Sliced, cast, in_memory, joined
from shardc.torch_private import OpOverload, TorchDispatchMode, pytree, replaced_trunc_normal

#: Held during recording and replay: both change global state, such as the generator's.
RECORDING = threading.RLock()
aten = torch.ops.aten
_COPIES = (aten.copy_.default, aten._to_copy.default, aten.clone.default)
_JOINS = (aten.cat.default, aten.stack.default)
REAL = "pass a real model instead of its builder"
#: Ops in place that overwrite all old values.
_FILLS = ("normal_", "uniform_", "trunc_normal_", "zero_", "fill_")


@dataclass(frozen=True)
class Ref:
    """A tensor on the tape: a view of a storage."""

    storage: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int  # of the storage

    @property
    def whole(self) -> bool:
        """Whether it is all of its storage, in order."""
        size, strides = 1, []
        for n in reversed(self.shape):
            strides.append(size)
            size *= n
        return self.nbytes == size * self.dtype.itemsize and self.stride == tuple(reversed(strides))

    def empty(self) -> Tensor:
        """Allocate memory for it."""
        last = sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        flat = torch.empty(self.offset if 0 in self.shape else self.offset + last + 1, dtype=self.dtype)
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Entry:
    """One op, with Refs for tensors.

    func: None: created[0] is read from args[0], a `Sliced`
    created: for each result, its Ref if the op made its storage
    writes, reads: storages
    line: the user's line
    random: ordinal among the random ops, else -1
    start: the ordinal of the random op after which it draws (-1: it is the first after the seed), or the state of a
           generator that the builder seeded
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
        """The storage that this op overwrites completely."""
        if self.name not in _FILLS and self.func is not aten.copy_.default:
            return None
        into, origin = self.args[0], self.args[1] if len(self.args) > 1 else None
        return into.storage if into.whole and getattr(origin, "storage", None) != into.storage else None


@dataclass
class Tape:
    """Entries in order. `writers`: positions of the entries that make or change a storage."""

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
        """Return a tensor's source by slice, if it was only copied, cast and joined; None: it is computed."""
        at = self.last_writer(ref.storage, before)
        if at is None:
            return None
        entry = self.entries[at]
        if entry.func is aten.copy_.default:
            into, origin = entry.args[:2] if entry.overwrites is not None else (None, None)
        else:
            into, origin = entry.created[0], next(iter(entry.args), None)
        result: Sliced | None = None
        if into == ref and entry.func is None:
            result = origin
        elif into == ref and entry.func in _COPIES and origin.shape == ref.shape:
            result = self.source(origin, at)
        elif into == ref and entry.func in _JOINS:
            members = [x for x in (self.source(r, at) for r in origin) if x is not None]
            dim = entry.args[1] if len(entry.args) > 1 else 0
            if len(members) == len(origin) and len({x.dtype for x in members}) == 1:
                result = joined(members, dim % len(ref.shape), new=entry.func is aten.stack.default)
        return result if result is None or result.dtype == ref.dtype else cast(result, ref.dtype)

    def closure(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Return positions of all entries that these storages depend on, in order. before: a position."""
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

    def is_drawn(self, storage: int) -> bool:
        """Return whether there are random numbers in a storage."""
        return any(self.entries[i].random >= 0 for i in self.closure([storage]))

    def last_writer(self, storage: int, before: int | None) -> int | None:
        """Return the position of the last entry (before this position) that makes or changes a storage."""
        positions = self.writers.get(storage, [])
        i = bisect_left(positions, len(self.entries) if before is None else before)
        return positions[i - 1] if i else None

    def replay(self, refs: Iterable[Ref], seed: int | None, before: int | None = None) -> list[Tensor]:
        """Compute these tensors; they share memory as before, perhaps with a source. seed None: no random ops."""
        targets = list(refs)
        needed = self.closure((r.storage for r in targets), before)
        memory = _Memory(self.entries[position] for position in needed)
        with RECORDING, torch.random.fork_rng(devices=[]), torch.no_grad():
            for position in needed:
                self._run(self.entries[position], memory, seed)
            return [memory.real(r) for r in targets]

    def _run(self, e: Entry, memory: _Memory, seed: int | None) -> None:
        if e.func is None:
            results: Any = e.args[0].tensor()
        elif e.random < 0:
            results = memory.call(e)
        elif seed is None:
            raise RandomValueError(e)
        else:
            torch.set_rng_state(self._state(e.start, seed))
            results = memory.call(e)
            self._states[seed, e.random] = torch.get_rng_state()
        for ref, x in zip(e.created, pytree.tree_flatten(results)[0], strict=True):
            if ref is not None:
                memory.add(ref, x, own=e.func is not None)

    def _state(self, start: int | Tensor, seed: int) -> Tensor:
        """Return the generator's state after the random op of this ordinal, and after those before it."""
        todo: list[int] = []
        while isinstance(start, int) and start >= 0 and (seed, start) not in self._states:
            todo.append(self.randoms[start])
            start = self.entries[todo[-1]].start
        for position in reversed(todo):
            e = self.entries[position]
            memory = _Memory([e])
            refs = [r for r in pytree.tree_flatten((e.args, e.kwargs))[0] if isinstance(r, Ref)]
            for r in refs:  # the op overwrites it, so any values will do
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
            return None  # the default generator has been set to its state
        return self.real(x) if isinstance(x, Ref) else torch.device("cpu") if isinstance(x, torch.device) else x

    def real(self, ref: Ref) -> Tensor:
        if ref.storage not in self._held:
            if ref.storage not in self._writes or not ref.whole:
                fault = "a tensor was made on the meta device, which keeps no values"
                raise ShardcError(fault, fix="build the model without torch.device('meta')")
            self._held[ref.storage] = ref.empty().untyped_storage()
        return torch.empty(0, dtype=ref.dtype).set_(self._held[ref.storage], ref.offset, ref.shape, ref.stride)

    def add(self, ref: Ref, x: Tensor, *, own: bool = True) -> None:
        """Store a result. own: it may be written to. Windows assume the strides of the recorded result."""
        shared = not own and self._writes[ref.storage] > 1
        if shared or x.stride() != ref.stride or x.storage_offset() != ref.offset:
            x = ref.empty().copy_(x)
        self._held[ref.storage] = x.untyped_storage()


class RandomValueError(Exception):
    """A value that Python reads depends on this random op."""


# --- the recording


#: torch's generator has this seed before the first recorded random op, and i + 1 more after the i-th (recording draws
#: nothing). So each op finds the op after which it draws, or finds that the builder has seeded the generator.
_SEEDS = 0x5EED_0F_4E0B_0000


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with Recorder() as r:` records on `r.tape`; `r.ref(tensor)` is a tensor's place on it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = Tape()
        self._held: dict[int, torch.UntypedStorage] = {}  # keeps storages alive, so that their ids stay unique
        self._shadows: dict[int, Tensor] = {}  # of real tensors' storages: meta tensors of the same size
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # with their old states, restored at the end
        self._stack = ExitStack()
        self._paused = self._open = False
        #: Notes on weights that were read while the model was built, and the folder that they came from.
        self.notes: list[str] = []
        self.folder: Path | None = None

    def __enter__(self) -> Recorder:
        self._stack.enter_context(RECORDING)
        self._stack.callback(self._restore_generators)
        self._seeded(torch.default_generator, _SEEDS + len(self.tape.randoms))
        self._stack.enter_context(replaced_trunc_normal(self._trunc_normal))
        self._stack.enter_context(_Pretend(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        self._stack.push(super().__exit__)
        self._open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._open = False
        self._stack.close()

    def _restore_generators(self) -> None:
        for generator, state in self._generators.values():
            generator.set_state(state)
        self._generators.clear()

    def _seeded(self, generator: torch.Generator, seed: int) -> None:
        self._generators.setdefault(id(generator), (generator, generator.get_state()))
        generator.manual_seed(seed)

    def ref(self, x: Tensor) -> Ref:
        """Return the place of x on the tape."""
        x = self._meta(x)
        storage = x.untyped_storage()
        self._held[id(storage)] = storage
        return Ref(id(storage), x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), storage.nbytes())

    def stored(self, source: Sliced) -> Tensor:
        """Return a tensor on the tape, without memory, whose values are read from a file when needed."""
        with self._pause():
            x = torch.empty(source.shape, dtype=source.dtype, device="meta")
            ref = self.ref(x)
        self._add(None, (source,), {}, (ref,), {ref.storage}, set())
        return x

    def value(self, x: Tensor) -> Tensor:
        """Return the real value of a recorded tensor. Raises ShardcError if it depends on random numbers."""
        ref = self.ref(x)
        try:
            with self._pause():
                return self.tape.replay([ref], None)[0].clone()
        except RandomValueError as e:
            place = source.of_call()
            fault = f"building the model reads the value of random numbers ({place.shown or e.args[0].name})"
            raise ShardcError(fault, where=place.line, fix=REAL) from e

    def _meta(self, x: Tensor) -> Tensor:
        """Return x, or the meta tensor in place of a real x (from numpy, a file, torch.tensor), a constant."""
        if x.layout is not torch.strided or x.is_quantized:
            fault = f"building the model makes a {x.layout} tensor"
            raise ShardcError(fault, where=source.of_call().line, fix=REAL)
        storage = x.untyped_storage()
        if storage.device.type == "meta":
            return x
        with self._pause():
            return self._shadow(x, storage)

    def _shadow(self, x: Tensor, storage: torch.UntypedStorage) -> Tensor:
        if id(storage) not in self._shadows:
            whole = torch.empty(0, dtype=x.dtype, device=storage.device).set_(storage)
            self._held[id(storage)] = storage
            self._shadows[id(storage)] = self.stored(in_memory(whole.clone()))
        like = torch.empty(0, dtype=x.dtype, device="meta")
        return like.set_(self._shadows[id(storage)].untyped_storage(), x.storage_offset(), x.shape, x.stride())

    def recording(self) -> AbstractContextManager[Any]:
        """Record ops in this context, even if the recorder is not open."""
        return nullcontext() if self._open else self

    def _pause(self) -> AbstractContextManager[None]:
        """Suspend recording in this context, for our own work on tensors."""
        return changed(self, _paused=True)

    def _add(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        created: tuple[Ref | None, ...],
        writes: set[int],
        reads: set[int],
        random: bool = False,
    ) -> None:
        ordinal, start = (len(self.tape.randoms), self._start(args, kwargs)) if random else (-1, -1)
        at = source.of_call()
        self.tape.add(Entry(func, args, kwargs, created, frozenset(writes), frozenset(reads), at, ordinal, start))

    def _start(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int | Tensor:
        """Return the random op after which the next one draws, or the state from which it draws."""
        generators = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator))
        generator, count = next(generators, torch.default_generator), len(self.tape.randoms)
        with self._pause():
            before = generator.initial_seed() - _SEEDS
            start = before - 1 if 0 <= before <= count else generator.get_state()
            self._seeded(generator, _SEEDS + count + 1)
        return start

    # --- ops

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an op on meta tensors and put it on the tape if it makes or changes a tensor."""
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return self._meta(args[0])
        if torch.Tag.data_dependent_output in func.tags:
            return func(*_each(self.value, args), **_each(self.value, kwargs))
        if any(a.name == "device" for a in func._schema.arguments) and not _tensors((args, kwargs)):
            kwargs = {**kwargs, "device": torch.device("cpu")}  # made explicit, so that replay can replace it
        given = {**dict(zip((a.name for a in func._schema.arguments), args, strict=False)), **kwargs}
        written = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        changed = _tensors([given[name] for name in written if name in given])
        args, kwargs = _each(self._meta, (args, kwargs))
        try:
            results = func(*pytree.tree_map(_on_meta, args), **pytree.tree_map(_on_meta, kwargs))
        except NotImplementedError:
            if changed:  # the result of an op in place is known without a run
                results = changed[0]
            else:  # the shape of the result depends on values: boolean indexing, nonzero
                return _each(self._meta, func(*_each(self.value, args), **_each(self.value, kwargs)))
        self._record(func, args, kwargs, changed, results)
        alias = func._schema.returns[0].alias_info if len(func._schema.returns) == 1 else None
        return changed[0] if alias is not None and alias.is_write and len(changed) == 1 else results

    def _record(self, func: OpOverload, args: Any, kwargs: Any, changed: list[Tensor], results: Any) -> None:
        writes = {self.ref(x).storage for x in changed}
        outputs: list[Ref | None] = []
        for x in pytree.tree_flatten(results)[0]:
            new = isinstance(x, Tensor) and id(x.untyped_storage()) not in self._held
            outputs.append(self.ref(x) if new else None)
        writes |= {r.storage for r in outputs if r is not None}
        if not writes:
            return  # a view
        args, kwargs = _each(self.ref, (args, kwargs))
        reads = {r.storage for r in pytree.tree_flatten((args, kwargs))[0] if isinstance(r, Ref)}
        takes_dtype = any(a.name == "dtype" for a in func._schema.arguments[len(args) :])
        if outputs and outputs[0] is not None and takes_dtype:
            kwargs = {**kwargs, "dtype": outputs[0].dtype}  # the default dtype may be another one at replay
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._add(func, args, kwargs, tuple(outputs), writes, reads, random)

    def _trunc_normal(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        """Replace torch.nn.init's, which draws until all numbers fit, and so reads them."""
        args = (self.ref(tensor), mean, std, a, b, generator)
        self._add(torch.nn.init.trunc_normal_, args, {}, (None,), {args[0].storage}, set(), random=True)
        return tensor


_PRETENCES: dict[Any, Any] = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


class _Pretend(TorchFunctionMode):
    """Makes meta tensors report the CPU as their device, and return their values to Python and numpy."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # this mode is off in here: devices are the real ones
        if func in _PRETENCES and args[0].device.type == "meta":
            return _PRETENCES[func]
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__) and args[0].device.type == "meta":
            args = (self.recorder.value(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _each(change: Callable[[Tensor], Any], x: Any) -> Any:
    return pytree.tree_map(lambda y: change(y) if isinstance(y, Tensor) else y, x)


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in pytree.tree_flatten(x)[0] if isinstance(t, Tensor)]


def _on_meta(x: Any) -> Any:
    if isinstance(x, torch.Generator):
        return None  # a generator of the CPU does not fit a meta tensor
    return torch.device("meta") if isinstance(x, torch.device) else x
