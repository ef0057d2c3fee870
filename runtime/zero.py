"""Gradient buckets: sums over ranks that run while backward still runs (DESIGN section 3; Li et al. 2020, "PyTorch Distributed").

A bucket is one flat buffer. When backward has finished a parameter's gradient, it is copied to its place in the buffer, which
becomes the parameter's `.grad`; when a bucket is full, and all before it have started, its all_reduce starts in the background.
Buckets come from the program in the order in which backward finishes them: no warm-up step finds it out, and all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardc.program import Bucket, Program
from shardc.runtime.comm import Work

Reduced = Callable[[Sequence[str]], None]


class Buckets:
    """The buckets of one rank. params: local parameters by name. Use: `start()`, backward, `finish()`.

    A parameter that has a `.grad` when backward starts gets the new sum added to it, as on one device; one that backward does
    not reach counts as zeros in the sum, and keeps the `.grad` it had, also as on one device.
    """

    def __init__(self, program: Program, params: Mapping[str, nn.Parameter], mesh: Any) -> None:
        self.mesh = mesh
        self._flats = [_Flat(b, f"bucket{i}", params) for i, b in enumerate(program.buckets) if mesh.members(b.axes) > 1]
        self._next = 0
        self._active = False
        for flat in self._flats:
            for name, p in flat.params.items():
                p.register_post_accumulate_grad_hook(self._hook(flat, name))  # type: ignore[no-untyped-call]

    @property
    def names(self) -> set[str]:
        """The parameters that are in buckets."""
        return {n for flat in self._flats for n in flat.params}

    @property
    def active(self) -> bool:
        """Between `start` and `finish`."""
        return self._active

    def start(self) -> None:
        """Before backward, or as its first act."""
        for flat in self._flats:
            flat.start()
        self._next, self._active = 0, True

    def reset(self) -> None:
        """Forget a backward that failed halfway. Not while one is running."""
        self._active = False

    def _hook(self, flat: _Flat, name: str) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            if self._active:
                flat.put(name, p)
                self._launch(all_of_them=False)

        return arrived

    def _launch(self, *, all_of_them: bool) -> None:
        """Start the buckets that are due, in order: every rank must start them alike."""
        while self._next < len(self._flats):
            flat = self._flats[self._next]
            if flat.missing and not all_of_them:
                return
            flat.work = self.mesh.start_all_reduce(flat.filled(), flat.spec.axes, direction="backward", tag=flat.tag)
            self._next += 1

    def finish(self, reduced: Reduced | None = None) -> None:
        """After backward: wait for all sums. reduced: called with each bucket's parameters while later ones are still under way."""
        self._launch(all_of_them=True)
        for flat in self._flats:
            flat.work.wait()
            flat.give_back()
            flat.add_kept()
            if reduced is not None:
                reduced(flat.spec.params)
        self._active = False


class _Flat:
    """One bucket's buffer and the views of it that are the parameters' gradients."""

    def __init__(self, spec: Bucket, tag: str, params: Mapping[str, nn.Parameter]) -> None:
        self.spec, self.tag = spec, tag
        self.params = {n: params[n] for n in spec.params}
        self.missing: set[str] = set()
        self.work = Work()
        self._kept: dict[str, Tensor] = {}
        self._flat: Tensor | None = None
        self._views: dict[str, Tensor] = {}

    def start(self) -> None:
        self.missing = set(self.params)
        self._kept = {n: p.grad for n, p in self.params.items() if p.grad is not None}
        for name, grad in self._kept.items():
            if name in self._views and grad.data_ptr() == self._views[name].data_ptr():
                self._kept[name] = grad.clone()
            self.params[name].grad = None

    def _buffer(self) -> Tensor:
        """Made when the first gradient arrives, and used in every step from then on."""
        if self._flat is None:
            sizes = [p.numel() for p in self.params.values()]
            device = next(iter(self.params.values())).device
            self._flat = torch.empty(sum(sizes), dtype=self.spec.dtype, device=device)
            parts = torch.split(self._flat, sizes)
            self._views = {n: v.view(p.shape) for (n, p), v in zip(self.params.items(), parts, strict=True)}
        return self._flat

    def put(self, name: str, p: Tensor) -> None:
        """One copy; the gradient that autograd made is freed, unless its sum is converted back to its dtype (`give_back`)."""
        assert name in self.missing, f"the gradient of {name} arrived twice in one backward"
        assert p.grad is not None
        self._buffer()
        self._views[name].copy_(p.grad)
        if p.dtype == self.spec.dtype:
            p.grad = self._views[name]
        self.missing.discard(name)

    def filled(self) -> Tensor:
        """The buffer, with zeros for what did not come."""
        buffer = self._buffer()
        for name in self.missing:
            self._views[name].zero_()
        return buffer

    def give_back(self) -> None:
        """Sums of another dtype than their parameters' become gradients."""
        for name, p in self.params.items():
            if name not in self.missing and p.dtype != self.spec.dtype:
                assert p.grad is not None
                p.grad.copy_(self._views[name])

    def add_kept(self) -> None:
        """What was there before backward is added to the sum, or stays if nothing came."""
        for name, grad in self._kept.items():
            if name in self.missing:
                self.params[name].grad = grad
            else:
                self.params[name].grad.add_(grad)  # type: ignore[union-attr]
        self._kept = {}


class GradNorm:
    """The 2-norm of all gradients of the whole model, every parameter counted once however it is split.

    Use: `start()`, `add`, `total()`. `add` takes parameters as their sums are ready, so that most of the work is done while other
    sums are still under way.
    """

    def __init__(self, program: Program, params: Mapping[str, nn.Parameter], mesh: Any) -> None:
        self.params, self.mesh = params, mesh
        self._axes = {p.name: tuple(a for a, _ in p.layout.shards() if mesh.size(a) > 1) for p in program.params}
        self._squares: dict[tuple[str, ...], list[Tensor]] = {}
        self._todo: set[str] = set()

    def start(self) -> None:
        self._squares = {axes: [] for axes in self._axes.values()}
        self._todo = set(self._axes)

    def add(self, names: Sequence[str]) -> None:
        groups: dict[tuple[str, ...], list[Tensor]] = {}
        for name in names:
            grad = self.params[name].grad
            if grad is not None:
                groups.setdefault(self._axes[name], []).append(grad.detach())
        for axes, grads in groups.items():
            norm = nn.utils.get_total_norm(grads)
            self._squares[axes].append(norm.to(torch.promote_types(norm.dtype, torch.float32)).square())
        self._todo.difference_update(names)

    def total(self) -> Tensor:
        """0-dim, float32 or wider, the same on all ranks. Collective where parameters are split."""
        self.add([n for n in self._axes if n in self._todo])
        whole = torch.zeros((), device=self.mesh.device)
        for axes in sorted(self._squares):  # on all ranks alike, also where one has no gradient
            found = self._squares[axes]
            part = torch.stack(found).sum() if found else whole.new_zeros(())
            whole = whole + (self.mesh.all_reduce(part, axes, direction="update", tag="grad_norm") if axes else part)
        return whole.sqrt()
