"""Which program evaluates: that of a step with dropout and BatchNorm switched, or one of the model in eval mode, where
forward has branches of its own on `self.training` (shardc.capture.attribute_reads finds out).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.step.batch_sizes import Shapes, Use

_BRANCHES = "forward has branches of its own on self.training"
_PLAIN = "evaluate the plain model with engine.full_state_dict()"


def switched(program: Program, tell: Callable[[str], None]) -> bool:
    """Does the program of a step evaluate as well? tell: of what nobody knows.

    Raises ShardcError where it does not, and there is no model to compile for it.
    """
    if program.evaluates == "alike":
        return True
    if program.resize is not None:
        return False
    if program.evaluates == "otherwise":
        what = f"{_BRANCHES}, and does something else in eval mode; a program that was loaded has no model to compile"
        raise ShardcError(what, where="evaluating", fix=f"compile in this process (shardc.compile), or {_PLAIN}")
    tell(f"{_BRANCHES}, which stay as in training: what they do in eval mode was not tried. If it matters, {_PLAIN}")
    return True


def compiled(
    program: Program, batch: Any, shapes: Shapes, mesh: Any, *, use: Use, tell: Callable[[str], None]
) -> Program:
    """The program for a batch of these global shapes, the same on all ranks, for a use. Collective.

    Raises ShardcError, on all, where one of them cannot compile it: for evaluating only if it is known to be another
    one than that of a step.
    """
    if program.resize is None:
        what = "scoring runs a program of its own, and one that was loaded has no model to compile"
        fix = 'compile in this process, or for scoring: shardc.compile(..., forward="score")'
        raise ShardcError(what, where="engine.score", fix=fix)
    made, error = program, None
    try:
        made = program.resize(program, batch, shapes, use)
    except ShardcError as e:
        error = e
    # the model may be alive on some ranks only, or a proof may fail on one rank's rows
    if not mesh.sum_on_host([error is not None])[0]:
        return made
    if use != "evaluate" or program.evaluates == "otherwise":
        raise error or ShardcError("another rank could not compile the program for this batch", where="engine")
    why = error.what if error is not None else "another rank could not compile the model in eval mode"
    tell(f"{why}. So dropout and BatchNorm alone are switched to evaluate. If it matters, {_PLAIN}")
    same = shapes == tuple(x.shape for x in program.inputs)
    return program if same else compiled(program, batch, shapes, mesh, use="as compiled", tell=tell)
