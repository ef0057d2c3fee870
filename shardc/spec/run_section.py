"""Define `run`: how `shardc run` trains. The command's options have the same names and override it.

It does not change the program.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from shardc.runtime.state import KEEP
from shardc.runtime.time_limits import NAMED
from shardc.spec.fields import ONE_OR_MANY, Count, Positive, Section, as_tuple, one_or_many, wrong

Times = Annotated[int, Field(ge=0)]  # 0: never
Seconds = Annotated[float, Field(ge=0)]  # 0: never, or torch's own


def _keep(value: Any) -> tuple[int | str, ...]:
    """Return what to keep as a tuple: a number of last checkpoints, `best`, or both."""
    several = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    kept = tuple(int(x) if isinstance(x, str) and x.isdecimal() else x for x in several)
    numbers = [x for x in kept if type(x) is int and x > 0]
    if len(numbers) + kept.count("best") < len(kept) or len(numbers) > 1 or not kept:
        raise wrong("keep is a number of checkpoints, best, or both", "e.g. 3, best, or [3, best]")
    return kept


_KEEP = {
    "anyOf": [x := {"anyOf": [{"type": "integer", "minimum": 1}, {"const": "best"}]}, {"type": "array", "items": x}]
}


class Run(Section):
    """Folders are relative to where the command is run."""

    steps: Annotated[int | None, Field(ge=0)] = Field(
        default=None,
        description="total optimizer steps, including those before a resume (default: 100, or what `epochs` needs)",
        examples=[100],
    )
    epochs: Positive | None = Field(
        default=None,
        description="passes over the training data, also a part of one; with `steps`, the first to end counts",
        examples=[3, 0.5],
    )
    seed: Times = Field(default=0, description="seed of initial weights, dropout and the order of data")
    clip: Positive | None = Field(default=None, description="clip gradients to this global norm", examples=[1.0])
    nonfinite: Literal["stop", "skip", "ignore"] = Field(
        default="stop", description="if a loss or gradient is nan or inf: stop before the update, skip it, or ignore it"
    )
    save: str = Field(default="", description="folder for checkpoints and exported weights", examples=["runs/a"])
    save_every: Times = Field(default=0, description="also save every N steps; 0 = only at the end")
    keep: Annotated[tuple[int | str, ...], BeforeValidator(_keep), ONE_OR_MANY, WithJsonSchema(_KEEP)] = Field(
        default=(KEEP,),
        description="number of last checkpoints to keep in `save`; best = also the best one, by `metric`",
        examples=[3, "best", [3, "best"]],
    )
    metric: Annotated[str, Field(min_length=1)] = Field(
        default="loss",
        description="held-out value that says which step is best: loss, or a name that the loss function returns",
    )
    metric_mode: Literal["min", "max"] = Field(default="min", description="whether less or more is better")
    patience: Times = Field(
        default=0, description="stop after N evaluations in a row without a better `metric`; 0 = never"
    )
    min_delta: Seconds = Field(default=0.0, description="the least difference that counts as better")
    auto_resume: bool = Field(
        default=False, description="resume from the last checkpoint in `save`, if any: one command starts and restarts"
    )
    max_restarts: Times = Field(default=0, description="number of restarts from `save` after a rank fails")
    eval_every: Times = Field(default=0, description="compute the held-out loss every N steps; 0 = at the end")
    eval_batches: Times = Field(default=0, description="number of held-out batches to use; 0 = all")
    choices: str = Field(
        default="",
        description="folder or file of choices by sample, for the section `choices`: replay reads it, record writes",
        examples=["runs/a/choices"],
    )
    log_every: Count = Field(default=1, description="read loss and gradient norm from the device every N steps")
    log: str = Field(default="", description="folder for steps.jsonl", examples=["runs/a"])
    track: Annotated[
        tuple[Literal["tensorboard", "wandb", "mlflow", "opentelemetry"], ...],
        BeforeValidator(one_or_many),
        ONE_OR_MANY,
    ] = Field(default=(), description="record the run in these trackers", examples=["wandb", ["wandb", "mlflow"]])
    tensorboard: bool = Field(default=False, description="write the step lines for TensorBoard, in `log`")
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

    @property
    def keeps_best(self) -> bool:
        return "best" in self.keep

    @property
    def last(self) -> int:
        """The number of last checkpoints to keep."""
        return next((n for n in self.keep if isinstance(n, int)), KEEP)

    @property
    def trackers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.track, *(("tensorboard",) if self.tensorboard else ()))))


#: Keys of the section that need another one: (attribute, needed key, what is wrong without it).
NEEDS = (
    ("trace", "log", "trace needs a folder to write to"),
    ("breakdown", "log", "breakdown needs a folder to write to"),
    ("memory_snapshot", "log", "memory-snapshot needs a folder to write to"),
    ("save_every", "save", "checkpoints need a folder"),
    ("auto_resume", "save", "a restart needs a saved checkpoint"),
    ("keeps_best", "save", "the best checkpoint needs a folder"),
    ("keeps_best", "eval_every", "the best checkpoint is known from evaluations"),
    ("patience", "eval_every", "patience counts evaluations"),
)
