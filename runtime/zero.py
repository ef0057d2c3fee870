"""Gradient buckets: sums over ranks that run while backward still runs (DESIGN section 3; Li et al. 2020, "PyTorch Distributed").

A bucket is one flat buffer. When backward has finished a parameter's gradient, it is copied to its place in the buffer, which
becomes the parameter's `.grad`; when a bucket is full, and all before it have started, its all_reduce starts in the background.
Buckets come from the program in the order in which backward finishes them: no warm-up step finds it out, and all ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardc.program import Bucket, Program
from shardc.runtime.comm import Work


class Buckets:
    """The buckets of one rank. params: local parameters by name. Use: `start()`, backward, `finish()`, every step."""

    def __init__(self, program: Program, params: Mapping[str, nn.Parameter], mesh: Any, on_first: Callable[[], None] | None = None) -> None:
        self.mesh, self.params = mesh, params
        self.buckets = [_Flat(b, f"bucket{i}", params) for i, b in enumerate(program.buckets)]
        self._next = 0
        self._active = False
        self._on_first = on_first
        for i, bucket in enumerate(self.buckets):
            for name in bucket.spec.params:
                params[name].register_post_accumulate_grad_hook(self._hook(i, name))

    def start(self) -> None:
        """Before backward: forget the last step's gradients."""
        for p in self.params.values():
            p.grad = None
        for b in self.buckets:
            b.begin()
        self._next, self._active = 0, True

    def _hook(self, i: int, name: str) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            if not self._active and self._on_first is not None:
                self._on_first()
            if self._active:
                self.buckets[i].put(name, p)
                self._launch(only_full=True)

        return arrived

    def _launch(self, *, only_full: bool) -> None:
        """Start the buckets that are due, in order: every rank must start them alike."""
        while self._next < len(self.buckets):
            b = self.buckets[self._next]
            if only_full and b.missing:
                return
            b.fill()
            b.work = self.mesh.start_all_reduce(b.buffer(), b.spec.axes, direction="backward", tag=b.tag)
            self._next += 1

    def finish(self) -> None:
        """After backward: gradients that no loss reached count as zeros; wait for all sums."""
        self._launch(only_full=False)
        for b in self.buckets:
            b.work.wait()
        self._active = False


class _Flat:
    """One bucket's buffer and the views of it that are the parameters' gradients."""

    def __init__(self, spec: Bucket, tag: str, params: Mapping[str, nn.Parameter]) -> None:
        self.spec, self.tag = spec, tag
        self.params = {n: params[n] for n in spec.params}
        self.missing: set[str] = set()
        self.work = Work()
        self._flat: Tensor | None = None
        self._views: dict[str, Tensor] = {}

    def buffer(self) -> Tensor:
        """The flat buffer: made when the first gradient arrives, kept from then on."""
        if self._flat is None:
            any_param = next(iter(self.params.values()))
            sizes = [p.numel() for p in self.params.values()]
            self._flat = torch.empty(sum(sizes), dtype=self.spec.dtype, device=any_param.device)
            parts = self._flat.split(sizes)
            self._views = {n: v.view(p.shape) for (n, p), v in zip(self.params.items(), parts, strict=True)}
        return self._flat

    def begin(self) -> None:
        self.missing = set(self.params)

    def put(self, name: str, p: Tensor) -> None:
        """One copy; the gradient that autograd made is freed."""
        if name not in self.missing:
            raise RuntimeError(f"the gradient of {name} arrived twice in one backward")
        self.buffer()
        assert p.grad is not None
        self._views[name].copy_(p.grad)
        p.grad = self._views[name]
        self.missing.discard(name)

    def fill(self) -> None:
        """Zeros for what never came."""
        self.buffer()
        for name in self.missing:
            self._views[name].zero_()
            self.params[name].grad = self._views[name]
        self.missing = set()


def global_norm(program: Program, params: Mapping[str, nn.Parameter], mesh: Any) -> Tensor:
    """The 2-norm of all gradients of the whole model, every parameter counted once however it is split; float32 or wider."""
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for p in program.params:
        grad = params[p.name].grad
        if grad is not None:
            by_axes.setdefault(tuple(a for a, _ in p.layout.shards()), []).append(grad)
    total = torch.zeros((), device=mesh.device)
    # the same sets of axes on all ranks, in one order, even where a rank has no gradient
    for axes in sorted({tuple(a for a, _ in p.layout.shards()) for p in program.params}):
        norms = torch._foreach_norm(by_axes.get(axes, []))
        squares = torch.stack([n.to(torch.promote_types(n.dtype, torch.float32)).square() for n in norms]).sum() if norms else total.new_zeros(())
        total = total + (mesh.all_reduce(squares, axes, direction="update", tag="grad_norm") if axes else squares)
    return total.sqrt()
