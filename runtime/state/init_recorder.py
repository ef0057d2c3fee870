"""Records what a model's constructor does to its tensors, on a tape (init_tape.py).

While a `Recorder` is open, tensors are made on the meta device, without memory, but answer that they lie on the CPU, so
that code which treats meta tensors differently (transformers, torch.nn.init) runs as always. Every op that makes or
changes a tensor goes on the tape. Tensors are known by their *storage*: views, `.data` and parameters made of a tensor
all lead to the same one, so views need no entry.

A value that Python reads (`.item()`, `if x.any()`) is replayed on the spot if no random number goes into it.

Tensors of files are on the tape too (`Recorder.stored`): they are read when a replay needs them, or by slice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.runtime.state.init_tape import RECORDING, Entry, RandomValue, Ref, Tape
from shardc.runtime.state.sliced_tensors import InMemory, Sliced
from shardc.torch_private import OpOverload, TorchDispatchMode, pytree, replaced_trunc_normal

#: torch's generator has this seed before the first random op that is recorded, and i + 1 more after the i-th, which
#: draws nothing: so each op finds out after which one it draws, or that the builder has seeded the generator.
_SEEDS = 0x5EED_0F_4E0B_0000


class Recorder:
    """`with Recorder() as r:` records on `r.tape`; `r.ref(tensor)` is a tensor's place on it."""

    def __init__(self) -> None:
        self.tape = Tape()
        self._held: dict[int, torch.UntypedStorage] = {}  # keeps storages alive, so that their ids stay theirs
        self._shadows: dict[int, Tensor] = {}  # of real tensors' storages: meta tensors of the same size
        self._generators: dict[int, tuple[torch.Generator, Tensor]] = {}  # with the states that they get back
        self._stack = ExitStack()
        self._paused = self._open = False
        #: What to tell of weights that were read while the model was built, and the folder that they came from.
        self.notes: list[str] = []
        self.folder: Path | None = None

    def __enter__(self) -> Recorder:
        self._stack.enter_context(RECORDING)
        self._stack.callback(self._give_back)
        self._seeded(torch.default_generator, _SEEDS)
        self._stack.enter_context(replaced_trunc_normal(self._trunc_normal))
        self._stack.enter_context(_Pretend(self))
        self._stack.enter_context(_Dispatch(self))
        self._open = True
        return self

    def __exit__(self, *exc: object) -> None:
        self._open = False
        self._stack.close()

    def _give_back(self) -> None:
        for generator, state in self._generators.values():
            generator.set_state(state)
        self._generators.clear()

    def _seeded(self, generator: torch.Generator, seed: int) -> None:
        self._generators.setdefault(id(generator), (generator, generator.get_state()))
        generator.manual_seed(seed)

    def ref(self, x: Tensor) -> Ref:
        """Where x is on the tape."""
        x = self._meta(x)
        storage = x.untyped_storage()
        self._held[id(storage)] = storage
        return Ref(id(storage), x.dtype, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), storage.nbytes())

    def stored(self, source: Sliced) -> Tensor:
        """A tensor on the tape, without memory, whose values are in a file: they are read when they are needed."""
        with self._pause():
            x = torch.empty(source.shape, dtype=source.dtype, device="meta")
            ref = self.ref(x)
        self._add(None, (source,), {}, (ref,), {ref.storage}, set())
        return x

    def value(self, x: Tensor) -> Tensor:
        """The real value of a recorded tensor. Raises ShardcError if it depends on random numbers."""
        ref = self.ref(x)
        try:
            with self._pause():
                return self.tape.replay([ref], None)[0].clone()
        except RandomValue as e:
            place = source.of_call()
            raise ShardcError(
                f"building the model looks at the value of random numbers ({place.shown or e.entry.name})",
                where=place.line,
                fix="pass a real model instead of its builder",
            ) from e

    def _meta(self, x: Tensor) -> Tensor:
        """x itself, or the meta tensor in place of a real x (from outside, from numpy, a file, torch.tensor): a
        constant.
        """
        if x.layout is not torch.strided or x.is_quantized:
            raise ShardcError(
                f"building the model makes a {x.layout} tensor",
                where=source.of_call().line,
                fix="pass a real model instead of its builder",
            )
        storage = x.untyped_storage()
        if storage.device.type == "meta":
            return x
        with self._pause():
            return self._shadow(x, storage)

    def _shadow(self, x: Tensor, storage: torch.UntypedStorage) -> Tensor:
        if id(storage) not in self._shadows:
            whole = torch.empty(0, dtype=x.dtype, device=storage.device).set_(storage)
            shadow = torch.empty(whole.shape, dtype=x.dtype, device="meta")
            self._held[id(storage)], self._shadows[id(storage)] = storage, shadow
            ref = self.ref(shadow)
            self._add(None, (InMemory(whole.detach().clone()),), {}, (ref,), {ref.storage}, set())
        like = torch.empty(0, dtype=x.dtype, device="meta")
        return like.set_(self._shadows[id(storage)].untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what runs in here, also where this recorder is not open."""
        if self._open:
            yield
        else:
            with self:
                yield

    @contextmanager
    def _pause(self) -> Iterator[None]:
        """Our own work on tensors is not recorded."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

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
        """After which random op the next one draws, or from which state."""
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Generator))
        generator, count = next(given, torch.default_generator), len(self.tape.randoms)
        with self._pause():
            before = generator.initial_seed() - _SEEDS
            start = before - 1 if 0 <= before <= count else generator.get_state()
            self._seeded(generator, _SEEDS + count + 1)
        return start

    # --- ops

    def op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op on meta tensors and put it on the tape if it makes or changes a tensor."""
        if self._paused:
            return func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            return self._meta(args[0])
        if torch.Tag.data_dependent_output in func.tags:
            return func(*self._values(args), **self._values(kwargs))
        if any(a.name == "device" for a in func._schema.arguments) and not _tensors((args, kwargs)):
            kwargs = {**kwargs, "device": torch.device("cpu")}  # made explicit, so that replay can replace it
        changed = [x for a, x in _by_name(func, args, kwargs) if a.alias_info is not None and a.alias_info.is_write]
        changed = _tensors(changed)
        args, kwargs = (
            pytree.tree_map(lambda x: self._meta(x) if isinstance(x, Tensor) else x, part) for part in (args, kwargs)
        )
        try:
            results = func(*pytree.tree_map(_on_meta, args), **pytree.tree_map(_on_meta, kwargs))
        except NotImplementedError:
            if changed:  # an op in place needs no run to know its result
                results = changed[0]
            else:  # the shape of the result depends on values: boolean indexing, nonzero
                results = func(*self._values(args), **self._values(kwargs))
                return pytree.tree_map(lambda x: self._meta(x) if isinstance(x, Tensor) else x, results)
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
        args, kwargs = (
            pytree.tree_map(lambda x: self.ref(x) if isinstance(x, Tensor) else x, part) for part in (args, kwargs)
        )
        reads = {r.storage for r in pytree.tree_flatten((args, kwargs))[0] if isinstance(r, Ref)}
        made = any(a.name == "dtype" for a in func._schema.arguments[len(args) :])
        if outputs and outputs[0] is not None and made:
            kwargs = {**kwargs, "dtype": outputs[0].dtype}  # the default dtype may be another one at replay
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._add(func, args, kwargs, tuple(outputs), writes, reads, random)

    def _trunc_normal(
        self, tensor: Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> Tensor:
        """Stands in for torch.nn.init's, which draws again until all numbers fit, and so looks at them."""
        args = (self.ref(tensor), mean, std, a, b, generator)
        self._add(torch.nn.init.trunc_normal_, args, {}, (None,), {args[0].storage}, set(), random=True)
        return tensor

    def _values(self, arguments: Any) -> Any:
        return pytree.tree_map(lambda x: self.value(x) if isinstance(x, Tensor) else x, arguments)


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.recorder.op(func, tuple(args), dict(kwargs or {}))


_PRETENCES: dict[Any, Any] = {
    torch.Tensor.device.__get__: torch.device("cpu"),
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


class _Pretend(TorchFunctionMode):
    """Meta tensors answer that they lie on the CPU, and give their values to Python and numpy."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # this mode is off in here: devices are the true ones
        if func in _PRETENCES and args[0].device.type == "meta":
            return _PRETENCES[func]
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__) and args[0].device.type == "meta":
            args = (self.recorder.value(args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


def _by_name(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """(argument of the schema, what was given for it)."""
    declared = func._schema.arguments
    return [
        *zip(declared, args, strict=False),
        *((a, kwargs[a.name]) for a in declared[len(args) :] if a.name in kwargs),
    ]


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in pytree.tree_flatten(x)[0] if isinstance(t, Tensor)]


def _on_meta(x: Any) -> Any:
    if isinstance(x, torch.Generator):
        return None  # a generator of the CPU does not fit a meta tensor
    return torch.device("meta") if isinstance(x, torch.device) else x
