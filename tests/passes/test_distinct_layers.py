"""Passes run on a few of many equal layers, and the program is the same to the letter as if they had run on all."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.capture import capture, run_of_layers
from shardc.ir.deferred_graph import fewer_layers, is_written
from shardc.ir.layers import layer_of
from shardc.ir.program import Program
from shardc.passes import distinct_layers
from shardc.passes.distinct_layers import cut, restore
from shardc.passes.distinct_layers.numbering import Numbering
from shardc.passes.distinct_layers.twins import UnlikeError
from shardc.passes.place import Place
from tests import zoo
from tests.equality import assert_equal, reference
from tests.zoo import hf

X = {"x": torch.linspace(-1, 1, 32).view(4, 8)}
SPLIT = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}


class Block(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Stack(nn.Module):
    """Of blocks, of these widths. summed: the head takes what every block gives."""

    def __init__(self, *widths: int, summed: bool = False) -> None:
        super().__init__()
        self.h, self.head, self.summed = nn.ModuleList(map(Block, widths)), nn.Linear(8, 4), summed

    def forward(self, x: Tensor) -> Tensor:
        each = [x]
        for block in self.h:
            each.append(block(each[-1]))
        return self.head(sum(each) if self.summed else each[-1]).square().mean()


def everything(program: Program) -> list[Any]:
    """All that a program says of itself, and all that its graphs' nodes do."""
    nodes = [
        (n.name, str(n.args), str(n.kwargs), n.meta, getattr(n.meta.get("source"), "calls", ()))
        for graph in (program.graph, *(s.graph for s in program.stages))
        for n in graph.nodes
    ]
    said = program.notes, program.params, program.buffers, program.inputs, program.outputs, program.buckets
    return [program.text(full=True), *said, program.meta.get("shard"), nodes]


def compared(model: nn.Module, batch: Any, spec: dict[str, Any]) -> bool:
    """Did the passes run on fewer layers? The program is that of passes which ran on all."""
    captured, spec = capture(model, batch, prove=False), {"shardc": 1, **spec}
    with mock.patch.object(distinct_layers, "restored", wraps=distinct_layers.restored) as restored:
        results = []
        with mock.patch.object(Place, "run", autospec=True, side_effect=Place.run) as place:
            program = shardc.compile(model, batch, spec, captured=captured, prove=False)
            results = [len(call.args[1].graph.nodes) for call in place.call_args_list]
    with mock.patch.object(distinct_layers, "cuts", return_value=()):
        whole = shardc.compile(model, batch, spec, captured=captured, prove=False)
    assert everything(program) == everything(whole)
    once = restored.called and len(results) == 1
    assert not once or results[0] < len(whole.graph.nodes)
    return once


SPECS: dict[str, dict[str, Any]] = {
    "microbatches": {**SPLIT, "batch": {"microbatches": 2}},
    "bfloat16, zero 3": {**SPLIT, "data": {"zero": 3, "bucket_mb": 0.01}, "precision": {"compute": "bfloat16"}},
    "sequence, recomputed": {
        **SPLIT,
        "sequence": {"axis": "tp"},
        "checkpoint": [{"match": "h.*", "recompute": "cheap"}],
    },
    "pipeline": {
        **SPLIT,
        "mesh": {"pp": 2, "tp": 2},
        "batch": {"microbatches": 2},
        "pipeline": {"axis": "pp", "stages": 4, "schedule": "interleaved"},
    },
}


@pytest.mark.parametrize("spec", SPECS)
def test_the_program_is_that_of_passes_on_all_layers(spec: str) -> None:
    model, batch = zoo.gpt(layers=9, dropout=0.1)
    assert compared(model, batch, SPECS[spec])


def test_casts_and_names_that_go_across_layers() -> None:
    """A norm that gives its operand back is noted at the layer before it."""
    with zoo.Wide():
        assert compared(*zoo.llama(layers=8), SPLIT)


def test_every_other_layer_is_another() -> None:
    sizes = {**hf.SIZES, "num_hidden_layers": 13}
    with zoo.Wide(), mock.patch.object(hf, "SIZES", sizes):
        assert compared(*hf.build(hf.FAMILIES["gemma2"]), SPLIT)


@pytest.mark.parametrize("known", [True, False])
def test_layers_of_other_widths_before_and_behind(known: bool) -> None:
    """Capture knows which layers are equal, or they are compared op by op."""
    with nullcontext() if known else mock.patch.object(cut, "fewer_layers", return_value=None):
        assert compared(Stack(*[24] * 2, *[16] * 9, *[32] * 2), X, SPLIT)


@pytest.mark.parametrize("known", [True, False])
def test_the_last_layer_may_be_another(known: bool) -> None:
    """Then passes run once more, with more layers, of which the last one is not compared."""
    model, spec = Stack(*[16] * 9), {"shardc": 1, **SPLIT}
    captured, stayed = capture(model, X, prove=False), []

    def restored(program: Program, shorter: cut.Cut, *args: Any) -> Program:
        stayed.append(len({layer_of(x.fqn) for x in shorter.program.params if x.fqn.startswith("h.")}))
        if len(stayed) == 1:
            raise UnlikeError("in a test")
        return restore.restored(program, shorter, *args)

    with (
        nullcontext() if known else mock.patch.object(cut, "fewer_layers", return_value=None),
        mock.patch.object(distinct_layers, "restored", restored),
    ):
        program = shardc.compile(model, X, spec, captured=captured, prove=False)
    assert stayed == ([4, 6] if known else [3, 5])
    with mock.patch.object(distinct_layers, "cuts", return_value=()):
        assert everything(program) == everything(shardc.compile(model, X, spec, captured=captured, prove=False))


class Between(Stack):
    """Something stands between the layers, or looks at what an inner one gives."""

    def __init__(self, how: str) -> None:
        super().__init__(*[16] * 9)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.h):
            y = block(x)
            x = y.sin() if self.how == "sin" else y
            first = y if i == 4 else first if i > 4 else y  # noqa: F821
        return self.head(x + first if self.how == "skip" else x).square().mean()


@pytest.mark.parametrize(("how", "fewer"), [("", True), ("sin", False), ("skip", False)])
def test_capture_leaves_layers_out_of_which_the_next_alone_takes_what_they_give(how: str, fewer: bool) -> None:
    captured = capture(Between(how), X, prove=False)
    assert (fewer_layers(captured.graph) is not None) == fewer == (not is_written(captured.graph))
    assert compared(Between(how), X, SPLIT) == (how != "skip")


def test_a_captured_graph_of_equal_layers_is_written_when_it_is_looked_at() -> None:
    model = Stack(*[16] * 9)
    captured = capture(model, X, prove=False)
    shardc.compile(model, X, {"shardc": 1, **SPLIT}, captured=captured, prove=False)
    assert not is_written(captured.graph)
    fewer = fewer_layers(captured.graph)
    assert fewer is not None
    assert (fewer.list, fewer.period, fewer.layers, fewer.left_out) == ("h", 1, (2, 3, 9), 5)
    assert fewer.stored["h_7_up_weight"] == ("h_3_up_weight", 4)
    assert fewer.more is not None
    assert fewer.more().layers == (2, 3, 4, 8)
    with mock.patch.object(run_of_layers, "LEFT_OUT", 100):
        whole = capture(model, X, prove=False)
    assert str(captured.graph) == str(whole.graph)
    assert is_written(whole.graph)


def test_results_are_those_of_one_device() -> None:
    one = reference(lambda: (Stack(*[16] * 7).double(), {"x": X["x"].double()}))
    with mock.patch.object(distinct_layers, "restored", wraps=distinct_layers.restored) as restored:
        program = shardc.compile(one.model, one.batch, {"shardc": 1, **SPLIT})
    assert restored.called
    assert_equal(shardc.simulate(program, one.model, one.batch), one.loss, one.grads)


@pytest.mark.parametrize("name", ["few", "widths", "summed", "named"])
def test_where_layers_are_not_alike_passes_run_on_all(name: str) -> None:
    spec = {"mesh": {"tp": 2}, "shard": {"h.3.up": "column", "h.3.down": "row"}} if name == "named" else SPLIT
    model = {
        "few": Stack(*[16] * 4),
        "widths": Stack(*[16, 24] * 4, 16),
        "summed": Stack(*[16] * 9, summed=True),
        "named": Stack(*[16] * 9),
    }[name]
    assert not compared(model, X, spec)


def test_what_is_refused_names_the_layers_of_the_model() -> None:
    model = Stack(*[16] * 9)
    captured = capture(model, X, prove=False)
    spec = {"shardc": 1, "mesh": {"tp": 3}, "shard": {"h.*.up": "column"}}
    texts = []
    for shorter in (distinct_layers.cuts, lambda *_: ()):
        with mock.patch.object(distinct_layers, "cuts", shorter), pytest.raises(shardc.ShardcError) as e:
            shardc.compile(model, X, spec, captured=captured, prove=False)
        texts.append(str(e.value))
    assert texts[0] == texts[1]
    assert "h.8.up" in texts[0] or "9" in texts[0]


def test_numbers_go_on_layer_by_layer() -> None:
    numbering = Numbering({"h_3_w"})
    units = [["linear_2", "add_1", "h_3_w_once", "add_1_sum"], ["linear_4", "add_2", "h_3_w_once", "add_2_sum"]]
    numbering.learn(units, ["linear", "linear_1", "add"], ["linear_6", "add_3"])
    assert numbering.name("linear_4").at(3, {}) == "linear_10"
    assert numbering.name("h_3_w_once").at(3, {"h_3_w": "h_6_w"}) == "h_6_w_once"
    assert [numbering.after(n, 2) for n in ("linear_6", "add_3_sum", "linear_1_sum", "other_1")] == [
        "linear_10",
        "add_5_sum",
        "linear_1_sum",
        "other_1",
    ]
    with pytest.raises(UnlikeError, match="inside of the layers"):
        numbering.after("linear_3_sum", 2)


@pytest.mark.parametrize(
    ("units", "after", "message"),
    [
        ([["mul_1", "mul_9"], ["mul_2", "mul_10"]], [], "not numbered layer by layer"),  # made in two sweeps
        ([["mul_1"], ["mul_2"], ["mul_4"]], [], "unevenly"),
        ([["mul_1"], ["add_2"]], [], "otherwise"),
        ([["mul_3"], ["mul_4"]], ["mul_1"], "not numbered in its place"),
    ],
)
def test_numbers_that_do_not_go_on(units: list[list[str]], after: list[str], message: str) -> None:
    with pytest.raises(UnlikeError, match=message):
        Numbering(set()).learn(units, ["mul", "add"], after)


def test_numbers_behind_those_that_a_pass_made_for_each_layer_and_another_one_took_away() -> None:
    units = [["mul_5"], ["mul_6"]]
    Numbering(set()).learn(units, ["mul"], [])
    Numbering(set()).learn([["pow_1"], ["pow_2"]], [], [])  # "pow" is Python's
    with pytest.raises(UnlikeError, match="names that are gone"):
        Numbering(set()).learn(units, ["mul_4"], [])


def test_numbers_of_what_was_put_in_the_place_of_others() -> None:
    """Of 3 units and of 5: conv to conv_4, and conv to conv_6, are gone."""
    numbering = Numbering(())
    few = ["conv_5", "add", "conv_6", "add_1", "conv_7", "add_2", "conv_8", "add_3", "conv_9", "x_bf16"]
    many = [f"conv_{int(n[5:]) + 2}" if "conv" in n else n for n in few]
    assert numbering.replaced(few, [2, 4, 6, 8], 2, {"add"}) == many
    with pytest.raises(UnlikeError, match="'slice_' is not numbered from the front"):
        numbering.replaced([*few, "slice_5"], [2, 4, 6, 8], 2, {"add"})
    assert numbering.replaced([*few, "slice_5"], [2, 4, 6, 8], 2, {"slice_5"}) == [*many, "slice_5"]


def test_a_convolution_that_is_put_in_the_place_of_another_has_its_name() -> None:
    """Of the first layer, too, which is none of the units: with a split sequence."""

    class Mixes(Block):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(8, 8, 3, padding=2, groups=8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + self.conv(x.mT)[..., :-2].mT)

    model = Stack()
    model.h = nn.ModuleList(Mixes() for _ in range(9))
    spec = {**SPLIT, "sequence": {"axis": "tp"}}
    assert compared(model, {"x": torch.linspace(-1, 1, 256).view(4, 8, 8)}, spec)


def test_the_placed_graph_of_one_device_is_written_when_it_is_looked_at() -> None:
    program = shardc.compile(Stack(*[16] * 9), X, {"shardc": 1, **SPLIT}, prove=False)
    assert not is_written(program.graph)
    assert not program.forward_only
    assert len(program.graph.nodes) > 9 * 8
    assert is_written(program.graph)


def test_a_placed_graph_that_cannot_be_written_out_is_made_of_all_layers() -> None:
    model = Stack(*[16] * 9)
    spec = {"shardc": 1, **SPLIT}
    captured = capture(model, X, prove=False)
    program = shardc.compile(model, X, spec, captured=captured, prove=False)
    with mock.patch("shardc.passes.distinct_layers.restore._Whole.finish", side_effect=UnlikeError("in a test")):
        assert len(program.graph.nodes) > 9 * 8
    with mock.patch.object(distinct_layers, "cuts", return_value=()):
        assert everything(program) == everything(shardc.compile(model, X, spec, captured=captured, prove=False))
