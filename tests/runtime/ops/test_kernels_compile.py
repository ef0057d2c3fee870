"""Triton's compiler takes the kernels, for a GPU that is not there. (Its interpreter, in which other tests run them,
also runs what the compiler refuses.)
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardc.runtime import rng
from shardc.runtime.rng import Rng

triton: Any = pytest.importorskip("triton")
compiler: Any = importlib.import_module("triton.backends.compiler")
jit: Any = importlib.import_module("triton.runtime.jit")
drivers: Any = importlib.import_module("triton.runtime.driver")
CPU = torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The kernels that were launched meanwhile: compiled for an H100, and not run."""
    found: list[Any] = []

    def launcher(kernel: Any, grid: Any) -> Any:
        return lambda *args, **named: found.append(kernel.warmup(*args, grid=grid, **named))

    driver = SimpleNamespace(
        get_current_target=lambda: compiler.GPUTarget("cuda", 90, 32),
        get_current_device=lambda: -1,  # by which the compiler remembers what it has compiled
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(jit.JITFunction, "__getitem__", launcher)
    monkeypatch.setattr(drivers.driver, "_active", driver)
    yield found
    assert found
    assert all("cubin" in kernel.asm for kernel in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dropout(compiled: list[Any], dtype: torch.dtype) -> None:
    from shardc.runtime.ops.dropout.kernel import launch

    x, words = torch.ones(64, 300, dtype=dtype), Rng().words(CPU)
    rows, columns = rng.row_and_column_offsets((64, 300), (), None, CPU, last=True)
    index = torch.int64 if dtype is torch.float32 else torch.int32
    launch(x, words, rows.to(index), columns.to(index), 5, 0.1)


@pytest.mark.parametrize(
    ("weighted", "kind"), [(False, "values"), (False, "packed"), (True, "values"), (True, "packed")], ids=str
)
def test_float8(compiled: list[Any], weighted: bool, kind: str) -> None:
    from shardc.features.fp8.cast_kernel import cast

    x, amax = torch.ones(64, 256, dtype=torch.bfloat16), torch.ones(64, 1)
    weights = torch.ones(256) if weighted else None
    out = x.clone() if kind == "values" else torch.empty(64 * 257, dtype=torch.uint8)
    cast(x, amax, weights, "e4m3", (1, 0), out, kind)


def test_the_largest_of_each_row(compiled: list[Any]) -> None:
    from shardc.features.fp8.cast_kernel import largest

    largest(torch.ones(64, 256), torch.ones(256))
