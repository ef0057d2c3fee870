"""Rows chosen by a mask of the batch end in a sum, a mean or a loss: equal to one device, also if a rank has none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from tests import equality

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


class Net(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.up, self.down = loss, nn.Linear(6, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        return self.loss(self.down(self.up(x).tanh()), y, mask)


def build(loss: Loss) -> tuple[nn.Module, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    mask = torch.rand(8, 4, generator=generator) > 0.4
    mask[:2] = False  # a microbatch of a rank without any
    x = torch.randn(8, 4, 6, generator=generator, dtype=torch.float64)
    torch.manual_seed(0)
    model = Net(loss).double()
    return model, {"x": x, "y": torch.randint(0, 5, (8, 4), generator=generator), "mask": mask}


def shifted(z: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """As transformers' GraniteSpeech and Qwen2Audio do."""
    some, their = z[..., :-1, :][m[:, 1:] != 0].contiguous(), y[..., 1:][m[:, 1:] != 0].contiguous()
    return nn.CrossEntropyLoss()(some.view(-1, some.size(-1)), their.view(-1))


def by_index(z: Tensor, y: Tensor, m: Tensor) -> Tensor:
    i = torch.where(m.flatten())[0]
    return F.cross_entropy(z.flatten(0, 1)[i], y.flatten()[i], ignore_index=3, reduction="sum", label_smoothing=0.1)


LOSSES: dict[str, Loss] = {
    "cross entropy": shifted,
    "cross entropy by index": by_index,
    "likelihood": lambda z, y, m: F.nll_loss(z.log_softmax(-1)[m], y[m], weight=torch.arange(1.0, 6).double()),
    "mean": lambda z, y, m: z[m].pow(2).mean(),
    "mean of rows": lambda z, y, m: z[m].mean(0, keepdim=True).pow(2).sum(),
    "mean of each row": lambda z, y, m: torch.mean(z[m], -1).sin().mean(),
    "sum": lambda z, y, m: torch.sum(torch.masked_select(z.sum(-1), m).sin()) / m.sum(),
    "squares": lambda z, y, m: F.mse_loss(z.sum(-1)[m], y[m].double()),
    "absolute": lambda z, y, m: nn.SmoothL1Loss(reduction="sum")(z.sum(-1)[m], y[m].double()),
    "logits": lambda z, y, m: F.binary_cross_entropy_with_logits(z[m][:, 0], (y[m] > 2).double()),
}


@pytest.mark.parametrize("name", [*LOSSES, "alignment"])
def test_chosen_rows_end_in_a_reduction(name: str) -> None:
    one = equality.reference(lambda: build(LOSSES.get(name, alignment)))
    specs: tuple[dict[str, Any], ...] = (
        {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}},
        {"mesh": {"dp": 4}, "batch": {"microbatches": 2}},
    )
    for spec in specs:
        program = one.compile({"shardc": 1, **spec})
        sim = shardc.simulate(program, one.model, one.batch)
        equality.assert_equal(sim, one.loss, one.grads)
        assert program.prove().ok


def alignment(z: Tensor, y: Tensor, m: Tensor) -> Tensor:
    """As transformers' models of speech do: labels are chosen anywhere in their row, and none of some rows."""
    kept = m & (y != 0)
    log_probs = torch.cat([z, z.flip(1)], 1).log_softmax(-1).transpose(0, 1)
    frames = torch.full((z.shape[0],), 8)
    return F.ctc_loss(log_probs, y.masked_select(kept), frames, kept.sum(-1), reduction="sum", zero_infinity=True)


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, y, m: (z[m] - z[m].mean(0)).pow(2).sum(),  # a mean of nothing is nan, and would be a gradient's
        lambda z, y, m: F.cross_entropy(z[m], y[y > 1][: m.sum()]),
        lambda z, y, m: z[m].sum() / z[m].shape[0],
        lambda z, y, m: F.ctc_loss(z.transpose(0, 1), y[m], torch.full((8,), 4), (y > 2).sum(-1)),
    ],
)
def test_what_needs_more_than_a_reduction_is_refused(loss: Loss) -> None:
    model, batch = build(loss)
    with pytest.raises(shardc.ShardcError, match=r"a result whose size depends on a tensor's value|chosen by a mask"):
        capture(model, batch)
