"""Recompile for a batch of fewer rows, such as the last one of an epoch, when the first such batch comes.

The new program is as exact as any: means are over the rows that are there, and rows that ranks and microbatches do not
divide are padded (`uneven: pad`). The engine runs it on the parameters, buckets and optimizer that it has, so the new
program needs the layouts of the first one.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.step import inputs

Build = Callable[[], nn.Module | None]
Loss = Callable[[Any, Any], Any]
Compile = Callable[..., Program]


class Resizer:
    """`(program, batch) -> program for that batch`, for Program.resize.

    build: gives the model that was compiled, or one like it. modes: whether each of its modules was in training mode.
    compile: shardc.compile.compile.
    """

    def __init__(self, build: Build, loss: Loss | None, modes: dict[str, bool], compile: Compile) -> None:
        self.build, self.loss, self.modes, self.compile = build, loss, modes, compile
        self._programs: dict[tuple[int, ...] | None, Program] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, model: nn.Module, loss: Loss | None, compile: Compile) -> Resizer:
        """For a model that somebody else holds: a program does not keep its weights alive."""
        return cls(weakref.ref(model), loss, {n: m.training for n, m in model.named_modules()}, compile)

    def __call__(self, program: Program, batch: Any) -> Program:
        """Compile, once for each size. Ranks that are threads of one process take turns: only one may capture at a
        time.

        Raises ShardcError if the model no longer exists, or if parameters would be split in another way.
        """
        size = inputs.fewer_rows(program, batch)
        with self._lock:
            if size not in self._programs:
                self._programs[size] = self._recompile(program, batch)
            return self._programs[size]

    def _recompile(self, program: Program, batch: Any) -> Program:
        model = self.build()
        if model is None or program.spec is None:
            raise ShardcError(
                "the batch has fewer rows than the program was compiled for, and the model that would have to be"
                " compiled for it no longer exists",
                where="engine.step",
                fix="keep the model that was compiled, or leave the last batch out (drop_last)",
            )
        with _modes(model, self.modes):
            return self.compile(
                model,
                batch,
                program.spec,
                loss=self.loss,
                overrides=("uneven=pad",),
                prove=False,
                compatible_with=program,
            )


@contextlib.contextmanager
def _modes(model: nn.Module, modes: dict[str, bool]) -> Iterator[None]:
    """While open, the model is in the modes in which it was compiled: it may have been switched since."""
    now = {n: m.training for n, m in model.named_modules()}
    try:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
        yield
    finally:
        for name, module in model.named_modules():
            module.training = now[name]
