"""Under torchrun one process of a machine compiles, and the others read its program: also where it fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardc
from shardc.api import load
from shardc.cli.ranks.compile_once import compiled_once
from shardc.cli.same_error_once import FirstFailedError
from shardc.errors import ShardcError
from shardc.runtime.mesh import activity, presence

SPEC = {"shardc": 1, "mesh": {"tp": 2}}


def program() -> Any:
    batch = {"input": torch.ones(4, 4)}
    return shardc.compile(nn.Linear(4, 4), batch, SPEC, loss=lambda y, _: y.square().mean(), prove=False)


def never() -> Any:
    raise AssertionError("it compiles, too")


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of three of a machine, which share a store."""
    store = dist.HashStore()
    monkeypatch.setattr(presence, "world_store", lambda: (store, 0, 3))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    return lambda rank: monkeypatch.setenv("LOCAL_RANK", str(rank))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "program"


def test_the_first_compiles_and_the_others_read(folder: Path, as_rank: Callable[[int], None]) -> None:
    as_rank(1)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(compiled_once, folder.parent / "mine", never, load)
        while not activity.waits():
            time.sleep(0.01)
        assert not early.done()
        as_rank(0)
        first = compiled_once(folder, program, load)
        assert str(early.result(60)) == str(first)
    as_rank(2)
    assert str(compiled_once(folder.parent / "mine", never, load)) == str(first)


def test_an_error_of_the_first_is_met_by_all(folder: Path, as_rank: Callable[[int], None]) -> None:
    """Also by one that comes later."""
    as_rank(0)

    def compiled() -> Any:
        raise ShardcError("2 errors", errors=[ShardcError("a", where="x", fix="y"), ShardcError("b")])

    with pytest.raises(ShardcError, match="x: a"):
        compiled_once(folder, compiled, load)
    for rank in (1, 2):
        as_rank(rank)
        with pytest.raises(FirstFailedError) as found:
            compiled_once(folder, never, load)
        assert found.value.texts() == ["x: a\n  fix: y", "b"]


def test_a_store_that_goes_away_is_an_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it was killed while it compiled."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    monkeypatch.setattr(presence, "world_store", lambda: (client, 1, 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(compiled_once, folder, never, load)
        while not activity.waits():
            time.sleep(0.01)
        del server
        with pytest.raises(ShardcError, match="rank 0, where the ranks meet, ended while this rank waited"):
            waits.result(60)


@pytest.mark.parametrize("there", ["nothing", "open to all", "a link"])
def test_who_cannot_trust_the_folder_compiles_for_itself(
    there: str, folder: Path, as_rank: Callable[[int], None]
) -> None:
    as_rank(0)
    (holder := folder.parent / "there").mkdir(mode=0o700)
    compiled_once(holder / "program", program, load)
    if there == "open to all":
        holder.chmod(0o777)
    else:
        holder.rename(elsewhere := folder.parent / "elsewhere")
        if there == "a link":
            holder.symlink_to(elsewhere)
    as_rank(1)
    compiled: list[int] = []

    def compiled_here() -> Any:
        compiled.append(1)
        return program()

    compiled_once(folder, compiled_here, lambda _: never())
    assert compiled == [1]


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_process_alone_asks_nobody(missing: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "world_store", never)
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.delenv(missing)
    assert compiled_once(folder, program, load).mesh.world == 2


def test_a_store_that_goes_away_is_no_dump_of_frames() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        env = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        env |= {"MASTER_PORT": str(server.getsockname()[1]), "PYTHONPATH": os.pathsep.join(sys.path)}
        env.pop("TORCH_CPP_LOG_LEVEL", None)

        def gone() -> None:
            while True:
                try:
                    server.accept()[0].close()
                except OSError:
                    return

        threading.Thread(target=gone, daemon=True).start()
        script = (
            "from shardc.cli.same_error_once import for_this_rank as f;"
            " print(f('model.py:3: no'), f('no', alone=False))"
        )
        done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "model.py:3: no \n"
    assert done.stderr == ""
