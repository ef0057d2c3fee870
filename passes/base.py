"""Define what a pass is: it is made from the spec, takes a program and returns a new one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardc.ir.outputs import OtherForward
from shardc.ir.program import Program
from shardc.spec import Spec

#: The name of what runs before the first pass: it makes a program of the model.
CAPTURE = "capture"


@dataclass(frozen=True)
class Options:
    """Facts about one compilation that passes need and that are not in its spec.

    model_plan: the model's own tensor-parallel plan, {pattern: style word}, for `shard: {use: model}`.
    compatible_with: a program of the same model and spec for another batch, which runs already. The new program must
    have its parameters, as they are split, and its buckets.
    forward: False: the program trains. True: it runs only forward. "score": it runs only forward, and returns the
    log-probabilities of the loss's targets. OtherForward: it runs a forward other than the model's.
    """

    model_plan: Mapping[str, str] = field(default_factory=dict)
    compatible_with: Program | None = None
    forward: bool | Literal["score"] | OtherForward = False


@dataclass(frozen=True)
class Pass:
    """A step of compilation: it returns a new program, and never changes its input.

    It copies a graph before it edits it (shardc.ir.graph.copy_graph).
    """

    spec: Spec
    options: Options = field(default_factory=Options)

    def applies(self, program: Program) -> bool:
        """Return whether there is work to do. If not, the pass is not run, timed or dumped."""
        return True

    def run(self, program: Program) -> Program:
        """Return the program after this pass. Raises ShardcError with all faults at once."""
        raise NotImplementedError
