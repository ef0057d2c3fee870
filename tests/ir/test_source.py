"""Whose code a file is."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

import shardc
from shardc.ir.source import is_models, is_users
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
