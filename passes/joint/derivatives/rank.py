"""Define a rank on which calls run without data: its mesh, random numbers, and tensors' types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardc.ir.program import Program
from shardc.passes.joint.derivatives.record import Ref
from shardc.passes.joint.derivatives.template import Template
from shardc.runtime.mesh.shapes import ShapeMesh
from shardc.runtime.rng import Rng
from shardc.torch_private import FakeTensorMode


class Rank:
    """Rank 0 of a program's mesh. mode: in which its tensors are made and its calls run."""

    def __init__(self, program: Program) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mesh = ShapeMesh(program.mesh, 0)
        self._mesh.step.set_microbatch(0, program.microbatches)
        self._rng = Rng(0)

    def named(self, name: str) -> Any:
        """Return the object for "mesh" or "rng"."""
        return self._mesh if name == "mesh" else self._rng

    def value(self, r: Ref, operands: Sequence[Any]) -> Any:
        """Return the value of a Ref in a call: one of these operands for "x", or that of "mesh" or "rng"."""
        return self.named(r.kind) if r.kind in ("mesh", "rng") else operands[r.index]

    def run(self, call: Template, operands: Sequence[Any]) -> list[Any]:
        """Run a call and return its result, or results, as a list."""
        result = call.call(lambda r: self.value(r, operands))
        return list(result) if isinstance(result, (tuple, list)) else [result]
