"""Define the metadata of graph nodes: the type of a value, and what an op communicates.

    linear_1_sum = ops.all_reduce(linear_1, mesh, ...)  # f32[8@dp, 64] grad | all_reduce/none tp 1024 "spec.yaml:3 ..."
                                                          ------- Value ----   ------------- Collective --------------

Keys of `node.meta` that several passes share
    in every graph
        "value"       Value, or a tuple of them for an op with several results (None for mesh and rng)
        "source"      Source: the model's module and line that the op came from (shardc.ir.source)
        "rows"        on weights of a part with another mesh: the digits that split its rows beside those of the batch
    in the global graph, until it is partitioned
        "through"     names of modules that return this value unchanged (Dropout(0.0))
        "pin"         Layout that the spec requires of a pinned value; "border": True if it enters or leaves a part
        "shared"      digits of axes over which a weight's heads are shared: their ranks hold the same ones
        "cause"       {axis: spec line that split the value}
        "strategies"  {axis: Strategy by which the op runs}
        "why"         {axis: the spec line behind that strategy}
        "spec_line"   the spec line that inserted the op
        "mixed"       True, on casts of mixed precision: only these casts to fewer bits may round summands
    in the graphs of stages
        "op"          name of the global op that this line and others compute together: one stage runs them all
        "collective"  Collective, on nodes that communicate
        "region"      name of the innermost Region that contains the op (shardc.ir.stage)
        "kept"        names of those of its regions that keep its result
        "again"       how often backward repeats the op, on collectives
    in the graphs of stages' backward
        "of"          name of the op of forward that a line belongs to; "repeats": whether the line recomputes it
    in both graphs of stages, as they are compiled
        "copy"        HostCopy, on lines that start one
        "like"        the same object on lines that are equal except for names (shardc.passes.joint)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout
from shardc.ir.type_text import show


@dataclass(frozen=True)
class Value:
    """Type of one tensor: global shape, dtype, layout over the mesh, and whether a gradient flows."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    layout: Layout = Layout()

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        return self.layout.local_shape(self.shape, mesh)

    def nbytes(self, mesh: Mesh | None = None) -> int:
        """Return the bytes of one rank's part (mesh given), or of the global tensor."""
        n = self.dtype.itemsize
        for s in self.local_shape(mesh) if mesh else self.shape:
            n *= s
        return n

    def __str__(self) -> str:
        return show(self.shape, self.dtype, self.layout)


@dataclass(frozen=True)
class Collective:
    """One communicating op of the program.

    kind: what forward runs: all_reduce | all_gather | reduce_scatter | all_to_all | none; backward: what its gradient
    runs.
    axes: mesh axes it runs over. bytes: per rank, of the whole (gathered or reduced) local tensor, per direction;
    packed: of forward, if it sends 8 bits of each number (0: it does not).
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
        """Bytes of the forward direction."""
        return self.packed or self.bytes


#: Used instead of axes for copies between device and host, which share one stream. No mesh axis has this name.
HOST_LINK = ("host link",)


@dataclass(frozen=True)
class HostCopy:
    """A stage's line that starts a copy between device and host memory (`checkpoint: {offload: cpu}`).

    bytes: of one rank. cause: the spec line.
    """

    bytes: int
    cause: str = ""


@dataclass(frozen=True)
class CommRecord:
    """One collective that ran on this rank.

    bytes: of the whole (reduced, gathered or exchanged) local tensor, as in Collective.
    direction: "forward", "recompute" (of forward, in backward), "backward" or "update". tag: the program's node or
    bucket that it belongs to.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    direction: str
    tag: str = ""

    @property
    def axis(self) -> str:
        return "+".join(self.axes)
