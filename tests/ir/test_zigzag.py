"""The order of a zigzag in its two forms: tensors that are cut, and numbers of elements."""

from __future__ import annotations

import pytest
import torch

from shardc.ir.placement import Shard, runs
from shardc.ir.shard_chunks import chunks, unchunk


@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize(("split", "ranks", "each"), [(2, 2, 3), (2, 4, 1), (4, 3, 2), (2, 3, 5)])
def test_tensors_and_numbers_agree(split: int, ranks: int, each: int, mirrored: bool) -> None:
    shard = Shard(0, split, mirrored=mirrored)
    whole = torch.arange(split * ranks * each)
    parts = chunks(whole, shard, ranks)
    for rank, part in enumerate(parts):
        held = torch.empty_like(part)
        for local, start, length in runs(len(whole), [(shard, ranks, rank)]):
            held[local : local + length] = whole[start : start + length]
        assert torch.equal(held, part)
    assert torch.equal(unchunk(parts, shard), whole)
