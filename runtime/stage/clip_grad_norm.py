"""Compute the 2-norm of the whole gradient, over split, replicated and ZeRO parameters; clip by it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.torch_private import norms


class GradNorm:
    """The 2-norm of all gradients of the whole model. Every parameter counts once, however it is split.

    params: the optimizer's parameters. Use: `start()`, `add`, `total()`. `add` takes parameters as soon as their sums
    are ready, so that most of the work overlaps with the other sums.
    """

    def __init__(self, program: Program, params: Mapping[str, nn.Parameter], mesh: Any) -> None:
        self.params, self.mesh = params, mesh
        self._axes = {p.name: norm_axes(program, p.name) for p in program.params}
        # of copies on several pipeline ranks, only the first one counts
        at = mesh.coordinate(program.axis) if program.axis else 0
        self._counted = {p.name for p in program.params if not program.axis or program.holders(p)[0] == at}
        # by parameters, not gradients: a rank may have no gradient where others have some
        self._dtypes: dict[tuple[str, ...], torch.dtype] = {}
        for p in program.params:
            axes = self._axes[p.name]
            real = p.dtype.to_real() if p.dtype.is_complex else p.dtype
            self._dtypes[axes] = torch.promote_types(self._dtypes.get(axes, torch.float32), real)
        self._squares: dict[tuple[str, ...], list[Tensor]] = {}
        self._pending: set[str] = set()  # counted parameters that were not added yet

    def start(self) -> None:
        """Begin a new norm."""
        self._squares = {axes: [] for axes in self._axes.values()}
        self._pending = set(self._counted)

    def add(self, names: Sequence[str]) -> None:
        """Add the squares of these parameters' gradients, which are final."""
        groups: dict[tuple[str, ...], list[Tensor]] = {}
        for name in (n for n in names if n in self._counted):
            grad = self.params[name].grad
            if grad is not None and grad.numel():
                groups.setdefault(self._axes[name], []).append(grad.as_subclass(Tensor))
        for axes, grads in groups.items():
            self._squares[axes].append(torch.stack(norms(grads, self._dtypes[axes])).square().sum())
        self._pending.difference_update(names)

    def total(self) -> Tensor:
        """Return the norm: 0-dim, float32 or wider, the same on all ranks. Collective if parameters are split."""
        self.add([n for n in self._axes if n in self._pending])
        whole = torch.zeros((), device=self.mesh.device)
        for axes in sorted(self._squares):  # the same order on all ranks, even without gradients
            none = torch.zeros((), dtype=self._dtypes[axes], device=whole.device)
            part = torch.stack(self._squares[axes]).sum() if self._squares[axes] else none
            whole = whole + (self.mesh.all_reduce(part, axes, direction="update", tag="grad_norm") if axes else part)
        return whole.sqrt()

    def clip(self, most: float, total: Tensor) -> None:
        """Scale all gradients down so that the norm, now `total`, is at most `most`."""
        nn.utils.clip_grads_with_norm_(self.params.values(), most, total)


def norm_axes(program: Program, name: str) -> tuple[str, ...]:
    """Return the axes whose ranks hold different parts of a parameter's gradient."""
    p, mesh = program.param(name), program.mesh
    cut = {a for a, _ in p.layout.shards()} | ({program.axis} if program.axis else set())
    bucket = program.bucket(p)
    if bucket is not None and bucket.zero:
        cut |= set(mesh.digits(bucket.shard))
    return tuple(a for a in mesh.names if a in cut and mesh.size(a) > 1)


def parameter_norms(program: Program, params: Mapping[str, nn.Parameter], mesh: Any, *, grad: bool) -> dict[str, float]:
    """Return {model name: 2-norm of the whole parameter}, the same on all ranks. Collective.

    One sum for all parameters with the same split. params: the optimizer's, by placeholder name. grad: norms of the
    gradients of trained parameters instead; 0 without a gradient.
    """
    at = mesh.coordinate(program.axis) if program.axis else 0
    included = [p for p in program.params if p.requires_grad or not grad]
    groups: dict[tuple[str, ...], list[str]] = {}
    squares: dict[str, Tensor] = {}
    for p in included:
        groups.setdefault(norm_axes(program, p.name), []).append(p.name)
        counts = not program.axis or program.holders(p)[0] == at  # of copies on several stages, only the first counts
        x: Tensor | None = params.get(p.name) if counts else None
        x = x.grad if grad and x is not None else x
        squares[p.name] = _square(x) if x is not None else torch.zeros((), dtype=torch.float64)
    by_name: dict[str, float] = {}
    for axes, names in sorted(groups.items()):  # the same order on all ranks, even without these parameters
        sums = torch.stack([squares[n].to(mesh.device) for n in names])
        if axes:
            sums = mesh.all_reduce(sums, axes, direction="update", tag="norms")
        by_name |= dict(zip(names, sums.sqrt().tolist(), strict=True))
    return {p.fqn: by_name[p.name] for p in included}


def _square(x: Tensor) -> Tensor:
    """Return the sum of squares of this rank's part, accumulated in float64."""
    plain = x.detach().as_subclass(Tensor)
    dtype = torch.complex128 if plain.is_complex() else torch.float64
    norm: Tensor = torch.linalg.vector_norm(plain, dtype=dtype)
    return norm.square()
