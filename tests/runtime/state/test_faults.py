"""Checkpoints survive disks and processes that fail, and tell what was damaged or made to do harm; see faults.py."""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import shardc
from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state import loading, saving
from shardc.runtime.state.checkpoint_folder import DamagedError, SavingError, generations, read_index, verify
from shardc.runtime.state.owners import RankState
from shardc.runtime.storage import disk_calls
from tests.runtime.state.faults import load, save, trained, try_all_faults, try_damages, try_hostile

torch.set_num_threads(1)


def test_whatever_fails_the_old_state_or_the_new_one_is_there() -> None:
    found = try_all_faults(every=13)
    assert sum(found.values()) > 15
    assert {name.split(": ")[1] for name in found} == {"old", "new"}


def test_damage_is_told() -> None:
    found = try_damages(200, seed=1)
    assert set(found) <= {"named", "benign", "benign to a load, named by verify"}, found
    assert found["named"] > 150


def test_hostile_checkpoints_do_no_harm() -> None:
    found = try_hostile(250, seed=1)
    assert set(found) <= {"refused", "loads"}, found
    assert found["refused"] > 150


def _names(folder: Path) -> list[str]:
    return [g.path.name for g in generations(folder)]


def test_the_last_ones_are_kept_and_the_only_good_one_always(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    assert _names(tmp_path) == ["step-000003", "step-000002"]
    save(tmp_path, 4, keep=1)
    assert _names(tmp_path) == ["step-000004"]
    (tmp_path / "step-000004" / "index.json").unlink()
    save(tmp_path, 5)
    (tmp_path / "step-000005" / "model-00000.safetensors").unlink()
    save(tmp_path, 6)
    assert _names(tmp_path) == ["step-000006", "step-000005", "step-000004"]  # one whole one is not two
    save(tmp_path, 7)
    assert _names(tmp_path) == ["step-000007", "step-000006"]


def test_a_step_that_is_saved_again_comes_first_and_later_ones_last(tmp_path: Path) -> None:
    for step in (5, 9):
        save(tmp_path, step, keep=9)
    save(tmp_path, 5, {"tp": 1}, keep=9)
    assert _names(tmp_path) == ["step-000005.2", "step-000005", "step-000009.old"]
    assert "'step': 5" in load(tmp_path)["extra"]
    save(tmp_path, 9, keep=9)
    assert _names(tmp_path)[0] == "step-000009.2"


def test_a_damaged_one_is_named_and_the_last_good_one_offered_and_taken(tmp_path: Path) -> None:
    save(tmp_path, 1)
    good = load(tmp_path)
    save(tmp_path, 2)
    file = tmp_path / "step-000002" / "optimizer-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    with pytest.raises(DamagedError) as e:
        load(tmp_path)
    assert "optimizer-00001.safetensors: optimizer." in str(e.value)
    assert "differs from the saved data (found by rank 0" in str(e.value)
    assert "step-000001 is complete: load that one, or find it with last_good=True" in str(e.value)
    assert load(tmp_path, last_good=True) == good
    (tmp_path / "step-000001" / "model-00000.safetensors").unlink()
    with pytest.raises(DamagedError) as e:
        load(tmp_path, last_good=True)
    assert [Path(x.where).name for x in e.value.errors] == ["step-000002", "step-000001"]


def test_a_file_of_another_checkpoint_is_told(tmp_path: Path) -> None:
    for step in (3, 6):
        save(tmp_path, step)
    name = "model-00001.safetensors"
    (tmp_path / "step-000006" / name).write_bytes((tmp_path / "step-000003" / name).read_bytes())
    with pytest.raises(DamagedError, match=r"the file is of another checkpoint, saved at step 3; rank 1 wrote it"):
        load(tmp_path)


def test_a_later_version_is_told(tmp_path: Path) -> None:
    save(tmp_path, 1)
    index = tmp_path / "step-000001" / "index.json"
    index.write_text(index.read_text().replace('"version": 3', '"version": 4'))
    with pytest.raises(DamagedError, match="it is of version 4, and this shardc reads 3"):
        load(tmp_path)


def test_verify_goes_on_after_a_file_that_is_a_link(tmp_path: Path) -> None:
    save(tmp_path, 1)
    folder = tmp_path / "step-000001"
    (folder / "model-00000.safetensors").rename(tmp_path / "elsewhere")
    (folder / "model-00000.safetensors").symlink_to(tmp_path / "elsewhere")
    other = folder / "optimizer-00001.safetensors"
    data = bytearray(other.read_bytes())
    data[-3] ^= 4
    other.write_bytes(data)
    first, second = verify(folder)
    assert Path(first.where).name == "model-00000.safetensors"
    assert "the file cannot be read" in first.what
    assert Path(second.where).name == other.name
    assert "differs from the saved data" in second.what


def test_an_index_with_a_slice_twice_and_another_missing_is_refused(tmp_path: Path) -> None:
    """Their sizes add up to the tensor's, and every byte of the files is in one slice."""
    save(tmp_path, 1)
    index = tmp_path / "step-000001" / "index.json"
    table = json.loads(index.read_text())
    first, second, *_ = table["tensors"]["model.emb.weight"][2]
    assert first[3] == second[3], "equal shapes"
    second[2] = first[2]
    body = json.dumps({k: v for k, v in table.items() if k != "sha256"}).encode()[1:]
    index.write_bytes(b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body)
    with pytest.raises(DamagedError, match=r"slices of 'model\.emb\.weight' overlap"):
        read_index(index.parent)


def test_a_save_whose_cleaning_up_fails_says_on_all_ranks_that_it_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path) -> None:
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    for step in (1, 2):
        save(tmp_path, step)
    monkeypatch.setattr(disk_calls, "remove_folder", fails)
    raised = save(tmp_path, 3)
    monkeypatch.undo()
    assert [type(e) for e in raised] == [SavingError] * 2
    for e in raised:
        assert "the checkpoint of step 3 was saved, but others cannot be renamed or deleted" in str(e)
        assert "was not saved" not in str(e)
        assert "check the permissions of the folder" in e.fix
    assert "'step': 3" in load(tmp_path)["extra"]


def test_an_error_of_one_rank_has_its_fix_on_all(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def work(mesh: LoopbackMesh) -> str:
        def accept(_: Any) -> None:
            if mesh.rank == 1:
                raise ShardcError("it is too old", fix="save it again")

        program, params, buffers, optimizer = trained(mesh, 9)
        with pytest.raises(ShardcError, match="it is too old") as e:
            loading.load(tmp_path, RankState(program, mesh, params, buffers, optimizer), accept=accept)
        return e.value.fix

    assert loopback(Mesh.of({"tp": 2}), work) == ["save it again"] * 2


def test_two_runs_do_not_save_to_one_folder_at_once(tmp_path: Path) -> None:
    lock = disk_calls.Lock(tmp_path / ".lock")
    raised = save(tmp_path, 1)
    assert "another process is saving to this folder" in str(raised[0])
    assert all(isinstance(e, SavingError) for e in raised)
    lock.release()
    assert not any(save(tmp_path, 1))


def test_a_process_forked_while_a_save_is_written_does_not_keep_its_lock(tmp_path: Path) -> None:
    """Such as a DataLoader's worker, made when an epoch begins."""
    lock = disk_calls.Lock(tmp_path / ".lock")
    with subprocess.Popen(["sleep", "60"], pass_fds=[lock._descriptor]) as forked:
        lock.release()
        raised = save(tmp_path, 1)
        forked.kill()
    assert not any(raised), raised


def test_training_goes_on_while_a_save_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the moment of `save` are written, whatever becomes of the tensors; one save at a time."""
    going, real = threading.Event(), disk_calls.sync

    def sync(descriptor: int) -> None:
        assert going.wait(30)
        real(descriptor)

    monkeypatch.setattr(disk_calls, "sync", sync)

    def work(mesh: LoopbackMesh) -> None:
        program, params, buffers, optimizer = trained(mesh, 1)
        saves = saving.Saves(mesh)
        for step in (1, 2):
            facts = {"step": step, "seed": 7}
            held = RankState(program, mesh, params, buffers, optimizer)
            saves.save(tmp_path, functools.partial(saving.planned, held, facts), wait=False)
            saves.poll()
            assert saves.progress is not None
            assert not list(tmp_path.glob(f"step-{step:06d}"))
            for p in params.values():
                p.detach().zero_()
            going.set()
        saves.finish()
        assert saves.progress is None

    loopback(Mesh.of({"tp": 2}), work)
    save(tmp_path / "straight", 1)
    first, second = load(tmp_path / "step-000001"), load(tmp_path / "step-000002")
    assert first == load(tmp_path / "straight")
    assert not any(second["qkv_weight"])
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-000001", "step-000002", "straight"]


def test_the_index_is_json_that_says_all(tmp_path: Path) -> None:
    save(tmp_path, 3, {"dp": 2, "tp": 2})
    table = json.loads((tmp_path / "step-000003" / "index.json").read_text())
    assert table["extra"] == {"step": 3, "seed": 7}
    assert table["mesh"] == {"dp": 2, "tp": 2}
    assert table["optimizer"]["class"] == "AdamW"
    dtype, shape, slices = table["tensors"]["optimizer.qkv.weight.exp_avg"]
    assert (dtype, shape, len(slices)) == ("float32", [24, 8], 12)


def test_an_engine_tells_on_all_ranks_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk behind a save in the background is raised before a step has begun, which can then be taken."""
    model, batch = torch.nn.Linear(4, 4), {"input": torch.ones(4, 4)}
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, loss=lambda y, _: y.square().mean())
    real = disk_calls.sync

    def run(mesh: LoopbackMesh, *, fails: bool) -> list[float]:
        engine = program.engine(model, mesh=mesh)
        engine.step(batch)
        engine.save(tmp_path / str(fails), wait=False)
        losses: list[float] = []
        told: list[str] = []
        while len(losses) < 4:
            try:
                losses.append(float(engine.step(batch)))
            except SavingError as e:
                told.append(str(e))
        engine.close()
        assert ["No space left on device (on rank" in text for text in told] == [True] * fails
        return losses

    straight = loopback(program.mesh, lambda mesh: run(mesh, fails=False))

    def full(descriptor: int) -> None:
        if threading.current_thread().name.startswith("save"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(disk_calls, "sync", full)
    assert loopback(program.mesh, lambda mesh: run(mesh, fails=True)) == straight
    assert _names(tmp_path / "False") == ["step-000001"]
    assert _names(tmp_path / "True") == []
