"""Define `pipeline`, `checkpoint`, `loss` and `execution`: how a step runs and recomputes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from shardc.runtime.schedule import SCHEDULES
from shardc.spec.fields import ONE_OR_MANY_SCHEMA, Axis, Count, Pattern, Section, as_tuple, one_or_many, schedule_name


class Pipeline(Section):
    """Pipeline stages: a number of them cut by cost, or before the modules `cut`, or by
    counts of the repeated layers.
    """

    axis: Axis = Field(description="mesh axis of the stages", examples=["pp"])
    stages: Count | None = Field(default=None, description="cut by cost into N stages", examples=[4])
    cut: Annotated[tuple[str, ...], BeforeValidator(one_or_many), WithJsonSchema(ONE_OR_MANY_SCHEMA)] | None = Field(
        default=None, description="cut before these modules", examples=[["model.layers.8"]]
    )
    balance: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] | None = Field(
        default=None, description="cut by counts of the repeated layers", examples=[[2, 2, 3, 1]]
    )
    schedule: Annotated[str, AfterValidator(schedule_name)] = Field(
        default="1f1b", description=f"{', '.join(SCHEDULES)}, or the path of a schedule file", examples=["1f1b"]
    )


class Loss(Section):
    """A loss behind a linear layer, as a language model's head is. chunks: the rows of its logits are computed in so
    many parts, forward and again in backward: they never all exist, but the product is computed twice.
    """

    chunks: Count = Field(
        default=1, description="parts in which rows of logits are computed, forward and again in backward", examples=[8]
    )


class Execution(Section):
    """How ranks run the forward and backward graphs of a step. compile: what is between two collectives is
    compiled, equal layers once, by torch's Inductor; needs a C++ compiler, or Triton on a GPU. graphs: a GPU starts
    what is recorded of them by one call of the host.
    """

    compile: Literal["none", "layers"] = Field(
        default="none",
        description="layers: lines between collectives become fused regions, compiled once for equal layers",
        examples=["layers"],
    )
    overlap: Literal["none", "microbatches", "forwards"] = Field(
        default="none",
        description="microbatches: a forward beside the backward of the one before; forwards: beside another forward",
        examples=["microbatches", "forwards"],
    )
    graphs: bool = Field(
        default=False,
        description="forward and backward are recorded as one CUDA graph, and started by one call; on a GPU",
        examples=[True],
    )


#: The kinds that `recompute: cheap` means (passes/recompute/kinds.py defines them).
CHEAP = ("elementwise", "norm", "gather")


class Checkpoint(Section):
    """One kind of recomputed region. One of three says what is kept: save: kinds of results; recompute: the fewest
    bytes from which only ops of these kinds have to run again; budget: the share of bytes to keep, chosen by cost. None
    of them: everything is computed again. every: only each k-th of the modules, from the first.
    """

    match: Pattern = Field(description="modules that are recomputed", examples=["model.layers.*"])
    save: (
        Annotated[
            tuple[Literal["linear", "attention", "collective", "matmul", "conv", "norm"], ...],
            BeforeValidator(as_tuple),
        ]
        | None
    ) = Field(
        default=None, description="results that are kept; [] = recompute everything", examples=[["linear", "attention"]]
    )
    recompute: (
        Annotated[
            Literal["cheap"]
            | tuple[
                Literal["elementwise", "norm", "gather", "attention", "matmul", "conv", "linear", "collective"], ...
            ],
            BeforeValidator(as_tuple),
        ]
        | None
    ) = Field(
        default=None,
        description=f"ops that may run again; cheap = {', '.join(CHEAP)}",
        examples=["cheap", ["elementwise", "norm", "gather", "matmul"]],
    )
    budget: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="share of the saved bytes to keep, chosen by cost", examples=[0.5]
    )
    every: Count = Field(default=1, description="recompute only every k-th module", examples=[2])
    offload: Literal["none", "cpu"] = Field(
        default="none", description="cpu = results that are kept are moved there until backward"
    )
