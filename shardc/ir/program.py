"""The compiled program: a value. It prints, saves and loads, and needs no process group, weights or devices to exist.

A `Program` holds fx graphs whose nodes carry typed metadata (`Value`, `Source`, `Collective`) and the layouts of
parameters, buffers and inputs. The *global* graph is the model as one device runs it; a *stage*'s graph is what one
rank runs.

Conventions of both graphs
    placeholders   `mesh` (a runtime mesh) and `rng` (a runtime random state), then one for each entry of `params`,
                   `buffers` and `inputs`, in that order, named as their `.name`. The stages of a pipeline take only
                   those that they use, and after them the values of other stages: placeholders with a `collective`.
    call_function  every other op: `torch.ops.*` overloads, `operator.getitem`, or functions of `shardc.runtime.ops`,
                   which take `mesh` / `rng` explicitly. Nothing in a graph depends on a global.
    output         `(loss, (new value of every buffer with updated=True, in order, then every output))`; of a pipeline's
                   stage `(loss or None, (new values of the buffers in its .updates, then its .outputs), (what other
                   stages take))`. Of a forward-only program the loss is None: it gives outputs alone

Metadata: all keys of `node.meta` that passes may rely on
    in every graph
        "value"       Value, or a tuple of them for an op with several results (None for mesh and rng)
        "source"      Source: the model's module and line that the op came from
    in the global graph, until it is partitioned
        "through"     names of modules that return this value as they take it (Dropout(0.0))
        "pin"         Layout that the spec requires of a pinned value
        "shared"      digits of axes over which a weight's heads are shared: their ranks hold the same ones
        "cause"       {axis: spec line that split the value}
        "strategies"  {axis: Strategy by which the op runs}
        "why"         {axis: why placement chose that strategy}
        "spec_line"   the spec line that inserted the op
    in the graphs of stages
        "collective"  Collective, on nodes that communicate
        "region"      name of the innermost Region that the op is in
        "kept"        names of those of its regions that keep its result
        "again"       how often backward repeats the op, on collectives
    in the graphs of lowered stages' backward
        "of"          name of the op of forward that a line belongs to; "repeats": whether the line runs it again
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.adapters import Adapter
from shardc.ir.mesh import Mesh
from shardc.ir.outputs import MEAN_SCORE, SCORE, SCORED, Output
from shardc.ir.placement import Layout, Shard
from shardc.ir.type_text import show
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


@dataclass(frozen=True)
class Value:
    """Type of one tensor: global shape, dtype, layout over the mesh, and whether a gradient flows through it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    layout: Layout = Layout()

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape, mesh)

    def nbytes(self, mesh: Mesh | None = None) -> int:
        """Bytes of one rank's part (mesh given), or of the global tensor."""
        n = self.dtype.itemsize
        for s in self.local_shape(mesh) if mesh else self.shape:
            n *= s
        return n

    def __str__(self) -> str:
        return show(self.shape, self.dtype, self.layout)


@dataclass(frozen=True)
class Source:
    """Where an op came from. module: FQN in the user's model ("" = the root); line: "file.py:31"; code: that line's
    text.

    calls: "FQN@n" for every module on the way that had been called n times before (not in the program's text).
    """

    module: str = ""
    line: str = ""
    code: str = ""
    calls: tuple[str, ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return " ".join(p for p in (self.module, f"({self.line})" if self.line else "") if p)


@dataclass(frozen=True)
class Collective:
    """One communicating op of the program.

    kind: what forward runs: all_reduce | all_gather | reduce_scatter | all_to_all | none; backward: what its gradient
    runs.
    axes: mesh axes it runs over. bytes: per rank, of the whole (gathered or reduced) local tensor, per direction;
    packed: of forward, where that sends 8 bits of each number (0: it does not).
    cause: the spec line behind it and why, e.g. "spec.yaml:9 '*.o_proj: row'".
    """

    kind: str
    backward: str
    axes: tuple[str, ...]
    bytes: int
    cause: str = ""
    implicit: bool = False  # no annotation implies it: a note, and an error under `strict`
    packed: int = 0

    @property
    def forward_bytes(self) -> int:
        """What `bytes` is of forward."""
        return self.packed or self.bytes


#: Stands in the place of axes for copies between a device's memory and the host's, which share one stream. No axis of a
#: mesh is called so.
HOST_LINK = ("host link",)


@dataclass(frozen=True)
class HostCopy:
    """A line of a lowered stage begins to copy a value from the device's memory to the host's, or back (`checkpoint:
    {offload: cpu}`). bytes: of one rank. cause: the spec line.
    """

    bytes: int
    cause: str = ""


class Stored:
    """What parameters and buffers have in common: names in the model's state_dict.

    A parameter may be a stack of several of the model's, [number, ...]: then these are its `members`, in order.
    """

    fqn: str
    shape: tuple[int, ...]
    aliases: tuple[str, ...]
    members: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the model."""
        return self.members or (self.fqn, *self.aliases)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shape of the tensor of each name."""
        return dict.fromkeys(self.names, self.shape[1:] if self.members else self.shape)

    def by_name(self, whole: torch.Tensor) -> dict[str, torch.Tensor]:
        """The global tensor under the model's names: all of a tied one, each member's of a stack (views)."""
        return dict(zip(self.members, whole, strict=True)) if self.members else dict.fromkeys(self.names, whole)

    def whole(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The global tensor of such tensors. Raises KeyError if none of its names is there."""
        if self.members:
            return torch.stack([tensors[n] for n in self.members])
        name = next((n for n in self.names if n in tensors), self.fqn)
        return tensors[name]


@dataclass(frozen=True)
class Param(Stored):
    """A trainable or frozen parameter. Tied parameters are one Param with several names.

    name: its placeholder in the graphs. fqn: the first of its names in the model; aliases: the others.
    members: of a stack of several of the model's parameters: their names, in order; fqn is then a pattern of them.
    shape, dtype: global. layout: how it is stored. reduce: axes over which its gradient is summed.
    order: position in which backward finishes its gradient (0 = first). bucket: index of its gradient bucket, -1 =
    none.
    stages: of a pipeline: those that use it, whose ranks have it. frozen: the spec says that it is not trained.
    """

    name: str
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = True
    aliases: tuple[str, ...] = ()
    layout: Layout = Layout()
    reduce: tuple[str, ...] = ()
    order: int = 0
    bucket: int = -1
    stages: tuple[int, ...] = ()
    members: tuple[str, ...] = ()
    frozen: bool = False

    @property
    def value(self) -> Value:
        return Value(self.shape, self.dtype, self.requires_grad, self.layout)


@dataclass(frozen=True)
class Buffer(Stored):
    """A buffer (running statistics, masks) or a constant tensor of the graph.

    updated: the step computes a new value for it; adds: each microbatch a summand of it. persistent: it is in the
    state_dict.
    constant: the tensor itself, for constants that capture lifted out of the code (they have no name in the model).
    stages: of a pipeline: those that use it, whose ranks have it. cache: keys or values that a program which generates
    keeps from token to token (shardc.ir.generation); no model has it.
    """

    name: str
    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    aliases: tuple[str, ...] = ()
    layout: Layout = Layout()
    updated: bool = False
    adds: bool = False
    persistent: bool = True
    constant: torch.Tensor | None = field(default=None, compare=False)
    stages: tuple[int, ...] = ()
    members: tuple[str, ...] = ()  # none: buffers are not stacked
    cache: bool = False

    @property
    def value(self) -> Value:
        return Value(self.shape, self.dtype, False, self.layout)


@dataclass(frozen=True)
class Input:
    """One tensor of the batch. path: how to reach it in the user's batch, e.g. ("input_ids",) or (0, "mask"); () = the
    batch itself.

    microbatch: how a rank's part of it is cut into the step's microbatches; None = each gets all of it.

    A batch is a dict (keyword arguments), tuple or tensor, possibly nested; leaves that are no tensors are baked into
    the graph."""

    name: str
    path: tuple[str | int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout = Layout()
    microbatch: Shard | None = None

    @property
    def value(self) -> Value:
        return Value(self.shape, self.dtype, False, self.layout)


@dataclass(frozen=True)
class Rounded:
    """How a parameter is rounded: format and granule, as `fp8_round` takes them; axes: over which granules are split,
    beside that of the bucket.
    """

    format: str
    granule: tuple[int, ...]
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bucket:
    """Parameters that lie in one flat buffer, and whose gradients are reduced together.

    axes: over which gradients are summed; () = they need no sum, or there are none. dtype: of the sums.
    params: names in the order in which backward finishes them; local parts of one dtype.
    shard: the data axis over which the flat buffer is cut into one part a rank; "" = nothing is cut.
    zero: what is kept cut: 1 the optimizer's state, 2 gradients too, 3 parameters too (Rajbhandari et al. 2020,
    "ZeRO"); 0 = nothing.
    compute: dtype in which the whole parameters are held or gathered, where all ops want another one than is stored;
    None = as stored.
    prefetch: at zero 3, how many buckets are gathered ahead of their use in backward. (Forward's gathers stand in the
    graph.)
    keep: at zero 3, what is gathered is kept, and gradients are not summed, until the last backward of a step.
    rounded: at zero 3, of each parameter, if all that ops want of it is what `fp8_round` gives: it is rounded before it
        is gathered, in 8 bits. () = they are gathered as `compute` says.
    stages: of a pipeline: those that use its parameters. late: other ranks' stages do too, and the sum is begun after
        all backwards: the ranks do not get there at the same time.
    """

    axes: tuple[str, ...]
    dtype: torch.dtype
    params: tuple[str, ...]
    shard: str = ""
    zero: int = 0
    compute: torch.dtype | None = None
    prefetch: int = 1
    stages: tuple[int, ...] = (0,)
    late: bool = False
    keep: bool = False
    rounded: tuple[Rounded, ...] = ()

    @property
    def each(self) -> bool:
        """Are gradients summed in every backward, so that none are kept whole? Otherwise once a step."""
        return self.zero == 2 or (self.zero == 3 and not self.keep)


@dataclass(frozen=True)
class Region:
    """Ops whose results are computed again in backward, so that they need not be kept (shardc.passes.recompute,
    shardc.runtime.step.recompute).

    name: the FQN of the module, with the number of its call after the first ("encoder.layer@2"). parent: name of the
    region around it.
    offload: what it keeps lies on the CPU until backward. cause: the spec line.
    kept, dropped: bytes of one rank that it holds until backward, and that it need not; again: collectives that
    backward repeats."""

    name: str
    parent: str = ""
    offload: bool = False
    cause: str = ""
    kept: int = 0
    dropped: int = 0
    again: int = 0


@dataclass(frozen=True)
class Lowered:
    """A stage as two functions, without autograd (shardc.passes.lower). Types are those of one rank.

    forward: takes what the stage takes, and returns `(loss, news and outputs, what other stages take, what backward
        wants of it)`; of what does not exist None or ().
    backward: takes of the stored values, of what forward kept for it, and of the gradients of the loss and of what
        other stages take (`NAME_grad`) those that it uses, by name. It puts gradients of parameters into buckets, and
        returns those of received values that have one, in their order.
    weights: where a schedule splits backward in two: the second half, which puts gradients into buckets; `backward`
        then returns `(gradients of received values, what the second half wants of it)`."""

    forward: fx.Graph
    backward: fx.Graph
    weights: fx.Graph | None = None

    @property
    def texts(self) -> dict[str, fx.Graph]:
        """All of them, by name."""
        second = {} if self.weights is None else {"weights": self.weights}
        return {"forward": self.forward, "backward": self.backward, **second}


@dataclass
class Stage:
    """What one rank runs. graph: local sizes, explicit collectives; see the module's docstring for its conventions.

    updates: the buffers of which a pipeline's stage computes the new value; outputs: the program's outputs that it
    computes. lowered: what a training step runs in its place, if the spec says `lower:`.
    """

    graph: fx.Graph
    name: str = "stage0"
    updates: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    lowered: Lowered | None = None

    def __repr__(self) -> str:
        return f"<Stage {self.name}: {sum(n.op == 'call_function' for n in self.graph.nodes)} ops>"

    @property
    def takes(self) -> tuple[str, ...]:
        """The params, buffers and inputs among its placeholders."""
        return tuple(
            n.name
            for n in self.graph.find_nodes(op="placeholder")
            if "collective" not in n.meta and n.meta.get("value") is not None
        )

    @property
    def receives(self) -> dict[str, Value]:
        """The values of other stages among its placeholders, in order."""
        return {n.name: n.meta["value"] for n in self.graph.find_nodes(op="placeholder") if "collective" in n.meta}

    @property
    def sends(self) -> tuple[str, ...]:
        """What it makes for other stages, in the order in which it returns them."""
        returned: Any = self.graph.output_node().args[0]
        return tuple(n.name for n in returned[2]) if len(returned) > 2 else ()


@dataclass(frozen=True)
class Edge:
    """What one stage of a pipeline makes for another one. names: of the values; values: their types."""

    source: int
    target: int
    names: tuple[str, ...]
    values: tuple[Value, ...]

    @property
    def gradient(self) -> bool:
        """Do gradients go back?"""
        return bool(self.differentiable())

    def differentiable(self) -> tuple[tuple[str, Value], ...]:
        """(name, type) of those whose gradients go back."""
        return tuple((n, v) for n, v in zip(self.names, self.values, strict=True) if v.requires_grad)


@dataclass(frozen=True)
class OffloadPlaces:
    """Where a rank keeps what it is not working with: "none" (on its device), "cpu", or a directory for files.

    optimizer: the optimizer's state; parameters: at zero 3, this rank's parts of them; page_mb: how much of the
    optimizer's state is brought to the device at a time."""

    optimizer: str = "none"
    parameters: str = "none"
    page_mb: float = 25.0

    @property
    def used(self) -> dict[str, str]:
        """{what: place} of what is kept off the device."""
        places = {"optimizer": self.optimizer, "parameters": self.parameters}
        return {kind: place for kind, place in places.items() if place != "none"}


#: What models and trainers have, and what there is in its place.
_INSTEAD = {
    **dict.fromkeys(("step", "train", "fit", "run", "backward"), "program.engine(model).step(batch) trains"),
    **dict.fromkeys(
        ("parameters", "named_parameters", "state_dict", "to", "eval"),
        "it has no weights; program.module(model) is an nn.Module, program.engine(model) a training loop",
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

    #: What forward and loss are, in short, for checkpoints; None for a program of an earlier shardc.
    record: ForwardRecord | None = field(default=None, compare=False, repr=False)

    #: Files of the user's, and names at their top level, that forward and loss come from; a saved program has digests
    #: of them instead (shardc.artifact.model_source).
    origins: tuple[tuple[Path, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def stored(self) -> tuple[Param | Buffer | Input, ...]:
        """Parameters, buffers and inputs: what has a layout of its own, in the order of the graphs' placeholders."""
        return (*self.params, *self.buffers, *self.inputs)

    @property
    def forward_only(self) -> bool:
        """Does it give outputs alone? Nothing runs backward then: no value has a gradient, and there is no loss."""
        found = self.graph.find_nodes(op="output")
        return bool(found) and found[0].args[0][0] is None

    @property
    def scores(self) -> bool:
        """Is it forward-only, for the log-probabilities of its loss's targets?"""
        return self.forward_only and tuple(o.name for o in self.outputs) == (SCORE, MEAN_SCORE, SCORED)

    @property
    def module_aliases(self) -> dict[str, tuple[str, ...]]:
        """All names of a module by each of them, for modules that have several."""
        return {name: names for names in self.shared_modules for name in names}

    def param(self, name: str) -> Param:
        """A parameter by placeholder name or by any of its FQNs."""
        for p in self.params:
            if name in (p.name, p.fqn, *p.names):
                return p
        raise KeyError(name)

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

    def lowered(self, stage: int | None = None) -> str:
        """Where the spec says `lower:`: the text of the forward and the backward that a training step runs, of all
        stages or of one. "" of a program that is not lowered.
        """
        from shardc.artifact import emit

        return emit.lowered(self, stage)

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

    def verify(self, *, seed: int = 0, lowered: bool = False) -> Report:
        """Compare a step on the loopback mesh with one device, in float64. `.ok`, `.findings`, `.seconds`. lowered:
        compare the lowered step with autograd's too, to the bit, and the compiled one. See shardc.verify.
        """
        from shardc.verify import verify

        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ShardcError(f"{seed!r} is no seed", where="program.verify", fix="give a whole number")
        return verify(self, seed=seed, lowered=lowered)

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
        {(axis, kind): bytes}, `.step_seconds`; `.symbolic`: closed forms. No weights, devices or processes are needed.
        See shardc.cost.

        device: a name ("a100-80g", "h100-80g", "h200"), a YAML file, or a shardc.cost.Device; default: the spec's
        `device:`, else h100-80g. optimizer: params -> torch optimizer; default AdamW, with `optimizer: {matrices:
        ...}` Muon for matrices beside it. clip_norm: of the engine. on:
        called before each rank is run: (its name, how many are done, how many there are). Raises ShardcError for a
        device that is not known, or has no room for the mesh.
        """
        from shardc.cost.device import chosen
        from shardc.cost.step import cost
        from shardc.runtime.step.engine_optimizer import assumed

        return cost(self, chosen(device, self.spec), optimizer or assumed(self), on=on, clip_norm=clip_norm)
