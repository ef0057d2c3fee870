"""Whose code a file is."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import shardc
from shardc.ir.source import is_models, is_users, models_frame
from shardc.runtime import launch


def test_whose_code_a_file_is(tmp_path: Path) -> None:
    library = str(Path(pytest.__file__).parents[1] / "transformers" / "models" / "llama.py")
    for file in (str(tmp_path / "model.py"), "/tmp/ipykernel_12/34.py"):  # a notebook's cell is no file
        assert is_models(file)
        assert is_users(file)
    assert is_models(library)
    assert not is_users(library)
    for file in (torch.__file__, shardc.__file__, launch.__file__, contextlib.__file__, "<string>"):
        assert not is_models(file)
        assert not is_users(file)


class Looks(TorchFunctionMode):
    """A user's own mode that sees each op."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_what_looks_at_ops_is_not_the_line_that_calls_them() -> None:
    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with Looks():
                return x.cos().sum()

    program = shardc.compile(Model(), {"x": torch.ones(2, 4)}, {"shardc": 1, "mesh": {"dp": 2}})
    assert "x.cos().sum()" in str(program)
    assert "return func(" not in str(program)


def test_frames_around_shardcs_command_line_are_not_the_models() -> None:
    """Those of typer, and of the script that pip has written."""
    scope: dict[str, Any] = {"__name__": "shardc.cli.run", "models_frame": models_frame, "sys": sys}
    code = compile("frame = models_frame(sys._getframe())", str(Path(shardc.__file__).with_name("run.py")), "exec")
    exec(code, scope)
    assert scope["frame"] is None
    scope["__name__"] = "shardc.api"
    exec(code, scope)
    assert scope["frame"].f_code.co_name == "test_frames_around_shardcs_command_line_are_not_the_models"
