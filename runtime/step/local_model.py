"""One rank's part of a model: its parameters and buffers, and what runs a batch on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc.ir.program import Program
from shardc.runtime import state
from shardc.runtime.checks.moments import Moments
from shardc.runtime.data import inputs
from shardc.runtime.data.loader import Rest
from shardc.runtime.matrices.whole import WholeMatrices
from shardc.runtime.mesh import TorchMesh
from shardc.runtime.offload import Offload
from shardc.runtime.rng import Rng
from shardc.runtime.stage.communicators import groups_of
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.run import Values
from shardc.runtime.step import batch_sizes
from shardc.runtime.zero.buckets import Buckets


class LocalModel:
    """parts: this rank's part of each parameter, by name, which `.buckets` take over. takes: the arguments of the
    model's forward. make: makes what runs a program's stages.

    .owned: the parameters that this rank updates: at ZeRO >= 1 a flat shard of each. .buffers: by name; replaced, never
    written to. .matrices: what brings an optimizer whole matrices, set by who makes it.
    """

    def __init__(
        self,
        program: Program,
        mesh: Any,
        rng: Rng,
        parts: Iterable[tuple[str, Any]],
        buffers: dict[str, Tensor],
        offload: Offload,
        takes: Mapping[str, Any],
        make: Callable[[Program, Any], Interpreter],
    ) -> None:
        self.program, self.mesh, self.rng, self.offload, self.takes = program, mesh, rng, offload, takes
        self.buckets = Buckets(program, parts, mesh, offload)
        self.owned, self.buffers = self.buckets.owned, buffers
        self.matrices: WholeMatrices | None = None
        self._make = make
        self.interpreter = make(program, mesh)
        #: For batches of other sizes, for evaluating and scoring: what runs them, and constants of their programs.
        self.others: dict[tuple[batch_sizes.Shapes, batch_sizes.Use], tuple[Interpreter, dict[str, Tensor]]] = {}

    def take(
        self, batch: Any, checks: Moments, *, local: bool, use: batch_sizes.Use = "as compiled"
    ) -> tuple[Interpreter, Values]:
        """Cut this rank's part from a batch (local: it is that part). Returns what runs a batch of this size, and what
        its stages take, by microbatch: {placeholder: value}.
        """
        if isinstance(batch, Rest):
            batch, local = batch.batch, False
        inputs.check_plain(batch)
        inputs.check_keywords(self.program, batch, self.takes)
        batch = batch_sizes.prepared(self.program, self.mesh, batch, local=local)
        checks.batch(batch, local=local)
        self.gather_written()
        interpreter, constants = self._sized(batch, local=local, use=use)
        program = interpreter.program
        parts = inputs.microbatches(program, inputs.take(program, batch, self.mesh, local=local))
        stored = {**self.stored(), **constants}
        return interpreter, [
            {**stored, **dict(zip((x.name for x in program.inputs), given, strict=True))} for given in parts
        ]

    def stored(self) -> dict[str, Any]:
        """What a program's stages take beside the batch, by placeholder name."""
        return {"mesh": self.mesh, "rng": self.rng, **self.buckets.given, **self.buffers}

    def replace_buffers(self, new: Mapping[str, Tensor]) -> None:
        """Copy new values: one may be a parameter's memory, or the batch's."""
        copies = {n: x.clone(memory_format=torch.contiguous_format) for n, x in new.items() if n in self.buffers}
        self.buffers = {**self.buffers, **copies}

    @property
    def written(self) -> bool:
        """Has anybody written to parameters of which other ranks keep copies?"""
        return self.buckets.written or (self.matrices is not None and self.matrices.written)

    def gather_written(self) -> None:
        """Send what anybody wrote to parameters to the ranks with copies: all at ZeRO 1 and 2, owners of matrices."""
        if self.buckets.written:
            self.buckets.publish()
        if self.matrices is not None and self.matrices.written:
            self.matrices.gather()

    def wholes(self) -> Mapping[str, Tensor]:
        """{name: whole local part, detached}. What ZeRO shards is gathered, a bucket at a time, when it is read: all
        ranks read in one order.
        """
        self.gather_written()
        return self.buckets.wholes()

    def _sized(self, batch: Any, *, local: bool, use: batch_sizes.Use) -> tuple[Interpreter, dict[str, Tensor]]:
        """What runs a batch, and constants of its own: the program, or one that is compiled when such sizes come."""
        shapes = batch_sizes.other_shapes(self.program, batch, local=local)
        if (use == "evaluate" and self._evaluates_alike) or (use == "score" and self.program.scores):
            use = "as compiled"
        if use != "score" and (self.program.resize is None or (shapes is None and use == "as compiled")):
            return self.interpreter, {}
        key = shapes or tuple(x.shape for x in self.program.inputs), use
        if key not in self.others:
            self.mesh.barrier()  # ranks that are threads of one process: nobody runs meanwhile
            start = time.perf_counter()
            program = batch_sizes.compiled(self.program, batch, key[0], self.mesh, use=use, note=self.mesh.note)
            self.mesh.barrier()
            if isinstance(self.mesh, TorchMesh):
                self.mesh.add_groups(groups_of(program))
            self.others[key] = self._make(program, self.mesh), state.constants(program, self.mesh)
            purpose = "scoring" if use == "score" else batch_sizes.described(self.program, key[0]) or "evaluating"
            self.mesh.note(f"compiled for {purpose} in {time.perf_counter() - start:.1f} s")
        return self.others[key]

    @cached_property
    def _evaluates_alike(self) -> bool:
        """Does the program of a step evaluate as well?"""
        return batch_sizes.switched(self.program, self.mesh.note)
