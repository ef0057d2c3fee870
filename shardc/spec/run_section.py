"""Define `run`: how `shardc run` trains. The command's options have the same names and override it.

It does not change the program.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardc.spec.fields import Count, Positive, Section, as_tuple

Times = Annotated[int, Field(ge=0)]  # 0: never
Seconds = Annotated[float, Field(ge=0)]  # 0: never, or torch's own


class Run(Section):
    """Folders are relative to where the command is run."""

    steps: Times = Field(default=100, description="optimizer steps in all, those before a resume counted in")
    seed: Times = Field(default=0, description="of initial weights, dropout and the order of data")
    clip: Positive | None = Field(
        default=None, description="clip gradients to this norm of all of them", examples=[1.0]
    )
    nonfinite: Literal["stop", "skip", "ignore"] = Field(
        default="stop",
        description="where a loss or gradient is nan or inf: stop before the update, skip it, or ignore it",
    )
    save: str = Field(default="", description="folder for checkpoints, and the weights for others", examples=["runs/a"])
    save_every: Times = Field(default=0, description="save every so many steps too; 0 = at the end")
    keep: Count = Field(default=2, description="checkpoints that stay in `save`, the last ones")
    auto_resume: bool = Field(
        default=False,
        description="go on from the last checkpoint in `save` if there is one: one command starts and restarts",
    )
    max_restarts: Times = Field(default=0, description="after a rank failed, begin again from `save` so many times")
    eval_every: Times = Field(default=0, description="held-out loss every so many steps; 0 = at the end")
    eval_batches: Times = Field(default=0, description="of so many held-out batches, the first; 0 = of all")
    log_every: Count = Field(
        default=1,
        description="read loss and gradient norm from the device every so many steps",
    )
    log: str = Field(default="", description="folder for steps.jsonl", examples=["runs/a"])
    tensorboard: bool = Field(default=False, description="write what the step lines say for TensorBoard, too, in `log`")
    trace: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="steps of which torch.profiler records a trace, in `log`", examples=[[5, 6]]
    )
    breakdown: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="steps of which every op is timed, in `log`: for `shardc cost --compare`",
        examples=[[5, 6]],
    )
    memory_snapshot: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(),
        description="steps of which CUDA's allocator records who holds memory, in `log`, for pytorch.org/memory_viz",
        examples=[[5]],
    )
    routing: bool = Field(default=False, description="say in every step line how tokens are spread over experts")
    watch: Seconds = Field(
        default=8.0, description="seconds after which a rank that the others wait for is named; 0 = never"
    )
    timeout: Seconds = Field(
        default=0.0, description="seconds that ranks wait for each other; 0 = torch's, 30 min (10 with NCCL)"
    )
