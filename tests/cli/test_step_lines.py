"""The unit of speed: tokens where an embedding looks ids up, else samples."""

from __future__ import annotations

import torch

import shardc
from shardc.cli.step_lines import speed, tokens_of
from tests import zoo

ONE = {"shardc": 1, "mesh": {"dp": 1}}


def test_ids_that_an_embedding_looks_up_are_tokens() -> None:
    model, batch = zoo.gpt()
    rows, positions = batch["ids"].shape
    assert tokens_of(shardc.compile(model, batch, ONE)) == rows * positions


def test_images_and_labels_are_not() -> None:
    model = torch.nn.Linear(4, 3)
    batch = {"input": torch.ones(2, 4), "target": torch.zeros(2, dtype=torch.long)}
    program = shardc.compile(
        model, batch, ONE, loss=lambda output, batch: torch.nn.functional.cross_entropy(output, batch["target"])
    )
    assert tokens_of(program) is None


def test_speed() -> None:
    assert speed({"samples_per_second": 12.34}) == "12.3 samples/s"
    assert speed({"samples_per_second": 1.0, "tokens_per_second": 2048.0}) == "2.0 k tokens/s"
