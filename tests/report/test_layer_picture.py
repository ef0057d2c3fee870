"""A module as a picture: its ops, split weights and collectives; and where its boxes go."""

from __future__ import annotations

import functools
import itertools
import xml.etree.ElementTree as ET
from typing import Any

import pytest
import torch

import shardc
from shardc.report.graph_drawing import place
from shardc.report.layer_picture import draw
from tests import zoo

TP = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
SPACE = "{http://www.w3.org/2000/svg}"


@functools.cache
def words(name: str = "h.0", zero: int = 0) -> tuple[str, ...]:
    spec: dict[str, Any] = {"shardc": 1, **TP, "data": {"zero": zero}}
    return texts(draw(shardc.compile(*zoo.gpt(), spec, prove=False), name))


def texts(svg: str) -> tuple[str, ...]:
    return tuple("".join(t.itertext()) for t in ET.fromstring(svg).iter(f"{SPACE}text"))


@pytest.mark.parametrize("zero", [0, 3])
def test_a_layer(zero: int) -> None:
    """Megatron's: what is split, and the four sums over tp; also where ZeRO 3 gathers the weights first."""
    shown = words("h.0", zero)
    assert {"qkv: linear", "fc: linear", "proj: linear", "out: linear", "scaled_dot_product_attention"} <= set(shown)
    assert "weight  f64[3·64@tp, 64] ~dp" in shown
    assert len([w for w in shown if w.startswith("all_reduce over tp, 32.0 KiB")]) == 2
    assert len([w for w in shown if w.startswith("all_reduce in backward over tp, ")]) == 2
    assert "weights split over tp" in shown
    assert not any("reshape" in w or "bucket" in w for w in shown)


def test_ops_of_a_submodule_are_one_box() -> None:
    program = shardc.compile(*zoo.llama(), {"shardc": 1, **TP}, prove=False)
    shown = texts(draw(program, "model.layers.0"))
    assert "input_layernorm" in shown
    assert "self_attn" in shown
    assert any(w.startswith("scaled_dot_product_attention, ") for w in shown)


def test_the_whole_model_and_a_stage_of_a_pipeline() -> None:
    assert "wte: embedding_partial" in words(".")
    spec = {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}
    program = shardc.compile(*zoo.gpt(), {"shardc": 1, **spec}, prove=False)
    assert "fc: linear" in texts(draw(program, "h.1"))


def test_a_module_that_is_not_there() -> None:
    with pytest.raises(shardc.ShardcError, match=r"is in a module 'h\.O'"):
        words("h.O")


def test_too_many_ops() -> None:
    class Long(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = x.sin()
            return x.sum()

    program = shardc.compile(Long(), {"x": torch.ones(4, 2, requires_grad=True)}, {"shardc": 1, "mesh": {"dp": 1}})
    with pytest.raises(shardc.ShardcError, match="too many to draw"):
        draw(program, ".")


def test_boxes_are_below_what_they_use_and_apart() -> None:
    edges = [("a", "b"), ("a", "c"), ("b", "d"), ("c", "d"), ("a", "d"), ("e", "d")]
    placed = place(dict.fromkeys("abced", 100.0), edges)
    assert all(placed.layers[user] > placed.layers[used] for used, user in edges)
    assert placed.layers["e"] == placed.layers["d"] - 1
    for layer in set(placed.layers.values()):
        xs = sorted(placed.centres[v] for v in "abcde" if placed.layers[v] == layer)
        assert all(y - x >= 100 for x, y in itertools.pairwise(xs))
    assert len(placed.bends["a", "d"]) == 1
    assert placed.width >= 300
