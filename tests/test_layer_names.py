"""Texts that differ in layers' numbers only are one."""

from __future__ import annotations

import pytest

from shardc.errors import Errors, ShardcError
from shardc.layer_names import NOTES, fold, note_lines


def test_layers_are_told_once_with_a_range_and_a_count() -> None:
    texts = [f"blocks.{i}.q.weight, blocks.{i}.k.weight: 4 heads" for i in (0, 1, 2, 5)]
    assert fold(texts) == ["blocks.{0-2,5}.q.weight, blocks.{0-2,5}.k.weight: 4 heads (4 alike)"]
    assert fold(f"{i}.weight is whole" for i in range(80)) == ["{0-79}.weight is whole (80 alike)"]
    assert fold(f"layers.{i}.experts.{j}" for i in range(2) for j in range(3)) == [
        "layers.{0-1}.experts.{0-2} (6 alike)"
    ]


def test_only_layers_are_folded_and_order_is_kept() -> None:
    texts = ["b.1: f32[3]", "a", "b.2: f32[4]", "model.py:3: x", "model.py:4: x", "takes 1.5 GiB", "takes 1.6 GiB"]
    assert fold(texts) == texts
    assert fold(["a.0 and b.1", "a.0 and b.0", "a.1 and b.1"]) == ["a.0 and b.1 (3 alike)"]
    assert fold(["z", "a.0", "a.0"]) == ["z", "a.0"]


def test_an_error_says_the_count_before_the_fix_and_keeps_the_single_ones() -> None:
    errors = Errors()
    for i in range(3):
        errors.add("is odd", where=f"h.{i}.fc", fix=f"make h.{i}.fc even")
    with pytest.raises(ShardcError) as e:
        errors.raise_any()
    assert str(e.value) == "h.{0-2}.fc: is odd (3 alike)\n  fix: make h.{0-2}.fc even"
    assert len(e.value.to_json()) == 3


def test_notes_are_never_a_wall() -> None:
    lines = note_lines([f"{'a' * n}: of its own" for n in range(1, 251)])
    assert len(lines) == NOTES + 1
    assert "and 238 more notes" in lines[-1]
    assert note_lines(["one", "two"]) == ["note: one", "note: two"]
