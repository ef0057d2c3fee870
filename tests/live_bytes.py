"""What a real step holds: every rank, a thread of a loopback mesh or a process of torch's world, counts the bytes of
all storages that its tensors lie in.

A storage is counted once, from the op that first returns a tensor in it until it is freed. What the mesh itself makes
while ranks meet is not counted: on GPUs NCCL does it; its results are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardc.cost import host_memory
from shardc.ir.program import Program
from shardc.runtime.checks.tensor_parts import plain
from shardc.runtime.data import inputs
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.mesh.base import RankMesh, Work
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.stage.communicators import runtime_mesh
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.step.engine import Engine


class Live(TorchDispatchMode):
    """now, peak: bytes. foreign: tensors whose memory is somebody else's. outside, outside_peak: bytes in the machine's
    memory, if the CPU plays the part of a device that has its own."""

    def __init__(self, foreign: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._foreign = {x.untyped_storage()._cdata for x in foreign}
        self.now = self.peak = self.outside = self.outside_peak = 0
        self.paused = False
        self.of: Any = None
        self._refs: dict[int, Any] = {}

    def see(self, x: Tensor, *, outside: bool = False) -> None:
        if x.is_meta:  # no memory: the skeleton of a model, kept for exports
            return
        storage = x.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._refs or key in self._foreign or self.paused:
            return
        self._count(nbytes, outside)

        def freed(ref: Any) -> None:
            if self._refs.get(key) is ref:
                del self._refs[key]
                self._count(-nbytes, outside)

        self._refs[key] = weakref.ref(storage, freed)

    def _count(self, nbytes: int, outside: bool) -> None:
        if outside:
            self.outside += nbytes
            self.outside_peak = max(self.outside, self.outside_peak)
        else:
            self.now += nbytes
            self.peak = max(self.peak, self.now)

    def host(self, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes lies outside."""
        self.paused = True
        try:
            made = make()
        finally:
            self.paused = False
        self.see(made, outside=True)
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with plain():  # this call is no user's
            result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.see(x)
        return result


class _Measured(RankMesh):
    """What the mesh itself makes while messages are under way is not counted; results are."""

    live: Live

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        before, self.live.paused = self.live.paused, True
        try:
            yield
        finally:
            self.live.paused = before

    def _all_reduce(self, *args: Any) -> Work:
        return self._started(super()._all_reduce, *args)

    def _all_gather(self, *args: Any) -> Work:
        return self._started(super()._all_gather, *args)

    def _reduce_scatter(self, *args: Any) -> Work:
        return self._started(super()._reduce_scatter, *args)

    def _all_to_all(self, *args: Any) -> Work:
        return self._started(super()._all_to_all, *args)

    def _send(self, x: Tensor, *args: Any) -> Work:
        work = self._started(super()._send, x, *args)
        work._kept = x  # as a real one, until it has gone
        return work

    def _started(self, start: Callable[..., Work], *args: Any) -> Work:
        with self._unseen():
            work = start(*args)
        if (then := work._then) is not None:

            def unseen() -> None:
                with self._unseen():
                    then()

            work._then = unseen
        return work


class Measured(_Measured, LoopbackMesh):
    """A thread among others."""

    def _exchange(self, *args: Any) -> Any:
        with self._unseen():
            return super()._exchange(*args)


class MeasuredProcess(_Measured, TorchMesh):
    """A process among others."""


def measured(program: Program, model: Any, batch: Any, *, steps: int = 2, **options: Any) -> list[int]:
    """The peak of live bytes of every rank, in the last of some steps."""
    return [found.peak for found in watched(program, model, batch, steps=steps, **options)]


def watched(program: Program, model: Any, batch: Any, *, steps: int = 2, **options: Any) -> list[Live]:
    """What every rank held in the last of some steps with AdamW, as it steps on a GPU; of a forward-only program, in a
    forward. Offloaded tensors lie outside. options: of Engine.
    """

    def work(mesh: LoopbackMesh) -> Live:
        torch.set_num_threads(1)
        mesh.__class__ = Measured
        assert isinstance(mesh, Measured)
        return _stepped(program, model, batch, mesh, steps, options)

    gc.collect()
    with mock.patch.object(inputs, "take", _copied(inputs.take)):
        return loopback(program.mesh, work)


def watched_here(program: Program, model: Any, batch: Any, *, steps: int = 2) -> Live:
    """As `watched`, of the one rank that this process is."""
    mesh = runtime_mesh(program)
    mesh.__class__ = MeasuredProcess
    assert isinstance(mesh, MeasuredProcess)
    with mock.patch.object(inputs, "take", _copied(inputs.take)):
        return _stepped(program, model, batch, mesh, steps, {})


def _copied(take: Callable[..., list[Tensor]]) -> Callable[..., list[Tensor]]:
    """A rank's part of the batch, as it comes to a GPU."""
    return lambda *args, **kwargs: [x.clone() for x in take(*args, **kwargs)]


def _stepped(program: Program, model: Any, batch: Any, mesh: _Measured, steps: int, options: dict[str, Any]) -> Live:
    theirs = [*model.parameters(), *model.buffers(), *(x for _, x in inputs.leaves(batch) if isinstance(x, Tensor))]
    mesh.live = live = Live(theirs)
    with live:
        engine = Engine(
            program,
            model,
            partial(adamw, fused=not program.spec.data.offload.used),
            mesh=mesh,
            interpreter=partial(Interpreter, offloaded=host_memory.offloaded_tensors(live.host)),
            offload=host_memory.offload(live.host),
            **options,
        )
        for x in (*engine.params.values(), *engine.buffers.values()):
            live.see(x)
        for _ in range(steps):
            live.peak, live.outside_peak = live.now, live.outside
            engine.evaluate(batch) if program.forward_only else engine.step(batch)
    live.of = engine  # what it holds is alive as long as the record
    return live


def adamw(params: Any, *, fused: bool = True) -> torch.optim.Optimizer:
    """As on a GPU, where all parameters are updated at once, in one kernel unless their state comes page by page."""
    return torch.optim.AdamW(params, lr=3e-4, fused=fused, foreach=not fused)
