"""The grammar of a spec, section by section, as pydantic models, from which the JSON Schema for editors is made.

A field's `description` and `examples` are shown by editors and in error messages. Short forms (`tp` for
`{axis: tp}`, one axis for a list of axes) are expanded before they are checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
    model_validator,
)

from shardc.ir.patterns import nearest
from shardc.runtime.schedule import SCHEDULES
from shardc.spec.fields import (
    _ONE_OR_MANY,
    NONE,
    ONE_OR_MANY,
    Axes,
    Axis,
    BatchDims,
    Count,
    Dim,
    Pattern,
    Place,
    Positive,
    Section,
    as_list,
    as_tuple,
    malformed,
    mesh_axis,
    module_pattern,
    number_or,
    number_schema,
    schedule_name,
    unknown,
    wrong,
    wrong_here,
)
from shardc.spec.run_section import Run
from shardc.spec.yaml_reader import say

#: What a weight may be said to be; `shardc.passes.annotate.weight_roles` says which dim each of them splits.
Style = Literal["column", "row", "vocab", "replicate"]
STYLES = get_args(Style)
DTYPES = ("float32", "bfloat16", "float16", "float64")
Use = Literal["model", "structure"]
USES = get_args(Use)


# --- shard and activations


class DimShard(Section):
    """One axis on one dim: the dim is seen as [split, axis, rest] and the middle digit is spread over the axis."""

    axis: Axis = Field(description="mesh axis that splits this dim", examples=["tp"])
    split: Count = Field(
        default=1, description="the dim is made of this many equal fused parts, each split", examples=[3]
    )
    sections: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="the dim is made of fused parts of these sizes, each split", examples=[[512, 128, 128]]
    )


def _dim_shards(value: Any) -> Any:
    """`tp`, `{axis: tp, split: 3}`, or a list of them, outermost first -> a tuple of mappings."""
    if isinstance(value, (str, Mapping)):
        value = (value,)
    if not isinstance(value, (list, tuple)) or not value:
        raise malformed("an axis, a list of axes or a mapping with `axis`", "e.g. {0: tp}")
    return tuple({"axis": v} if isinstance(v, str) else v for v in value)


_DIM_SHARD: dict[str, Any] = {
    "type": "object",
    "required": ["axis"],
    "additionalProperties": False,
    "properties": {
        "axis": {"type": "string"},
        "split": {"type": "integer", "minimum": 1},
        "sections": {"type": "array", "items": {"type": "integer", "minimum": 1}},
    },
}
_ONE: dict[str, Any] = {"anyOf": [{"type": "string"}, _DIM_SHARD]}
_DIMS: dict[str, Any] = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": False,
    "patternProperties": {"^[0-9]+$": {"anyOf": [*_ONE["anyOf"], {"type": "array", "minItems": 1, "items": _ONE}]}},
}


def _some(value: Any) -> Any:
    if not isinstance(value, Mapping):
        raise malformed("a mapping from dim to axis", "e.g. {1: tp}")
    if not value:
        raise wrong_here("names no dim", "e.g. {0: tp}")
    return value


Dims = Annotated[
    dict[Dim, Annotated[tuple[DimShard, ...], BeforeValidator(_dim_shards)]],
    BeforeValidator(_some),
    WithJsonSchema(_DIMS),
]


def _output(value: Any) -> Any:
    """`whole` -> None."""
    if value == "whole":
        return None
    if not isinstance(value, Mapping):
        raise malformed("`whole`, or a mapping from dim to axis", "e.g. {2: tp}")
    return value


def _is_dim(key: object) -> bool:
    return isinstance(key, int) or (isinstance(key, str) and key.lstrip("-").isdecimal())  # "0" is refused later


def _rule(value: Any) -> Any:
    """`column`, `{style: column, axis: tp}` or `{0: tp}` -> a mapping of style and axis, or of dims."""
    if isinstance(value, str):
        return {"style": value}
    if not isinstance(value, Mapping):
        raise malformed(f"a style ({', '.join(STYLES)}) or a mapping from dim to axis", "e.g. column, or {0: tp}")
    if all(map(_is_dim, value)):
        return {" dims": dict(value)}
    if any(map(_is_dim, value)):
        raise wrong_here("mixes dims and words", "write {style: column, axis: tp}, or {0: {axis: tp, split: 3}}")
    if value and not any(nearest(key, RuleForm.model_fields) for key in value):
        raise wrong_here("names neither a style nor a dim", "dims are numbers: {0: tp} splits dim 0, {1: tp} dim 1")
    return dict(value)


class RuleForm(Section):
    """How one pattern's weights are split: by a style word, or by dims. (No key of a spec begins with a space.)"""

    style: Style | None = Field(default=None, examples=["column"])
    axis: Axis | None = Field(default=None, examples=["tp"])
    dims: Dims | None = Field(default=None, validation_alias=" dims")

    @model_validator(mode="after")
    def _something(self) -> RuleForm:
        if self.style is None and self.dims is None:
            raise wrong_here("names neither a style nor a dim", "e.g. {style: column, axis: tp}, or {0: tp}")
        return self


Rule = Annotated[RuleForm, BeforeValidator(_rule)]


def _shard(value: Any) -> Any:
    """`use` is the one keyword of the section; every other key is a pattern."""
    if not isinstance(value, Mapping):
        raise malformed("a mapping from pattern to style or dims", 'e.g. "*.o_proj": row')
    return {
        " rules": {k: v for k, v in value.items() if k != "use"},
        **({"use": value["use"]} if "use" in value else {}),
    }


def _use(value: Any) -> Any:
    """`model` or `{plan: model, axis: tp}` -> a mapping."""
    if isinstance(value, (str, Mapping)):
        return {"plan": value} if isinstance(value, str) else dict(value)
    raise malformed(f"a plan ({', '.join(USES)})", "e.g. use: model, or use: {plan: model, axis: tp}")


class UseForm(Section):
    """Where the weights' splits come from: the plan that the model carries, or the structure of its graph."""

    plan: Use = Field(examples=["model"])
    axis: Axis | None = Field(default=None, examples=["tp"])


class ShardForm(Section):
    """The section `shard`."""

    use: Annotated[UseForm | None, BeforeValidator(_use)] = Field(default=None, examples=["model"])
    rules: dict[Pattern, Rule] = Field(default={}, validation_alias=" rules")


_STYLE: dict[str, Any] = {"enum": list(STYLES)}
_STYLED: dict[str, Any] = {
    "type": "object",
    "required": ["style"],
    "additionalProperties": False,
    "properties": {"style": _STYLE, "axis": {"type": "string"}},
}
_SHARD: dict[str, Any] = {
    "type": "object",
    "properties": {
        "use": {
            "description": (
                "start from the model's own plan, or from the structure of its graph; entries beside it override"
            ),
            "anyOf": [
                {"enum": list(USES)},
                {
                    "type": "object",
                    "required": ["plan"],
                    "additionalProperties": False,
                    "properties": {"plan": {"enum": list(USES)}, "axis": {"type": "string"}},
                },
            ],
        }
    },
    "additionalProperties": {"anyOf": [_STYLE, _DIMS, _STYLED]},
}


def _boundary(value: str) -> str:
    """A module pattern, with `:in` behind it if its input is meant."""
    name, colon, side = value.partition(":")
    if colon and side != "in":
        raise wrong(
            "unknown side {side} of a module", f'"{name}" is its output, "{name}:in" its input', side=f"':{side}'"
        )
    return module_pattern(name) + colon + side


# --- the other sections


class Batch(Section):
    """How the global batch is split. dims: glob over input names -> batch dim, None = not split; the first that matches
    counts.
    """

    dims: BatchDims = Field(
        default={"*": 0}, description="each input's batch dim; null = not split", examples=[{"*": 0}]
    )
    axes: Axes | None = Field(
        default=None, description="axes that split the batch (default: every data axis)", examples=[["dp"]]
    )
    microbatches: Count = Field(default=1, description="microbatches per step", examples=[8])
    rows: Count | None = Field(
        default=None,
        description="rows that a rank has in a microbatch: there are as many microbatches as the ranks need",
        examples=[4],
    )
    lengths: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="lengths to which batches are padded; needs pad", examples=[[128, 256, 512]]
    )
    pad: dict[Pattern, float] = Field(
        default={},
        description="number that pads an input to the batch's length (the dim beside the batch's)",
        examples=[{"input_ids": 0, "labels": -100}],
    )


Method = Literal["auto", "gather", "ring", "ulysses"]


#: Of each axis of the sequence, or one for all.
Methods = Annotated[tuple[Method, ...], BeforeValidator(as_list), ONE_OR_MANY]
_METHODS = {"anyOf": [{"enum": list(get_args(Method))}, {"type": "array", "items": {"enum": list(get_args(Method))}}]}


def _methods(value: Any) -> Any:
    """`ring` -> {"*": ring}."""
    return value if isinstance(value, dict) else {"*": value}


class Sequence(Section):
    """Context parallel: the inputs' sequence dim is split. Of several axes the first is the outermost: its ranks have
    the longest stretches.
    """

    axis: Annotated[Axes, Field(min_length=1), ONE_OR_MANY] = Field(
        description="mesh axis that splits the sequence; [outer, inner] = both, each by a method of its own",
        examples=["cp"],
    )
    dims: BatchDims = Field(default={"*": 1}, description="each input's sequence dim; null = none", examples=[{"*": 1}])
    method: Annotated[
        dict[Pattern, Methods],
        BeforeValidator(_methods),
        WithJsonSchema({"anyOf": [*_METHODS["anyOf"], {"type": "object", "additionalProperties": _METHODS}]}),
    ] = Field(
        default={"*": ("auto",)},
        description="how queries meet the keys of other ranks, [ring, ulysses] of two axes; or {module: method}, the"
        " first that matches counts",
        examples=["ring"],
    )
    balance: Literal["auto", "zigzag", "none"] = Field(
        default="auto",
        description="tokens of a rank: zigzag = two stretches, whose causal work is even; none = one; auto = zigzag"
        " where attention is causal and the sequence divides",
    )


class Pipeline(Section):
    """Pipeline stages: a number of them cut by cost, or before the modules `cut`, or by
    counts of the repeated layers.
    """

    axis: Axis = Field(description="mesh axis of the stages", examples=["pp"])
    stages: Count | None = Field(default=None, description="cut by cost into so many stages", examples=[4])
    cut: Annotated[tuple[str, ...], BeforeValidator(as_list), WithJsonSchema(_ONE_OR_MANY)] | None = Field(
        default=None, description="cut before these modules", examples=[["model.layers.8"]]
    )
    balance: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] | None = Field(
        default=None, description="cut by counts of the repeated layers", examples=[[2, 2, 3, 1]]
    )
    schedule: Annotated[str, AfterValidator(schedule_name)] = Field(
        default="1f1b", description=f"{', '.join(SCHEDULES)}, or the path of a schedule file", examples=["1f1b"]
    )


class Offload(Section):
    """Where optimizer state and parameters are kept: none = on the device, cpu, or a directory on disk."""

    optimizer: Place = Field(default="none", examples=["cpu"])
    parameters: Place = Field(default="none", examples=["cpu"])


class Loss(Section):
    """Cross entropy behind a linear layer, as a language model's head is. chunks: the rows of its logits are computed
    in so many parts, forward and again in backward: they never all exist, for one more product.
    """

    chunks: Count = Field(
        default=1, description="parts in which rows of logits are computed, forward and again in backward", examples=[8]
    )


#: How parameters are cut into the matrices that an optimizer sees: not at all; one for each head of attention; one for
#: each entry of a stack of experts.
CUTS = ("whole", "heads", "experts")


def _cut(value: Any) -> Any:
    """A word, or {dim: number of parts} or {dim: sizes} -> the word, or a mapping of whole numbers."""
    if isinstance(value, str):
        if value not in CUTS:
            raise unknown("way to cut a parameter", CUTS, "or {dim: parts}, e.g. {0: 3}")
        return value
    if not isinstance(value, Mapping) or not value:
        raise malformed(f"a word ({', '.join(CUTS)}) or a mapping from dim to parts", "e.g. whole, or {0: 3}")
    cuts: dict[int, int | tuple[int, ...]] = {}
    for dim, parts in value.items():
        if not _is_dim(dim) or int(dim) < 0:
            raise wrong_here("names a dim that is no whole number", "e.g. {0: 3}: dim 0 is three matrices")
        sizes = tuple(parts) if isinstance(parts, (list, tuple)) else (parts,)
        if not sizes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
            raise wrong_here("cuts a dim by what are no sizes", "e.g. {0: 3}, or {0: [512, 128, 128]}")
        cuts[int(dim)] = sizes if isinstance(parts, (list, tuple)) else parts
    return cuts


def _matrices(value: Any) -> Any:
    """One word is for all parameters."""
    if isinstance(value, str):
        return {"*": value}
    if not isinstance(value, Mapping) or not value:
        raise malformed(f"a word ({', '.join(CUTS)}) or a mapping from pattern to one", "e.g. matrices: whole")
    return {"*": value} if all(map(_is_dim, value)) else value


_CUT: dict[str, Any] = {
    "anyOf": [
        {"enum": list(CUTS)},
        {
            "type": "object",
            "minProperties": 1,
            "additionalProperties": False,
            "patternProperties": {
                "^[0-9]+$": {
                    "anyOf": [
                        {"type": "integer", "minimum": 1},
                        {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1}},
                    ]
                }
            },
        },
    ]
}
_MATRICES: dict[str, Any] = {
    "anyOf": [{"enum": list(CUTS)}, {"type": "object", "minProperties": 1, "additionalProperties": _CUT}]
}


class Optimizer(Section):
    """For optimizers whose step of a parameter needs all of it (Muon, Shampoo, SOAP, Adafactor, LAMB): each matrix has
    an owner, a rank that steps it. What steps each element by itself (AdamW) stays split.
    """

    matrices: (
        Annotated[
            dict[Pattern, Annotated[Any, BeforeValidator(_cut)]],
            BeforeValidator(_matrices),
            WithJsonSchema(_MATRICES),
        ]
        | None
    ) = Field(
        default=None,
        description="what of a parameter is one matrix: whole, heads, experts, {dim: parts}, or these by pattern",
        examples=["whole", {"*.qkv.weight": {0: 3}}],
    )


class Lower(Section):
    """Forward and backward of a training step as two texts, run without autograd. compile: runs of element-wise ops and
    reductions of equal layers are compiled once, by torch's Inductor; needs a C++ compiler, or Triton on a GPU.
    """

    compile: Literal["none", "layers"] = Field(
        default="none",
        description="layers: element-wise ops and reductions become fused kernels, compiled once for equal layers",
        examples=["layers"],
    )
    overlap: Literal["none", "microbatches", "forwards"] = Field(
        default="none",
        description="microbatches: a forward beside the backward of the one before; forwards: beside another forward",
        examples=["microbatches", "forwards"],
    )


_LOWER: dict[str, Any] = {
    "anyOf": [
        {"type": "boolean"},
        {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "compile": {"enum": ["none", "layers"], "default": "none"},
                "overlap": {"enum": ["none", "microbatches", "forwards"], "default": "none"},
            },
        },
    ]
}


def _lower(value: Any) -> Any:
    """`true` is short for `{}`, `false` for no section."""
    return {} if value is True else None if value is False else value


class Data(Section):
    """Data parallel and ZeRO. axis: () = the mesh's axes dp and dp_*; [outer, inner] = sharded in inner, replicated
    over outer.
    """

    axis: Axes = Field(default=(), description="data axis; [dp_outer, dp] = HSDP", examples=["dp"])
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        default=0,
        description="0 all-reduced gradients, 1 +optimizer state split, 2 +gradients, 3 +parameters",
        examples=[2],
    )
    bucket_mb: Positive | None = Field(
        default=None,
        description="size of a bucket in MB; without it 1 for each rank that sums it, at least 25 and at most 256",
        examples=[25],
    )
    prefetch: Annotated[int, Field(ge=0)] = Field(
        default=1, description="at zero 3: buckets gathered ahead of their use", examples=[2]
    )
    keep: bool = Field(
        default=False, description="at zero 3: parameters stay whole from a step's first forward to its last backward"
    )
    offload: Offload = Field(default=Offload(), examples=[{"optimizer": "cpu"}])

    def bucket_bytes(self, ranks: int = 1) -> float:
        """Bytes of a bucket that so many ranks sum. In a ring each of them sends a part of it at a time, which should
        take longer than to begin: 1 MB is 20 us at 50 GB/s between machines (8 us of latency), and more than inside.
        Beyond 256 MB a bucket is a burden: of ZeRO 3's, some are whole at a time.
        """
        return (self.bucket_mb or min(max(25.0, ranks), 256.0)) * 2**20


#: The axis over which the plans of `use` spread experts.
EXPERTS_AXIS = "ep"


class Expert(Section):
    """One kind of expert layer. capacity: None = dropless, else the factor of a fixed capacity, of the global batch or
    per microbatch.
    """

    match: Pattern = Field(description="modules that hold experts", examples=["*.mlp.experts"])
    axis: Axis = Field(description="mesh axis over which experts are spread", examples=["ep"])
    capacity: Annotated[float | None, BeforeValidator(number_or("none")), NONE, number_schema("none")] = Field(
        default=None,
        description="none = dropless; a factor = fixed capacity, overflow dropped",
        examples=["none", 1.25],
    )
    per: Literal["batch", "microbatch"] = Field(
        default="batch",
        description="the tokens that capacity is a share of: batch = exactly the single device's",
        examples=["microbatch"],
    )


class Adapter(Section):
    """Matrices of low rank beside the weights of linear layers and experts: W x + scale B A x. What the model has
    itself is frozen then, unless `freeze` says otherwise.
    """

    match: Pattern = Field(description="modules (or weights) that get one", examples=["*.{q,v}_proj"])
    kind: Literal["lora", "rslora", "dora"] = Field(
        default="lora",
        description="lora: scale = alpha/rank; rslora: alpha/sqrt(rank); dora: the length of each row is a parameter",
    )
    rank: Count = Field(description="rows of A", examples=[16])
    alpha: Positive | None = Field(default=None, description="of the scale; without it the rank", examples=[32])
    dropout: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="of what A takes, in training", examples=[0.05]
    )


def _trained(value: str) -> str:
    """A pattern, perhaps behind an exclamation mark."""
    module_pattern(value.removeprefix("!"))
    return value


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
        description="ops that may run again, the fewest bytes being kept; cheap = [elementwise, norm, gather]",
        examples=["cheap", ["elementwise", "norm", "gather", "matmul"]],
    )
    budget: Annotated[float, Field(ge=0, le=1)] | None = Field(
        default=None, description="share of the saved bytes to keep, chosen by cost", examples=[0.5]
    )
    every: Count = Field(default=1, description="recompute each k-th of the modules only", examples=[2])
    offload: Literal["none", "cpu"] = Field(
        default="none", description="cpu = results that are kept are moved there until backward"
    )


Recipe = Literal["fp8-rowwise", "fp8-tensorwise", "mxfp8"]
RECIPES = get_args(Recipe)


class Products(Section):
    """Products of linear layers with numbers of 8 bits: inputs, weights and gradients are rounded to float8, with one
    scale for each row (fp8-rowwise), each tensor (fp8-tensorwise), or each block of 32 (mxfp8).
    """

    recipe: Recipe = Field(
        description="what has one scale: a row, a tensor, or a block of 32 along what is summed",
        examples=["fp8-rowwise"],
    )
    match: Annotated[
        tuple[Annotated[str, AfterValidator(_trained)], ...], BeforeValidator(as_list), WithJsonSchema(_ONE_OR_MANY)
    ] = Field(
        default=("*",),
        description="linear layers (or their weights) that are computed so; behind a ! those that are not; the last"
        " that matches counts",
        examples=[["*", "!lm_head"]],
    )

    @property
    def by_rows(self) -> bool:
        """Does what is computed for a row hang on that row alone? A tensor's scale is that of all rows."""
        return self.recipe != "fp8-tensorwise"


def _products(value: Any) -> Any:
    """`fp8-rowwise` is short for {recipe: fp8-rowwise}; none for no section."""
    return None if value == "none" else {"recipe": value} if isinstance(value, str) else value


_PRODUCTS: dict[str, Any] = {
    "anyOf": [
        {"enum": ["none", *RECIPES]},
        {
            "type": "object",
            "required": ["recipe"],
            "additionalProperties": False,
            "properties": {"recipe": {"enum": list(RECIPES)}, "match": _ONE_OR_MANY},
        },
    ]
}


class Precision(Section):
    """Number formats. params: the master copy; compute: forward and backward; reduce: the sums of gradients over ranks.
    products: those of linear layers, in 8 bits.

    None: params as the model has them, compute as params, reduce as the parameter.
    """

    params: Literal["float32", "bfloat16", "float16", "float64"] | None = Field(
        default=None, description="dtype of the stored (master) weights (default: the model's)", examples=["float32"]
    )
    compute: Literal["float32", "bfloat16", "float16", "float64"] | None = Field(
        default=None,
        description="dtype of products and activations (default: that of the weights)",
        examples=["bfloat16"],
    )
    reduce: Literal["float32", "bfloat16", "float16", "float64"] | None = Field(
        default=None,
        description="dtype in which gradients are summed over ranks (default: that of the weights)",
        examples=["float32"],
    )
    loss_scale: Annotated[
        float | Literal["dynamic"] | None,
        BeforeValidator(number_or("none", "dynamic")),
        NONE,
        number_schema("none", "dynamic"),
    ] = Field(default=None, description="none, dynamic, or a number (for float16)", examples=["none", "dynamic"])
    products: Annotated[Products | None, BeforeValidator(_products), WithJsonSchema(_PRODUCTS)] = Field(
        default=None,
        description="none, or how linear layers multiply numbers of 8 bits: fp8-rowwise, fp8-tensorwise, mxfp8",
        examples=["fp8-rowwise", {"recipe": "fp8-rowwise", "match": ["*", "!lm_head"]}],
    )


class On(Section):
    """What a step is priced on, where no command names another: a program itself is the same on all."""

    name: Annotated[str, Field(min_length=1)] = Field(
        description="a device that `shardc device` lists, or the path of a YAML file", examples=["h100-80g"]
    )
    nodes: Count | None = Field(
        default=None, description="how many nodes there are; the mesh has to have room on them", examples=[8]
    )


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
    """`h100-80g` -> {"name": "h100-80g"}."""
    return {"name": value} if isinstance(value, str) else value


def _version(value: Any) -> Any:
    if type(value) is not int or value != 1:  # True == 1.0 == 1
        raise wrong("this shardc reads version 1 of the format, not {value}", "write shardc: 1", value=say(value))
    return value


_SIZE = WithJsonSchema({"type": "integer", "anyOf": [{"const": -1}, {"minimum": 1}]})


class Form(Section):
    """A whole spec as it is written."""

    shardc: Annotated[Literal[1], BeforeValidator(_version)] = Field(description="the version of this format")
    mesh: dict[Annotated[str, AfterValidator(mesh_axis)], Annotated[int, _SIZE]] = Field(
        default={},
        description="axis: size, outermost first; one size may be -1: computed from the world size",
        examples=[{"dp": 2}],
    )
    device: Annotated[On | None, BeforeValidator(_on), WithJsonSchema(_ON)] = Field(
        default=None,
        description="what a step is priced on, where no command names another",
        examples=["h100-80g", {"name": "h100-80g", "nodes": 8}],
    )
    batch: Batch = Field(default=Batch(), examples=[{"dims": {"*": 0}}])
    shard: Annotated[ShardForm, BeforeValidator(_shard), WithJsonSchema(_SHARD)] = Field(
        default=ShardForm(), description="weights: pattern: style or {dim: axis}; the first match wins"
    )
    activations: dict[Annotated[str, AfterValidator(_boundary)], Dims] = Field(
        default={},
        description='a module\'s output ("name") or input ("name:in"): {dim: axis}',
        examples=[{"layers.*": {1: "tp"}}],
    )
    outputs: dict[
        Pattern,
        Annotated[
            Dims | None,
            BeforeValidator(_output),
            WithJsonSchema({"anyOf": [{"const": "whole"}, _DIMS]}),
        ],
    ] = Field(
        default={},
        description="how values come out: {dim: axis}, or whole (default: a rank's rows, all else whole)",
        examples=[{"logits": {2: "tp"}}],
    )
    sequence: Sequence | None = Field(default=None, examples=[{"axis": "cp"}])
    pipeline: Pipeline | None = Field(default=None, examples=[{"axis": "pp", "stages": 4}])
    data: Data = Field(default=Data(), examples=[{"zero": 2}])
    experts: Annotated[tuple[Expert, ...], BeforeValidator(as_tuple)] = Field(
        default=(), examples=[[{"match": "*.mlp.experts", "axis": "ep"}]]
    )
    adapters: Annotated[tuple[Adapter, ...], BeforeValidator(as_tuple)] = Field(
        default=(), examples=[[{"match": "*.{q,v}_proj", "rank": 16, "alpha": 32}]]
    )
    freeze: Annotated[
        tuple[Annotated[str, AfterValidator(_trained)], ...], BeforeValidator(as_list), WithJsonSchema(_ONE_OR_MANY)
    ] = Field(
        default=(),
        description="weights that are not trained: patterns of modules, with all in them, or of weights; behind a ! of"
        " those that are; the last that matches counts",
        examples=[["*", "!score"]],
    )
    checkpoint: Annotated[tuple[Checkpoint, ...], BeforeValidator(as_tuple)] = Field(
        default=(), examples=[[{"match": "model.layers.*", "save": ["linear"]}]]
    )
    loss: Loss = Field(default=Loss(), examples=[{"chunks": 8}])
    precision: Precision = Field(default=Precision(), examples=[{"compute": "bfloat16"}])
    optimizer: Optimizer = Field(default=Optimizer(), examples=[{"matrices": "whole"}])
    lower: Annotated[Lower | None, BeforeValidator(_lower), WithJsonSchema(_LOWER)] = Field(
        default=None,
        description="true: a step runs forward and backward as two texts, without autograd",
        examples=[True],
    )
    run: Run = Field(default=Run(), examples=[{"steps": 1000, "save": "runs/a"}])
    batch_norm: Literal["sync", "local"] = Field(
        default="sync", description="sync = exactly the single device's statistics"
    )
    unknown_ops: Literal["error", "replicate"] = "error"
    uneven: Literal["error", "pad"] = Field(
        default="error", description="sizes that an axis does not divide: pad = the last ranks hold less"
    )
    strict: bool = Field(default=False, description="true: a collective that no annotation requires is an error")
