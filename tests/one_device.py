"""A model's own tensors, for the graph that one device runs (shardc.verify.reference)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.verify.reference import reach


def tensors_of(
    program: Program, model: nn.Module, batch: Any
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """(params, buffers, inputs) by placeholder name: the model's own tensors, not copies, and the batch's."""
    params, buffers = (
        dict(model.named_parameters(remove_duplicate=False)),
        dict(model.named_buffers(remove_duplicate=False)),
    )
    return (
        {p.name: p.whole(params) for p in program.params},
        {b.name: buffers[b.fqn] for b in program.buffers if b.constant is None},
        {i.name: reach(batch, i.path) for i in program.inputs},
    )
