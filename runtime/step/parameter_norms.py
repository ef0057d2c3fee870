"""The norm of each parameter, and of its gradient, of the whole model: what people print who watch a training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.runtime.stage.clip_grad_norm import norm_axes


def norms(program: Program, params: Mapping[str, nn.Parameter], mesh: Any, *, grad: bool) -> dict[str, float]:
    """{name in the model: 2-norm of the whole parameter}, the same on all ranks. Collective: one sum for all that are
    split alike.

    params: what the optimizer works on, by placeholder name. grad: of the gradients instead, of those that are trained;
    of one that none has reached it is 0.
    """
    here = mesh.coordinate(program.axis) if program.axis else 0
    asked = [p for p in program.params if p.requires_grad or not grad]
    groups: dict[tuple[str, ...], list[str]] = {}
    squares: dict[str, Tensor] = {}
    for p in asked:
        groups.setdefault(norm_axes(program, p.name), []).append(p.name)
        held = not program.axis or program.holders(p)[0] == here  # of copies on several stages, the first one counts
        x: Tensor | None = params.get(p.name) if held else None
        x = x.grad if grad and x is not None else x
        squares[p.name] = _square(x) if x is not None else torch.zeros((), dtype=torch.float64)
    found: dict[str, float] = {}
    for axes, names in sorted(groups.items()):  # on all ranks alike, also where one holds none of them
        sums = torch.stack([squares[n].to(mesh.device) for n in names])
        if axes:
            sums = mesh.all_reduce(sums, axes, direction="update", tag="norms")
        found |= dict(zip(names, sums.sqrt().tolist(), strict=True))
    return {p.fqn: found[p.name] for p in asked}


def _square(x: Tensor) -> Tensor:
    """Of this rank's part, added up in float64."""
    plain = x.detach().as_subclass(Tensor)
    dtype = torch.complex128 if plain.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(plain, dtype=dtype)
    return norm.square()
