"""What of a step grows with its rows: ops of one dry run, with more rows, are those of a dry run of more rows."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from shardc.machine.work import Op
from shardc.plan.few_layers import Subject
from shardc.plan.runs import Rank, Runs
from shardc.plan.space import CHECKPOINTS, Choice, spec
from tests.plan.test_plan import Stack


def ops(ranks: list[Rank]) -> list[Op]:
    return [w for rank in ranks for _, part in rank.run.actions for w in part.work if isinstance(w, Op)]


CHOICES = Choice(microbatches=2), Choice(tp=2, checkpoint="full", microbatches=2), Choice(dp=2, microbatches=2)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_ops_of_more_rows_follow_from_those_of_few(choice: Choice) -> None:
    """Also where a gradient has as many elements as an activation: sizes decide nothing."""
    assert CHECKPOINTS["full"] is not None
    with torch.device("meta"):
        model = Stack(6, hidden=32, wide=64, vocab=32)
    runs = Runs(Subject(model, {"ids": torch.empty(4, 32, dtype=torch.long)}))
    facts = replace(runs.facts, precision={"params": "float32", "compute": "bfloat16"})
    few, many = (
        sorted(
            ops(runs.ranks(spec(choice, facts), rows * choice.dp, 3, None, (0,))),
            key=lambda op: (op.name, op.dtype, op.still, op.traffic, op.grows is None),
        )
        for rows in (2, 6)
    )  # by name, as what hides a collective hangs on sizes, and so does the order of casts and products
    assert len(few) == len(many)
    for one, more in zip(few, many, strict=True):
        found = one.of_rows(3)
        assert (found.flops, found.matrices) == (more.flops, more.matrices)
        assert abs(found.traffic - more.traffic) <= 64, one  # of numbers of a whole batch, such as a mean loss
    assert any(one.still == one.traffic for one in few)
    assert any(0 < one.still < one.traffic for one in few)
    as_if_all_grew, real = 3 * sum(x.traffic for x in few), sum(x.traffic for x in many)
    assert as_if_all_grew > 1.2 * real
