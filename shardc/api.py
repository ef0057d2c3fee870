"""What a user does with a compiled program: `shardc.Program` is its data (shardc.ir.program) with these verbs.

A rank of a run imports this too: what it does not need, such as the proof, is imported when it is called.
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
from shardc.runtime.checks.engine_options import MOVES, check_names, check_program
from shardc.runtime.data import inputs
from shardc.runtime.mesh import rank_here
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.engine_optimizer import adamw, assumed
from shardc.runtime.step.forward import Forward
from shardc.runtime.step.module import ShardedModule
from shardc.spec import Spec

if TYPE_CHECKING:
    from shardc.cost import Cost
    from shardc.report.resharding import Resharding
    from shardc.verify import Report
    from shardc.verify.static import Proof

#: What models and trainers have, and what there is in its place.
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
    """A compiled program: what `shardc.compile` and `shardc.load` return. Its fields: shardc.ir.program.Program."""

    @classmethod
    def of(cls, data: ir.Program) -> Program:
        """The same program, with verbs."""
        return data if isinstance(data, cls) else cls(**{f.name: getattr(data, f.name) for f in fields(data)})

    def engine(self, model: Any = None, optimizer: Any = ..., seed: int = 0, **options: Any) -> Engine:
        """A training loop for this rank. See shardc.runtime.step.engine.Engine. optimizer: default AdamW(3e-4); None:
        nothing is updated.
        """
        check_names("engine", Engine, options)
        return Engine(self, model, adamw if optimizer is ... else optimizer, seed, **options)

    def forward(self, model: Any = None, seed: int = 0, **options: Any) -> Forward:
        """What runs this rank's part of a forward-only program. See shardc.runtime.step.forward.Forward."""
        check_names("forward", Forward, options)
        return Forward(self, model, seed, **options)

    def module(self, model: Any = None, seed: int = 0, **options: Any) -> ShardedModule:
        """This rank's nn.Module, for a custom loop. See shardc.runtime.step.module.ShardedModule."""
        check_names("module", ShardedModule, options)
        return ShardedModule(self, model, seed, **options)

    def local(self, batch: Any, rank: int | None = None) -> Any:
        """A rank's part of a global batch, in the same form: what a module, and an engine with local=True, take.

        rank: default: this process's, in torch.distributed's world. Raises ShardcError for a batch that is not of the
        compiled names, shapes and dtypes, and where the program pads it.
        """
        if rank is not None and not 0 <= rank < self.mesh.world:
            fault = f"there is no rank {rank}: the mesh {self.mesh} has {self.mesh.world}"
            raise ShardcError(fault, where="program.local", fix=f"name one of 0 ... {self.mesh.world - 1}")
        return inputs.local(self, batch, rank_here() if rank is None else rank)

    def text(self, *, full: bool = False) -> str:
        """Its typed text: how everything is stored, and what a rank runs, with every collective's cause and bytes.
        Layers that are equal are shown once, unless `full`.
        """
        return emit.text(self, full=full)

    def joint(self, stage: int | None = None) -> str:
        """The text of the forward and the backward graph that a training step runs, of all
        stages or of one. "" of a forward-only program.
        """
        return emit.joint(self, stage)

    def __str__(self) -> str:
        return self.text()

    if not TYPE_CHECKING:  # checkers would let any name pass

        def __getattr__(self, name: str) -> Any:
            said = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"a program has no {name!r}{said}", name=name, obj=self)

    def __call__(self, *_: Any, **__: Any) -> None:
        fix = "program.engine(model).step(batch) trains; program.module(model) is called as a model is"
        raise ShardcError("a program is not called", where="program(...)", fix=fix)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardcError(
            "a program is not pickled: it would come with the code of the model, and of a version of torch",
            where="pickle of a program",
            fix="program.save(folder), and shardc.load(folder) where it is needed; or compile it there",
        )

    def save(self, folder: str | Path) -> None:
        """Write the artifact: readable Python, layouts, manifest; no pickle. `shardc.load` reads it. See
        shardc.artifact.
        """
        artifact.write(self, folder)

    def verify(self, *, seed: int = 0, compiled: bool = False) -> Report:
        """Compare a step on the loopback mesh with one device, in float64. `.ok`, `.findings`, `.seconds`.
        compiled: compare the compiled step too, with the same line by line. See shardc.verify.
        """
        from shardc.verify import verify

        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ShardcError(f"{seed!r} is no seed", where="program.verify", fix="give a whole number")
        return verify(self, seed=seed, compiled=compiled)

    def prove(self) -> Proof:
        """Check without running, for every rank, that the program computes what one device does: values, gradients,
        updates. `.ok`, `.gaps`, `.seconds`. See shardc.verify.static.
        """
        from shardc.verify.static import prove

        return prove(self)

    def html(self, device: str | Path | Device | None = None, *, full: bool = False) -> str:
        """One HTML page to look around in, which needs nothing else: modules and their weights, graphs before and after
        the passes, a step's timeline, memory and collectives on a device, the proof, and which line of the spec caused
        what. See shardc.report.page.

        device: of `cost`. full: also layers that are equal to one that is shown. Raises ShardcError for a device that
        is not known."""
        from shardc.report import html

        return html(self, self.cost(device), self.prove(), full=full) if self.stages else html(self, full=full)

    def to(self, spec: str | Path | Mapping[str, Any] | Spec, *, world: int | None = None) -> Program:
        """The same model, loss and batch compiled for another spec (path, dict or Spec), which the engine of this one
        can go on under: `engine.to(program.to("split.yaml"))`, or at once `engine.to("split.yaml")`.

        world: number of ranks, where known, as of `shardc.compile`. Raises ShardcError as that does; where the model no
        longer exists; and of a program that was loaded, which has none.
        """
        check_program(spec, "program.to")
        return Program.of(self.for_spec(spec, world))

    def reshard(self, other: ir.Program, *, moments: int = 0) -> Resharding:
        """What would move from this program's ranks to those of another one of the same model, by `engine.to` and
        `engine.weights_to`: print it. No weights, devices or processes are needed. See shardc.report.resharding.

        moments: tensors of the optimizer for each trained parameter, which move with it: of AdamW 2.
        Raises ShardcError for a program of another number of ranks, or of another model.
        """
        from shardc.report.resharding import resharding

        return resharding(self, other, moments)

    def cost(
        self,
        device: str | Path | Device | None = None,
        *,
        optimizer: Any = None,
        clip_norm: float | None = None,
        on: Callable[[str, int, int], None] = lambda rank, done, total: None,
    ) -> Cost:
        """What a step takes on each rank: `.memory` (`.peak` in bytes, by kind, the op at the peak), `.flops`, `.comm`
        {(axis, kind): bytes}, `.step_seconds`. No weights, devices or processes are needed.
        See shardc.cost.

        device: a name ("a100-80g", "h100-80g", "h200"), a YAML file, or a shardc.cost.Device; default: the spec's
        `device:`, else h100-80g. optimizer: params -> torch optimizer; default AdamW, with `optimizer: {matrices:
        ...}` Muon for matrices beside it. clip_norm: of the engine. on:
        called before each rank is run: (its name, how many are done, how many there are). Raises ShardcError for a
        device that is not known, or has no room for the mesh.
        """
        from shardc.cost.measured.device_file import chosen
        from shardc.cost.step import cost

        return cost(self, chosen(device, self.spec), optimizer or assumed(self), on=on, clip_norm=clip_norm)


def load(folder: str | Path, *, trust: bool = False, as_compiled: bool = False) -> Program:
    """Read a program that `Program.save` wrote. Nothing that is read is executed, and no file outside of the folder is
    read but the source that it was compiled from, to see whether that has changed.

    trust: accept files that were edited since, and artifacts of another torch. as_compiled: do not look whether the
    source of forward and loss changed since, which is a note on the first rank's stderr.
    Raises ShardcError for a folder that is not an artifact, is damaged or edited, is of another version, or holds what
    `shardc compile` would not have written; all damaged files at once.
    """
    program = Program.of(artifact.read(folder, trust=trust))
    if not as_compiled and os.environ.get("RANK", "0") == "0":
        fault, _ = model_source.stale(program.meta)
        if fault:
            fix = "compile it again, or say that it is meant so: shardc.load(folder, as_compiled=True)"
            print(f"note: {folder}: {fault}; {fix}", file=sys.stderr, flush=True)
    return program
