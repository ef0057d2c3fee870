"""Define `run`: how `shardc run` trains. The command's options have the same names and override it.

It does not change the program.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from shardc.runtime.state import KEEP
from shardc.runtime.time_limits import NAMED
from shardc.spec.fields import Count, Positive, Section, as_tuple

Times = Annotated[int, Field(ge=0)]  # 0: never
Seconds = Annotated[float, Field(ge=0)]  # 0: never, or torch's own


class Run(Section):
    """Folders are relative to where the command is run."""

    steps: Times = Field(default=100, description="total optimizer steps, including those before a resume")
    seed: Times = Field(default=0, description="seed of initial weights, dropout and the order of data")
    clip: Positive | None = Field(default=None, description="clip gradients to this global norm", examples=[1.0])
    nonfinite: Literal["stop", "skip", "ignore"] = Field(
        default="stop", description="if a loss or gradient is nan or inf: stop before the update, skip it, or ignore it"
    )
    save: str = Field(default="", description="folder for checkpoints and exported weights", examples=["runs/a"])
    save_every: Times = Field(default=0, description="also save every N steps; 0 = only at the end")
    keep: Count = Field(default=KEEP, description="number of last checkpoints to keep in `save`")
    auto_resume: bool = Field(
        default=False, description="resume from the last checkpoint in `save`, if any: one command starts and restarts"
    )
    max_restarts: Times = Field(default=0, description="number of restarts from `save` after a rank fails")
    eval_every: Times = Field(default=0, description="compute the held-out loss every N steps; 0 = at the end")
    eval_batches: Times = Field(default=0, description="number of held-out batches to use; 0 = all")
    log_every: Count = Field(default=1, description="read loss and gradient norm from the device every N steps")
    log: str = Field(default="", description="folder for steps.jsonl", examples=["runs/a"])
    tensorboard: bool = Field(default=False, description="also write the step lines for TensorBoard, in `log`")
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
        description="steps in which CUDA's allocator records memory use, in `log`, for pytorch.org/memory_viz",
        examples=[[5]],
    )
    routing: bool = Field(default=False, description="print in every step line how tokens are spread over experts")
    check_links: bool = Field(
        default=False, description="before the first step: send some megabytes between ranks, name slow or broken links"
    )
    watch: Seconds = Field(
        default=NAMED, description="seconds after which a rank that the others wait for is reported; 0 = never"
    )
    timeout: Seconds = Field(
        default=0.0, description="seconds that ranks wait for each other; 0 = torch's, 30 min (10 with NCCL)"
    )


#: Keys of the section that need a folder: (key, key of the folder, what is wrong without it).
NEEDS = (
    ("tensorboard", "log", "tensorboard needs a folder to write to"),
    ("trace", "log", "trace needs a folder to write to"),
    ("breakdown", "log", "breakdown needs a folder to write to"),
    ("memory_snapshot", "log", "memory-snapshot needs a folder to write to"),
    ("save_every", "save", "checkpoints need a folder"),
    ("auto_resume", "save", "a restart needs a saved checkpoint"),
)
