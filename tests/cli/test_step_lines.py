"""What a run says of itself: the unit of speed (tokens where an embedding looks ids up, else samples), TensorBoard."""

from __future__ import annotations

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import shardc
from shardc.cli.ranks.step_lines import StepLines, speed
from tests import zoo

ONE = {"shardc": 1, "mesh": {"dp": 1}}


def test_what_lines_say_is_there_for_tensorboard(tmp_path: Path) -> None:
    lines = StepLines(2, None, tmp_path, append=False, tensorboard=True)
    for step in (1, 2):
        lines.add({"step": step, "loss": 1 / step, "lr": None, "bytes": {"dp+tp": 256}, "experts": [{"op": "experts"}]})
    lines.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    found = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"loss": [(1, 1.0), (2, 0.5)], "bytes/dp+tp": [(1, 256.0), (2, 256.0)]}


def test_ids_that_an_embedding_looks_up_are_tokens() -> None:
    model, batch = zoo.gpt()
    rows, positions = batch["ids"].shape
    assert shardc.compile(model, batch, ONE).tokens == rows * positions


def test_images_and_labels_are_not() -> None:
    model = torch.nn.Linear(4, 3)
    batch = {"input": torch.ones(2, 4), "target": torch.zeros(2, dtype=torch.long)}
    program = shardc.compile(
        model, batch, ONE, loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch["target"])
    )
    assert program.tokens is None


def test_speed() -> None:
    assert speed({"samples_per_second": 12.34}) == "12.3 samples/s"
    assert speed({"samples_per_second": 1.0, "tokens_per_second": 2048.0}) == "2.0 k tokens/s"
