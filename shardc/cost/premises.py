"""Describe in words what a predicted step computes: predictions of a program differ where these do."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardc.ir.program import Program


def premises(program: Program, optimizer: str, *, clip_norm: float | None = None, norm: bool = False, **_: Any) -> str:
    """Return words such as "in float32, AdamW, ...". optimizer: its class name or ""; others: Engine's."""
    from shardc.runtime.step import step_graph

    numbers = Counter(p.dtype for p in program.params)
    stored = str(max(numbers, key=numbers.__getitem__, default="")).removeprefix("torch.")
    computed = (program.spec.precision.compute if program.spec is not None else None) or stored
    words = [f"in {computed}"] if computed else []
    if computed != stored:
        words.append(f"weights in {stored}")
    if step_graph.requested(program) and not step_graph.why_not(program):
        words.append("one CUDA graph on a GPU")
    if optimizer:
        words.append(optimizer)
        words.append(gradients_norm(norm=norm, clipped=clip_norm is not None))
    return ", ".join(words)


def gradients_norm(*, norm: bool, clipped: bool) -> str:
    """Return in words whether a step computes the norm of gradients. `shardc run` does, to show it."""
    if clipped:
        return "clipping by the norm of gradients"
    return f"with{'' if norm else 'out'} the norm of gradients"
