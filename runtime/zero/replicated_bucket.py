"""ZeRO 0: a bucket of parameters that every rank of the data axes has whole. Gradients are copied into one flat buffer,
and summed in it. The other two kinds of bucket build on this one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.buckets import Bucket
from shardc.ir.program import Program
from shardc.runtime.mesh import Work
from shardc.runtime.zero.flat_partition import Flat, Run
from shardc.runtime.zero.gather import views
from shardc.runtime.zero.trained_params import trained_params


class ReplicatedBucket:
    """A bucket whose gradients are summed whole. Use: `adopt` all parameters; in each step `start`, `put` each,
    `launch`, `finish`.
    """

    def __init__(self, program: Program, index: int, mesh: Any, *, aliased: bool = False) -> None:
        self.spec: Bucket = program.buckets[index]
        self._aliased = aliased
        self.tag, self.mesh = f"bucket{index}", mesh
        # whose gradients other stages' ranks may bring, if this one's stages do not
        self.elsewhere = trained_params(program).intersection(self.spec.params) if self.spec.late else frozenset()
        self.flat = Flat.of(program, self.spec)
        self.params: dict[str, nn.Parameter] = {}  # whole local parts, which autograd knows
        self.owned: dict[str, nn.Parameter] = {}
        self.runs: dict[str, Run] = {}  # the stretch of each parameter that this rank updates, if not all of it
        self.missing: set[str] = set()  # gradients that this backward has not brought
        self.seen: set[str] = set()  # gradients that some backward of this step has brought
        self._work = Work()
        self._kept: dict[str, Tensor] = {}
        self.sums: dict[str, Tensor] = {}  # of the last step, in another dtype than its gradients
        self._buffer: Tensor | None = None
        self._views: dict[str, Tensor] = {}
        self._there: set[str] = set()  # gradients that stand in the buffer

    def adopt(self, name: str, p: nn.Parameter) -> Any:
        """Take a parameter over; what the program's graph gets for it.

        aliased: a leaf of its own on the same memory. So what a user's loop adds to the loss by the parameters
        themselves (a penalty) goes to the parameter, whole on every rank, and is not summed with the graph's gradients.
        """
        self.owned[name] = p
        self.params[name] = nn.Parameter(p.detach(), requires_grad=p.requires_grad) if self._aliased else p
        return self.params[name]

    def follow(self) -> None:
        """Parameters may have been frozen, or have got other memory (`p.data = ...`), since the last forward."""
        for name, p in self.owned.items() if self._aliased else ():
            follow(self.params[name], p)

    def ready(self) -> None:
        """All parameters are adopted."""

    def reset(self) -> None:
        """Forget what was begun."""

    # --- gradients

    def start(self, first: bool) -> None:
        """Before a backward. first: of the step; what stands in `.grad` then is added to what comes."""
        self.missing = set(self.spec.params)
        if first:
            self._work.wait()  # of a step that failed halfway
            self.seen, self._there, self.sums = set(), set(), {}
            self._kept = {n: p.grad for n, p in self.owned.items() if p.grad is not None}
            for p in self.owned.values():
                p.grad = None

    @property
    def buffer(self) -> Tensor | None:
        """Of whole gradients, while there are any."""
        return self._buffer

    def _flat(self) -> Tensor:
        """The buffer of whole gradients, made when the first one arrives."""
        if self._buffer is None:
            self._buffer = torch.empty(self.flat.padded, dtype=self.spec.dtype, device=self.mesh.device)
            for start, stop in self.flat.gaps:
                self._buffer[start:stop].zero_()
            self._views = dict(
                zip(self.spec.params, views(self._buffer, self.flat.starts, self.flat.shapes), strict=True)
            )
            self._there = set()
        return self._buffer

    def put(self, name: str) -> None:
        """A gradient has come: one copy, and what autograd made is freed."""
        assert name in self.missing, f"the gradient of {name} arrived twice in one backward"
        p = self.params[name]
        assert p.grad is not None
        self._add(name, p.grad)
        p.grad = None

    def _add(self, name: str, grad: Tensor) -> None:
        self._flat()
        if name in self._there:
            self._views[name].add_(grad)
        else:
            self._views[name].copy_(grad)
        self._there.add(name)
        self.missing.discard(name)
        self.seen.add(name)

    def _filled(self) -> Tensor:
        """The buffer, with zeros for what did not come."""
        buffer = self._flat()
        for name in self.spec.params:
            if name not in self._there:
                self._views[name].zero_()
        return buffer

    def launch(self) -> None:
        """Begin the sum over ranks, in the background."""
        self._work = self.mesh.start_all_reduce(self._filled(), self.spec.axes, direction="backward", tag=self.tag)

    def settle(self) -> None:
        """Later buckets are under way: go on with this one."""

    @property
    def final(self) -> bool:
        """Is the sum that is under way the step's last?"""
        return not self.spec.late

    def finish(self) -> None:
        """Wait for the sums: gradients stand in `.owned`, and nowhere else: who lets go of them frees the memory for
        the next forward.
        """
        self._work.wait()
        self._give(self._views)
        self._free()

    def _free(self) -> None:
        self._buffer, self._views = None, {}

    def _give(self, sums: dict[str, Tensor]) -> None:
        for name, p in self.owned.items():
            # of before this backward, and what other terms of the loss brought meanwhile
            others = [g for g in (self._kept.get(name), p.grad) if g is not None]
            if name in (self.seen | self.elsewhere) and name in sums:
                others.insert(0, sums[name].to(p.dtype))
            p.grad = others[0] if others else None
            for g in others[1:]:
                others[0].add_(g)
        self._kept, self.sums = {}, {n: x for n, x in sums.items() if x.dtype != self.owned[n].dtype}

    def narrow(self) -> None:
        """After an update: gradients that were widened for it lie where they were summed again, in that dtype."""
        for name, p in self.owned.items():
            if p.grad is not None and p.grad.dtype != self.spec.dtype and name in self.sums:
                grad, p.grad = p.grad, None
                p.grad_dtype = None  # any
                p.grad = self.sums[name].copy_(grad)
        self.sums = {}

    # --- parameters

    def publish(self) -> None:
        """After an update: begin to gather the other ranks' parts."""

    def wait_for_gather(self) -> None:
        """Wait for what `publish` began."""

    def filled(self) -> None:
        """New values stand in parts and wholes."""

    def wholes(self) -> dict[str, Tensor]:
        """{name: whole local part, as stored}. Collective where it is cut."""
        self.follow()
        return {n: p.detach() for n, p in self.params.items()}


def follow(alias: nn.Parameter, p: nn.Parameter) -> None:
    """Let a leaf of its own be as the parameter is whose memory it has."""
    if alias.data_ptr() != p.data_ptr():
        alias.data = p.data
    if alias.requires_grad != p.requires_grad:
        alias.requires_grad_(p.requires_grad)
