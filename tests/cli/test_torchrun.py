"""Under torchrun: a rank that fails begins again with all others, and nothing of it is to be seen in the weights."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shardc.runtime import launch
from tests import warm
from tests.cli.test_run import MODEL


def weights(folder: Path, mode: str, *torchrun: str) -> tuple[bytes, str]:
    """(model.safetensors, what was printed) of 8 steps in a folder of its own."""
    folder.mkdir()
    (folder / "model.py").write_text(MODEL.replace("MODE", repr(mode)))
    (folder / "spec.yaml").write_text("shardc: 1\nmesh: {dp: 1, tp: 2}\nshard: {up: column, down: row}\n")
    log = folder / "log"
    log.touch()
    command = [sys.executable, "-m", "shardc", "run", "model.py", "spec.yaml", "--steps", "8", "--save", "out"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        process = warm.start(
            *("-m", "torch.distributed.run", "--no-python", "--nproc-per-node", "2", *torchrun), *command, log=log
        )
        assert process.wait(200) == 0, log.read_text()
    return (folder / "out" / "model.safetensors").read_bytes(), log.read_text()


def test_torchruns_restarts_go_on_where_the_run_was(tmp_path: Path) -> None:
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{launch.free_port()}")
    straight, _ = weights(tmp_path / "straight", "stream")
    again, said = weights(tmp_path / "again", "op raises once", "--max-restarts", "1", *meeting)
    assert "OSError: the machine is tired" in said
    assert "weights: those of out" in said
    assert again == straight
