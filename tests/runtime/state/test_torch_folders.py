"""Folders of torch.distributed.checkpoint that FSDP2 wrote on 1 and 4 ranks: weights, and runs that go on."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardc
from shardc.cli import app
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.state import torch_format
from shardc.runtime.state.checkpoint_folder import checkpoints_in, diff, read_box, read_index, verify
from shardc.runtime.state.weight_files import open_weights
from shardc.runtime.storage import disk_calls
from tests.runtime.state.fsdp_writer import adamw, data, lm

ROOT = Path(__file__).parents[3]
MESHES: list[dict[str, Any]] = [
    {"shardc": 1, "mesh": {"dp": 1}},
    {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"model.layers.*.0": "column", "model.layers.*.2": "row"}},
    {"shardc": 1, "mesh": {"dp": 4}, "data": {"zero": 3}},
]


@pytest.fixture(scope="module", params=[1, 4])
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp(f"ranks{request.param}")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(request.param), "--standalone"]
    script = ROOT / "tests/runtime/state/fsdp_writer.py"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, str(script), str(folder)], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return folder


def whole(written: Path, name: str = "model") -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(written / "whole.pt")[name]
    return found


def state_after(spec: dict[str, Any], model: nn.Module, folder: Path, steps: int, make: Any = adamw) -> Any:
    program = shardc.compile(model, data(), spec)

    def work(mesh: Any) -> Any:
        engine = program.engine(model, make, mesh=mesh)
        engine.load(folder)
        assert engine.step_count == 3
        for _ in range(steps):
            engine.step(data())
        return engine.full_state_dict()

    return loopback(program.mesh, work)[0]


# --- runs that go on


@pytest.mark.parametrize(
    ("layout", "spec"), [*(("titan", x) for x in MESHES), ("titan/step-3", MESHES[1]), ("app", MESHES[1])]
)
def test_a_run_of_fsdp_goes_on_on_any_mesh(
    written: Path, layout: str, spec: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    reached, later = state_after(spec, lm(), written / layout, 2), whole(written, "later")
    assert reached.keys() == later.keys()
    for n, x in later.items():
        torch.testing.assert_close(reached[n], x, rtol=1e-12, atol=1e-12, msg=n)
    assert capfd.readouterr().err.count("note: data: from the beginning") == 1


def test_commands_read_it(written: Path) -> None:
    listed = CliRunner().invoke(app, ["checkpoint", "ls", str(written / "titan")]).output
    assert re.fullmatch(r"step-3  torch.distributed.checkpoint, \d+ tensors, \d+\.\d KiB\n", listed), listed
    assert "step-3  read whole" in CliRunner().invoke(app, ["checkpoint", "verify", str(written / "titan")]).output


def test_numbers_are_compared_as_there_are_no_digests(written: Path, tmp_path: Path) -> None:
    shutil.copytree(written / "titan" / "step-3", tmp_path / "step-3")
    parts = max((tmp_path / "step-3").glob("*.distcp"), key=lambda x: x.stat().st_size)
    name, stored = max(read_index(tmp_path / "step-3").tensors.items(), key=lambda x: x[1].shape)
    assert not list(diff(written / "titan" / "step-3", tmp_path / "step-3"))
    index = read_index(tmp_path / "step-3")
    one = next(s for s in stored.slices if index.files[s.file].name == parts.name)
    data = bytearray(parts.read_bytes())
    numbers = read_box(tmp_path / "step-3", index, name, one.offset, one.shape).numpy().tobytes()
    data[data.index(numbers) + 6] ^= 0x10
    parts.write_bytes(data)
    assert [d.what for d in diff(written / "titan" / "step-3", tmp_path / "step-3")] == [name]
    done = CliRunner().invoke(app, ["checkpoint", "verify", str(tmp_path / "step-3")])
    assert "read whole; torch's format has no digests of numbers" in done.stdout


def test_settings_of_the_optimizer_are_the_runs(written: Path) -> None:
    for layout in ("titan", "app"):
        index = read_index(checkpoints_in(written / layout)[0].path)
        assert index.step == 3
        assert index.optimizer is not None
        (group,) = index.optimizer["groups"]
        assert (group["class"], group["lr"], group["betas"], group["weight_decay"]) == ("AdamW", 0.02, [0.8, 0.95], 0.1)
        assert {f"optimizer.{n}.exp_avg" for n in group["params"]} <= index.tensors.keys()


@pytest.mark.parametrize(
    ("layout", "make", "message"),
    [
        ("model", adamw, "the checkpoint has no optimizer state"),
        ("numbered", adamw, "its optimizer's state is by numbers, not by names"),
        ("sgd", adamw, "the checkpoint is of the optimizer SGD, not AdamW"),
    ],
)
def test_optimizers_that_do_not_fit_are_errors(written: Path, layout: str, make: Any, message: str) -> None:
    with pytest.raises(ShardcError, match=message):
        state_after(MESHES[0], lm(), written / layout, 0, make)


def test_other_models_are_errors_with_suggestions(written: Path) -> None:
    misspelt, extra, wider = lm(), lm(), lm()
    misspelt.model["layers"][0].register_module("norm", misspelt.model["layers"][0].pop(3))
    with pytest.raises(ShardcError, match=r"did you mean model\.layers\.0\.3\.weight"):
        state_after(MESHES[0], misspelt, written / "titan", 0)
    wider.model["layers"][0][0] = nn.Linear(6, 14).double()
    wider.model["layers"][0][2] = nn.Linear(14, 6).double()
    with pytest.raises(ShardcError, match=r"model\.layers\.0\.0\.weight has the shape \[12, 6\]"):
        state_after(MESHES[0], wider, written / "titan", 0)
    del extra.model["layers"][1][3]
    with pytest.raises(ShardcError, match=r"model\.layers\.1\.3\.weight in the checkpoint .* is unknown"):
        state_after(MESHES[0], extra, written / "titan", 0)


# --- weights


@pytest.mark.parametrize(
    ("layout", "spec"), [("titan", MESHES[0]), *((x, MESHES[1]) for x in ("app", "model", "untied", "compiled"))]
)
def test_weights_begin_a_run(written: Path, layout: str, spec: dict[str, Any]) -> None:
    program = shardc.compile(lm(), data(), spec)
    work = lambda mesh: program.engine(lm, mesh=mesh, weights=written / layout).full_state_dict()  # noqa: E731
    found, expected = loopback(program.mesh, work)[0], whole(written)
    assert all(torch.equal(found[n], x) for n, x in expected.items())


def test_weights_of_bfloat16_are_those_that_were_saved(written: Path) -> None:
    found, expected = open_weights(written / "bfloat16").tensors, whole(written, "bfloat16")
    for n, x in expected.items():
        assert found[n].dtype == x.dtype
        assert torch.equal(found[n].tensor(), x)
        assert all(torch.equal(found[n].read((i,), (1,)), x[i : i + 1]) for i in range(len(x)) if x.dim() == 1)
        if x.dim() == 2:
            assert torch.equal(found[n].read((3, 1), (2, 4)), x[3:5, 1:5])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_only_rows_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    big = torch.arange(4096.0 * 64).view(4096, 64)
    save({"up": big, "down": big.t()}, checkpoint_id=tmp_path / "c", no_dist=True)
    read = 0
    plain = disk_calls.read_into

    def counted(descriptor: Any, into: memoryview, place: int) -> None:
        nonlocal read
        read += len(into)
        plain(descriptor, into, place)

    monkeypatch.setattr(disk_calls, "read_into", counted)
    tensors = open_weights(tmp_path / "c").tensors
    read = 0
    assert torch.equal(tensors["up"].read((1024, 0), (64, 64)), big[1024:1088])
    assert read < 64 * 64 * 4 + (1 << 17)
    assert torch.equal(tensors["down"].read((3, 1024), (2, 64)), big.t()[3:5, 1024:1088])


# --- folders that are damaged, or made to do harm


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written / "titan" / "step-3", tmp_path / "c"))


def test_damage_is_named(folder: Path) -> None:
    assert not list(verify(folder))
    file = next(f for f in sorted(folder.glob("*.distcp")))
    data = file.read_bytes()
    file.write_bytes(data[:-64])
    with pytest.raises(ShardcError, match=r"it cannot be read|__\d_\d\.distcp"):
        raise next(iter(verify(folder)))
    file.write_bytes(bytes(len(data)))
    with pytest.raises(ShardcError, match=r"cannot be read|differs from the saved data|is not a plain value"):
        state_after(MESHES[0], lm(), folder, 0)
    file.unlink()
    with pytest.raises(ShardcError, match=r"the file is missing|No such file"):
        state_after(MESHES[0], lm(), folder, 0)


class Trap:
    def __init__(self, at: Path) -> None:
        self.at = str(at)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.at,)


def test_no_code_in_it_is_run(folder: Path, tmp_path: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Trap(tmp_path / "ran")
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ShardcError, match=r"it is not a file of torch: it needs posix\.mkdir"):
        read_index(folder)
    for wrong in ("../__0_0.distcp", "/etc/passwd", "x.distcp"):
        metadata.planner_data = None
        next(iter(metadata.storage_data.values())).relative_path = wrong
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(ShardcError, match="names a file that torch does not write"):
            read_index(folder)
    assert not (tmp_path / "ran").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("facts", ["", "[]", '{"extra": 3}', '{"extra": {}, "optimizer": 3}'])
def test_wrong_facts_are_an_error(tmp_path: Path, facts: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    save({"model.up": torch.ones(2), "shardc": facts}, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(ShardcError, match="it cannot be read"):
        read_index(tmp_path / "c")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_a_value_that_is_code_is_refused(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    values = {"up": torch.ones(2), "train_state": {"step": Trap(tmp_path / "ran")}}
    save(values, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(ShardcError, match=r"train_state\.step is not a plain value: .* an object, which is code"):
        read_index(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("what", ["offset", "size", "missing", "beyond", "negative"])
def test_boxes_that_do_not_make_up_a_tensor_are_refused(folder: Path, what: str) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key = "model.emb.weight"
    stored = metadata.state_dict_metadata[key]
    places = {tuple(i.offset): x for i, x in metadata.storage_data.items() if i.fqn == key}
    if what == "missing":
        stored.chunks.pop()
    elif what == "offset":
        stored.chunks[0].offsets = torch.Size((1, 0))
    elif what == "size":
        stored.size = torch.Size((19, 6))
    elif what == "beyond":
        places[0, 0].length = 1 << 40
    else:
        places[0, 0].offset = -1
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ShardcError):
        state_after(MESHES[0], lm(), folder, 0)


def test_folders_are_found_by_their_last_step(written: Path, tmp_path: Path) -> None:
    for step in ("step-3", "step-20", "step-100"):
        shutil.copytree(written / "model", tmp_path / step)
    (tmp_path / "step-1000").mkdir()  # nothing is in it
    assert checkpoints_in(tmp_path)[0].path == tmp_path / "step-100"
    assert torch_format.last_in(tmp_path / "step-1000") is None
