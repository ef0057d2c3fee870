"""Define `optimizer`: the optimizer and the learning rate's schedule of a training run. They do not change the program.

`optimizer(params)` and `scheduler(optimizer)` of a model file, and arguments of an engine, are used instead.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator
from typing_extensions import Self

from shardc import optional
from shardc.spec.fields import Choices, Count, Pattern, Positive, Section, unknown, wrong

Share = Annotated[float, Field(ge=0)]  # below 1: of all steps; else a number of steps


class Schedule(Section):
    """A factor of the learning rate for each step: it rises over `warmup`, then stays or falls to `least`. wsd stays
    until the last `decay`, and falls linearly there.
    """

    name: Literal["constant", "cosine", "linear", "wsd"] = Field(description="how the rate falls", examples=["cosine"])
    warmup: Share = Field(default=0, description="steps, or a share of all steps below 1", examples=[100, 0.03])
    decay: Share = Field(default=0.1, description="of wsd: the last steps, or a share of all steps")
    least: Annotated[float, Field(ge=0, le=1)] = Field(default=0.0, description="the last factor of the learning rate")
    steps: Count | None = Field(
        default=None, description="steps until the end of the schedule (default: those of the run)", examples=[1000]
    )


def _schedule(value: Any) -> Any:
    """Expand the short form: `cosine` -> {name: cosine}."""
    return {"name": value} if isinstance(value, str) else value


def _optimizer_name(value: str) -> str:
    from shardc.runtime.step.engine_optimizer import classes  # imports torch, which other specs do not need

    if value.lower() not in classes():
        raise unknown("optimizer", tuple(classes()), "")
    return value.lower()


class Optimizer(Section):
    """The optimizer of a run. Other keys are arguments of the class in torch.optim: `betas`, `weight_decay`, ...

    `muon` updates the matrices between tables and head; AdamW with this rate and weight decay updates the rest.
    """

    model_config = ConfigDict(extra="allow")

    name: Annotated[str, AfterValidator(_optimizer_name)] = Field(
        default="adamw", description="a class of torch.optim, such as adamw, sgd, muon", examples=["adamw"]
    )
    lr: Positive | None = Field(
        default=None, description="learning rate (default: 3e-4 of adamw, torch's of others)", examples=[3e-4]
    )
    no_decay: Choices = Field(
        default=(), description="parameters without weight decay", examples=[["*.bias", "*norm*"]]
    )
    groups: dict[Pattern, dict[str, Any]] = Field(
        default={}, description="settings of some parameters, by pattern; the first match wins"
    )
    schedule: Annotated[
        Schedule | None,
        BeforeValidator(_schedule),
        WithJsonSchema({"anyOf": [{"enum": ["constant", "cosine", "linear", "wsd"]}, Schedule.model_json_schema()]}),
    ] = Field(
        default=None,
        description="constant, cosine, linear, wsd, or these with warmup",
        examples=["cosine", {"name": "cosine", "warmup": 100}],
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the optimizer's class that are written."""
        written = {"lr": self.lr, **(self.model_extra or {})}
        return {k: tuple(v) if isinstance(v, list) else v for k, v in written.items() if v is not None}

    @property
    def chosen(self) -> bool:
        """Whether the section says which optimizer a run has."""
        return bool(self.model_fields_set & {"name", "lr", "no_decay", "groups"} or self.model_extra)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Check the arguments against the optimizer's class."""
        if self.chosen:
            from shardc.runtime.step.engine_optimizer import fault

            for key in self.model_extra or {}:
                if feature := optional.missing(f"optimizer.{key}"):
                    fix = f"install shardc with shardc/features/{feature}, or leave it out"
                    fault_text = f"{key!r} in `optimizer` belongs to the feature {feature}, which is not installed"
                    raise wrong("{fault}", fix, fault=fault_text)
            if found := fault(self.name, self.arguments, self.groups, type(self).model_fields):
                raise wrong("{fault}", found[1], fault=found[0])
        return self
