"""Define `shardc.Program`, a compiled program: the data of shardc.ir.program plus the user's methods.

A rank of a run imports this too. Parts that a rank does not need, such as the proof, are imported when called.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc import artifact
from shardc.artifact import emit, model_source
from shardc.errors import ShardcError
from shardc.ir import program as ir
from shardc.machine.device import Device
from shardc.optional import needed
from shardc.runtime.checks.engine_options import MOVES, check_options, check_program
from shardc.runtime.data import inputs
from shardc.runtime.mesh import rank_here
from shardc.spec import Spec

if TYPE_CHECKING:
    from shardc.cost import Cost
    from shardc.runtime.step.engine import Engine
    from shardc.runtime.step.forward import Forward
    from shardc.runtime.step.module import ShardedModule
    from shardc.verify.equality import Report
    from shardc.verify.static import Proof

#: Attributes of models and trainers -> what to use instead.
_INSTEAD = {
    **dict.fromkeys(("step", "train", "fit", "run", "backward"), "program.engine(model).step(batch) trains"),
    **dict.fromkeys(
        ("parameters", "named_parameters", "state_dict", "to", "eval"),
        "it has no weights; program.module(model) is an nn.Module, program.engine(model) a training loop",
    ),
    **MOVES,
    **dict.fromkeys(
        ("evaluate", "score", "generate"), "program.engine(model), or of one compiled with forward=, has it"
    ),
}


@dataclass(frozen=True, repr=False)
class Program(ir.Program):
    """A compiled program, returned by `shardc.compile` and `shardc.load`. Fields: shardc.ir.program."""

    @classmethod
    def of(cls, data: ir.Program) -> Program:
        """Return the program as a `shardc.Program`, the class with the user's methods."""
        return data if isinstance(data, cls) else cls(**{f.name: getattr(data, f.name) for f in fields(data)})

    def engine(self, model: Any = None, optimizer: Any = ..., seed: int = 0, **options: Any) -> Engine:
        """Return a training loop for this rank: shardc.runtime.step.engine.Engine.

        optimizer: default the spec's, else AdamW(3e-4); None: parameters are not updated. scheduler: default the
        spec's, over the steps of `run: {steps: N}` or of the schedule.
        """
        from shardc.runtime.step import engine_optimizer, schedulers
        from shardc.runtime.step.engine import Engine

        check_options("engine", Engine, options)
        section = self.spec.optimizer
        if optimizer is not None and section.schedule is not None and "scheduler" not in options:
            if section.schedule.steps is None and self.spec.run.steps is None:
                fix = "write optimizer: {schedule: {name: ..., steps: N}}, or run: {steps: N}"
                raise ShardcError("the schedule needs a number of steps", where="optimizer.schedule", fix=fix)
            options["scheduler"] = schedulers.of_spec(self, lambda: self.spec.run.steps)
        engine = Engine(self, model, engine_optimizer.of_spec(self) if optimizer is ... else optimizer, seed, **options)
        if optimizer not in (..., None) and section.chosen:
            engine.mesh.note("`optimizer` of the spec is not used: the engine has its own optimizer")
        return engine

    def forward(self, model: Any = None, seed: int = 0, **options: Any) -> Forward:
        """Return the runner of this rank's part of a forward-only program (shardc.runtime.step.forward)."""
        from shardc.runtime.step.forward import Forward

        check_options("forward", Forward, options)
        return Forward(self, model, seed, **options)

    def module(self, model: Any = None, seed: int = 0, **options: Any) -> ShardedModule:
        """Return this rank's nn.Module, for a custom loop: shardc.runtime.step.module.ShardedModule."""
        from shardc.runtime.step.module import ShardedModule

        check_options("module", ShardedModule, options)
        return ShardedModule(self, model, seed, **options)

    def local(self, batch: Any, rank: int | None = None) -> Any:
        """Return a rank's part of a global batch, in the same form: for a module, or engine(local=True).

        rank: default: this process's, in torch.distributed's world. Raises ShardcError if the batch does not have the
        compiled names, shapes and dtypes, and where the program pads it.
        """
        if rank is not None and not 0 <= rank < self.mesh.world:
            fault = f"there is no rank {rank}: the mesh {self.mesh} has {self.mesh.world}"
            raise ShardcError(fault, where="program.local", fix=f"name one of 0 ... {self.mesh.world - 1}")
        return inputs.local(self, batch, rank_here() if rank is None else rank)

    def text(self, *, full: bool = False) -> str:
        """Return the program as typed text: layouts, and a rank's code with each collective's cause and bytes.

        Equal layers are shown once, unless `full`.
        """
        return emit.text(self, full=full)

    def joint(self, stage: int | None = None) -> str:
        """Return the text of a step's forward and backward graphs, of one stage or all; "" if forward-only."""
        return emit.joint(self, stage)

    def __str__(self) -> str:
        return self.text()

    if not TYPE_CHECKING:  # checkers would let any name pass

        def __getattr__(self, name: str) -> Any:
            hint = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"a program has no {name!r}{hint}", name=name, obj=self)

    def __call__(self, *_: Any, **__: Any) -> None:
        fix = "program.engine(model).step(batch) trains; program.module(model) is called as a model is"
        raise ShardcError("a program is not called", where="program(...)", fix=fix)

    def __reduce_ex__(self, protocol: Any) -> Any:
        fault = "a program is not pickled: it would come with the code of the model, and of a version of torch"
        fix = "program.save(folder), and shardc.load(folder) where it is needed; or compile it there"
        raise ShardcError(fault, where="pickle of a program", fix=fix)

    def save(self, folder: str | Path) -> None:
        """Write the artifact (shardc.artifact): readable Python, layouts, manifest; no pickle."""
        artifact.write(self, folder)

    def verify(self, *, seed: int = 0, compiled: bool = False) -> Report:
        """Compare a step on the loopback mesh with one device, in float64 (shardc.verify).

        The result has `.ok`, `.findings`, `.seconds`. compiled: also compare the compiled step with a run line by line.
        """
        from shardc.verify.equality import verify

        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ShardcError(f"{seed!r} is no seed", where="program.verify", fix="give a whole number")
        return verify(self, seed=seed, compiled=compiled)

    def prove(self) -> Proof:
        """Prove without running, for every rank, that values, gradients and updates are one device's.

        The result has `.ok`, `.gaps`, `.seconds`. See shardc.verify.static.
        """
        from shardc.verify.static import prove

        return prove(self)

    def html(self, device: str | Path | Device | None = None, *, full: bool = False) -> str:
        """Return one self-contained HTML page about the program (shardc.report.page).

        It shows modules, weights, graphs before and after the passes, a step's timeline, memory and collectives, the
        proof and causes in the spec. device: as in `cost`. full: also layers equal to a shown one. Raises ShardcError
        for an unknown device.
        """
        from shardc.report.page import html

        return html(self, self.cost(device), self.prove(), full=full) if self.stages else html(self, full=full)

    def to(self, spec: str | Path | Mapping[str, Any] | Spec, *, world: int | None = None) -> Program:
        """Compile the same model, loss and batch for another spec (path, dict or Spec), to continue training.

        `engine.to(program.to("split.yaml"))`, or directly `engine.to("split.yaml")`. world: as in `shardc.compile`.
        Raises ShardcError as that does, if the model no longer exists, and for a loaded program, which has no model.
        """
        check_program(spec, "program.to")
        return Program.of(self.for_spec(spec, world))

    def reshard(self, other: Any, *, moments: int = 0) -> Any:
        """Report what `engine.to` and `engine.weights_to` would move to the ranks of another program, or an engine.

        other: a program; or the layout of an engine on other ranks (shardc.engines), or its file.
        It needs no weights, devices or processes. Print the result. See shardc.features.reshard.report.
        moments: optimizer tensors per trained parameter, which move too: 2 for AdamW.
        Raises ShardcError for a program of another number of ranks or of another model, and for a wrong layout.
        """
        return needed("reshard", "report", "resharding")(self, other, moments)

    def cost(
        self,
        device: str | Path | Device | None = None,
        *,
        optimizer: Any = None,
        clip_norm: float | None = None,
        on: Callable[[str, int, int], None] = lambda rank, done, total: None,
    ) -> Cost:
        """Estimate a step on each rank without devices, weights or processes (shardc.cost).

        The result has `.memory` (`.peak` in bytes, by kind, the op at the peak), `.flops`, `.comm` {(axis, kind):
        bytes} and `.step_seconds`. device: a name ("a100-80g", "h100-80g", "h200"), a YAML file, or a
        shardc.cost.Device; default: the spec's `device:`, else h100-80g. optimizer: params -> torch optimizer; default
        the spec's, else AdamW; with `optimizer: {matrices: ...}` also Muon. clip_norm: as for the engine. on: called
        before each rank is run, with its name, ranks done and ranks in total. Raises ShardcError for an unknown device,
        or one without room for the mesh.
        """
        from shardc.cost.measured.device_file import chosen
        from shardc.cost.step import cost
        from shardc.runtime.step.engine_optimizer import assumed

        return cost(self, chosen(device, self.spec), optimizer or assumed(self), on=on, clip_norm=clip_norm)


def load(folder: str | Path, *, trust: bool = False, as_compiled: bool = False) -> Program:
    """Read a program that `Program.save` wrote, without executing any of it.

    No file outside of the folder is read except the source that it was compiled from, to note whether that has changed.
    trust: accept files that were edited since, and artifacts of another torch. as_compiled: skip the check for changes
    in the source of forward and loss; otherwise a change prints a note on the first rank's stderr. Raises ShardcError
    for a folder that is not an artifact, is damaged or edited, is of another version, or contains what `shardc compile`
    would not have written; all damaged files at once.
    """
    program = Program.of(artifact.read(folder, trust=trust))
    if not as_compiled and os.environ.get("RANK", "0") == "0" and (fault := model_source.stale(program.meta)):
        fix = "compile it again, or say that it is meant so: shardc.load(folder, as_compiled=True)"
        print(f"note: {folder}: {fault}; {fix}", file=sys.stderr, flush=True)
    return program
