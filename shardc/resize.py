"""Programs for batches of fewer rows: the last one of an epoch. Compiled from the same model and spec when the first
such
batch comes.

Exact as any program: means are over the rows that are there, and rows that ranks and microbatches do not divide are
padded (`uneven: pad`). The engine runs it on the parameters, buckets and optimizer that it has, so they have to lie
where the first program has them."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.step import inputs

Build = Callable[[], nn.Module | None]
Loss = Callable[[Any, Any], torch.Tensor]


class Resizer:
    """`(program, batch) -> program for that batch`, for Program.resize. build: gives the model that was compiled, or
    one like it.
    """

    def __init__(self, build: Build, loss: Loss | None, modes: dict[str, bool]) -> None:
        self.build, self.loss, self.modes = build, loss, modes
        self._found: dict[tuple[int, ...] | None, Program] = {}
        self._lock = threading.Lock()

    @classmethod
    def of(cls, model: nn.Module, loss: Loss | None) -> Resizer:
        """Of a model that somebody else keeps: a program does not keep weights alive."""
        return cls(weakref.ref(model), loss, {n: m.training for n, m in model.named_modules()})

    def __call__(self, program: Program, batch: Any) -> Program:
        """Compile, once for each size. Ranks that are threads of one process come here together: capture bears nobody
        beside it.

        Raises ShardcError if the model is gone, or its parameters would lie elsewhere.
        """
        size = inputs.fewer_rows(program, batch)
        with self._lock:
            if size not in self._found:
                self._found[size] = self._make(program, batch)
            return self._found[size]

    def _make(self, program: Program, batch: Any) -> Program:
        from shardc.compile import compile

        model = self.build()
        if model is None or program.spec is None:
            raise ShardcError(
                "the batch has fewer rows than the program was compiled for, and the model, from which another program"
                " would be made, is gone",
                where="engine.step",
                fix="keep the model that was compiled, or leave the last batch out (drop_last)",
            )
        with _modes(model, self.modes):
            return compile(
                model, batch, program.spec, loss=self.loss, overrides=("uneven=pad",), prove=False, like=program
            )


@contextlib.contextmanager
def _modes(model: nn.Module, modes: dict[str, bool]) -> Iterator[None]:
    """The model in the modes in which it was compiled: it may have been switched since."""
    now = {n: m.training for n, m in model.named_modules()}
    try:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)
        yield
    finally:
        for name, module in model.named_modules():
            module.training = now[name]
