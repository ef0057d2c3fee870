"""Triton's kernels without a GPU: Triton's interpreter runs them with numpy."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch


@contextmanager
def interpreted(name: str) -> Iterator[ModuleType]:
    """A module of Triton kernels, by its name, as a second copy that is interpreted. The test is skipped where there is
    no Triton."""
    pytest.importorskip("triton", reason="needs Triton, which `make` installs on Linux with an x86-64 processor")
    from triton.runtime import interpreter

    real = interpreter._convert_float

    def rounding(data: Any, source: Any, target: Any, mode: Any) -> Any:
        """To bfloat16 by rounding to the nearest, as every GPU does; the interpreter cuts bits off."""
        if str(source) == "fp32" and str(target) == "bf16":
            return torch.from_numpy(data.copy()).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
        return real(data, source, target, mode)

    file = importlib.import_module(name).__file__
    spec = importlib.util.spec_from_file_location(f"interpreted_{name}", file)
    assert spec is not None
    assert spec.loader is not None
    with (
        mock.patch.dict("os.environ", {"TRITON_INTERPRET": "1"}),
        mock.patch.object(interpreter, "_convert_float", rounding),
        np.errstate(all="ignore"),
    ):
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
