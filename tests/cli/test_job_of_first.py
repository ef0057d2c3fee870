"""Under torchrun one process of a machine makes the job, and the others read it: also where it fails."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardc.cli.options import Named
from shardc.cli.ranks.make_job import Ranks, _job_of_first, _shared
from shardc.errors import ShardcError
from shardc.runtime.mesh import activity, presence


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes this process one of three of a machine, which share a store."""
    store = dist.HashStore()
    monkeypatch.setattr(presence, "world_store", lambda: (store, 0, 3))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    return lambda rank: monkeypatch.setenv("LOCAL_RANK", str(rank))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    return tmp_path / "job.json"


def publish(folder: Path, made: Any) -> None:
    Ranks(Named("model.py"), None, lambda *_: None, folder, True).publish(made)


def test_the_first_makes_it_and_the_others_read(file: Path, as_rank: Callable[[int], None]) -> None:
    as_rank(1)
    with ThreadPoolExecutor(1) as threads:
        early = threads.submit(_job_of_first, _shared())
        while not activity.waits():
            time.sleep(0.01)
        publish(file.parent, "one that is not the first says nothing")
        assert not early.done()
        as_rank(0)
        publish(file.parent, str(file))
        assert early.result(60) == str(file)
    as_rank(2)
    assert _job_of_first(_shared()) == str(file)


def test_an_error_of_the_first_is_met_by_all(file: Path, as_rank: Callable[[int], None]) -> None:
    """Also by one that comes later."""
    as_rank(0)
    error = ShardcError("2 errors", errors=[ShardcError("a", where="x", fix="y"), ShardcError("b")])
    publish(file.parent, error.to_json())
    for rank in (1, 2):
        as_rank(rank)
        with pytest.raises(ShardcError) as found:
            _job_of_first(_shared())
        assert found.value.texts() == ["x: a\n  fix: y", "b"]


def test_a_store_that_goes_away_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that held it was killed while it compiled."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    monkeypatch.setattr(presence, "world_store", lambda: (client, 1, 2))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    with ThreadPoolExecutor(1) as threads:
        waits = threads.submit(_job_of_first, _shared())
        while not activity.waits():
            time.sleep(0.01)
        del server
        with pytest.raises(ShardcError, match="rank 0, where the ranks meet, ended while this rank waited"):
            waits.result(60)


@pytest.mark.parametrize("there", ["nothing", "open to all", "a link"])
def test_who_cannot_trust_the_folder_makes_it_for_itself(
    there: str, file: Path, as_rank: Callable[[int], None]
) -> None:
    as_rank(0)
    (holder := file.parent / "there").mkdir(mode=0o700)
    publish(holder, str(holder / "job.json"))
    if there == "open to all":
        holder.chmod(0o777)
    else:
        holder.rename(elsewhere := file.parent / "elsewhere")
        if there == "a link":
            holder.symlink_to(elsewhere)
    as_rank(1)
    assert _job_of_first(_shared()) is None


@pytest.mark.parametrize("missing", ["LOCAL_RANK", "LOCAL_WORLD_SIZE"])
def test_a_process_alone_asks_nobody(missing: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presence, "world_store", lambda: pytest.fail("it asks"))
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.delenv(missing)
    assert not _shared()
    publish(file.parent, json.dumps(str(file)))
