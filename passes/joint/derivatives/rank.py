"""Define a rank on which calls run without data: its mesh, random numbers, and tensors' types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardc.ir.program import Program
from shardc.passes.joint.derivatives.record import Ref, map_refs
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

    def run(self, call: Template, operands: Sequence[Any]) -> list[Any]:
        """Run a call and return its result, or results, as a list."""

        def put(r: Ref) -> Any:
            if r.kind == "n":
                return call.names[r.index]
            return operands[r.index] if r.kind == "x" else self.named(r.kind)

        result = call.target(*map_refs(call.args, put), **{k: map_refs(a, put) for k, a in call.kwargs.items()})
        return list(result) if isinstance(result, (tuple, list)) else [result]
