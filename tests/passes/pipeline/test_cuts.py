"""Where stages are cut: by cost as evenly as can be, before modules, by counts of layers; and every mistake at its line
of the spec.
"""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path

import pytest
import torch
from torch import fx, nn

import shardc
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.passes.pipeline import cuts as cutting
from shardc.passes.pipeline.cuts import Ops, even
from tests import equality, zoo
from tests.zoo import plain

SPEC = """\
shardc: 1
mesh: {{pp: {ranks}}}
pipeline:
  axis: pp
  {asked}
"""


@functools.cache
def reference(name: str) -> equality.Reference:
    build = {"gpt": lambda: zoo.gpt(layers=4), "t5": lambda: zoo.t5(layers=2), "unet": plain.ALL["unet"]}[name]
    return equality.reference(build)


def compiled(name: str, ranks: int, asked: str, folder: Path) -> Program:
    (folder / "spec.yaml").write_text(SPEC.format(ranks=ranks, asked=asked))
    one = reference(name)
    with zoo.Wide():
        return shardc.compile(one.model, one.batch, folder / "spec.yaml", captured=one.captured)


def modules(program: Program) -> list[list[str]]:
    """The modules whose ops each stage runs, in order."""
    return [
        list(dict.fromkeys(n.meta["source"].module for n in s.graph.nodes if n.op == "call_function"))
        for s in program.stages
    ]


def places(error: shardc.ShardcError) -> list[str]:
    return [e.where.rpartition("spec.yaml:")[2] for e in error.errors or [error]]


# --- by cost


def ops(work: list[float], crossing: list[int]) -> Ops:
    graph = fx.Graph()
    nodes = [graph.placeholder(f"op{i}") for i in range(len(work))]
    for n in nodes:
        n.meta["source"] = Source()
    return Ops(tuple(nodes), tuple(work), tuple(crossing))


def cost(of: Ops, cuts: tuple[int, ...]) -> float:
    bounds = [0, *cuts, len(of.work)]
    return max(*(sum(of.work[a:b]) for a, b in itertools.pairwise(bounds)), *map(of.sending, cuts), 0.0)


def test_no_cuts_are_much_better() -> None:
    """Against all cuts there are, for small random graphs: up to as many stages as ops, ops without cost, cuts over
    which much crosses.
    """
    for seed in range(400):
        draw = random.Random(seed)
        length = draw.randint(1, 9)
        n = draw.randint(1, length)
        work = [draw.choice([0.0, 0.0, 1.0, 100 * draw.random(), 1000 * draw.random()]) for _ in range(length)]
        of = ops(work, [0, *(draw.choice([0, 1, 10, draw.randint(0, 30)]) for _ in range(length - 1)), 0])
        cuts = even(of, n)
        assert len(cuts) == n - 1
        assert all(a < b for a, b in itertools.pairwise([0, *cuts, length]))
        best = min(cost(of, c) for c in itertools.combinations(range(1, length), n - 1))
        assert cost(of, tuple(cuts)) <= 1.01 * cutting.SLACK * best + 1e-9, seed


def test_of_even_cuts_the_one_over_which_little_crosses() -> None:
    crossing = [0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 2, *[8] * 9, 0]
    assert even(ops([1000.0] * 20, crossing), 2) == [10]
    crossing[10], crossing[11] = 8, 2
    assert even(ops([100.0] * 9 + [20.0, 20.0] + [100.0] * 9, crossing), 2) == [11]  # hardly less even


def test_sending_counts_where_it_takes_longer_than_the_stages() -> None:
    huge = [0, 1, 1, 1, 1, 10_000_000, 1, 1, 1, 1, 0]
    assert even(ops([1e-6] * 10, huge), 2) in ([4], [6])


def test_many_ops_and_stages_take_no_time() -> None:
    draw = random.Random(0)
    cuts = even(ops([100 * draw.random() for _ in range(3000)], [0, *(draw.randint(0, 3) for _ in range(2999)), 0]), 64)
    assert len(cuts) == 63


def gpt(vocab: int, hidden: int, layers: int) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = zoo.GPT(vocab, 256, hidden, 8, layers, 0.0)
        model.head.weight = model.wte.weight
        ids = torch.zeros(16, 256, dtype=torch.long)
    return model, {"ids": ids, "targets": ids.clone()}


@pytest.mark.parametrize("stages", [2, 4])
def test_a_large_embedding_and_head_weigh_as_much_as_layers(stages: int) -> None:
    """8 layers over 4 stages, a vocabulary that costs some layers: the first and last stage have fewer of them."""
    spec = {"shardc": 1, "mesh": {"pp": stages}, "pipeline": {"axis": "pp"}, "batch": {"microbatches": 8}}
    program = shardc.compile(*gpt(16384, 512, 8), spec, prove=False)
    costs = [
        sum(Ops.of([n for n in s.graph.nodes if n.op == "call_function"], program.mesh, 8).work) for s in program.stages
    ]
    assert max(costs) <= 1.2 * sum(costs) / stages  # a layer is 0.4 of a stage
    layers = [sum(f"h.{i}" in each for i in range(8)) for each in modules(program)]
    assert layers[-1] < max(layers)
    assert all(len(e.names) == 1 for e in program.edges)  # the residual, between its sums
    assert [(e.source, e.target) for e in program.edges] == [(i, i + 1) for i in range(stages - 1)]


def test_equal_cuts_are_between_modules(tmp_path: Path) -> None:
    assert [[m for m in each if m.endswith("ln_1")] for each in modules(compiled("gpt", 2, "stages: 2", tmp_path))] == [
        ["h.0.ln_1", "h.1.ln_1"],
        ["h.2.ln_1", "h.3.ln_1"],
    ]


def test_no_stage_is_empty(tmp_path: Path) -> None:
    program = compiled("gpt", 8, "stages: 32", tmp_path)
    assert len(program.stages) == 32
    assert all(any(n.op == "call_function" for n in s.graph.nodes) for s in program.stages)


# --- before modules


def test_before_modules(tmp_path: Path) -> None:
    program = compiled("gpt", 4, "cut: [h.0, h.3, ln_f]", tmp_path)
    first, second, third, last = modules(program)
    assert first == ["wte", "", "wpe"]
    assert {m.split(".")[1] for m in second if m} == {"0", "1", "2"}
    assert {m.split(".")[1] for m in third if m} == {"3"}
    assert last[0] == "ln_f"
    assert 'f64[8, 16, 64] grad | send_recv/send_recv pp 65536 "spec.yaml:3:1 pipeline"' in str(program).replace(
        str(tmp_path) + "/", ""
    )


def test_encoder_and_decoder(tmp_path: Path) -> None:
    """T5: the decoder's stages get the encoder's result, each from the stage that made it; masks and biases are made
    again.
    """
    program = compiled("t5", 4, "cut: [encoder.block.1, decoder, decoder.block.1]", tmp_path)
    assert [(e.source, e.target, len(e.names)) for e in program.edges] == [(0, 1, 1), (1, 2, 1), (1, 3, 1), (2, 3, 1)]
    for stage in program.stages[1:3]:
        assert all("relative_attention_bias" in name or "shared" in name for name in _shared(program, stage.takes))


def _shared(program: Program, names: tuple[str, ...]) -> list[str]:
    return [p.fqn for p in program.params if p.name in names and len(p.stages) > 1]


@pytest.mark.parametrize(
    ("asked", "ranks", "expected"),
    [
        ("cut: [h2]", 2, [("5:9", "no op of the model runs in a module 'h2'", "did you mean 'h.2'?")]),
        ("cut: [wte]", 2, [("5:9", "'wte' runs first: the stage before it would be empty", "a later module")]),
        ("cut: [h.2, h.1, h.3]", 4, [("5:14", "'h.1' begins before 'h.2' does", "in the order in which they run")]),
        ("cut: [h.1, h.2, h.2]", 4, [("5:19", "'h.2' is listed twice: the stage between would be empty", "remove it")]),
        (
            "cut: [h.1, h.2, h.2.ln_1]",
            4,
            [("5:19", "'h.2.ln_1' begins where 'h.2' does: the stage between would be empty", "a later module")],
        ),
        (
            "cut: [nope, wte, x]",
            4,
            [
                ("5:9", "in a module 'nope'", "as model.named_modules() does"),
                ("5:15", "'wte' runs first", ""),
                ("5:20", "in a module 'x'", ""),
            ],
        ),
        ("cut: [h.1, h.2]", 2, [("5:8", "3 stages do not spread evenly over pp=2", "make it 2 or 4 stages")]),
        (
            "balance: [2, 3]",
            2,
            [("5:3", "balance counts 5 layers, and the model has h (4)", "make the counts add up to 4")],
        ),
        ("balance: [1, 1, 2]", 4, [("5:12", "3 stages do not spread evenly over pp=4", "make it 4 stages")]),
        (
            "stages: 256",
            2,
            [
                (
                    "5:3",
                    "256 stages, and the model has only 84 ops that depend on its input and its weights",
                    "at most 84 stages",
                )
            ],
        ),
        ("stages: 3", 2, [("5:11", "3 stages do not spread evenly over pp=2", "make it 2 or 4 stages")]),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_mistakes(asked: str, ranks: int, expected: list[tuple[str, str, str]], tmp_path: Path) -> None:
    with pytest.raises(shardc.ShardcError) as e:
        compiled("gpt", ranks, asked, tmp_path)
    found = e.value.errors or [e.value]
    assert places(e.value) == [place for place, _, _ in expected]
    for error, (_, what, fix) in zip(found, expected, strict=True):
        assert what in error.what
        assert fix in (error.fix or "")


# --- by counts


def test_counts_of_layers(tmp_path: Path) -> None:
    layers = [
        {m.split(".")[1] for m in each if m.startswith("h.")}
        for each in modules(compiled("gpt", 2, "balance: [1, 3]", tmp_path))
    ]
    assert layers == [{"0"}, {"1", "2", "3"}]


def test_counts_over_encoder_and_decoder(tmp_path: Path) -> None:
    """All layers count, in the order in which they run; the embedding between belongs to the stage before."""
    first, last = modules(compiled("t5", 2, "balance: [3, 1]", tmp_path))
    assert "decoder.block.0.layer.2.DenseReluDense.wo" in first
    assert not any(m.startswith("encoder") for m in last)
    assert any(m.startswith("decoder.block.1") for m in last)


def test_counts_that_fit_two_lists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        shardc.ShardcError, match=r"balance counts 2 layers, and the model has encoder.block \(2\), decoder.block \(2\)"
    ) as e:
        compiled("t5", 2, "balance: [1, 1]", tmp_path)
    assert e.value.fix == "make the counts add up to 4"


def test_a_model_without_layers(tmp_path: Path) -> None:
    model, batch = zoo.mlp()
    spec = {"shardc": 1, "mesh": {"pp": 2}, "pipeline": {"axis": "pp", "balance": [1, 1]}}
    with pytest.raises(shardc.ShardcError, match="the model has no lists of layers") as e:
        shardc.compile(model, batch, spec)
    assert e.value.fix == "write stages: N, or cut: [modules]"


def test_skips_cross_each_from_where_it_is_made(tmp_path: Path) -> None:
    """A U-Net: what the way down keeps goes straight to the stage of the way up that takes it."""
    program = compiled("unet", 4, "cut: [pool1, middle, out2]", tmp_path)
    edges = {(e.source, e.target): e for e in program.edges}
    assert set(edges) >= {(0, 1), (1, 2), (2, 3), (0, 3)}
    assert (8, 8, 8, 8) in {v.shape for v in edges[0, 3].values}  # the outermost skip
