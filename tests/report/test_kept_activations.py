"""`shardc inspect --memory`: what forward keeps for backward, layer by layer, and which ops want it."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, fx, nn

import shardc
from shardc.cost import Cost
from shardc.cost.kept_activations import storages
from shardc.ir.graph import source_of
from shardc.ir.types import op_name
from shardc.report import cost as cost_report
from shardc.report import kept_activations
from tests import zoo
from tests.zoo import plain


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(nn.functional.silu(self.gate(x)) * self.up(x))
        return result


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(Gated() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.h:
            x = layer(x)
        return x.square().mean()


SPEC: dict[str, Any] = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"h.*.{gate,up}": "column", "h.*.down": "row"}}


@functools.cache
def found(again: bool) -> Cost:
    entry: list[dict[str, Any]] = [{"match": "h.*", "recompute": "cheap"}] if again else []
    return shardc.compile(Model(), torch.randn(4, 8), {**SPEC, "checkpoint": entry}, prove=False).cost()


def named(n: fx.Node) -> str:
    return f"{source_of(n).module} {op_name(n.target)}"


def wanted(cost: Cost, layer: str) -> dict[str, set[str]]:
    """{op: the ops that want its result}, each by its module and the ops that run again before it."""
    return {
        named(x.node): {" ".join((named(n), *(op_name(a.target) for a in after))) for n, after in x.wants.items()}
        for x in cost.kept()[0]
        if named(x.node).startswith(layer)
    }


def test_every_tensor_is_wanted_by_what_autograd_keeps_it_for() -> None:
    assert wanted(found(False), "h.1") == {
        "h.1.gate linear": {"h.1 silu"},
        "h.1 silu": {"h.1 mul"},
        "h.1.up linear": {"h.1 mul"},
        "h.1 mul": {"h.1.down linear"},
        "h.1 add": {"h.2.gate linear", "h.2.up linear"},
    }


def test_what_runs_again_is_told() -> None:
    assert wanted(found(True), "h.1") == {
        "h.1.gate linear": {"h.1 silu", "h.1 mul silu", "h.1.down linear silu mul"},
        "h.1.up linear": {"h.1 mul", "h.1.down linear mul"},
        "h.1 add": {"h.2.gate linear", "h.2.up linear"},
    }


def test_gathered_inputs_are_kept_too() -> None:
    spec = {**SPEC, "activations": {"h.*": {0: "tp"}}}
    cost = shardc.compile(Model(), torch.randn(4, 8), spec, prove=False).cost()
    assert "h.1.gate all_gather_partial_grad" in wanted(cost, "h.1")


def test_what_a_recurrent_layer_keeps_is_listed() -> None:
    """Its op stays whole, and its memory is named after one of its results."""
    model, batch = plain.lstm()
    cost = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False).cost()
    (items,), (run,) = cost.kept(), cost.dry_runs
    assert sum(x.storage.nbytes for x in items) == sum(x.nbytes for x in storages(run))
    assert any(source_of(x.node).module == "rnn" and x.own for x in items)


def test_layers_that_keep_the_same_are_told_once() -> None:
    lines = kept_activations.table(found(True)).splitlines()
    assert lines[2] == "h.0 and 1 more like it: 640 B each"
    assert [line.split("  ")[-1].strip() for line in lines[3:6]] == [
        "wanted by silu; mul after silu; down linear after silu, mul",
        "wanted by mul; down linear after mul",
        "wanted by the next layer's gate linear; the next layer's up linear",
    ]
    assert lines[7].startswith("h.2: ")  # its result goes elsewhere


def test_bytes_are_those_of_the_json() -> None:
    (rank,) = cost_report.to_json(found(True))["ranks"]
    assert sum(x["bytes"] for x in rank["kept"]) == sum(x.storage.nbytes for x in found(True).kept()[0])
    gate = next(x for x in rank["kept"] if x["module"] == "h.0.gate")
    assert gate["type"] == "f32[4, 16]"
    assert gate["wanted_by"]["linear_2"] == ["silu", "mul"]


def test_a_tensor_that_backward_reads_in_parts_is_wanted() -> None:
    """Queries, keys and values are one product, and views of it."""
    cost = shardc.compile(*zoo.gpt(torch.float32, layers=1), {"shardc": 1, "mesh": {"dp": 1}}, prove=False).cost()
    (wants,) = (x.wants for x in cost.kept()[0] if named(x.node).endswith("qkv linear"))
    assert [op_name(n.target) for n in wants] == ["scaled_dot_product_attention"]
