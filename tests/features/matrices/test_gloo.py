"""Owners of matrices on real processes: messages of unequal sizes, and of none, over gloo."""

from __future__ import annotations

import functools
import os
from pathlib import Path

import torch

import shardc
from shardc.runtime import launch
from tests import warm
from tests.features.matrices.test_whole import BATCH, CLIP, SPECS, check, compiled, expected, model, several

STEPS = 3


def work(rank: int, port: int, folder: str) -> None:
    """One rank of two: some steps, a checkpoint, and some more in another engine that reads it."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = shardc.load(Path(folder) / "program")
    first = program.engine(model(), several, clip_norm=CLIP)
    for _ in range(STEPS - 1):
        first.step(BATCH)
    first.save(Path(folder) / "saved")
    second = program.engine(model(), several, clip_norm=CLIP)
    second.load(Path(folder) / "saved")
    second.step(BATCH)
    state = second.full_state_dict(rank0_only=True)
    if rank == 0:
        torch.save(state, Path(folder) / "state.pt")
    first.close()


def _positional(rank: int, run: functools.partial[None]) -> None:
    run(rank)


def test_real_processes(tmp_path: Path) -> None:
    compiled(SPECS["dp"]).save(tmp_path / "program")
    warm.ranks(_positional, functools.partial(work, port=launch.free_port(), folder=str(tmp_path)), world=2)
    check([torch.load(tmp_path / "state.pt")], expected(STEPS))
