"""The compiled program: a value. It prints, saves and loads, and needs no process group, weights or devices to exist.

A `Program` holds fx graphs whose nodes carry typed metadata (metadata.py), the layouts of parameters, buffers and
inputs (stored.py), and how gradients are reduced (buckets.py). The *global* graph is the model as one device runs it; a
*stage*'s graph is what one rank runs (stage.py).

Conventions of both graphs
    placeholders   `mesh` (a runtime mesh) and `rng` (a runtime random state), then one for each entry of `params`,
                   `buffers` and `inputs`, in that order, named as their `.name`. The stages of a pipeline take only
                   those that they use, and after them the values of other stages: placeholders with a `collective`.
    call_function  every other op: `torch.ops.*` overloads, `operator.getitem`, or functions of `shardc.runtime.ops`,
                   which take `mesh` / `rng` explicitly. Nothing in a graph depends on a global.
    output         `(loss, (new value of every buffer with updated=True, in order, then every output))`; of a pipeline's
                   stage `(loss or None, (new values of the buffers in its .updates, then its .outputs), (what other
                   stages take))`. Of a forward-only program the loss is None: it gives outputs alone

What nodes carry in `node.meta`: shardc.ir.metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.adapters import Adapter
from shardc.ir.buckets import Bucket
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.offload import OffloadPlaces
from shardc.ir.outputs import MEAN_SCORE, SCORE, SCORED, Output
from shardc.ir.placement import Layout
from shardc.ir.stage import Edge, Region, Stage
from shardc.ir.stored import Buffer, Input, Param, UnknownParameterError
from shardc.ir.units import count, plural

if TYPE_CHECKING:
    from shardc.cost import Cost, Device
    from shardc.ir.forward_record import ForwardRecord
    from shardc.ir.generation import Begins, Generation, Sizes
    from shardc.ir.matrices import Cut
    from shardc.ir.pairs import Pair
    from shardc.report.resharding import Resharding
    from shardc.runtime.schedule import Schedule
    from shardc.runtime.step.engine import Engine
    from shardc.runtime.step.forward import Forward
    from shardc.runtime.step.module import ShardedModule
    from shardc.spec import Spec
    from shardc.verify import Report
    from shardc.verify.static import Proof


class Resize(Protocol):
    """Compiles the model of a program again (shardc.recompile)."""

    def __call__(self, program: Program, batch: Any, shapes: tuple[tuple[int, ...], ...], use: Any, /) -> Program:
        """For a batch of these global shapes, for a use."""

    def begins(self) -> Begins:
        """Where texts begin and end."""

    def generating(self, program: Program, sizes: Sizes, /) -> Generation:
        """To generate with a cache."""

    def whole(self, program: Program, sizes: Sizes, /) -> Program:
        """To generate without one: for sequences of `sizes.length`."""

    def to(self, spec: Any, world: int | None, /) -> Program:
        """For another spec."""


#: What models and trainers have, and what there is in its place.
_INSTEAD = {
    **dict.fromkeys(("step", "train", "fit", "run", "backward"), "program.engine(model).step(batch) trains"),
    **dict.fromkeys(
        ("parameters", "named_parameters", "state_dict", "to", "eval"),
        "it has no weights; program.module(model) is an nn.Module, program.engine(model) a training loop",
    ),
    **dict.fromkeys(
        ("cuda", "cpu", "half", "float", "double", "bfloat16"),
        "devices are those of the ranks, the dtype is `precision` of the spec: leave it out",
    ),
    **dict.fromkeys(
        ("evaluate", "score", "generate"), "program.engine(model), or of one compiled with forward=, has it"
    ),
}


@dataclass
class Program:
    """See the module docstring. `graph` is the global graph; `stages` is empty until partition has run.

    microbatches: a step runs the stages so many times, each time on its part of every input, and adds losses and
    gradients up.
    prologue: what runs on all microbatches first; output `(summands, ())`, whose sums over microbatches are
    `ops.total(mesh, i)`.
    outputs: what a step gives beside the loss (shardc.ir.outputs). adapters: of the spec, beside weights that stay.
    axis: mesh axis over which the stages are spread; "" = there is one stage, on every rank. schedule: who runs which
    of them when."""

    mesh: Mesh
    graph: fx.Graph
    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[Input, ...]
    stages: tuple[Stage, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    microbatches: int = 1
    prologue: Stage | None = None
    outputs: tuple[Output, ...] = ()
    adapters: tuple[Adapter, ...] = ()
    spec: Spec | None = None
    notes: tuple[str, ...] = ()  # what a user should know: gathers that no annotation implies, replicated ops, ...
    #: JSON-able facts for people and reports: model name, versions, seconds. Nothing acts on them.
    meta: dict[str, Any] = field(default_factory=dict)
    axis: str = ""
    schedule: Schedule | None = None
    pairs: tuple[Pair, ...] = ()
    regions: tuple[Region, ...] = ()  # outer ones before those in them
    shared_modules: tuple[tuple[str, ...], ...] = ()  # names of one module object: a node's Source carries just one
    #: What the engine multiplies the loss by before backward: a number, or "dynamic".
    loss_scale: float | str | None = None
    offload: OffloadPlaces = OffloadPlaces()
    #: How parameters are cut into the matrices of an optimizer that needs them whole, by placeholder name (others: not
    #: at all); None: the spec says nothing of it.
    matrices: Mapping[str, tuple[Cut, ...]] | None = None
    #: Numbers of the batch that are no tensors, which the graph has in it: (path, value).
    baked: tuple[tuple[tuple[str | int, ...], float | str], ...] = ()
    #: Is what the graph computes with dropout and BatchNorm switched what the model computes in eval mode? "untried":
    #: forward has branches of its own on `self.training`, and was not run.
    evaluates: Literal["alike", "otherwise", "untried"] = "alike"
    #: Was the model in eval mode, and would it compute something else in training mode? Training has no dropout then.
    eval_mode: bool = False
    #: Submodules that were in eval mode while others trained, and would compute something else in training mode.
    still: tuple[str, ...] = ()
    resize: Resize | None = field(default=None, compare=False, repr=False)  # not saved
    #: Raises ShardcError for attributes of the model, or of one that is given, that are not as forward read them, and
    #: returns notes by name on what forward may have read otherwise; not saved.
    check_attributes: Callable[..., dict[str, str]] | None = field(default=None, compare=False, repr=False)

    #: Makes `record`.
    recorded: Callable[[], ForwardRecord | None] = field(default=lambda: None, compare=False, repr=False)

    #: Files of the user's, and names at their top level, that forward and loss come from; a saved program has digests
    #: of them instead (shardc.artifact.model_source).
    origins: tuple[tuple[Path, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def record(self) -> ForwardRecord | None:
        """What forward and loss are, in short, for checkpoints; None for a program of an earlier shardc."""
        return self.recorded()

    @property
    def stored(self) -> tuple[Param | Buffer | Input, ...]:
        """Parameters, buffers and inputs: what has a layout of its own, in the order of the graphs' placeholders."""
        return (*self.params, *self.buffers, *self.inputs)

    @property
    def forward_only(self) -> bool:
        """Does it give outputs alone? Nothing runs backward then: no value has a gradient, and there is no loss."""
        output: Any = next(iter(self.graph.find_nodes(op="output")), None)
        return output is not None and output.args[0][0] is None

    @property
    def scores(self) -> bool:
        """Is it forward-only, for the log-probabilities of its loss's targets?"""
        return self.forward_only and tuple(o.name for o in self.outputs) == (SCORE, MEAN_SCORE, SCORED)

    @property
    def module_aliases(self) -> dict[str, tuple[str, ...]]:
        """All names of a module by each of them, for modules that have several."""
        return {name: names for names in self.shared_modules for name in names}

    @cached_property
    def placed_params(self) -> Mapping[str, Param]:
        """The parameters by placeholder name."""
        return {p.name: p for p in self.params}

    def param(self, name: str) -> Param:
        """A parameter by placeholder name or by any of its FQNs. Raises UnknownParameterError."""
        for p in self.params:
            if name in (p.name, p.fqn, *p.names):
                return p
        raise UnknownParameterError.of(name, (n for p in self.params for n in p.names), f"program.param({name!r})")

    def parameter_bytes(self) -> int:
        """Bytes of the parameters that a rank stores, at ZeRO 3 its parts; of a pipeline, the rank that stores most."""

        def part(p: Param) -> float:
            b = self.bucket(p)
            return p.value.nbytes(self.mesh) / (self.mesh.size(b.shard) if b is not None and b.zero == 3 else 1)

        ranks = range(self.mesh.size(self.axis)) if self.axis else (0,)
        return max(round(sum(part(p) for p in self.params if self.has(p, {self.axis: at}))) for at in ranks)

    def bucket(self, p: Param) -> Bucket | None:
        """The bucket that a parameter lies in."""
        return self.buckets[p.bucket] if 0 <= p.bucket < len(self.buckets) else None

    # --- pipelines

    @property
    def edges(self) -> tuple[Edge, ...]:
        """What stages make for each other, by pair of stages."""
        maker = {name: i for i, stage in enumerate(self.stages) for name in stage.sends}
        crossing: dict[tuple[int, int], dict[str, Value]] = {}
        for i, stage in enumerate(self.stages):
            for name, value in stage.receives.items():
                crossing.setdefault((maker[name], i), {})[name] = value
        return tuple(Edge(*pair, tuple(each), tuple(each.values())) for pair, each in sorted(crossing.items()))

    def holders(self, x: Param | Buffer) -> tuple[int, ...]:
        """The coordinates on the pipeline's axis whose ranks have a parameter or buffer,
        sorted; () without a pipeline.
        """
        return tuple(sorted({self.schedule.placement[s] for s in x.stages})) if self.schedule is not None else ()

    def replica_axis(self, p: Param) -> str:
        """The axis (shardc.ir.mesh) over which several coordinates have copies of a parameter; "" if one has it, or all
        alike.
        """
        coordinates = self.holders(p)
        return self.mesh.subaxis(self.axis, coordinates) if len(coordinates) > 1 else ""

    def broadcast_of(self, b: Buffer) -> tuple[int, tuple[int, ...]]:
        """Which coordinate computes a buffer's new value, and which others have it too and get it after the step."""
        if self.schedule is None or not b.updated:
            return 0, ()
        home = next(self.schedule.placement[i] for i, stage in enumerate(self.stages) if b.name in stage.updates)
        return home, tuple(c for c in self.holders(b) if c != home)

    def has(self, x: Param | Buffer, coords: Mapping[str, int]) -> bool:
        """Does the rank at these coordinates have it?"""
        return not self.axis or coords[self.axis] in self.holders(x)

    def with_layouts(self, layouts: Mapping[str, Layout]) -> Program:
        """A copy with the layouts of the named params, buffers and inputs replaced."""

        def put(x: Any) -> Any:
            return replace(x, layout=layouts[x.name]) if x.name in layouts else x

        return replace(
            self,
            params=tuple(map(put, self.params)),
            buffers=tuple(map(put, self.buffers)),
            inputs=tuple(map(put, self.inputs)),
        )

    # --- What a user does with a program. These verbs import what is above this room, each when it is called: the one
    # exception to the order of rooms (tests/test_layers.py), so that `program.save(...)` can be written.

    def engine(self, model: Any = None, optimizer: Any = ..., seed: int = 0, **options: Any) -> Engine:
        """A training loop for this rank. See shardc.runtime.step.engine.Engine. optimizer: default AdamW(3e-4); None:
        nothing is updated.
        """
        from shardc.runtime.step.engine import Engine
        from shardc.runtime.step.engine_optimizer import adamw
        from shardc.runtime.step.engine_options import check_names

        check_names("engine", Engine, options)
        return Engine(self, model, adamw if optimizer is ... else optimizer, seed, **options)

    def forward(self, model: Any = None, seed: int = 0, **options: Any) -> Forward:
        """What runs this rank's part of a forward-only program. See shardc.runtime.step.forward.Forward."""
        from shardc.runtime.step.engine_options import check_names
        from shardc.runtime.step.forward import Forward

        check_names("forward", Forward, options)
        return Forward(self, model, seed, **options)

    def module(self, model: Any = None, seed: int = 0, **options: Any) -> ShardedModule:
        """This rank's nn.Module, for a loop of one's own. See shardc.runtime.step.module.ShardedModule."""
        from shardc.runtime.step.engine_options import check_names
        from shardc.runtime.step.module import ShardedModule

        check_names("module", ShardedModule, options)
        return ShardedModule(self, model, seed, **options)

    def local(self, batch: Any, rank: int | None = None) -> Any:
        """A rank's part of a global batch, in the same form: what a module, and an engine with local=True, take.

        rank: default: this process's, in torch.distributed's world. Raises ShardcError for a batch that is not of the
        compiled names, shapes and dtypes, and where the program pads it.
        """
        from shardc.runtime.mesh import rank_here
        from shardc.runtime.step import inputs

        if rank is not None and not 0 <= rank < self.mesh.world:
            what = f"there is no rank {rank}: the mesh {self.mesh} has {self.mesh.world}"
            raise ShardcError(what, where="program.local", fix=f"name one of 0 ... {self.mesh.world - 1}")
        return inputs.local(self, batch, rank_here() if rank is None else rank)

    def text(self, *, full: bool = False) -> str:
        """Its typed text: how everything is stored, and what a rank runs, with every collective's cause and bytes.
        Layers that are equal are shown once, unless `full`.
        """
        from shardc.artifact import emit
        from shardc.artifact.repeated_layers import NOTHING, fold

        return emit.text(self, NOTHING if full else fold(self))

    def joint(self, stage: int | None = None) -> str:
        """The text of the forward and the backward graph that a training step runs, of all
        stages or of one. "" of a forward-only program.
        """
        from shardc.artifact import emit

        return emit.joint(self, stage)

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        stages = plural(len(self.stages), "stage") if self.stages else "captured"
        numbers = sum(math.prod(p.shape) for p in self.params)
        kept = f"{plural(len(self.params), 'parameter')} of {count(numbers)} numbers"
        return f"<Program {self.meta.get('model', '')} on {self.mesh}: {stages}, {kept}; print it for its text>"

    if not TYPE_CHECKING:  # checkers would let any name pass

        def __getattr__(self, name: str) -> Any:
            said = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
            raise AttributeError(f"a program has no {name!r}{said}", name=name, obj=self)

    def __call__(self, *_: Any, **__: Any) -> None:
        fix = "program.engine(model).step(batch) trains; program.module(model) is called as a model is"
        raise ShardcError("a program is not called", where="program(...)", fix=fix)

    def __copy__(self) -> Program:
        return self  # a value, which nothing changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self

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
        from shardc.artifact import save

        save(self, folder)

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
        from shardc.runtime.step.engine_options import check_program

        check_program(spec, "program.to")
        if self.resize is None:
            what, fix = "a program that was loaded has no model to compile", "load, or compile, the other program"
            raise ShardcError(what, where="program.to", fix=fix)
        return self.resize.to(spec, world)

    def reshard(self, other: Program, *, moments: int = 0) -> Resharding:
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
        from shardc.cost.device_file import chosen
        from shardc.cost.step import cost
        from shardc.runtime.step.engine_optimizer import assumed

        return cost(self, chosen(device, self.spec), optimizer or assumed(self), on=on, clip_norm=clip_norm)
