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
inductor: Any = importlib.import_module("shardc.runtime.compiled.inductor")


def put_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From here on; regions are also those that save nothing. Returns how many inputs each compiled region has."""
    made: list[int] = []

    def run(function: Callable[..., Any], inputs: Sequence[Tensor], *, any_rows: bool) -> Callable[[list[Tensor]], Any]:
        made.append(len(inputs))
        return lambda box: function(*(box.pop(0) for _ in range(len(box))))

    monkeypatch.setattr(cut, "LEAST_SAVED", 0)
    monkeypatch.setattr(inductor, "inductor_compiled", run)
    monkeypatch.setattr(inductor, "no_compiler", lambda device: "")
    monkeypatch.setattr(inductor, "_DONE", {})
    return made
