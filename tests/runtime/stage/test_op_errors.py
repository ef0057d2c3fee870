"""Ops that fail at run time name module, line, what is wrong and what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.source import Source
from shardc.runtime import launch
from shardc.runtime.stage import op_errors


class Words(nn.Module):
    """A table of words, and one of positions."""

    def __init__(self, words: int = 8, length: int = 6) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, 4), nn.Embedding(length, 4)
        self.head = nn.Linear(4, words)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids.flatten()) + self.positions(torch.arange(ids.shape[1])).repeat(ids.shape[0], 1)
        return F.cross_entropy(self.head(x), labels.flatten())


def batch(top: int = 7, label: int = 7, length: int = 6) -> dict[str, Tensor]:
    ids = torch.zeros(2, length, dtype=torch.long)
    labels = torch.zeros(2, length, dtype=torch.long)
    ids[1, 2], labels[1, 3] = top, label
    return {"ids": ids, "labels": labels}


SPECS: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp": 1}},
    {"mesh": {"tp": 2}, "shard": {"words": "vocab", "head": "column"}},
    {"mesh": {"dp": 1}, "checkpoint": [{"match": "words", "save": []}]},
    {"mesh": {"dp": 2}, "data": {"zero": 3}},
)


@pytest.mark.parametrize("spec", SPECS, ids=["one", "split", "checkpoint", "zero3"])
def test_an_id_outside_of_the_table_names_module_line_id_and_size(spec: dict[str, Any]) -> None:
    model = Words()
    program = shardc.compile(model, batch(), {"shardc": 1, **spec})
    with pytest.raises(op_errors.OutOfRangeError) as e:
        shardc.simulate(program, model, batch(top=9))
    assert "the id in 'ids' is outside of the table: 9 is not in 0 ... 7" in e.value.what
    assert e.value.where.startswith("words (test_op_errors.py:")
    assert "correct 'ids' in the batch" in e.value.fix


@pytest.mark.parametrize("spec", SPECS[:2], ids=["one", "split"])
def test_a_label_that_is_no_class(spec: dict[str, Any]) -> None:
    model = Words()
    program = shardc.compile(model, batch(), {"shardc": 1, **spec})
    with pytest.raises(IndexError) as e:
        shardc.simulate(program, model, batch(label=8))
    assert isinstance(e.value, ShardcError)
    assert "a label is not a class: 8 is not in 0 ... 7" in e.value.what
    assert "ignore_index" in e.value.fix


def test_what_a_batch_would_raise_is_told_when_it_is_compiled() -> None:
    with torch.device("meta"):
        model = Words()
    one = {"shardc": 1, "mesh": {"dp": 1}}
    said = r"words \(test_op_errors.py:\d+\): the id in 'ids' is outside.*9 is not in 0 ... 7\n  fix: correct 'ids'"
    with pytest.raises(ShardcError, match=said):
        shardc.compile(model, batch(top=9), one)

    with pytest.raises(
        ShardcError, match=r"positions \(.*6 is not in 0 ... 5\n  fix: make the table larger, or the seq"
    ):
        shardc.compile(model, batch(length=7), one)
    with pytest.raises(ShardcError, match=r"a label is not a class: 8 is not in 0 ... 7"):
        shardc.compile(model, batch(label=8), one)


def test_memory_that_runs_out_names_the_op_and_the_remedy() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.expand.default, (x, [1 << 60]))
    big = graph.call_function(torch.ops.aten.clone.default, (node,))
    big.meta["source"] = Source("layers.3.mlp", "llama.py:31", "h = up(x)")
    graph.output(big)
    with pytest.raises(op_errors.OutOfMemoryError) as e, op_errors.named(graph):
        fx.GraphModule(nn.Module(), graph)(torch.zeros(1))
    assert e.value.where == "layers.3.mlp (llama.py:31)"
    assert e.value.what.startswith("out of memory")
    assert "checkpoint" in e.value.fix


def test_other_errors_stay_what_they_are() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.view.default, (x, [7])))
    with pytest.raises(RuntimeError, match="shape"), op_errors.named(graph):
        fx.GraphModule(nn.Module(), graph)(torch.zeros(1))


def test_a_rank_that_is_left_over_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    program = shardc.compile(Words(), batch(), {"shardc": 1, "mesh": {"dp": 1}})
    with pytest.raises(
        ShardcError, match="has RANK=0, but not WORLD_SIZE, MASTER_ADDR, MASTER_PORT\n  fix: another job left"
    ):
        program.engine(Words())
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ShardcError, match="RANK=0, but not MASTER_ADDR, MASTER_PORT"):
        launch.in_world()
