"""The compiled program: a value, which needs no process group, weights or devices to exist. What a user does with one
is in shardc.api.

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
    from shardc.ir.forward_record import ForwardRecord
    from shardc.ir.generation import Begins, Generation, Sizes
    from shardc.ir.matrices import Cut
    from shardc.ir.pairs import Pair
    from shardc.runtime.schedule import Schedule
    from shardc.spec import Spec


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
        return tuple(Edge(*pair, tuple(values), tuple(values.values())) for pair, values in sorted(crossing.items()))

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

    def for_spec(self, spec: Any, world: int | None) -> Program:
        """The same model, loss and batch compiled for another spec. Raises ShardcError without a model to compile."""
        if self.resize is None:
            fault, fix = "a program that was loaded has no model to compile", "load, or compile, the other program"
            raise ShardcError(fault, where="program.to", fix=fix)
        return self.resize.to(spec, world)

    def __repr__(self) -> str:
        stages = plural(len(self.stages), "stage") if self.stages else "captured"
        numbers = sum(math.prod(p.shape) for p in self.params)
        kept = f"{plural(len(self.params), 'parameter')} of {count(numbers)} numbers"
        return f"<Program {self.meta.get('model', '')} on {self.mesh}: {stages}, {kept}; print it for its text>"

    def __copy__(self) -> Program:
        return self  # a value, which nothing changes

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self
