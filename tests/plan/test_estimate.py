"""What estimates know of choices that dry runs of one microbatch do not show."""

from __future__ import annotations

import torch

from shardc.cost.device_file import device
from shardc.plan.few_layers import Subject
from shardc.plan.planner import Planner
from shardc.plan.source import Source
from shardc.plan.space import Choice
from tests.plan.test_monotone import Stack


def test_with_zero_no_microbatch_casts_weights() -> None:
    """A row of few tokens: most of the time goes to reading weights, and to casts of them and of their gradients."""
    with torch.device("meta"):
        model = Stack(6, hidden=2048, wide=8192, vocab=256)
    batch = {"ids": torch.empty(64, 64, dtype=torch.long)}
    on = device("h100-80g")
    plans = Planner(Source(lambda: Subject.of(model, batch)), on, "bfloat16", 0.0, "it", lambda what, done, of: None)
    plans.finder.splits(4)
    choice = Choice(dp=4, zero=1, checkpoint="full", microbatches=16)
    assert 0.95 < plans.finder.estimates(choice).seconds / plans.finder.exact(choice).seconds < 1.05
