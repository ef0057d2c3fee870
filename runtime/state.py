"""State is keyed by the model's own names and the global slice, never by plan (DESIGN section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from shardc.program import Program


def local_parameters(program: Program, source: Any, mesh: Any, seed: int) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """This rank's parameters and buffers by placeholder name, cut out of a model with real weights or a dict of tensors."""
    if isinstance(source, Mapping):
        tensors = dict(source)
    else:
        tensors = dict(source.named_parameters(remove_duplicate=False)) | dict(source.named_buffers(remove_duplicate=False))
    coords = mesh.layout.coords(mesh.rank)

    def part(x: Any) -> Tensor:
        whole = x.constant if getattr(x, "constant", None) is not None else tensors[x.fqn].detach()
        return x.layout.local(whole, mesh.layout, coords).detach().to(mesh.device).clone()

    params = {p.name: nn.Parameter(part(p), requires_grad=p.requires_grad) for p in program.params}
    return params, {b.name: part(b) for b in program.buffers}
