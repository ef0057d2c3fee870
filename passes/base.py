"""What every pass is: made from the spec, it takes a program and gives another one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardc.ir.generation import Step
from shardc.ir.program import Program
from shardc.spec import Spec


@dataclass(frozen=True)
class Options:
    """What passes need to know of one compilation that is not in its spec.

    model_plan: the tensor-parallel plan that the model carries, {pattern: style word}, for `shard: {use: model}`.
    forward: the program is forward-only; "score": of the model's loss, the log-probabilities of its targets; a step
    that generates.
    compatible_with: a program of the same model and spec for another batch, whose parameters and buckets the new
    program has to share; None: it has its own.
    """

    model_plan: Mapping[str, str] = field(default_factory=dict)
    compatible_with: Program | None = None
    forward: bool | Literal["score"] | Step = False


@dataclass(frozen=True)
class Pass:
    """One stage of compilation. It returns a new program and never changes its input: it copies a graph before it
    edits it (shardc.ir.graph.copy_graph).
    """

    spec: Spec
    options: Options = field(default_factory=Options)

    def applies(self, program: Program) -> bool:
        """Whether there is anything to do. If not, the pass is neither run nor timed nor dumped."""
        return True

    def run(self, program: Program) -> Program:
        """The program after this pass. Raises ShardcError, all at once, for what it cannot do."""
        raise NotImplementedError
