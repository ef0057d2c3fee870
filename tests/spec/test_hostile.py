"""Hostile specs are refused or compiled, by an error in the user's terms. `make hostile` tries many, with times and
memory (tests/spec/hostile.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.spec import Spec
from tests import harm
from tests.spec import hostile


@pytest.fixture(scope="module")
def subject() -> tuple[nn.Module, dict[str, Any], Program]:
    return hostile.subject()


def test_right_specs_compile(subject: tuple[nn.Module, dict[str, Any], Program]) -> None:
    """Else mutations of them would be refused for another reason."""
    assert [hostile.tried(text, *subject) for text in hostile.RIGHT] == ["compiled"] * len(hostile.RIGHT)


def test_hostile_specs_are_refused_by_name(subject: tuple[nn.Module, dict[str, Any], Program]) -> None:
    assert hostile.tried(hostile.RIGHT[0], *subject) == "compiled"  # what is imported on the first call is no harm
    tried = {}
    for name, source in hostile.every(60):
        seen = harm.Watch(*hostile.SCHEDULES)
        tried[name] = hostile.tried(source, *subject, seen)
        assert not seen.harm, f"{name}: {seen.harm}"
    refused = {name: text for name, text in tried.items() if text != "compiled"}
    assert len(refused) > 350
    assert all(text.strip() for text in refused.values())


@pytest.mark.parametrize("path", ["/dev/zero", "/dev/stdin", "/", "pipe", "nul\0.yaml", "large.yaml", "latin.yaml"])
def test_what_is_no_file_of_text_is_not_read(path: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "large.yaml").write_bytes(b"#" * (17 << 20))
    (tmp_path / "latin.yaml").write_bytes(b"shardc: 1\nmesh: {d\xe9: 2}\n")
    with pytest.raises(ShardcError) as e:
        Spec.load(path)
    assert e.value.fix


def test_nothing_in_an_error_is_obeyed_by_a_terminal() -> None:
    with pytest.raises(ShardcError) as e:
        Spec.parse('shardc: 1\n"\\e[31mred": 1\nmesh: {"\\0": 2}\n')
    assert "\x1b" not in str(e.value)
    assert "\\x1b[31mred" in str(e.value)


def test_the_first_of_very_many_errors_are_shown() -> None:
    with pytest.raises(ShardcError, match="and 160 more errors") as e:
        Spec.parse("shardc: 1\n" + "".join(f"k{i}: {i}\n" for i in range(200)))
    assert len(e.value.errors) == 200
