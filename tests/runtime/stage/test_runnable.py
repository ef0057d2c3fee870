"""Stages that ranks, threads of one process, make runnable at the same time."""

from __future__ import annotations

import threading

import torch

import shardc
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.stage.joint_stage import Tools
from shardc.runtime.stage.runnable import WRITING, RunnableStage
from tests import zoo


def test_two_ranks_make_their_step_graphs_at_the_same_time() -> None:
    """One does so when a step runs them, the other while it holds the lock of all writers, as for an overlapped pair.

    Before Python 3.12 `cached_property` has a lock too, and each rank would wait for the lock of the other.
    """
    model, batch = zoo.gpt()
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}})
    tools = Tools(torch.device("cpu"), OffloadedTensors(torch.device("cpu")))
    first, second = (RunnableStage(program, i, tools) for i in (0, 1))
    held, ended = threading.Event(), [threading.Event(), threading.Event()]

    def in_a_step() -> None:
        held.wait()
        assert first.joint is first.joint
        ended[0].set()

    def of_a_pair() -> None:
        with WRITING:
            held.set()
            ended[0].wait(0.2)  # the other rank cannot end before: it waits for WRITING
            assert second.joint is second.joint
        ended[1].set()

    for work in (in_a_step, of_a_pair):
        threading.Thread(target=work, daemon=True).start()
    assert all(e.wait(60) for e in ended)
