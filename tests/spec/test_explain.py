"""shardc/spec/explain.py and spec_check.py: what is said about a wrong spec: where, what and fix, every mistake once
and at once.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.spec import Spec
from shardc.spec.foreign_words import KEYS, VALUES, ours
from shardc.spec.precision_section import DTYPES
from shardc.spec.schema import Form
from shardc.spec.shard_section import STYLES
from tests.spec.test_spec import HEAD, errors_of

# --- wrong specs: (text, where, part of what, part of fix); after HEAD they go on in line 3

WHOLE = [  # the whole text
    ("", "1:1", "`shardc` is missing", "write `shardc: 1`"),
    ("mesh: {tp: 2}\n", "1:1", "`shardc` is missing", "first line"),
    ("- a\n", "1:1", "a mapping of sections, not a list", "begin with `shardc: 1`"),
    ("shardc 1\n", "1:1", "not 'shardc 1'", "begin with"),
    ("shardc: 2\n", "1:9", "version 1 of the format, not 2", "write shardc: 1"),
    ("shardc: '1'\n", "1:9", "not '1'", "write shardc: 1"),
    ("shardc: true\n", "1:9", "not true", "write shardc: 1"),
    ("shardc: 1\nmesh: 4\n", "2:7", "`mesh` must be a mapping, not 4", "`mesh: {dp: 2}`"),
    ("shardc: 1\nmesh: {tp: two}\n", "2:12", "`mesh.tp` must be a whole number, not 'two'", "`mesh: {dp: 2}`"),
    ("shardc: 1\nmesh: {tp: 2.0}\n", "2:12", "must be a whole number, not 2.0", "`mesh: {dp: 2}`"),
    ("shardc: 1\nmesh: {tp: 0}\n", "2:12", "mesh axis 'tp' cannot have size 0", "sizes are at least 1"),
    (
        "shardc: 1\nmesh: {dp: -1, tp: -1}\n",
        "2:20",
        "only one size may be -1, and 'dp' is already",
        "write the size of tp",
    ),
    ("shardc: 1\nmesh: {dp: -1, tp: 2}\n", "2:12", "the world size, which is not known here", "--nproc N"),
    ("shardc: 1\nmesh: {t-p: 2}\n", "2:8", "'t-p' is not a valid axis name", "letters, digits and _"),
    ("shardc: 1\nmesh: {3: 2}\n", "2:8", "`mesh.3`: a name is text, not 3", "quote it"),
    ("shardc: 1\nmesh: {tp: 2, tp: 4}\n", "2:15", "duplicate key 'tp'", "the first is in line 2"),
    ("shardc: 1\nshard:\n  '*.a': row\n", "3:10", "`row` splits over the axis 'tp', which the mesh", "mesh: {tp: N}"),
    (
        "shardc: 1\nmesh: {dp: 2}\nshard: {use: model}\n",
        "3:14",
        "`use: model` splits over the axis 'tp'",
        "write mesh: {dp: 2, tp: N}",
    ),
    (
        "shardc: 1\nmesh: {mp: 2}\nshard: {a: row, b: column, c: vocab}\n",
        "3:12",
        "(and so do 2 more rules)",
        "{style: row, axis: mp}",
    ),
    ("shardc: 1\nstrict: true\n---\nshardc: 1\n", "3:1", "here a second one begins", "in its own file"),
]
SECTIONS = [  # after HEAD
    ("shrad: {}\n", "3:1", "unknown section 'shrad'", "did you mean 'shard'?"),
    ("qqq: {}\n", "3:1", "unknown section 'qqq'", "one of shardc, mesh, device, batch"),
    (
        "data: {zeor: 1}\n",
        "3:8",
        "unknown key 'zeor' in `data`",
        "did you mean 'zero'? (axis, zero, bucket_mb, prefetch, keep, offload)",
    ),
    ("data: 3\n", "3:7", "`data` must be a mapping, not 3", "`data: {zero: 2}`"),
    ("data: {zero: two}\n", "3:14", "`data.zero` must be a whole number, not 'two'", "`zero: 2`"),
    ("data: {zero: '0'}\n", "3:14", "must be a whole number, not '0'", "write 0 without quotes"),
    ("data: {zero: true}\n", "3:14", "must be a whole number, not true", "`zero: 2`"),
    ("data: {zero: 4}\n", "3:14", "must be at most 3, not 4", "`zero: 2`"),
    ("data: {bucket_mb: 0}\n", "3:19", "must be a number above 0, not 0", "`bucket_mb: 25`"),
    ("data: {offload: cpu}\n", "3:17", "must be a mapping, not 'cpu'", "`offload: {optimizer: cpu}`"),
    (
        "data: {zero: 2, offload: {parameters: cpu}}\n",
        "3:39",
        "offloaded at zero: 3 only; this spec has zero: 2",
        "write zero: 3, or",
    ),
    (
        "data: {offload: {optimizer: gpu}}\n",
        "3:29",
        "unknown place 'gpu'",
        "did you mean 'cpu'? (none, cpu, or a directory",
    ),
    ("data: {axis: dpp}\n", "3:14", "the mesh has no axis 'dpp'", "did you mean 'dp'?"),
    ("data: {axis: [dp, dp]}\n", "3:19", "axis 'dp' is listed twice", "list it once"),
    ("data: {axis: 3}\n", "3:14", "`data.axis` must be a list, not 3", "`axis: dp`"),
    ("strict: yes\n", "3:9", "`strict` must be true or false, not 'yes'", "write true"),
    ("unknown_ops: ignore\n", "3:14", "unknown value 'ignore' for `unknown_ops`", "one of error, replicate"),
    ("batch_norm: Sync\n", "3:13", "unknown value 'Sync' for `batch_norm`", "did you mean 'sync'?"),
    ("batch: {dims: {'*': -1}}\n", "3:21", "must be at least 0, not -1", '`dims: {"*": 0}`'),
    ("batch: {dims: 0}\n", "3:15", "`batch.dims` must be a mapping, not 0", '`dims: {"*": 0}`'),
    ("batch: {axes: [dq]}\n", "3:16", "the mesh has no axis 'dq'", "the mesh's axes are dp, tp"),
    ("batch: {microbatches: 0}\n", "3:23", "must be at least 1, not 0", "`microbatches: 8`"),
    ("batch: {dims: {'{a': 0}}\n", "3:16", "the pattern '{a' has braces that do not pair up", '"*.{q,k,v}_proj"'),
    ("shard: column\n", "3:8", "`shard` must be a mapping from pattern to style or dims", '"*.o_proj": row'),
    ("shard:\n  0: row\n", "4:3", "`shard.0`: a name is text, not 0", "quote it"),
    ("shard:\n  '': row\n", "4:3", "the pattern '' is empty", '"*.{q,k,v}_proj"'),
    ("shard:\n  a: colum\n", "4:6", "unknown style 'colum'", "did you mean 'column'?"),
    ("shard:\n  a: 3\n", "4:6", "`shard.a` must be a style (column, row, vocab, replicate) or", "{0: tp}"),
    ("shard:\n  a:\n", "4:5", "or a mapping from dim to axis, not nothing", "{0: tp}"),
    ("shard:\n  a: {style: row, axs: tp}\n", "4:19", "unknown key 'axs' in `shard.a`", "did you mean 'axis'?"),
    ("shard:\n  a: {styl: row}\n", "4:7", "unknown key 'styl'", "did you mean 'style'?"),
    ("shard:\n  a: {axis: tp}\n", "4:6", "names neither a style nor a dim", "{style: column, axis: tp}"),
    ("shard:\n  a: {style: row, axis: tpp}\n", "4:25", "the mesh has no axis 'tpp'", "did you mean 'tp'?"),
    ("shard:\n  a: {0: tp, style: row}\n", "4:6", "mixes dims and words", "{0: {axis: tp, split: 3}}"),
    ("shard:\n  a: {}\n", "4:6", "`shard.a` names no dim", "{0: tp}"),
    ("shard:\n  a: {0: []}\n", "4:10", "must be an axis, a list of axes or a mapping with `axis`", "{0: tp}"),
    ("shard:\n  a: {0: tq}\n", "4:10", "the mesh has no axis 'tq'", "the mesh's axes are dp, tp"),
    ("shard:\n  a: {0: [dp, tq]}\n", "4:15", "the mesh has no axis 'tq'", "the mesh's axes are dp, tp"),
    ("shard:\n  a: {-1: tp}\n", "4:7", "dims count from 0, so -1 is not a dim", "use a dim >= 0"),
    ("shard:\n  a: {'0': tp}\n", "4:7", "a dim is a whole number, not '0'", "write 0 without quotes"),
    ("shard:\n  a: {0: tp, 1: tp}\n", "4:14", "axis 'tp' splits dim 0 and dim 1 of one tensor", "one dim, once"),
    ("shard:\n  a: {0: tp, 0: dp}\n", "4:14", "duplicate key 0", "the first is in line 4"),
    ("shard:\n  a: {0: [tp, tp]}\n", "4:7", "axis 'tp' splits dim 0 twice", "one dim, once"),
    ("shard:\n  a: {0: {split: 3}}\n", "4:7", "`shard.a.0` needs `axis`", "`axis: tp`"),
    ("shard:\n  a: {0: {axis: tp, split: 0}}\n", "4:28", "must be at least 1, not 0", "`split: 3`"),
    (
        "shard:\n  a: {0: {axis: tp, sections: [4, 3]}}\n",
        "4:31",
        "the section of 3 is not divisible by tp=2",
        "tp=1, or change the sections",
    ),
    ("shard:\n  a: {0: {axis: tp, sections: [4, x]}}\n", "4:35", "must be a whole number, not 'x'", "sections: [512"),
    (
        "shard:\n  a: {0: {axis: tp, sections: [4, 4], split: 2}}\n",
        "4:7",
        "both split and sections",
        "for unequal ones",
    ),
    (
        "shard:\n  a: {0: [dp, {axis: tp, sections: [4, 4]}]}\n",
        "4:7",
        "split twice, and once by sections",
        "over one axis only",
    ),
    ("shard: {use: modle}\n", "3:14", "unknown plan 'modle'", "did you mean 'model'?"),
    ("shard: {use: {plan: modle}}\n", "3:21", "unknown plan 'modle'", "did you mean 'model'?"),
    ("shard: {use: {plan: model, axis: tq}}\n", "3:34", "the mesh has no axis 'tq'", "the mesh's axes are dp, tp"),
    ("shard: {use: {axis: tp}}\n", "3:9", "`shard.use` needs `plan`", "`plan: model`"),
    ("shard: {use: 3}\n", "3:14", "`shard.use` must be a plan (model, structure), not 3", "{plan: model, axis: tp}"),
    ("activations:\n  'a:out': {1: tp}\n", "4:3", "unknown side ':out' of a module", '"a:in" its input'),
    ("activations:\n  a: tp\n", "4:6", "`activations.a` must be a mapping from dim to axis", "{1: tp}"),
    ("activations:\n  a: {1: tpp}\n", "4:10", "the mesh has no axis 'tpp'", "did you mean 'tp'?"),
    (
        "sequence: {axis: tp, method: rign}\n",
        "3:30",
        "unknown value 'rign' for `sequence.method`",
        "did you mean 'ring'?",
    ),
    ("sequence: {method: ring}\n", "3:1", "`sequence` needs `axis`", "`axis: cp`"),
    ("sequence: {axsi: tp}\n", "3:12", "unknown key 'axsi' in `sequence`", "did you mean 'axis'?"),
    ("sequence: {axis: dp}\n", "3:18", "axis 'dp' already splits the batch", "its own axis"),
    ("pipeline: {axis: tp, schedule: 1f1c}\n", "3:32", "unknown schedule '1f1c'", "did you mean '1f1b'?"),
    ("pipeline: {axis: tp, stages: 3}\n", "3:30", "3 stages do not spread evenly over tp=2", "make it 2 or 4 stages"),
    ("pipeline: {axis: tp, cut: [a, b]}\n", "3:27", "3 stages do not spread", "make it 2 or 4 stages"),
    ("pipeline: {axis: tp, stages: 2, cut: [a]}\n", "3:33", "`stages` and `cut` both say where to cut", "keep one"),
    ("pipeline: {axis: tp, balance: [1, 0]}\n", "3:35", "must be at least 1, not 0", "`balance: [2, 2, 3, 1]`"),
    ("pipeline: {axis: tp}\nactivations:\n  a: {0: tp}\n", "5:10", "axis 'tp' is the pipeline's", "its own axis"),
    ("experts: {match: a}\n", "3:10", "`experts` must be a list, not a mapping", '`experts: [{match: "*.mlp.experts"'),
    ("experts:\n  - {match: a, axis: ep}\n", "4:22", "the mesh has no axis 'ep'", "the mesh's axes are dp, tp"),
    ("experts:\n  - {axis: tp}\n", "4:5", "`experts[0]` needs `match`", '`match: "*.mlp.experts"`'),
    (
        "experts:\n  - {match: a, axis: tp, capacity: nnoe}\n",
        "4:36",
        "unknown value 'nnoe'",
        "'none'? (none, or a number)",
    ),
    ("checkpoint:\n  - {match: a, save: [linaer]}\n", "4:23", "unknown value 'linaer'", "did you mean 'linear'?"),
    ("checkpoint:\n  - {match: a, budget: 2}\n", "4:24", "must be at most 1, not 2", "`budget: 0.5`"),
    (
        "checkpoint:\n  - {match: a, budget: 0.5, save: []}\n",
        "4:16",
        "`save` and `budget` both say what is kept",
        "keep one",
    ),
    ("run: {steps: -1}\n", "3:14", "`run.steps` must be at least 0, not -1", "e.g. `steps: 100`"),
    (
        "shard: {up.weight: {rows: tp}}\n",
        "3:20",
        "names neither a style nor a dim",
        "dims are numbers: {0: tp} splits dim 0",
    ),
    ("checkpoint:\n  - {match: a, offload: disk}\n", "4:25", "unknown value 'disk'", "one of none, cpu"),
    (
        "precision: {compute: bf16}\n",
        "3:22",
        "unknown value 'bf16' for `precision.compute`",
        "did you mean 'bfloat16'?",
    ),
    ("precision: {loss_scale: dynamc}\n", "3:25", "unknown value 'dynamc'", "'dynamic'? (none, dynamic, or a number)"),
    ("data: {}\ndata: {}\n", "4:1", "duplicate key 'data'", "the first is in line 3"),
    ("data: &d {}\n", "3:7", "YAML anchors are not allowed: &d", "write the value out"),
    ("data: *d\n", "3:7", "YAML aliases are not allowed: *d", "write the value out"),
    ("shard:\n  *proj : row\n", "4:3", "YAML aliases are not allowed: *proj", '"*proj"'),
    ("<<: {strict: true}\n", "3:1", "YAML merge keys (<<) are not allowed", "write the entries out"),
    (
        "strict: !!python/name:os.system x\n",
        "3:9",
        "YAML tags are not allowed: !!python/name:os.system",
        "delete the tag",
    ),
    ("shard:\n  ~: row\n", "4:3", "a key is text or a whole number, not nothing", "quote it"),
    ("shard:\n  {q,k}_proj: row\n", "4:3", "a key is text or a whole number, not a mapping", "quote the pattern"),
    ("shard:\n  *.o_proj: row\n", "4:4", "this is not YAML", 'quote the pattern: "*.o_proj"'),
    ("shard:\n\ta: row\n", "4:1", "this is not YAML: found character '\\t'", "indent with spaces, not tabs"),
    ("data: zero: 1\n", "3:11", "this is not YAML: mapping values are not allowed here", "quote text"),
    (
        "batch: {axes: [dp\nstrict: true\n",
        "4:7",
        "(while parsing a flow sequence in line 3)",
        "close what line 3 opens, with ']'",
    ),
    ("strict: \x01\n", "3:9", "the character U+0001 is not allowed", "save the file as UTF-8"),
    ("data: " + "[" * 60 + "]" * 60 + "\n", "3:39", "nested more than 32 deep", "no section of a spec nests so deep"),
]
WRONG = WHOLE + [(HEAD + text, *rest) for text, *rest in SECTIONS]


@pytest.mark.parametrize(("text", "place", "what", "fix"), WRONG, ids=[w[2][:40] for w in WRONG])
def test_wrong(text: str, place: str, what: str, fix: str) -> None:
    found = errors_of(text)
    assert len(found) == 1, [str(e) for e in found]
    assert found[0].where == f"spec.yaml:{place}"
    assert what in found[0].what
    assert fix in found[0].fix
    # the same mistake in a file of a real path
    assert str(found[0]).startswith(f"spec.yaml:{place}: ")


def test_every_mistake_at_once_in_the_order_of_the_file() -> None:
    text = """\
shardc: 1
mesh: {dp: 2, tp: 0}
shard:
  "*.a": colum
  "*.b": {0: tq}
  "*.b": row
  "*.c": row
data: {zero: 1, zeor: 2}
stricct: true
pipeline: {axis: pp, stages: two}
"""
    found = errors_of(text)
    assert [(e.where.removeprefix("spec.yaml:"), e.what) for e in found] == [
        ("2:19", "mesh axis 'tp' cannot have size 0"),
        ("4:10", "unknown style 'colum'"),
        ("5:14", "the mesh has no axis 'tq'"),
        ("6:3", "duplicate key '*.b'"),
        ("8:17", "unknown key 'zeor' in `data`"),
        ("9:1", "unknown section 'stricct'"),
        ("10:18", "the mesh has no axis 'pp'"),
        ("10:30", "`pipeline.stages` must be a whole number, not 'two'"),
    ]


def test_one_mistake_is_said_once() -> None:
    """What follows from a mistake is no mistake of its own: a wrong mesh does not make every axis unknown."""
    text = "shardc: 1\nmesh: {dp: 2, tp: x}\nshard: {a: {0: {axis: tp, sections: [3]}}}\nbatch: {axes: [dp]}\n"
    assert [e.where for e in errors_of(text)] == ["spec.yaml:2:19"]
    text = "shardc: 1\nmesh: *m\nshard: {a: row}\nbatch: {axes: [dp]}\n"
    assert [e.where for e in errors_of(text)] == ["spec.yaml:2:7"]


# --- mesh, overrides, files


@pytest.mark.parametrize(
    ("sizes", "world", "what", "fix"),
    [
        (
            "{dp: -1, tp: 4}",
            6,
            r"a world of 6 ranks is not divisible by the mesh's other sizes \(4\)",
            "run 4 or 8 ranks",
        ),
        (
            "{dp: 2, tp: 2}",
            8,
            r"the mesh has 4 ranks \(dp=2 × tp=2\), and the world has 8",
            "run 4 ranks, or write --mesh dp=4",
        ),
        ("{tp: 3}", 4, "the mesh has 3 ranks", "run 3 ranks, or write --mesh tp=4"),
    ],
)
def test_world_that_does_not_fit(sizes: str, world: int, what: str, fix: str) -> None:
    found = errors_of(f"shardc: 1\nmesh: {sizes}\n", world=world)
    assert len(found) == 1
    assert found[0].where.startswith("spec.yaml:2:")
    assert re.match(what, found[0].what)
    assert found[0].fix.startswith(fix)


@pytest.mark.parametrize(
    ("setting", "what", "fix"),
    [
        ("data.zero", "cannot read this override", "write section.key=value"),
        ("=3", "cannot read this override", "write section.key=value"),
        ("data.=3", "cannot read this override", "write section.key=value"),
        ("shard.*.o_proj=row", "cannot read this override", 'quote patterns: shard."*.o_proj"=row'),
        ("data.zero=4", "`data.zero` must be at most 3, not 4", "e.g. `zero: 2`"),
        ("data.zeor=1", "unknown key 'zeor' in `data`", "did you mean 'zero'?"),
        ("dta.zero=1", "unknown section 'dta'", "did you mean 'data'?"),
        ("data.zero.x=1", "data.zero is 0, which cannot contain 'x'", "set data.zero itself"),
        ("experts.3.axis=tp", "experts is a list of 1 without an item 3", "use an index from 0 to 0"),
        ("batch.axes=[dp", "this is not YAML", "write `name: value`"),
        ("batch.axes=[dq]", "the mesh has no axis 'dq'", "the mesh's axes are dp, tp"),
        ("mesh.tp=0", "mesh axis 'tp' cannot have size 0", "sizes are at least 1"),
        ("data=*x", "YAML aliases are not allowed", "write the value out"),
    ],
)
def test_wrong_override(setting: str, what: str, fix: str) -> None:
    text = HEAD + "data: {zero: 0}\n" + ("experts: [{match: a, axis: tp}]\n" if "experts" in setting else "")
    found = errors_of(text, overrides=[setting])
    assert len(found) == 1
    assert found[0].where == f"--set {setting}"
    assert what in found[0].what
    assert fix in found[0].fix


@pytest.mark.parametrize("keys", [33, 2_000])
def test_an_override_that_nests_without_end(keys: int) -> None:
    found = errors_of(HEAD, overrides=["a" + ".a" * (keys - 1) + "=1"])
    assert [e.what for e in found] == [f"a path of {keys} keys: no more than 32 are allowed"]
    assert found[0].where.startswith("--set a.a.a")
    assert len(found[0].where) <= 210


def test_wrong_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_bytes(HEAD.encode() + b"# \xff\n")
    with pytest.raises(ShardcError, match="the spec is not UTF-8 text") as e:
        Spec.load(file)
    assert (e.value.where, e.value.fix) == (f"{file}:3:3", "save it as UTF-8")
    with pytest.raises(ShardcError, match="this spec file does not exist") as e:
        Spec.load(tmp_path / "spce.yaml")
    assert e.value.fix == f"did you mean {str(file)!r}?"
    with pytest.raises(ShardcError, match="this is a folder, not the path of a spec") as e:
        Spec.load(tmp_path)
    assert e.value.fix == f"give a file, such as {str(file)!r}"
    (tmp_path / "manifest.json").touch()
    with pytest.raises(ShardcError, match=r"fix: a compiled folder is already a program: shardc.load\("):
        Spec.load(tmp_path)
    with pytest.raises(ShardcError, match="a spec is a path, a dict or a Spec, not a int"):
        Spec.load(3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("shard: {a: colwise}\n", "did you mean 'column'?"),
        ("shard: {a: RowwiseParallel}\n", "did you mean 'row'?"),
        ("shard: {a: VocabParallelEmbedding}\n", "did you mean 'vocab'?"),
        ("shard: {a: sequence_parallel}\n", "activations:"),
        ("sequence_parallel: true\n", "activations:"),
        ("precision: {compute: float8}\n", "`precision: {products: fp8-rowwise}`"),
        ("precision: {products: tensorwise}\n", "fp8-tensorwise"),
        ("fp8: {enabled: true}\n", "`precision: {products: fp8-rowwise}`"),
        ("precision: {compute: bf16}\n", "did you mean 'bfloat16'?"),
        ("fp16: {enabled: true}\n", "precision:"),
        ("zero_optimization: {stage: 3}\n", "`data: {zero: N}`"),
        ("fsdp: full_shard\n", "`data: {zero: 3}`"),
        ("tensor_model_parallel_size: 2\n", "`mesh: {tp: N}`"),
        ("pipeline_parallel_degree: 2\n", "`pipeline: {axis: pp, stages: N}`"),
        ("gradient_accumulation_steps: 2\n", "`batch: {microbatches: N}`"),
        ("activation_checkpointing: full\n", "`checkpoint:"),
        ("pipeline: {axis: dp, schedule: ZBVZeroBubble}\n", "did you mean 'zb-v'?"),
        ("data: {stage: 3}\n", "`data: {zero: N}`"),
        ("data: {microbatches: 3}\n", "it is a key of `batch`"),
        ("zero: 3\n", "it is a key of `data`"),
    ],
)
def test_words_of_other_libraries_get_a_hint_at_ours(text: str, fix: str) -> None:
    assert fix in errors_of(HEAD + text)[0].fix


def test_the_table_of_others_words_names_ours() -> None:
    """No word of ours is in it as a foreign one, and what it says is ours can be read."""
    for key, table in ((True, KEYS), (False, VALUES)):
        for words in table:
            assert all(ours(word.strip().replace(" ", "_"), key=key) for word in words.split(","))
    assert not any(ours(name, key=True) for name in Form.model_fields if name not in ("precision",))
    assert not any(ours(word, key=False) for word in (*STYLES, *DTYPES) if word not in ("float32", "float16"))


class Wrapped(nn.Module):
    """A layer that an adapter is around, as peft makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.base_layer, self.lora_A = nn.Linear(8, 8), nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_A(x).sum()


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"q_proj": Wrapped(), "k_proj": nn.Linear(8, 8), "o_proj": nn.Linear(8, 8)}) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer["o_proj"](layer["q_proj"](x) * layer["k_proj"](x))  # type: ignore[index]
        return x.sum()


def test_an_alternative_that_matches_nothing_is_noted() -> None:
    """Of a wrapper the layer in it is named: it is a module, but has no weight of its own."""
    batch, head = {"x": torch.ones(4, 8)}, {"shardc": 1, "mesh": {"tp": 2}}
    both = shardc.compile(Adapted(), batch, {**head, "shard": {"*.{q,k,w}_proj": "column"}})
    first, second = [n for n in both.notes if "alternative" in n]
    assert "of '*.{q,k,w}_proj' the alternative '*.q_proj' matches layers.0.q_proj, which has no weight itself" in first
    assert first.endswith("name the layer in it: '*.q_proj.base_layer'")
    assert "the alternative '*.w_proj' matches no parameter and no module of the model" in second
    with pytest.raises(ShardcError) as e:
        shardc.compile(Adapted(), batch, {**head, "shard": {"*.q_proj": "column"}})
    assert e.value.what == "pattern '*.q_proj' matches layers.0.q_proj, which has no weight itself"
    assert e.value.fix == "name the layer in it: '*.q_proj.base_layer'"


def test_patterns_that_match_nothing_are_told_with_the_mistakes_of_a_spec() -> None:
    spec = {
        "shardc": 1,
        "mesh": {"tp": 2},
        "foo": 1,
        "data": {"zero": 5},
        "shard": {"*.k_prj": "column", "*.o_proj": "row"},
        "activations": {"layer.*:in": {1: "tp"}},
        "checkpoint": [{"match": "blocks.*"}],
        "experts": [{"match": "*.experts", "axis": "tp"}],
    }
    with pytest.raises(ShardcError) as e:
        shardc.compile(Adapted(), {"x": torch.ones(4, 8)}, spec)
    told = [x.what for x in e.value.errors]
    assert {w for w in told if not w.startswith("pattern")} == {
        "unknown section 'foo'",
        "`data.zero` must be at most 3, not 5",
    }
    assert [w for w in told if w.startswith("pattern")] == [
        "pattern '*.k_prj' matches no parameter and no module of the model",
        "pattern 'layer.*' matches no module of the model",
        "pattern '*.experts' matches no module of the model",
        "pattern 'blocks.*' matches no module of the model",
    ]
