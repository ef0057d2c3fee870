"""In the place of Inductor: regions run as they are. So regions, masks, and what is freed when are tried on any spec,
to the bit, without minutes of g++.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from torch import Tensor

cut: Any = importlib.import_module("shardc.passes.joint.fused_regions")
compiler: Any = importlib.import_module("shardc.runtime.compiled.compiler")


def put_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on; regions are also those that save nothing. Returns how many inputs each compiled region has."""
    made: list[int] = []

    def run(function: Callable[..., Any], inputs: Sequence[Tensor], *, any_rows: bool) -> Callable[[list[Tensor]], Any]:
        made.append(len(inputs))
        return lambda box: function(*(box.pop(0) for _ in range(len(box))))

    monkeypatch.setattr(cut, "LEAST_SAVED", 0)
    monkeypatch.setattr(compiler, "inductor_compiled", run)
    monkeypatch.setattr(compiler, "no_compiler", lambda device: "")
    monkeypatch.setattr(compiler, "_DONE", {})
    return made
