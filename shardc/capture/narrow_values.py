"""A note on what a model of float64 computes in fewer bits by itself: norms, softmax and rotary tables that cast."""

from __future__ import annotations

import torch

from shardc.ir.graph import calls, source_of, values_of
from shardc.ir.program import Program


def note(program: Program) -> tuple[str, ...]:
    """Of a captured model all of whose weights are float64: the first line that computes in a narrower type.

    A sum over ranks is taken in another order, so there a comparison with one device is one in that type.
    """
    weights = {p.dtype for p in program.params if p.dtype.is_floating_point}
    if weights != {torch.float64}:
        return ()
    narrow = [
        (node, value.dtype)
        for node in calls(program.graph)
        for value in values_of(node)
        if value.dtype.is_floating_point and value.dtype != torch.float64
    ]
    if not narrow:
        return ()
    (first, dtype), *rest = narrow
    place = source_of(first)
    name, eps = str(dtype).removeprefix("torch."), torch.finfo(dtype).eps
    return (
        f"{place.line}: the weights are float64, but forward computes in {name} here"
        f"{f' ({place.shown})' if place.code else ''} and at {len(rest)} more values: compared with one device it"
        f" differs by rounding of {name}, about {eps:.0e}, not of float64",
    )
