"""Define a forward other than the model's own, which an optional feature compiles (`forward=` of shardc.compile)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardc.ir.outputs import Output


class OtherForward:
    """A forward-only program of the model, with a batch and outputs of its own kind."""

    def spec(self, spec: Any) -> Any:
        """Return the part of a spec that applies."""
        raise NotImplementedError

    def module(self, model: Any, leaves: Any) -> Any:
        """Return the module to capture, a shardc.capture.loss.ValuesOf."""
        raise NotImplementedError

    def outputs(self, outputs: Sequence[Output]) -> tuple[Output, ...]:
        """Return the program's outputs with the layouts that they need."""
        raise NotImplementedError
