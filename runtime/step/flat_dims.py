"""`p.ndim` in a loop of the user's own, where ZeRO has left flat stretches: it is 1 whatever the model's is.

    for p in module.parameters():
        if p.ndim > 1:              # at ZeRO 3 of none
            nn.init.orthogonal_(p)

Nothing fails there: a branch is not taken, or a parameter is in the other group. torch lets nobody answer `p.ndim` in a
tensor's place, and a class of one's own in place of nn.Parameter would turn off fused optimizers. So who asks for the
parameters is looked at: code that reads how many dims a tensor has is told, whether or not it asks these.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType

from torch import Tensor, nn

from shardc.ir import source
from shardc.ir.program import Program

_READS = {"ndim", "ndimension", "dim"}


def notes(program: Program, owned: Mapping[str, Tensor]) -> dict[str, str]:
    """What to tell who asks a module for its parameters, two calls above, if the code that does reads dims: {its line:
    the note}. owned: the parameters of this rank, by placeholder name.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is nn.Module.parameters.__code__:  # that asks for the named ones
        frame = frame.f_back
    if frame is None or not source.is_models(frame.f_code.co_filename) or not _reads(frame.f_code):
        return {}
    flat = [p.fqn for p in program.params if p.name in owned and owned[p.name].dim() != len(p.shape)]
    if not flat:
        return {}
    place = source.of_frame(frame, frame.f_lineno)
    more = f" and {len(flat) - 1} more" if len(flat) > 1 else ""
    what = (
        f"code that asks for a module's parameters ({place.code}) reads how many dims a tensor has: at ZeRO"
        f" {max(b.zero for b in program.buckets)} {flat[0]}{more} are flat stretches, whose p.ndim is 1 whatever the"
        " model's is. Choose by name, or make the optimizer with module.optimizer(function), which sees whole shapes"
    )
    return {place.line: what}


@functools.cache
def _reads(code: CodeType) -> bool:
    """Does it, or a comprehension or lambda in it, read `x.ndim`, or call `x.dim()`?"""
    return any(
        i.argval in _READS and (i.argval != "dim" or i.opname == "LOAD_METHOD" or "NULL" in i.argrepr)
        for c in _nested(code)
        for i in dis.get_instructions(c)
        if i.opname in ("LOAD_ATTR", "LOAD_METHOD")
    )


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for c in code.co_consts:
        if isinstance(c, CodeType) and c.co_name.startswith("<"):
            yield from _nested(c)
