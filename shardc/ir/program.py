"""Define the compiled program: a value that needs no process group, weights or devices.

shardc.api has the methods for users. A `Program` holds fx graphs whose nodes have typed metadata (metadata.py), the
layouts of parameters, buffers and inputs (stored.py), and how gradients are reduced (Bucket). The *global* graph is
the model as one device runs it; a *stage*'s graph is what one rank runs (stage.py).

Conventions of both graphs
    placeholders   `mesh` (a runtime mesh) and `rng` (a runtime random state), then one for each entry of `params`,
                   `buffers` and `inputs`, in that order, named as their `.name`. The stages of a pipeline take only
                   those that they use, and after them the values of other stages: placeholders with a `collective`.
    call_function  every other op: `torch.ops.*` overloads, `operator.getitem`, or functions of `shardc.runtime.ops`,
                   which take `mesh` / `rng` explicitly. Nothing in a graph depends on a global.
    output         `(loss, (new value of every buffer with updated=True, in order, then every output))`; of a pipeline's
                   stage `(loss or None, (new values of the buffers in its .updates, then its .outputs), (values for
                   other stages))`. In a forward-only program the loss is None: it returns outputs only

The metadata of nodes (`node.meta`): shardc.ir.metadata.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import torch
from pydantic import Field
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.outputs import MEAN_SCORE, SCORE, SCORED, Output
from shardc.ir.placement import Layout
from shardc.ir.stage import Edge, Pair, Region, Stage
from shardc.ir.stored import Bucket, Buffer, Input, Param, UnknownParameterError
from shardc.ir.units import count, plural

if TYPE_CHECKING:
    from shardc.ir.forward_record import ForwardRecord
    from shardc.runtime.schedule import Schedule
    from shardc.spec import Spec


#: An int of any sign: other fields count from 0.
AnyInt = Annotated[int, "any sign"]


class Resize(Protocol):
    """Compiles the model of a program again (shardc.recompile)."""

    def __call__(self, program: Program, batch: Any, shapes: tuple[tuple[int, ...], ...], use: Any, /) -> Program:
        """Compile for a batch of these global shapes and for a use."""

    def to(self, spec: Any, world: int | None, /) -> Program:
        """Compile for another spec."""


@dataclass(frozen=True)
class Program:
    """The compiled program. `graph` is the global graph; `stages` is empty until partition has run.

    microbatches: how many times a step runs the stages, each time on its part of every input; losses and gradients
    are added up.
    prologue: a graph that a step first runs for each microbatch (shardc.passes.accumulate). Its output is
    `(summands, ())`; `ops.total(mesh, i)` in a stage is the sum of summand i over all microbatches.
    outputs: values that a step returns beside the loss (shardc.ir.outputs). features: what optional features store, by
    name. spec: also what ranks read of a section's keys; it is spec.yaml of a compiled folder.
    axis: the pipeline's mesh axis, over which stages are spread; "" = one stage, on every rank. schedule: which rank
    runs which stage, and when.
    """

    mesh: Mesh
    graph: fx.Graph
    params: tuple[Param, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[Input, ...]
    stages: tuple[Stage, ...] = ()
    buckets: tuple[Bucket, ...] = ()
    microbatches: Annotated[int, Field(ge=1, lt=1 << 31)] = 1
    prologue: Stage | None = None
    outputs: tuple[Output, ...] = ()
    features: Mapping[str, Any] = field(default_factory=dict)
    spec: Spec = None  # type: ignore[assignment]  # a captured program has none
    notes: tuple[str, ...] = ()  # what a user should know: gathers that no annotation implies, replicated ops, ...
    #: JSON-able facts for people and reports: model name, versions, seconds. No code depends on them.
    meta: dict[str, Any] = field(default_factory=dict)
    axis: str = ""
    schedule: Schedule | None = None
    pairs: tuple[Pair, ...] = ()
    regions: tuple[Region, ...] = ()  # outer ones before inner ones
    shared_modules: tuple[tuple[str, ...], ...] = ()  # names of one module object: a node's Source has only one
    #: Numbers and texts of the batch that are not tensors and became constants of the graph: (path, value).
    baked: tuple[tuple[tuple[str | int, ...], bool | AnyInt | float | str], ...] = ()
    #: Whether the graph with dropout and BatchNorm switched computes the same as the model in eval mode. "untried":
    #: forward branches on `self.training` itself, and was not run.
    evaluates: Literal["alike", "otherwise", "untried"] = "alike"
    #: Whether the model was in eval mode and would compute something else in training mode (then no dropout).
    eval_mode: bool = False
    #: Submodules that were in eval mode while others trained, and that compute something else in training mode.
    still: tuple[str, ...] = ()
    resize: Resize | None = field(default=None, compare=False, repr=False)  # not saved
    #: Raises ShardcError if attributes of the model (or of a model passed in) differ from what forward read, and
    #: returns notes, by name, on attributes that may differ; not saved.
    check_attributes: Callable[..., dict[str, str]] | None = field(default=None, compare=False, repr=False)

    #: Makes `record`, which is needed only for a checkpoint.
    recorded: Callable[[], ForwardRecord | None] = field(default=lambda: None, compare=False, repr=False)
    #: The user's files, and top-level names in them, that define forward and loss; a saved program has digests of them
    #: instead (shardc.artifact.model_source).
    origins: tuple[tuple[Path, str], ...] = field(default=(), compare=False, repr=False)

    @property
    def record(self) -> ForwardRecord | None:
        """A short record of what forward and loss compute, for checkpoints; None for older programs."""
        return self.recorded()

    @property
    def stored(self) -> tuple[Param | Buffer | Input, ...]:
        """Parameters, buffers and inputs: everything with a layout, in the order of the graphs' placeholders."""
        return (*self.params, *self.buffers, *self.inputs)

    @property
    def params_and_buffers(self) -> tuple[Param | Buffer, ...]:
        return (*self.params, *self.buffers)

    @property
    def forward_only(self) -> bool:
        """Whether the program has no loss and returns only outputs. No value has a gradient then."""
        output: Any = next(iter(self.graph.find_nodes(op="output")), None)
        return output is not None and output.args[0][0] is None

    @property
    def tokens(self) -> int | None:
        """The tokens in a batch: rows x positions of ids that an embedding looks up; None without any."""
        for node in self.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default):
            ids: Any = node.args[1]
            while ids.op == "call_function" and len(ids.all_input_nodes) == 1:
                ids = ids.all_input_nodes[0]  # reshaped, sliced, cast
            read = next((x for x in self.inputs if x.name == ids.name and len(x.shape) > 1), None)
            if read is not None:
                return read.shape[0] * read.shape[1]
        return None

    @property
    def scores(self) -> bool:
        """Whether the program is forward-only and returns the log-probabilities of its loss's targets."""
        return self.forward_only and tuple(o.name for o in self.outputs[:3]) == (SCORE, MEAN_SCORE, SCORED)

    @property
    def module_aliases(self) -> dict[str, tuple[str, ...]]:
        """For each name of a module that has several names: all its names."""
        return {name: names for names in self.shared_modules for name in names}

    @cached_property
    def params_by_name(self) -> Mapping[str, Param]:
        """The parameters by placeholder name."""
        return {p.name: p for p in self.params}

    def param(self, name: str) -> Param:
        """Return a parameter by placeholder name or by any of its FQNs. Raises UnknownParameterError."""
        if name in self.params_by_name:
            return self.params_by_name[name]
        for p in self.params:
            if name == p.fqn or name in p.names:
                return p
        raise UnknownParameterError.of(name, (n for p in self.params for n in p.names), f"program.param({name!r})")

    def parameter_bytes(self) -> int:
        """Return the bytes of parameters that a rank stores (at ZeRO 3: its shards); the most of a pipeline's ranks."""

        def part(p: Param) -> float:
            b = self.bucket(p)
            return p.value.nbytes(self.mesh) / (self.mesh.size(b.shard) if b is not None and b.zero == 3 else 1)

        ranks = range(self.mesh.size(self.axis)) if self.axis else (0,)
        return max(round(sum(part(p) for p in self.params if self.has(p, {self.axis: at}))) for at in ranks)

    def bucket(self, p: Param) -> Bucket | None:
        """Return the bucket of a parameter; None if it has none."""
        return self.buckets[p.bucket] if 0 <= p.bucket < len(self.buckets) else None

    # --- pipelines

    @property
    def edges(self) -> tuple[Edge, ...]:
        """The values that stages send each other, by pair of stages."""
        maker = {name: i for i, stage in enumerate(self.stages) for name in stage.sends}
        crossing: dict[tuple[int, int], dict[str, Value]] = {}
        for i, stage in enumerate(self.stages):
            for name, value in stage.receives.items():
                crossing.setdefault((maker[name], i), {})[name] = value
        return tuple(Edge(*pair, tuple(values), tuple(values.values())) for pair, values in sorted(crossing.items()))

    def holders(self, x: Param | Buffer) -> tuple[int, ...]:
        """Return the sorted coordinates on the pipeline's axis that hold a tensor; () without a pipeline."""
        return tuple(sorted({self.schedule.placement[s] for s in x.stages})) if self.schedule is not None else ()

    def replica_axis(self, p: Param) -> str:
        """Return the axis (shardc.ir.mesh) over whose coordinates a parameter has replicas; "" if it has none."""
        coordinates = self.holders(p)
        return self.mesh.subaxis(self.axis, coordinates) if len(coordinates) > 1 else ""

    def broadcast_of(self, b: Buffer) -> tuple[int, tuple[int, ...]]:
        """Return which coordinate computes a buffer's new value, and which others receive it after the step."""
        if self.schedule is None or not b.updated:
            return 0, ()
        home = next(self.schedule.placement[i] for i, stage in enumerate(self.stages) if b.name in stage.updates)
        return home, tuple(c for c in self.holders(b) if c != home)

    def has(self, x: Param | Buffer, coords: Mapping[str, int]) -> bool:
        """Return whether the rank at these coordinates holds a parameter or buffer."""
        return not self.axis or coords[self.axis] in self.holders(x)

    def with_layouts(self, layouts: Mapping[str, Layout]) -> Program:
        """Return a copy with the layouts of the named params, buffers and inputs replaced."""

        def put(x: Any) -> Any:
            return replace(x, layout=layouts[x.name]) if x.name in layouts else x

        return replace(
            self,
            params=tuple(map(put, self.params)),
            buffers=tuple(map(put, self.buffers)),
            inputs=tuple(map(put, self.inputs)),
        )

    def for_spec(self, spec: Any, world: int | None) -> Program:
        """Compile the same model, loss and batch for another spec. Raises ShardcError if there is no model."""
        if self.resize is None:
            fault, fix = "a loaded program has no model to compile", "load, or compile, the other program"
            raise ShardcError(fault, where="program.to", fix=fix)
        return self.resize.to(spec, world)

    def __repr__(self) -> str:
        stages = plural(len(self.stages), "stage") if self.stages else "captured"
        numbers = sum(math.prod(p.shape) for p in self.params)
        kept = f"{plural(len(self.params), 'parameter')} of {count(numbers)} numbers"
        return f"<Program {self.meta.get('model', '')} on {self.mesh}: {stages}, {kept}; print it for its text>"

    def __copy__(self) -> Program:
        return self  # an immutable value

    def __deepcopy__(self, memo: dict[int, Any]) -> Program:
        return self
