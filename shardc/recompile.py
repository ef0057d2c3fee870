"""Recompile a program when it is first needed for other batch sizes, eval mode or another spec.

Batches may have fewer rows, such as the last ones of an epoch, or another sequence length. With several times the rows,
as balanced short rows have, fewer ranks share each row (shardc.features.sequence). Eval mode needs a program
if forward branches on `self.training`. The new program is as exact as any: means are over the existing rows, and
fewer rows that ranks and microbatches do not divide are padded (`uneven: pad`). The engine runs it on its parameters,
buckets and optimizer, so it needs the layouts of the first one; weights move to the program of another spec.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.optional import registered
from shardc.runtime.data.inputs import leaves, mapped, name_of, without_choices
from shardc.runtime.step import batch_sizes
from shardc.runtime.step.batch_sizes import Shapes, Use
from shardc.spec import Spec
from shardc.spec.model_names import Names

Build = Callable[[], nn.Module | None]
Loss = Callable[[Any, Any], Any]
Compile = Callable[..., Program]

#: Limit of sizes if the spec has no `batch: {lengths}`: each costs a compilation and a program in memory.
MOST_SIZES = 16
SCORES = "scoring runs a separate program"
OTHERWISE = "forward does something else in eval mode, by its own branches on self.training"


class Resizer:
    """Compiles a program again: `(program, batch, its global shapes, use) -> program for that batch`.

    build: returns the model that was compiled, or an equal one. modes: module name -> whether it was in training mode.
    compile: shardc.compile.compile; forward, batch: the arguments of that call. Used as Program.resize.
    lock: held during a compilation.
    """

    def __init__(
        self, build: Build, loss: Loss | None, modes: dict[str, bool], compile: Compile, forward: Any, batch: Any
    ) -> None:
        self.build, self.loss, self.modes, self.compile, self.forward = build, loss, modes, compile, forward
        self.batch = mapped(batch, (), _without_numbers)
        self._specs: list[tuple[Spec, Program]] = []
        self._programs: dict[tuple[Shapes, Use], Program] = {}
        self.lock = threading.Lock()

    @classmethod
    def of(cls, model: nn.Module, loss: Loss | None, compile: Compile, forward: Any, batch: Any) -> Resizer:
        """Make one for a model that the caller owns: a program does not keep the model's weights alive."""
        modes = {n: m.training for n, m in model.named_modules()}
        return cls(weakref.ref(model), loss, modes, compile, forward, batch)

    def __call__(self, program: Program, batch: Any, shapes: Shapes, use: Use = "as compiled") -> Program:
        """Compile once for each set of sizes. Threads take turns, as only one may capture at a time.

        batch: of these global shapes, or a rank's part of one. use: "evaluate": with all modules in eval mode; "score":
        forward only, for the log-probabilities of the loss's targets.
        Raises ShardcError if the model no longer exists, if parameters would be split in another way, and after
        MOST_SIZES of them, unless the spec names its lengths.
        """
        with self.lock:
            key = shapes, use
            if key not in self._programs:
                self._programs[key] = self._recompile(program, batch, shapes, use)
            return self._programs[key]

    def to(self, spec: Any, world: int | None) -> Program:
        """Compile the same model, loss and batch once for another spec. Raises ShardcError without a model."""
        with self.lock:
            model = self.build()
            if model is None:
                fault = "another spec needs a separate program, and the model that was compiled no longer exists"
                fix = (
                    "keep it: `net = model(); program = shardc.compile(net, ...)`; or compile it, and give the program"
                )
                raise ShardcError(fault, where="to(spec)", fix=fix)
            loaded = Spec.load(spec, world=world, names=Names.of(model))
            for known, program in self._specs:
                if known == loaded:
                    return program
            with _modes(model, self.modes):
                resized = self.compile(model, self.batch, loaded, loss=self.loss, forward=self.forward, prove=False)
            self._specs.append((loaded, resized))
            return resized

    def _recompile(self, program: Program, batch: Any, shapes: Shapes, use: Use) -> Program:
        again = use == "as compiled"
        model, changed = self.build(), batch_sizes.sizes_text(program, shapes)
        if model is None:
            sizes = f"the batch has other sizes than the program was compiled for ({changed})"
            why = SCORES if use == "score" else sizes if changed else OTHERWISE
            raise ShardcError(
                f"{why}, and the model that would have to be compiled for it no longer exists",
                where="engine.step" if again else "evaluating",
                fix="keep the model that was compiled: `net = model(); program = shardc.compile(net, ...)`"
                + ", or leave such batches out (drop_last)" * bool(changed),
            )
        if sum(u == use for _, u in self._programs) >= MOST_SIZES and not program.spec.batch.lengths:
            fix = "name a few in the spec, with what to pad by: batch: {lengths: [128, 256], pad: {input_ids: 0}}"
            if batch_sizes.fewer_rows(program, shapes):
                fix = "give batches of one size: leave bad samples out of the dataset, or put others in their place"
            raise ShardcError(
                f"batches of {MOST_SIZES} other sizes than the program's have been compiled, and now comes {changed}",
                where="engine.step",
                fix=fix,
            )
        if any(tuple(x.shape) != shape for x, shape in zip(_tensors(program, batch), shapes, strict=True)):
            batch = batch_sizes.empty_batch(batch, program, shapes)
        if any(x.choice is not None for x in program.inputs):
            batch = without_choices(batch)
        forward = "score" if use == "score" else self.forward
        with _modes(model, self.modes) if again else in_eval_mode(model):
            try:
                return self.compile(
                    model,
                    batch,
                    program.spec,
                    loss=self.loss,
                    forward=forward,
                    overrides=("uneven=pad",) if batch_sizes.fewer_rows(program, shapes) else (),
                    prove=not again,
                    compatible_with=program,
                )
            except ShardcError as e:
                if use == "score":
                    raise
                sizes = f"the program was compiled for other sizes, and compiling it for {changed} fails"
                fault = f"{sizes if again else f'{OTHERWISE}, and compiling it in that mode fails'}: {e.what}"
                then = ", ".join(f"{name_of(x.path)} {list(x.shape)}" for x in program.inputs)
                fix = (
                    f"give batches as the one that was compiled ({then}), or leave others out (drop_last); or: {e.fix}"
                    if again
                    else e.fix
                )
                where = e.where if again or e.where != "engine.step" else "evaluating"
                raise ShardcError(fault, where=where, fix=fix) from e


def spec_of(spec: Spec, program: Program, running: Program) -> Spec:
    """Return the spec for a captured batch of other sizes than the running program's, as features change it."""
    for change in registered("passes", "recompiled_spec"):
        spec = change(spec, program, running)
    return spec


def _without_numbers(_: Any, leaf: Any) -> Any:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _tensors(program: Program, batch: Any) -> list[Any]:
    by_path = dict(leaves(batch))
    return [by_path[x.path] for x in program.inputs]


def in_eval_mode(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Put all modules of the model in eval mode inside the block."""
    return _modes(model, {n: False for n, _ in model.named_modules()})


@contextlib.contextmanager
def _modes(model: nn.Module, modes: dict[str, bool]) -> Iterator[None]:
    """Put the model's modules in the given modes inside the block; the user may have switched them since."""
    now = {n: m.training for n, m in model.named_modules()}
    try:
        _switch(model, modes)
        yield
    finally:
        _switch(model, now)


def _switch(model: nn.Module, modes: Mapping[str, bool]) -> None:
    """Switch modules by their own `train()`, which may set more, then set `training` itself to be sure."""
    for name, module in model.named_modules():
        if module.training != modes.get(name, module.training):
            module.train(modes[name])
    for name, module in model.named_modules():
        module.training = modes.get(name, module.training)
