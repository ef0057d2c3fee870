"""Define stages: the graphs that ranks run, and the values that they send each other.

Without a pipeline there is one stage, which every rank runs; a pipeline's ranks run one or more each:

    stage0 --- Edge(0, 1): names and types of values, whose gradients go back ---> stage1
      |
      +-- regions: ops that backward recomputes
      +-- joint: its forward and its backward graph, which a training step runs

Conventions of the graphs, of stages and of the whole model: shardc.ir.program.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import fx

from shardc.ir.metadata import Value
from shardc.ir.stored import Name

if TYPE_CHECKING:
    from shardc.ir.program import Program


@dataclass(frozen=True)
class Region:
    """Ops that are recomputed in backward, so that their results are not kept (shardc.passes.recompute).

    name: the FQN of the module, with the number of its call after the first ("encoder.layer@2"). parent: name of the
    region around it. offload: its kept values stay on the CPU until backward. cause: the spec line.
    kept, dropped: bytes on one rank that are kept until backward, and that are not; again: number of collectives that
    backward repeats.
    """

    name: str
    parent: str = ""
    offload: bool = False
    cause: str = ""
    kept: int = 0
    dropped: int = 0
    again: int = 0


@dataclass(frozen=True)
class Joint:
    """A stage as two functions, without autograd (shardc.passes.joint). Types are those of one rank.

    forward: takes what the stage takes, and returns `(loss, new buffer values and outputs, values for other stages,
        values kept for backward)`. What does not exist is None or ().
    backward: takes by name the values that it uses: stored values, those that forward kept, and gradients of the loss
        and of values for other stages (`NAME_grad`). It puts gradients of parameters into buckets, and returns those
        of received values that have one, in their order.
    weights: where a schedule splits backward in two: the second half, which puts gradients into buckets. `backward`
        then returns `(gradients of received values, values that the second half needs)`.
    """

    forward: fx.Graph
    backward: fx.Graph
    # no class-level default: a DeferredJoint would find it, and __getattr__ would not run
    weights: fx.Graph | None = field(default_factory=lambda: None)

    @property
    def graphs(self) -> dict[str, fx.Graph]:
        """All graphs by name."""
        second = {} if self.weights is None else {"weights": self.weights}
        return {"forward": self.forward, "backward": self.backward, **second}


class DeferredJoint(Joint):
    """A `Joint` whose graphs are written at first access: a rank runs only some of a pipeline's stages.

    write: returns the graphs; lock: is held meanwhile, as ranks may be threads. Then the object becomes a plain Joint.
    """

    def __init__(self, write: Callable[[], Joint], lock: AbstractContextManager[object]) -> None:
        self.__dict__.update(_write=write, _lock=lock)  # the fields are missing until first access

    def __getattr__(self, name: str) -> Any:
        if name not in Joint.__dataclass_fields__:
            raise AttributeError(name)
        with self.__dict__["_lock"]:
            if type(self) is DeferredJoint:
                self.__dict__.update(vars(self.__dict__["_write"]()), _write=None)
                self.__class__ = Joint  # type: ignore[assignment]
        return self.__dict__[name]


@dataclass
class Stage:
    """The graph that one rank runs, with local sizes and explicit collectives; see the module's docstring.

    updates: the buffers whose new values this stage of a pipeline computes; outputs: the program's outputs that it
    computes. joint: what a training step runs instead; None in a forward-only program.
    """

    graph: fx.Graph
    name: Name = "stage0"
    updates: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    joint: Joint | None = None

    def __repr__(self) -> str:
        return f"<Stage {self.name}: {sum(n.op == 'call_function' for n in self.graph.nodes)} ops>"

    @property
    def takes(self) -> tuple[str, ...]:
        """Names of the params, buffers and inputs among the placeholders."""
        return tuple(
            n.name
            for n in self.graph.find_nodes(op="placeholder")
            if "collective" not in n.meta and n.meta.get("value") is not None
        )

    @property
    def receives(self) -> dict[str, Value]:
        """The values of other stages among the placeholders, in order."""
        return {n.name: n.meta["value"] for n in self.graph.find_nodes(op="placeholder") if "collective" in n.meta}

    @property
    def sends(self) -> tuple[str, ...]:
        """Names of the values for other stages, in the order in which the stage returns them."""
        returned: Any = self.graph.output_node().args[0]
        return tuple(n.name for n in returned[2]) if len(returned) > 2 else ()


@dataclass(frozen=True)
class Edge:
    """Values that one stage of a pipeline sends to another. names: of the values; values: their types."""

    source: int
    target: int
    names: tuple[str, ...]
    values: tuple[Value, ...]

    @property
    def gradient(self) -> bool:
        """Whether any gradients go back."""
        return bool(self.differentiable())

    def differentiable(self) -> tuple[tuple[str, Value], ...]:
        """Return (name, type) of the values whose gradients go back."""
        return tuple((n, v) for n, v in zip(self.names, self.values, strict=True) if v.requires_grad)


@dataclass(frozen=True)
class Pair:
    """A forward beside a backward (kind "FB") or beside another forward ("FF"). first, then: their stages.

    graph: takes what both graphs take, with other names for the second, and returns `(what the first graph returns,
    what the second returns)`: a forward's results, a backward's gradients.
    """

    kind: str
    first: int
    then: int
    graph: fx.Graph

    @property
    def key(self) -> tuple[str, int, int]:
        """The key in the form of `shardc.runtime.schedule.Action.of_pair`."""
        return self.kind, self.first, self.then


def second_prefix(kind: str, forward: fx.Graph) -> str:
    """Return the prefix of the second half's names: `back_` or `next_`, longer if the first half uses it."""
    prefix = "back_" if kind == "FB" else "next_"
    while any(n.name.startswith(prefix) for n in forward.nodes):
        prefix += "_"
    return prefix


def mesh_or_rng(n: fx.Node) -> str:
    """Return "mesh" or "rng" if a placeholder is one (of either half); "" for anything else."""
    if n.name in ("mesh", "rng"):
        return n.name
    no_value = n.op == "placeholder" and n.meta.get("value") is None
    return "mesh" if no_value and re.fullmatch("(back|next)_+mesh", n.name) else ""


def names_in_both(program: Program) -> frozenset[str]:
    """Return the names that both halves share, as the values are the same for all microbatches."""
    return frozenset(("rng", *(p.name for p in program.params)))
