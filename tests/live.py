"""What a real step holds: every rank of a loopback mesh is a thread, and counts the bytes of all storages that its tensors lie in.

A storage is counted once, from the op that first returns a tensor in it until it is freed. What the loopback mesh itself makes while ranks
meet is not counted: a real mesh has NCCL do it; its results are.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shardc.program import Program
from shardc.runtime import inputs
from shardc.runtime.comm import Work
from shardc.runtime.engine import Engine, adamw
from shardc.runtime.loopback import LoopbackMesh, loopback


class Live(TorchDispatchMode):
    """now, peak: bytes. foreign: tensors whose memory is somebody else's."""

    def __init__(self, foreign: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self._foreign = {x.untyped_storage()._cdata for x in foreign}
        self.now = self.peak = 0
        self.paused = False
        self._refs: dict[int, Any] = {}

    def see(self, x: Tensor) -> None:
        storage = x.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._refs or key in self._foreign or self.paused:
            return
        self.now += nbytes
        self.peak = max(self.peak, self.now)

        def freed(ref: Any) -> None:
            if self._refs.get(key) is ref:
                del self._refs[key]
                self.now -= nbytes

        self._refs[key] = weakref.ref(storage, freed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.see(x)
        return result


class Measured(LoopbackMesh):
    live: Live

    def _exchange(self, *args: Any) -> Any:
        self.live.paused = True
        try:
            found = super()._exchange(*args)
        finally:
            self.live.paused = False
        return found

    def _all_reduce(self, x: Tensor, *args: Any) -> Tensor:
        return self._made(super()._all_reduce, x, *args)

    def _all_gather(self, x: Tensor, *args: Any) -> Tensor:
        return self._made(super()._all_gather, x, *args)

    def _reduce_scatter(self, x: Tensor, *args: Any) -> Tensor:
        return self._made(super()._reduce_scatter, x, *args)

    def _all_to_all(self, x: Tensor, *args: Any) -> Tensor:
        return self._made(super()._all_to_all, x, *args)

    def _made(self, make: Callable[..., Tensor], *args: Any) -> Tensor:
        found = make(*args)
        self.live.see(found)
        return found

    # in place: what lies between is the loopback's own

    def _start_all_reduce(self, *args: Any) -> Any:
        return self._unseen(super()._start_all_reduce, *args)

    def _start_all_gather(self, *args: Any) -> Any:
        return self._unseen(super()._start_all_gather, *args)

    def _start_reduce_scatter(self, *args: Any) -> Any:
        return self._unseen(super()._start_reduce_scatter, *args)

    def _start_send(self, x: Tensor, *args: Any) -> Work:
        self._unseen(super()._start_send, x, *args)
        return Work(kept=x)  # as a real one, until it has gone

    def _unseen(self, start: Callable[..., Any], *args: Any) -> Any:
        see, self.live.see = self.live.see, lambda x: None  # type: ignore[method-assign]
        try:
            return start(*args)
        finally:
            self.live.see = see  # type: ignore[method-assign]


def measured(program: Program, model: Any, batch: Any, *, steps: int = 2) -> list[int]:
    """The peak of live bytes of every rank, in the last of some steps with AdamW."""

    leaves = dict(inputs.leaves(batch))
    whole = [leaves[x.path] for x in program.inputs if not x.layout.shards()]  # what ranks use as it is; on a GPU they have copies of it
    parts = [leaves[x.path] for x in program.inputs if x.layout.shards()]
    theirs = [*model.parameters(), *model.buffers(), *parts]

    def work(mesh: LoopbackMesh) -> int:
        torch.set_num_threads(1)
        mesh.__class__ = Measured
        assert isinstance(mesh, Measured)
        mesh.live = live = Live(theirs)
        with live:
            engine = Engine(program, model, adamw, mesh=mesh)
            for x in (*engine.params.values(), *engine.buffers.values(), *whole):
                live.see(x)
            for _ in range(steps):
                live.peak = live.now
                engine.step(batch)
        return live.peak

    gc.collect()
    return loopback(program.mesh, work)
