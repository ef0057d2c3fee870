"""Hold one rank's part of a model: its parameters, buffers, and the interpreters that run a batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.checks.hooks import CheckHooks
from shardc.runtime.data import inputs
from shardc.runtime.data.ragged import Ragged, Size
from shardc.runtime.data.worker import Rest
from shardc.runtime.offload import Offload
from shardc.runtime.rng import Rng
from shardc.runtime.stage.communicators import groups_of
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.run import Values
from shardc.runtime.state.owners import Owners
from shardc.runtime.state.parts import constants
from shardc.runtime.step import batch_sizes
from shardc.runtime.zero.buckets import Buckets
from shardc.torch_private import FakeTensor

#: Bytes of an error that all ranks raise.
_TEXT = 2048


class LocalModel:
    """One rank's parameters and buffers, and the interpreters that run a batch on them.

    parts: this rank's part of each parameter by name, for `.buckets`. forward_arguments: of the model's forward.
    make_interpreter: makes the interpreter of a program's stages. .owned: the parameters that this rank updates: at
    ZeRO >= 1 a flat shard of each.
    .buffers: by name; replaced, never written to. .owners: where the optimizer steps parameters; set by its maker.
    """

    def __init__(
        self,
        program: Program,
        mesh: Any,
        rng: Rng,
        parts: Iterable[tuple[str, Any]],
        buffers: dict[str, Tensor],
        offload: Offload,
        forward_arguments: Mapping[str, Any],
        make_interpreter: Callable[[Program, Any], Interpreter],
    ) -> None:
        self.program, self.mesh, self.rng, self.offload = program, mesh, rng, offload
        self.buckets = Buckets(program, parts, mesh, offload)
        self.owned, self.buffers = self.buckets.owned, buffers
        self.owners = Owners()
        self.forward_arguments, self._make_interpreter = forward_arguments, make_interpreter
        self.interpreter = make_interpreter(program, mesh)
        #: For other batch sizes, evaluating and scoring: the interpreter, and its program's constants.
        self._recompiled: dict[tuple[batch_sizes.Shapes, batch_sizes.Use], tuple[Interpreter, dict[str, Tensor]]] = {}

    def take(
        self, batch: Any, checks: CheckHooks, *, local: bool, use: batch_sizes.Use = "as compiled", choices: Any = None
    ) -> tuple[Interpreter, Values]:
        """Cut this rank's part from a batch; return (interpreter, inputs {placeholder: value} by microbatch).

        choices: given beside the batch (shardc.features.choices).
        """
        if isinstance(batch, Ragged):
            checks.batch(batch, local=True)
            self.gather_written()
            checks.ragged(batch, lambda sizes, numbers: self._ragged(batch, sizes, numbers))
            return self._ragged(batch, batch.sizes, {})
        if isinstance(batch, Rest):  # an epoch's last, smaller batch, which is whole on every rank
            batch, local = batch.batch, False
        batch = inputs.prepared(self.program, batch, choices, local=local)
        inputs.check_plain(batch)
        inputs.check_keywords(self.program, batch, self.forward_arguments)
        batch = batch_sizes.cast_and_pad(self.program, self.mesh, batch, local=local)
        if checks.batch(batch, local=local):
            batch, local = batch_sizes.joined_parts(self.program, self.mesh, batch), False
        self.gather_written()
        interpreter, constants = self._interpreter_for(batch, local=local, use=use)
        program = interpreter.program
        parts = inputs.microbatches(program, self._taken(program, batch, local=local))
        stored = {**self.stored(), **constants}
        return interpreter, [
            {**stored, **dict(zip((x.name for x in program.inputs), part, strict=True))} for part in parts
        ]

    def _ragged(self, batch: Ragged, sizes: Sequence[Size], numbers: Mapping[str, float]) -> tuple[Interpreter, Values]:
        """Cut this rank's part of each microbatch, and choose the program of its size. Collective.

        numbers: to pad inputs with instead of the spec's, by name.
        """
        by_size = {}
        for size in batch.every:
            shapes = batch_sizes.shapes_of(self.program, size)
            same = shapes == tuple(x.shape for x in self.program.inputs)
            by_size[size] = (
                (self.interpreter, {}) if same else self._recompile(batch.parts[0], shapes, "as compiled", known=True)
            )
        each, values = list[Interpreter](), list[dict[str, Any]]()
        for i, (part, size) in enumerate(zip(batch.parts, sizes, strict=True)):
            interpreter, constants = by_size[size]
            program, part = (
                interpreter.program,
                batch_sizes.padded_to(self.program, self.mesh, part, size.length, numbers),
            )
            # the engine takes a rank's rows of all microbatches: those of this one, at the place of each
            taken = inputs.take(program, inputs.repeated(program, part, self.mesh), self.mesh, local=True)
            mine = inputs.microbatches(program, taken)[i]
            each.append(interpreter)
            own = {"mesh": interpreter.mesh, **dict(zip((x.name for x in program.inputs), mine, strict=True))}
            values.append({**self.stored(), **constants, **own})
        return self.interpreter.with_each(each, [one for one, _ in by_size.values()]), values

    def _taken(self, program: Program, batch: Any, *, local: bool) -> list[Tensor]:
        """Cut this rank's part. Raise one rank's error on all, if choices are given: each rank checks only its own."""
        mine, taken = None, list[Tensor]()
        try:
            taken = inputs.take(program, batch, self.mesh, local=local)
        except ShardcError as e:
            mine = e
        together = any(x.choice is not None for x in program.inputs) and not any(
            isinstance(x, FakeTensor) for x in taken
        )
        if not together:
            if mine is not None:
                raise mine
            return taken
        ranks = [0] * self.mesh.layout.world
        ranks[self.mesh.rank] = int(mine is not None)
        ranks = self.mesh.sum_on_host(ranks)
        if 1 not in ranks:
            return taken
        one = mine.errors[0] if mine is not None and ranks.index(1) == self.mesh.rank else None
        raw = "\0".join((one.what, one.where, one.fix)).encode()[:_TEXT] if one is not None else b""
        text = bytes(self.mesh.sum_on_host([*raw, *[0] * (_TEXT - len(raw))])).rstrip(b"\0").decode(errors="ignore")
        fault, where, fix = [*text.split("\0"), "", ""][:3]
        raise mine or ShardcError(fault, where=where, fix=fix)

    def stored(self) -> dict[str, Any]:
        """Return the inputs of a program's stages other than the batch, by placeholder name."""
        return {"mesh": self.mesh, "rng": self.rng, **self.buckets.given, **self.buffers}

    def replace_buffers(self, new: Mapping[str, Tensor]) -> None:
        """Store copies of new values: a value may share memory with a parameter or the batch."""
        copies = {n: x.clone(memory_format=torch.contiguous_format) for n, x in new.items() if n in self.buffers}
        self.buffers = {**self.buffers, **copies}

    @property
    def written(self) -> bool:
        """Whether user code wrote to parameters of which other ranks keep copies."""
        return self.buckets.written or self.owners.written

    def gather_written(self) -> None:
        """Send written parameters to the ranks with copies: all at ZeRO 1 and 2, and to owners."""
        if self.buckets.written:
            self.buckets.publish()
        if self.owners.written:
            self.owners.gather()

    def wholes(self) -> Mapping[str, Tensor]:
        """Return {name: local part uncut by ZeRO, detached}; reading gathers, so all ranks read in one order."""
        self.gather_written()
        return self.buckets.wholes()

    def _interpreter_for(
        self, batch: Any, *, local: bool, use: batch_sizes.Use
    ) -> tuple[Interpreter, dict[str, Tensor]]:
        """Return the interpreter for a batch and its extra constants; compile when such sizes first come."""
        shapes = batch_sizes.other_shapes(self.program, batch, local=local)
        if (use == "evaluate" and self._can_evaluate) or (use == "score" and self.program.scores):
            use = "as compiled"
        can_compile = use == "score" or self.program.resize is not None
        if not can_compile or (shapes is None and use == "as compiled"):
            return self.interpreter, {}
        return self._recompile(batch, shapes or tuple(x.shape for x in self.program.inputs), use)

    def _recompile(
        self, batch: Any, shapes: batch_sizes.Shapes, use: batch_sizes.Use, *, known: bool = False
    ) -> tuple[Interpreter, dict[str, Tensor]]:
        """Compile once for these shapes. Collective. known: a loader has said so already."""
        key = shapes, use
        if key not in self._recompiled:
            start = time.perf_counter()
            program = batch_sizes.recompile(self.program, batch, key[0], self.mesh, use=use)
            same = program.mesh == self.program.mesh
            mesh = self.mesh if same else self.mesh.in_digits(program.mesh, groups_of(program))
            self._recompiled[key] = self._make_interpreter(program, mesh), constants(program, mesh)
            purpose = "scoring" if use == "score" else batch_sizes.sizes_text(self.program, key[0]) or "evaluating"
            if not known:
                self.mesh.note(f"compiled for {purpose} in {time.perf_counter() - start:.1f} s")
        return self._recompiled[key]

    @cached_property
    def _can_evaluate(self) -> bool:
        """Whether the program of a step evaluates as well."""
        return batch_sizes.step_can_evaluate(self.program, self.mesh)
