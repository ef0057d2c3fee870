"""The spec: what it contains, and how it prints back. Its grammar is in docs/reference/spec.md; wrong specs:
tests/spec/test_explain.py.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardc.errors import Errors, ShardcError
from shardc.ir.mesh import Mesh
from shardc.spec import ActivationRule, DimShard, ShardRule, Spec
from shardc.spec.yaml_reader import dotted, flow, of_mapping, read, scalar

# the example of docs/reference/spec.md
EXAMPLE = """\
shardc: 1                                # required: the version of this format

mesh: {pp: 2, dp: 2, tp: 2}              # axis: size, outermost first; one may be -1

batch:
  dims: {"*": 0}                         # each input's batch dim (default 0; null = not split). Globs over input names
  axes: [dp]                             # axes that split it (default: every data axis of the mesh)
  microbatches: 8                        # pipeline / gradient-accumulation microbatches per step (default 1)

shard:                                   # weights: first match wins; a pattern that never does is an error
  "model.embed_tokens": vocab            # rows split over tp; lookups outside the rank's rows are masked and summed
  "*.{q,k,v}_proj": column               # module pattern + style word: out-features split
  "*.o_proj": row                        # in-features split: the output is a partial sum
  "*.{gate,up}_proj": column
  "*.down_proj": row
  "*.attn.qkv.weight": {0: {axis: tp, split: 3}}   # or parameter pattern + {dim: axis}: each third split
  "*.qkv_proj.weight": {0: {axis: tp, sections: [512, 128, 128]}}   # fused parts of unequal size, each split
  "lm_head": column                      # logits split by vocabulary; the loss is computed on the parts
# shard: {use: model}                    # start from the plan that the model carries

activations:                             # a module's output ("name") or input ("name:in"), and how it is split
  "model.layers.*": {1: tp}              # sequence parallel: between blocks the sequence dim is split over tp

sequence:                                # context parallel: the inputs' sequence dim is split too
  axis: cp
  dims: {"*": 1}
  method: ring                           # ring | gather | ulysses
  balance: zigzag                        # causal work evened out over ranks: zigzag | none

pipeline:
  axis: pp
  stages: 4                              # cut by cost into N stages (a multiple of the axis) ...
  # cut: [model.layers.8, model.layers.16]   # ... or before these modules
  # balance: [2, 2, 3, 1]                # ... or by counts of the repeated layers
  schedule: 1f1b                         # gpipe | 1f1b | interleaved | zb-h1 | zb-v | path to a schedule file

data:
  axis: dp                               # [dp_outer, dp] = sharded within dp, replicated over dp_outer (HSDP)
  zero: 2                                # 0 all-reduced gradients · 1 +optimizer state · 2 +gradients · 3 +parameters
  bucket_mb: 25
  offload: {optimizer: none, parameters: none}   # each: none | cpu | a directory on disk (ZeRO-Infinity)

experts:
  - match: "*.mlp.experts"
    axis: ep                             # its own, or a data axis: its ranks split tokens and experts
    capacity: none                       # none = dropless; a factor such as 1.25 = fixed capacity, overflow dropped

checkpoint:                              # recompute instead of keeping activations
  - match: "model.layers.*"
    save: [linear, attention, collective]   # kept through; [] = recompute everything; or budget: 0.5
    offload: none                        # none | cpu

precision:
  params: float32                        # master copy
  compute: bfloat16
  reduce: float32                        # gradients are summed in this
  loss_scale: none                       # none | dynamic | a number (for float16)

batch_norm: sync                         # sync = exactly the single device's statistics (default) | local
unknown_ops: error                       # error | replicate
strict: false                            # true: a collective that no annotation requires is an error
"""
AXES = ("mesh.cp=1", "mesh.ep=1")  # the example names two axes that its mesh leaves out
HEAD = "shardc: 1\nmesh: {dp: 2, tp: 2}\n"


def errors_of(text: str, **options: Any) -> list[ShardcError]:
    with pytest.raises(ShardcError) as e:
        Spec.parse(text, "spec.yaml", **options)
    return list(e.value.errors)


# --- what a spec says


def test_example() -> None:
    spec = Spec.parse(EXAMPLE, "spec.yaml", overrides=AXES)
    assert spec.mesh == Mesh.of({"pp": 2, "dp": 2, "tp": 2, "cp": 1, "ep": 1})
    assert spec.batch.dims == {"*": 0}
    assert (spec.batch.axes, spec.batch.microbatches, spec.data_axes) == (("dp",), 8, ("dp",))
    assert [r.style for r in spec.shard] == ["vocab", "column", "row", "column", "row", None, None, "column"]
    assert spec.shard[0] == ShardRule("model.embed_tokens", "vocab")
    assert spec.shard[5].dims == {0: (DimShard(axis="tp", split=3),)}
    assert spec.shard[6].dims == {0: (DimShard(axis="tp", sections=(512, 128, 128)),)}
    assert spec.activations == (ActivationRule("model.layers.*", "output", {1: (DimShard(axis="tp"),)}),)
    sequence = spec.sections["sequence"]
    assert (sequence.axis, sequence.method, sequence.balance) == (("cp",), {"*": ("ring",)}, "zigzag")
    assert spec.pipeline is not None
    assert (spec.pipeline.stages, spec.pipeline.cut, spec.pipeline.schedule) == (4, None, "1f1b")
    assert (spec.data.axis, spec.data.zero, spec.data.bucket_mb, spec.data.offload.optimizer) == (
        ("dp",),
        2,
        25.0,
        "none",
    )
    assert (spec.experts[0].match, spec.experts[0].axis, spec.experts[0].capacity) == ("*.mlp.experts", "ep", None)
    assert spec.checkpoint[0].save == ("linear", "attention", "collective")
    assert (spec.precision.compute, spec.precision.loss_scale) == ("bfloat16", None)
    assert (spec.batch_norm, spec.unknown_ops, spec.strict) == ("sync", "error", False)


def test_defaults() -> None:
    spec = Spec.load({"shardc": 1})
    assert spec.mesh.axes == ()
    assert (spec.shard, spec.activations, spec.data_axes, spec.data.zero, spec.data.bucket_mb) == ((), (), (), 0, None)
    assert (spec.batch.dims, spec.batch.axes, spec.batch.microbatches) == ({"*": 0}, None, 1)


def test_empty_and_trivial_sections_pass() -> None:
    trivial: dict[str, Any] = {"shard": None, "activations": {}, "data": {"zero": 0, "offload": {}}, "experts": []}
    trivial["precision"] = {"loss_scale": "none"}
    assert Spec.load({"shardc": 1, **trivial}) == Spec.load({"shardc": 1})


@pytest.mark.parametrize(
    ("extra", "axes"),
    [
        ({}, ("dp_outer", "dp")),
        ({"batch": {"axes": ["dp"]}}, ("dp",)),
        ({"batch": {"axes": "dp"}}, ("dp",)),
        ({"batch": {"axes": []}}, ()),
        ({"data": {"axis": "fsdp"}}, ("dp_outer", "dp", "fsdp")),
        ({"data": {"axis": ["dp_outer", "dp"]}}, ("dp_outer", "dp")),
        ({"data": {"axis": ["dp", "tp"]}, "sequence": {"axis": "tp"}}, ("dp_outer", "dp")),
    ],
)
def test_data_axes(extra: dict[str, Any], axes: tuple[str, ...]) -> None:
    assert Spec.load({"shardc": 1, "mesh": {"dp_outer": 2, "dp": 2, "fsdp": 2, "tp": 2}, **extra}).data_axes == axes


@pytest.mark.parametrize(
    ("written", "rule"),
    [
        ("row", ShardRule("w", "row")),
        ({"style": "row", "axis": "dp"}, ShardRule("w", "row", "dp")),
        ({"style": "row"}, ShardRule("w", "row")),
        ({0: "tp"}, ShardRule("w", None, "tp", {0: (DimShard(axis="tp"),)})),
        ({1: ["dp", "tp"]}, ShardRule("w", None, "tp", {1: (DimShard(axis="dp"), DimShard(axis="tp"))})),
        (
            {0: ["dp", {"axis": "tp", "split": 3}]},
            ShardRule("w", None, "tp", {0: (DimShard(axis="dp"), DimShard(axis="tp", split=3))}),
        ),
        (
            {0: {"axis": "tp", "sections": (4, 2)}},
            ShardRule("w", None, "tp", {0: (DimShard(axis="tp", sections=(4, 2)),)}),
        ),
    ],
)
def test_forms_of_a_rule(written: Any, rule: ShardRule) -> None:
    spec = Spec.load({"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"w": written}})
    assert spec.shard == (rule,)
    assert Spec.parse(str(spec)) == spec


def test_replicate_needs_no_axis_and_use_is_no_pattern() -> None:
    assert Spec.load({"shardc": 1, "shard": {"w": "replicate"}}).shard == (ShardRule("w", "replicate"),)
    spec = Spec.load({"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "model", "w": "row"}})
    assert (spec.shard_use, spec.shard) == ("model", (ShardRule("w", "row"),))
    assert Spec.parse(str(spec)) == spec


def test_activation_inputs() -> None:
    spec = Spec.load({"shardc": 1, "mesh": {"tp": 2}, "activations": {"a": {1: "tp"}, "a:in": {0: "tp"}}})
    assert [(r.pattern, r.at) for r in spec.activations] == [("a", "output"), ("a", "input")]


def test_a_spec_is_frozen_and_pickles() -> None:
    spec = Spec.parse(EXAMPLE, "spec.yaml", overrides=AXES)
    with pytest.raises(AttributeError, match="strict"):
        spec.strict = True  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        spec.data.zero = 0
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert again.where(("data", "zero")) == "spec.yaml:39:3"


# --- where things stand


def test_where() -> None:
    spec = Spec.parse(EXAMPLE, "spec.yaml", overrides=AXES)
    assert spec.where(("shard", "*.o_proj")) == "spec.yaml:13:3"
    assert spec.where(("shard", "*.qkv_proj.weight", 0, "sections")) == "spec.yaml:17:39"
    assert spec.where(("shard", "*.o_proj", "no", "such")) == "spec.yaml:13:3"
    assert spec.where(("experts", 0, "axis")) == "spec.yaml:45:5"
    assert spec.where(("mesh", "cp")) == "--set mesh.cp=1"
    assert spec.where(("nothing",)) == "spec.yaml:1:1"


def test_where_in_a_dict() -> None:
    spec = Spec.load({"shardc": 1, "mesh": {"tp": 2}, "shard": {"*.o_proj": "row"}}, overrides=["strict=true"])
    assert spec.where(("shard", "*.o_proj")) == 'spec: shard."*.o_proj"'
    assert spec.where(("strict",)) == "--set strict=true"
    assert spec.where(()) == "spec"
    wrong = {
        "shardc": 1,
        "mesh": {"tp": 2},
        "shard": {"*.a": {0: "tq"}},
        "experts": [{"match": "x", "axis": "tp", "capacity": 0}],
    }
    with pytest.raises(ShardcError) as e:
        Spec.load(wrong)
    assert [x.where for x in e.value.errors] == ["spec: experts[0].capacity", 'spec: shard."*.a".0']
    assert wrong["shard"] == {"*.a": {0: "tq"}}, "the caller's dict is left alone"


def test_dotted() -> None:
    assert dotted(("shard", "*.w", 0, 1, "axis")) == 'shard."*.w".0[1].axis'
    assert dotted(("experts", 1, "axis")) == "experts[1].axis"
    assert dotted(("pipeline", "balance", 2)) == "pipeline.balance[2]"


# --- mesh and overrides


@pytest.mark.parametrize(
    ("sizes", "world", "axes"),
    [
        ({"dp": -1, "tp": 2}, 8, (("dp", 4), ("tp", 2))),
        ({"dp": 2}, 2, (("dp", 2),)),
        ({"tp": -1}, 1, (("tp", 1),)),
        ({}, 1, ()),
    ],
)
def test_world(sizes: dict[str, int], world: int, axes: tuple[tuple[str, int], ...]) -> None:
    spec = Spec.load({"shardc": 1, "mesh": sizes}, world=world)
    assert spec.mesh.axes == axes
    assert Spec.parse(str(spec)) == spec


def test_mesh_sizes_are_overridden() -> None:
    text = HEAD + "shard: {a: {0: {axis: tp, sections: [6, 6]}}}\n"
    assert Spec.parse(text, mesh={"tp": 3}).mesh.axes == (("dp", 2), ("tp", 3))
    assert Spec.load(Spec.parse(text), mesh={"dp": 1, "tp": 1}).mesh.world == 1
    assert Spec.load({"shardc": 1}, mesh={"dp": 2, "tp": 2}).mesh.axes == (("dp", 2), ("tp", 2)), (
        "a spec without a mesh takes it whole"
    )
    found = errors_of(text, mesh={"tp": 4})
    assert [(e.where, e.what) for e in found] == [("spec.yaml:3:37", "the section of 6 is not divisible by tp=4")]
    found = errors_of(text, mesh={"tpp": 4, "dp": 0})
    assert [(e.where, e.what, e.fix) for e in found] == [
        ("--mesh tpp=4", "the spec's mesh has no axis 'tpp'", "did you mean 'tp'? its axes are dp, tp"),
        (
            "--mesh dp=0",
            "mesh axis 'dp' cannot have size 0",
            "sizes are at least 1; -1 is computed from the world size",
        ),
    ]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"mesh": "dp=2"}, 'mesh: mesh is .dp=2., not a mapping from axis to size\n  fix: e.g. mesh={"dp": 2}'),
        ({"mesh": 2}, "mesh is 2, not a mapping"),
        ({"world": "2"}, "world: world is .2., not the number of ranks"),
        ({"overrides": "data.zero=3"}, "overrides: overrides is .data.zero=3., not a list or tuple of texts"),
        ({"overrides": {"data.zero": 3}}, r"overrides: overrides is .*, not a list or tuple of texts"),
        ({"overrides": (3,)}, "an override is a text, not 3"),
    ],
)
def test_arguments_of_another_type(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ShardcError, match=text):
        Spec.load({"shardc": 1}, **arguments)


def test_overrides() -> None:
    spec = Spec.parse(
        HEAD + 'shard: {"*.o_proj": row, b: {0: tp}}\nexperts: [{match: a, axis: tp}]\npipeline: {axis: dp}\n',
        overrides=[
            'shard."*.o_proj"=column',
            "shard.b.0=[dp, tp]",
            "shard.'c.w'={1: tp}",
            "experts.0.capacity=1.5",
            "data.axis=dp",
            "strict=true",
            "mesh.tp=4",
            "pipeline=null",
        ],
    )
    assert [(r.pattern, r.style) for r in spec.shard] == [("*.o_proj", "column"), ("b", None), ("c.w", None)]
    assert spec.shard[1].dims == {0: (DimShard(axis="dp"), DimShard(axis="tp"))}
    assert (spec.experts[0].capacity, spec.data.axis, spec.strict, spec.mesh.size("tp"), spec.pipeline) == (
        1.5,
        ("dp",),
        True,
        4,
        None,
    )
    assert spec.where(("shard", "*.o_proj")) == '--set shard."*.o_proj"=column'


# --- files


def test_file(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + HEAD.encode() + "strict: true   # größer\r\n".encode())
    spec = Spec.load(file)
    assert spec == Spec.load(str(file))
    assert (spec.strict, spec.where(("strict",))) == (True, f"{file}:3:1")


# --- printing back


def test_prints_back() -> None:
    spec = Spec.parse(EXAMPLE, overrides=AXES)
    assert Spec.parse(str(spec)) == spec
    assert Spec.load(spec.to_dict()) == spec
    assert Spec.load(spec) == spec
    assert (
        str(Spec.load({"shardc": 1, "mesh": {"tp": 2}, "shard": {"a": "row"}, "strict": True}))
        == "shardc: 1\nmesh: {tp: 2}\n\nshard:\n  a: row\n\nstrict: true\n"
    )


WORD = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="{}:"), min_size=1, max_size=8)
ONE_AXIS = st.sampled_from(["dp", "tp"])
DIM = st.one_of(
    ONE_AXIS,
    st.builds(lambda a, n: {"axis": a, "split": n}, ONE_AXIS, st.integers(1, 9)),
    st.just(["dp", "tp"]),
    st.builds(
        lambda a, s: {"axis": a, "sections": [4 * n for n in s]},
        ONE_AXIS,
        st.lists(st.integers(1, 5), min_size=1, max_size=3),
    ),
)
DIMS = st.dictionaries(st.integers(0, 5), DIM, min_size=1, max_size=1)
STYLE = st.sampled_from(["column", "row", "vocab", "replicate"])
NUMBER = st.floats(0.0001, 1e9)
SPECS = st.fixed_dictionaries(
    {
        "shardc": st.just(1),
        "mesh": st.fixed_dictionaries({"dp": st.sampled_from([1, 2]), "tp": st.sampled_from([1, 4]), "cp": st.just(2)}),
    },
    optional={
        "batch": st.fixed_dictionaries(
            {},
            optional={
                "dims": st.dictionaries(WORD, st.none() | st.integers(0, 3), max_size=2),
                "axes": st.just(["dp"]),
            },
        ),
        "shard": st.dictionaries(
            WORD.filter(lambda w: w != "use"),
            STYLE | DIMS | st.builds(lambda s, a: {"style": s, "axis": a}, STYLE, ONE_AXIS),
            max_size=4,
        ),
        "activations": st.dictionaries(WORD | WORD.map(lambda w: w + ":in"), DIMS, max_size=3),
        "sequence": st.fixed_dictionaries(
            {"axis": st.just("cp")}, optional={"method": st.sampled_from(["ring", "gather"])}
        ),
        "data": st.fixed_dictionaries(
            {}, optional={"axis": ONE_AXIS | st.just(["dp"]), "zero": st.integers(0, 3), "bucket_mb": NUMBER}
        ),
        "experts": st.lists(
            st.fixed_dictionaries({"match": WORD, "axis": ONE_AXIS}, optional={"capacity": NUMBER | st.just("none")}),
            max_size=2,
        ),
        "checkpoint": st.lists(
            st.fixed_dictionaries({"match": WORD}, optional={"budget": st.floats(0, 1)}), max_size=2
        ),
        "precision": st.fixed_dictionaries({}, optional={"loss_scale": NUMBER | st.sampled_from(["none", "dynamic"])}),
        "strict": st.booleans(),
    },
)


@given(SPECS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_spec_prints_back(written: dict[str, Any]) -> None:
    spec = Spec.load(written)
    assert Spec.parse(str(spec)) == spec
    assert Spec.load(spec) == spec
    jsonschema.validate(json.loads(json.dumps(spec.to_dict())), Spec.json_schema())


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**17), 10**17)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT | st.integers(-99, 99), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_any_value_prints_back(value: Any) -> None:
    errors = Errors()
    assert read(flow(value), "x", errors).value == value
    assert errors.found == []


@given(st.text("shardc: 1mesh{}[]\n'\"*&!<-|,", max_size=60))
@settings(max_examples=150, deadline=None)
def test_no_text_gives_anything_but_a_spec_or_a_user_error(text: str) -> None:
    found: tuple[ShardcError, ...] = ()
    try:
        Spec.parse(text)
    except ShardcError as e:
        found = e.errors
    assert all(e.what and e.where for e in found)


@given(st.dictionaries(st.sampled_from([*Spec.json_schema()["properties"], "x"]), VALUES, max_size=5))
@settings(max_examples=150, deadline=None)
def test_no_dict_gives_anything_but_a_spec_or_a_user_error(written: dict[str, Any]) -> None:
    found: tuple[ShardcError, ...] = ()
    try:
        Spec.load({"shardc": 1, **written})
    except ShardcError as e:
        found = e.errors
    assert all(e.what and e.where for e in found)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("012", "012"),
        ("1_000", "1_000"),
        ("1.5", 1.5),
        ("1e3", 1000.0),
        ("1.0e-05", 1e-5),
        (".5", 0.5),
        ("1.", 1.0),
        ("yes", "yes"),
        ("on", "on"),
        ("true", True),
        ("False", False),
        ("~", None),
        ("null", None),
        ("none", "none"),
        ("1:30", "1:30"),
        ("2001-01-01", "2001-01-01"),
        ("0x1f", "0x1f"),
        ("9" * 5000, "9" * 5000),
        ("e3", "e3"),
        (".", "."),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    assert scalar(text) == value
    assert type(scalar(text)) is type(value)


# --- the schema for editors


def test_schema() -> None:
    schema = Spec.json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    example = json.loads(json.dumps(read(EXAMPLE, "x", Errors()).value))
    jsonschema.validate(example, schema)
    assert "2 +gradients" in schema["$defs"]["Data"]["properties"]["zero"]["description"]
    assert json.loads(json.dumps(schema)) == schema


@pytest.mark.parametrize(
    "wrong",
    [
        {"shrad": {}},
        {"data": {"zero": 4}},
        {"shard": {"a": "colum"}},
        {"shard": {"a": {"0": {"split": 3}}}},
        {"mesh": {"tp": 0}},
        {"activations": {"a": {"x": "tp"}}},
        {"experts": [{"axis": "tp"}]},
        {"shard": {"use": "modle"}},
        {"strict": "yes"},
        {"precision": {"loss_scale": "dynamc"}},
        {"batch": {"dims": {"*": -1}}},
        {"shardc": 2},
    ],
)
def test_schema_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"shardc": 1, **wrong}, Spec.json_schema())
    with pytest.raises(ShardcError):
        Spec.load({"shardc": 1, **wrong})


def test_of_mapping_copies() -> None:
    inner = {"dp": 2}
    copy = of_mapping({"mesh": inner, "axes": ("a",)})
    copy["mesh"]["dp"] = 3
    assert (inner, copy["axes"]) == ({"dp": 2}, ["a"])


def test_buckets_grow_with_the_ranks_that_sum_them_unless_the_spec_says_their_size() -> None:
    data = Spec.load({"shardc": 1, "mesh": {}}).data
    assert [data.bucket_bytes(n) / 2**20 for n in (1, 8, 128, 4096)] == [25, 25, 128, 256]
    assert Spec.load({"shardc": 1, "mesh": {}, "data": {"bucket_mb": 7}}).data.bucket_bytes(1024) == 7 * 2**20
