"""Under torchrun one process of a machine compiles, and the others read its program: also where it fails or dies."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.api import load
from shardc.cli.ranks import compile_once
from shardc.cli.same_error_once import FirstFailedError
from shardc.errors import ShardcError

SPEC = {"shardc": 1, "mesh": {"tp": 2}}


def program() -> Any:
    batch = {"input": torch.ones(4, 4)}
    return shardc.compile(nn.Linear(4, 4), batch, SPEC, loss=lambda y, _: y.square().mean(), prove=False)


def meet(folder: Path, compiled: Callable[[int], Any], ranks: int = 3) -> list[Any]:
    """What each of the processes of a machine gets: a program, or an error. Threads stand for them."""

    def one(rank: int) -> Any:
        try:
            with compile_once.once(folder, first=rank == 0, compiled=lambda: compiled(rank), read=load) as found:
                return str(found)
        except ShardcError as e:
            return e

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


def test_the_first_compiles_and_the_others_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once.shutil, "rmtree", lambda *_, **__: None)  # until all have it, as when it trains
    compiled: list[int] = []

    def compile_(rank: int) -> Any:
        compiled.append(rank)
        return program()

    texts = meet(tmp_path / "there", compile_)
    assert compiled == [0]
    assert len(set(texts)) == 1
    assert oct((tmp_path / "there").stat().st_mode & 0o777) == "0o700"


def test_the_folder_goes_with_the_first(tmp_path: Path) -> None:
    with compile_once.once(tmp_path / "there", first=True, compiled=program, read=load):
        assert (tmp_path / "there" / "program").is_dir()
    assert not (tmp_path / "there").exists()


def test_an_error_of_the_first_is_met_by_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_once, "APPEARS", 0.5)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")

    def compile_(rank: int) -> Any:
        raise ShardcError(f"wrong on {rank}", where="spec")

    assert [str(e) for e in meet(tmp_path / "there", compile_)] == ["spec: wrong on 0"] * 3


def test_who_comes_when_the_first_has_failed_ends_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that failed after it had compiled; what an earlier run has left there is not looked at; the last of the
    others removes the folder."""
    folder = tmp_path / "there"
    two = [ShardcError("a", where="x", fix="y"), ShardcError("b")]
    with (
        pytest.raises(ShardcError, match="x: a"),
        compile_once.once(folder, first=True, compiled=program, read=load),
    ):
        raise ShardcError("2 errors", errors=two)
    assert [f.name for f in folder.iterdir()] == ["failed"]
    monkeypatch.setattr(compile_once, "_BEGAN", time.time() + 9)
    compile_once.check(folder)
    monkeypatch.setattr(compile_once, "_BEGAN", 0.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    for rank in ("1", "2"):
        assert folder.exists()
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(FirstFailedError) as found:
            compile_once.check(folder)
        assert found.value.texts() == ["x: a\n  fix: y", "b"]
    assert not folder.exists()


@pytest.mark.parametrize("there", ["nothing", "open to all", "a link"])
def test_who_cannot_trust_the_folder_compiles_for_itself(
    there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_once, "APPEARS", 0.2)
    folder, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    program().save(elsewhere / "program")
    elsewhere.chmod(0o700)
    if there == "open to all":
        elsewhere.rename(folder)
        folder.chmod(0o777)
    elif there == "a link":
        folder.symlink_to(elsewhere)
    compiled: list[int] = []

    def compile_() -> Any:
        compiled.append(1)
        return program()

    with compile_once.once(folder, first=False, compiled=compile_, read=load):
        assert compiled == [1]


def test_what_an_earlier_run_left_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there" / "program").mkdir(parents=True)
    (tmp_path / "there").chmod(0o700)
    with compile_once.once(tmp_path / "there", first=True, compiled=program, read=load):
        assert load(tmp_path / "there" / "program").mesh == program().mesh


def test_processes_of_one_parent_and_world_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert compile_once.meeting() is None
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    first = compile_once.meeting()
    assert first is not None
    assert str(os.getppid()) in first.name
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # a restart may have another spec
    assert compile_once.meeting() != first
