"""Define a forward other than the model's own, which an optional feature compiles (`forward=` of shardc.compile)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from shardc.ir.outputs import Output

if TYPE_CHECKING:
    from shardc.spec import Spec


class OtherForward:
    """A forward-only program of the model, with a batch and outputs of its own kind."""

    def spec(self, spec: Spec) -> Spec:
        """Return the part of a spec that applies."""
        raise NotImplementedError

    def module(self, model: Any, leaves: Any) -> Any:
        """Return the module to capture, a shardc.capture.loss.ValuesOf."""
        raise NotImplementedError

    def outputs(self, outputs: Sequence[Output]) -> tuple[Output, ...]:
        """Return the program's outputs with the layouts that they need."""
        raise NotImplementedError
