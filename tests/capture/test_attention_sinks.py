"""Attention with sinks is one op, whether a model writes it out or takes FlexAttention, and gives what it gives."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardc
from shardc.capture import capture
from shardc.capture.transformers import with_one_more_key
from shardc.ir.graph import calls, values_of
from shardc.ir.program import Program
from tests import equality, zoo
from tests.zoo import hf, hf_more

FAMILY = hf_more.FAMILIES["gpt_oss"]


def written_out(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Tensor, scale: float) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = (q @ k.mT * scale).masked_fill(~mask, -torch.inf)
    each = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, each], -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize("window", [3, 12])
def test_a_sink_is_the_score_of_one_more_key(window: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 12, 6), (2, 2, 12, 6), (2, 2, 12, 5), (4,))
    given = [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]
    mask, scale = torch.ones(12, 12, dtype=torch.bool).tril().triu(1 - window), 0.3
    want = written_out(*given, mask, scale)
    ours = F.scaled_dot_product_attention(
        *with_one_more_key(*given, scale), F.pad(mask, (0, 1), value=True), scale=scale, enable_gqa=True
    )
    weights = torch.linspace(0.5, 1.5, want.numel(), dtype=torch.float64).view_as(want)
    torch.testing.assert_close(ours, want, rtol=1e-12, atol=1e-14)
    for a, b in zip(*(torch.autograd.grad((y * weights).sum(), given) for y in (ours, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@cache
def one() -> equality.Reference:
    """As transformers writes it out, in eager mode."""
    return equality.reference(lambda: hf.build(FAMILY))


def keeps_scores(program: Program) -> bool:
    """Is there a softmax of scores of all pairs of queries and keys? (The router's is of experts.)"""
    return any("softmax" in str(n.target) and len(values_of(n)[0].shape) == 4 for n in calls(program.graph))


MESHES: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "cp": {"mesh": {"cp": 2}, "sequence": {"axis": "cp"}},
}


@pytest.mark.parametrize("mesh", MESHES)
def test_written_out(mesh: str) -> None:
    reference = one()
    assert not keeps_scores(reference.captured)
    equality.assert_equal(reference.on({"shardc": 1, **MESHES[mesh]}), reference.loss, reference.grads)


def test_flex_attention() -> None:
    """transformers does not run sinks with it on a CPU; nothing has to be run. Against the same model, written out."""
    reference = one()
    with zoo.Wide():
        model, batch = hf.build(FAMILY)
        model.set_attn_implementation("flex_attention")  # type: ignore[operator]
        captured = capture(model, batch)
        program = shardc.compile(model, batch, {"shardc": 1, **MESHES["tp"]}, captured=captured)
    assert not keeps_scores(captured)
    equality.assert_equal(shardc.simulate(program, model, batch), reference.loss, reference.grads)


def test_where_weights_are_dropped_it_is_as_the_model_has_it() -> None:
    with zoo.Wide():
        model, batch = hf.build(FAMILY)
        for layer in model.modules():
            if hasattr(layer, "attention_dropout"):
                layer.attention_dropout = 0.5
        assert keeps_scores(capture(model, batch))
