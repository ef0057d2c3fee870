"""What a device refuses ends the process, and is not trained on."""

from __future__ import annotations

import pytest
import torch

import shardc
from tests import warm, zoo
from tests.gpu.twin_mesh import twin


def trains_on_an_id_that_no_rank_has(rank: int, device: str) -> None:
    model, batch = zoo.gpt()
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "structure"}}, prove=False)
    batch["ids"] = batch["ids"].clone()
    batch["ids"][0, 0] = zoo.VOCAB
    with twin(program, rank, device) as mesh:
        program.engine(model, mesh=mesh, check=False).step(batch)
        if device == "cuda":
            torch.cuda.synchronize()


def test_an_id_outside_of_a_split_table(device: str) -> None:
    with pytest.raises(Exception, match="out of range" if device == "cpu" else "(?i)assert"):
        warm.ranks(trains_on_an_id_that_no_rank_has, device, world=1)
