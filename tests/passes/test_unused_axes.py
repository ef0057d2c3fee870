"""Axes of the mesh that split nothing are noted, whatever else there is."""

from __future__ import annotations

from typing import Any

import pytest

import shardc
from tests import zoo


def _idle(program: shardc.Program) -> list[str]:
    return [n for n in program.notes if "splits nothing" in n]


@pytest.mark.parametrize("axis", ["tp", "x", "pp"])
def test_an_axis_that_splits_nothing_is_noted(axis: str) -> None:
    (note,) = _idle(shardc.compile(*zoo.mlp(), {"shardc": 1, "mesh": {"dp": 2, axis: 2}}))
    assert note.startswith(f"spec: mesh.{axis}: {axis}=2 splits nothing: its 2 ranks all compute the same.")
    assert f"pipeline: {{axis: {axis}, stages: 2}}" in note
    assert "or leave it out" in note


@pytest.mark.parametrize(
    "more",
    [
        {"shard": {"use": {"plan": "structure", "axis": "x"}}},
        {"data": {"axis": ["dp", "x"]}},
        {"batch": {"axes": ["x"]}, "mesh": {"x": 2}},
        {"pipeline": {"axis": "x", "stages": 2}},
        {"mesh": {"dp": 2, "x": 1}},
        {"data": {"axis": ["dp", "x"], "zero": 1}, "batch": {"microbatches": 2}},
    ],
)
def test_an_axis_that_does_something_is_not(more: dict[str, Any]) -> None:
    program = shardc.compile(*zoo.mlp(), {"shardc": 1, "mesh": {"dp": 2, "x": 2}, **more})
    assert not _idle(program)


def test_the_digits_of_an_axis_are_the_axis() -> None:
    """Two key-value heads on tp=4: the axis is seen as two, of which one splits them."""
    from tests.test_equal import spec_of

    model, batch = zoo.ALL["llama"](layers=1)
    assert not _idle(shardc.compile(model, batch, spec_of("llama", {"dp": 1, "tp": 4}), prove=False))
