"""Stages: the graphs that ranks run, and what one of them makes for another.

Without a pipeline there is one stage, which every rank runs; a pipeline's ranks run one or more each:

    stage0 --- Edge(0, 1): names and types of values, whose gradients go back ---> stage1
      |
      +-- regions: ops whose results backward computes again
      +-- joint: its forward and its backward graph, which a training step runs

Conventions of the graphs, of stages and of the whole model: shardc.ir.program.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardc.ir.metadata import Value


@dataclass(frozen=True)
class Region:
    """Ops whose results are computed again in backward, so that they need not be kept (shardc.passes.recompute).

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
class Joint:
    """A stage as two functions, without autograd (shardc.passes.joint). Types are those of one rank.

    forward: takes what the stage takes, and returns `(loss, news and outputs, what other stages take, what backward
        wants of it)`; of what does not exist None or ().
    backward: takes of the stored values, of what forward kept for it, and of the gradients of the loss and of what
        other stages take (`NAME_grad`) those that it uses, by name. It puts gradients of parameters into buckets, and
        returns those of received values that have one, in their order.
    weights: where a schedule splits backward in two: the second half, which puts gradients into buckets; `backward`
        then returns `(gradients of received values, what the second half wants of it)`."""

    forward: fx.Graph
    backward: fx.Graph
    # no default of the class: it would stand where a DeferredJoint has none yet
    weights: fx.Graph | None = field(default_factory=lambda: None)

    @property
    def graphs(self) -> dict[str, fx.Graph]:
        """All of them, by name."""
        second = {} if self.weights is None else {"weights": self.weights}
        return {"forward": self.forward, "backward": self.backward, **second}


class DeferredJoint(Joint):
    """Texts that are written when they are first looked at: of a pipeline's stages a rank runs a few, and what does not
    train runs none.

    write: gives them; lock: is held meanwhile, as ranks may be threads. Once they are written it is a `Joint` as any
    other.
    """

    def __init__(self, write: Callable[[], Joint], lock: AbstractContextManager[object]) -> None:
        self.__dict__.update(_write=write, _lock=lock)  # its fields are missing until they are made

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
    """What one rank runs. graph: local sizes, explicit collectives; see the module's docstring for its conventions.

    updates: the buffers of which a pipeline's stage computes the new value; outputs: the program's outputs that it
    computes. joint: what a training step runs in its place; None of a forward-only program.
    """

    graph: fx.Graph
    name: str = "stage0"
    updates: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    joint: Joint | None = None

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
