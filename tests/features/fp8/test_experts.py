"""Products of experts, rounded to float8 row by row: every mesh computes what one device does."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.features.fp8 import products as fp8_products
from shardc.features.fp8 import rounding as fp8
from shardc.features.fp8.recipe import RECIPES
from shardc.verify.equality import verify
from tests import zoo

E = 4


class Experts(nn.Module):
    """A router of two choices over gated experts."""

    def __init__(self, width: int = 32, transposed: bool = False, bias: bool = False) -> None:
        super().__init__()
        self.router, self.norm = nn.Linear(width, E), nn.LayerNorm(width)
        up, down = (E, 2 * width, width), (E, width, width)
        turned = (lambda s: (s[0], s[2], s[1])) if transposed else (lambda s: s)
        self.up, self.down = (nn.Parameter(torch.randn(turned(s)) / 4) for s in (up, down))
        self.transposed, self.bias = transposed, nn.Parameter(torch.zeros(E, 2 * width)) if bias else None

    def forward(self, x: Tensor, g: Tensor) -> Tensor:
        rows = self.norm(x).flatten(0, 1)
        weights, index = self.router(rows).softmax(-1).topk(2)
        y = shardc.nn.experts(
            rows, index, weights, self.up, self.down, up_bias=self.bias, activation="silu", transposed=self.transposed
        )
        return (y.view_as(x) * g).sum()


def build(**how: Any) -> tuple[Experts, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Experts(**how)
    with torch.no_grad():
        model.up.mul_(torch.exp(torch.randn(E, model.up.shape[1], 1)))  # rows whose scales differ
    return model, {"x": torch.randn(12, 4, 32), "g": torch.randn(12, 4, 32)}


def compiled(more: dict[str, Any], recipe: Any = "fp8-rowwise", **how: Any) -> Program:
    model, batch = build(**how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return shardc.compile(model, batch, {"shardc": 1, "precision": {"products": recipe}, **more})


ON = {"match": "*", "axis": "ep"}
COLUMNS = {"up": "column", "down": "row"}
MESHES: tuple[dict[str, Any], ...] = (
    {"mesh": {"dp": 3}, "batch": {"microbatches": 2}},
    {"mesh": {"ep": 2}, "experts": [ON]},
    {"mesh": {"dp": 2}, "experts": [{"match": "*", "axis": "dp"}]},
    {"mesh": {"dp": 2, "tp": 2}, "shard": COLUMNS, "data": {"zero": 3}},
    {"mesh": {"ep": 2, "tp": 2}, "experts": [ON], "shard": COLUMNS},
    {"mesh": {"ep": 2, "dp": 2}, "experts": [ON], "data": {"zero": 3}},
)


@pytest.mark.parametrize("more", MESHES, ids=str)
def test_equal_to_one_device(more: dict[str, Any]) -> None:
    program = compiled(more)
    assert "ops.fp8_experts" in str(program)
    assert program.prove().ok, str(program.prove())
    report = verify(program)
    assert report.worst < 1e-12, str(report)
    if program.buckets and program.buckets[0].zero == 3:
        assert {n for b in program.buckets if b.rounded for n in b.params} >= {"up", "down"}  # gathered in 8 bits


@pytest.mark.parametrize("transposed", [False, True])
def test_an_expert_is_two_layers_of_8_bits(transposed: bool) -> None:
    """One device, beside each expert's rows through `fp8_linear` with its rounded gradients."""
    model, batch = build(transposed=transposed)
    model, batch = model.double(), {k: v.double() for k, v in batch.items()}
    with zoo.Wide():
        program = shardc.compile(
            model, batch, {"shardc": 1, "mesh": {"dp": 1}, "precision": {"products": "fp8-rowwise"}}
        )
        one = shardc.simulate(program, model, batch)
    rows = model.norm(batch["x"]).flatten(0, 1)
    assert "router_weight_amax" not in str(program)  # four outputs: it is left as it is
    weights, index = model.router(rows).softmax(-1).topk(2)

    def layer(x: Tensor, w: Tensor) -> Tensor:
        granule = RECIPES["fp8-rowwise"].of_weight(transposed)
        amax = fp8.fp8_amax(w, granule)
        x8 = fp8.fp8_round(x, fp8.fp8_amax(x, (1, 0)), "e4m3", (1, 0))
        return fp8.fp8_grad(fp8_products.fp8_linear(x8, w, amax, "fp8-rowwise", transposed), amax, "e4m3", (1, 0))

    y = torch.zeros_like(rows)
    for e in range(E):
        token, choice = (index == e).nonzero(as_tuple=True)
        gate, up = layer(rows[token], model.up[e]).chunk(2, -1)
        made = layer(nn.functional.silu(gate) * up, model.down[e])
        y = y.index_add(0, token, made * weights[token, choice].unsqueeze(-1))
    loss = (y.view_as(batch["x"]) * batch["g"]).sum()
    loss.backward()
    assert torch.allclose(one.loss, loss, rtol=1e-12)
    for name, p in model.named_parameters():
        assert torch.allclose(one.grads[name], p.grad, rtol=1e-10, atol=1e-12 * float(p.grad.abs().max())), name


@pytest.mark.parametrize(
    ("recipe", "how", "why"),
    [
        ("mxfp8", {}, "products of experts are not implemented for mxfp8"),
        ("fp8-rowwise", {"bias": True}, "experts with biases are not implemented in 8 bits"),
        ({"recipe": "fp8-rowwise", "match": ["up"]}, {}, "both weights of experts must be rounded, or none"),
    ],
)
def test_experts_that_are_left_are_named(recipe: Any, how: dict[str, Any], why: str) -> None:
    program = compiled({"mesh": {"dp": 1}}, recipe, **how)
    assert any(why in str(n) for n in program.notes)
    assert "fp8_experts" not in str(program)
