"""Define the grammar of a whole spec as pydantic models, which also make the JSON Schema for editors.

Each section has its own file (shardc.spec). Short forms are expanded before they are checked:

    shard: {"*.o_proj": row}   ->  {rules: {"*.o_proj": {style: row}}}      data: {axis: dp}  ->  {axis: [dp]}
    outputs: {logits: whole}   ->  {logits: None}

A field's `description` and `examples` are shown by editors and in error messages.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema, create_model

from shardc import optional
from shardc.spec.batch_section import Batch
from shardc.spec.data_section import Data
from shardc.spec.fields import Count, Pattern, Section, as_tuple, mesh_axis, wrong
from shardc.spec.module_sections import Expert
from shardc.spec.optimizer_section import Optimizer
from shardc.spec.precision_section import Precision
from shardc.spec.run_section import Run
from shardc.spec.shard_section import Boundary, Dims, DimsOrWhole, ShardForm, ShardSection
from shardc.spec.step_sections import Checkpoint, Execution, Loss, Pipeline
from shardc.spec.yaml_reader import say


class On(Section):
    """The device that a step is priced on, unless a command names another: no program depends on it."""

    name: Annotated[str, Field(min_length=1)] = Field(
        description="a device that `shardc device` lists, or the path of a YAML file", examples=["h100-80g"]
    )
    nodes: Count | None = Field(default=None, description="number of nodes; the mesh must fit on them", examples=[8])


_ON: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "required": ["name"],
            "additionalProperties": False,
            "properties": {"name": {"type": "string"}, "nodes": {"type": "integer", "minimum": 1}},
        },
    ]
}


def _on(value: Any) -> Any:
    """Expand the short form: `h100-80g` -> {"name": "h100-80g"}."""
    return {"name": value} if isinstance(value, str) else value


def _version(value: Any) -> Any:
    if type(value) is not int or value != 1:  # True == 1.0 == 1
        raise wrong("this shardc reads version 1 of the format, not {value}", "write shardc: 1", value=say(value))
    return value


_SIZE = WithJsonSchema({"type": "integer", "anyOf": [{"const": -1}, {"minimum": 1}]})


class Form(Section):
    """A whole spec as it is written, without the sections of optional features."""

    shardc: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="the version of this format")
    mesh: dict[Annotated[str, AfterValidator(mesh_axis)], Annotated[int, _SIZE]] = Field(
        default={},
        description="axis: size, outermost first; one size may be -1: computed from the world size",
        examples=[{"dp": 2}],
    )
    device: Annotated[On | None, BeforeValidator(_on), WithJsonSchema(_ON)] = Field(
        default=None,
        description="device for which a step is priced, unless a command names another",
        examples=["h100-80g", {"name": "h100-80g", "nodes": 8}],
    )
    batch: Batch = Field(default=Batch(), examples=[{"dims": {"*": 0}}])
    shard: ShardSection = Field(
        default=ShardForm(), description="weights: pattern: style or {dim: axis}; the first match wins"
    )
    activations: dict[Boundary, Dims] = Field(
        default={},
        description='a module\'s output ("name") or input ("name:in"): {dim: axis}',
        examples=[{"layers.*": {1: "tp"}}],
    )
    outputs: dict[Pattern, DimsOrWhole] = Field(
        default={},
        description="layout of the outputs: {dim: axis}, or whole (default: a rank's rows, all else whole)",
        examples=[{"logits": {2: "tp"}}],
    )
    pipeline: Pipeline | None = Field(default=None, examples=[{"axis": "pp", "stages": 4}])
    data: Data = Field(default=Data(), examples=[{"zero": 2}])
    experts: Annotated[tuple[Expert, ...], BeforeValidator(as_tuple)] = Field(
        default=(), examples=[[{"match": "*.mlp.experts", "axis": "ep"}]]
    )
    checkpoint: Annotated[tuple[Checkpoint, ...], BeforeValidator(as_tuple)] = Field(
        default=(), examples=[[{"match": "model.layers.*", "save": ["linear"]}]]
    )
    loss: Loss = Field(default=Loss(), examples=[{"chunks": 8}])
    precision: Precision = Field(default=Precision(), examples=[{"compute": "bfloat16"}])
    optimizer: Optimizer = Field(default=Optimizer(), examples=[{"name": "adamw", "lr": 3e-4}])
    execution: Execution = Field(default=Execution(), examples=[{"compile": "layers"}])
    run: Run = Field(default=Run(), examples=[{"steps": 1000, "save": "runs/a"}])
    batch_norm: Literal["sync", "local"] = Field(
        default="sync", description="sync = exactly the single device's statistics"
    )
    unknown_ops: Literal["error", "replicate"] = "error"
    uneven: Literal["error", "pad"] = Field(
        default="error", description="sizes that an axis does not divide: pad = the last ranks hold less"
    )
    strict: bool = Field(default=False, description="true: a collective that no annotation requires is an error")


@functools.cache
def whole_form() -> type[Form]:
    """Return the form of a spec with the sections of all optional features."""
    bases = (*optional.registered("section", "Sections"), Form)
    return create_model("Form", __base__=bases, __doc__="A whole spec as it is written.")
