"""One rank's bucket, by what ZeRO keeps cut of it (Rajbhandari et al. 2020, "ZeRO"): nothing, gradients and optimizer
state, parameters.

    Summed    zero 0      gradients are copied into one flat buffer, and summed in it
    Cut       zero 1, 2   parameters are views of one flat buffer; each rank gets the sum of its part of the gradients, updates its
                          part of the parameters, and gathers the others' parts
    Stored    zero 3      only the part exists; see shardc.runtime.zero.gather

What the optimizer works on is `.owned`: {name: parameter}: the parameter itself, or the stretch of it in this rank's
part (1-d, perhaps empty). Reduced gradients stand in `.owned[name].grad`.
"""  # noqa: E501 (a table)

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir.program import Bucket, Program
from shardc.runtime.mesh import Work
from shardc.runtime.offload import Offload
from shardc.runtime.offload.copies import Home
from shardc.runtime.zero.flat import Flat, Run
from shardc.runtime.zero.gather import Gathered, Use, views
from shardc.runtime.zero.trained_params import trained_params


class Held:
    """What the program's graph gets in place of a parameter of a cut bucket; `ops.gather_start` and `ops.updated` take
    it.
    """

    def __init__(self, bucket: Any) -> None:
        self.bucket = bucket


class Summed:
    """A bucket whose gradients are summed whole. Use: `adopt` all parameters; in each step `start`, `put` each,
    `launch`, `finish`.
    """

    def __init__(self, program: Program, index: int, mesh: Any) -> None:
        self.spec: Bucket = program.buckets[index]
        self.tag, self.mesh = f"bucket{index}", mesh
        # whose gradients other stages' ranks may bring, if this one's stages do not
        self.elsewhere = trained_params(program).intersection(self.spec.params) if self.spec.late else frozenset()
        self.flat = Flat.of(program, self.spec)
        self.params: dict[str, nn.Parameter] = {}  # whole local parts, which autograd knows
        self.owned: dict[str, nn.Parameter] = {}
        self.missing: set[str] = set()  # gradients that this backward has not brought
        self.seen: set[str] = set()  # gradients that some backward of this step has brought
        self._work = Work()
        self._kept: dict[str, Tensor] = {}
        self._sums: dict[str, Tensor] = {}  # of the last step, in another dtype than its gradients
        self._buffer: Tensor | None = None
        self._views: dict[str, Tensor] = {}

    def adopt(self, name: str, p: nn.Parameter) -> Any:
        """Take a parameter over; what the program's graph gets for it."""
        self.params[name] = self.owned[name] = p
        return p

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
            self.seen, self._sums = set(), {}
            self._kept = {n: p.grad for n, p in self.owned.items() if p.grad is not None}
            for p in self.owned.values():
                p.grad = None

    def _flat(self) -> Tensor:
        """The buffer of whole gradients, made when the step's first one arrives."""
        if self._buffer is None:
            self._buffer = torch.empty(self.flat.padded, dtype=self.spec.dtype, device=self.mesh.device)
            self._buffer[sum(self.flat.sizes) :].zero_()
            self._views = dict(
                zip(self.spec.params, views(self._buffer, self.flat.starts, self.flat.shapes), strict=True)
            )
        return self._buffer

    def put(self, name: str) -> None:
        """A gradient has come: one copy, and what autograd made is freed."""
        assert name in self.missing, f"the gradient of {name} arrived twice in one backward"
        p = self.params[name]
        assert p.grad is not None
        self._flat()
        if name in self.seen:
            self._views[name].add_(p.grad)
        else:
            self._views[name].copy_(p.grad)
        p.grad = None
        self.missing.discard(name)
        self.seen.add(name)

    def _filled(self) -> Tensor:
        """The buffer, with zeros for what did not come."""
        buffer = self._flat()
        for name in self.spec.params:
            if name not in self.seen:
                self._views[name].zero_()
        return buffer

    def launch(self) -> None:
        """Begin the sum over ranks, in the background."""
        self._work = self.mesh.start_all_reduce(self._filled(), self.spec.axes, direction="backward", tag=self.tag)

    def settle(self) -> None:
        """Later buckets are under way: go on with this one."""

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
            kept = self._kept.get(name)
            if name not in (self.seen | self.elsewhere) or name not in sums:
                p.grad = kept
            else:
                p.grad = sums[name].to(p.dtype)
                if kept is not None:
                    p.grad.add_(kept)
        self._kept, self._sums = {}, {n: x for n, x in sums.items() if x.dtype != self.owned[n].dtype}

    def narrow(self) -> None:
        """After an update: gradients that were widened for it lie where they were summed again, in that dtype."""
        for name, p in self.owned.items():
            if p.grad is not None and p.grad.dtype != self.spec.dtype and name in self._sums:
                grad, p.grad = p.grad, None
                p.grad_dtype = None  # any
                p.grad = self._sums[name].copy_(grad)
        self._sums = {}

    # --- parameters

    def publish(self) -> None:
        """After an update: begin to gather the other ranks' parts."""

    def settled(self) -> None:
        """Wait for what `publish` began."""

    def wholes(self) -> dict[str, Tensor]:
        """{name: whole local part, as stored}. Collective where it is cut."""
        return {n: p.detach() for n, p in self.params.items()}


class _Part(Summed):
    """What cut buckets share: this rank's part, and the sum of gradients into it."""

    def __init__(self, program: Program, index: int, mesh: Any, offload: Offload) -> None:
        super().__init__(program, index, mesh)
        self._offload = offload
        self._home: Home | None = None  # where the master is, if it is not on the device
        self.rank = mesh.coordinate(self.spec.shard)
        self.runs = self.flat.runs(self.rank)
        self.rest = tuple(a for a in self.spec.axes if a != self.spec.shard)
        self.low, self.high = self.rank * self.flat.part, (self.rank + 1) * self.flat.part
        self._sum: Tensor | None = None  # the gradients' part

    def _slices(self, part: Tensor) -> dict[str, Tensor]:
        """This rank's stretch of every parameter in its part of the flat buffer."""
        starts = dict(zip(self.spec.params, self.flat.starts, strict=True))
        found = {}
        for name, run in self.runs.items():
            at = starts[name] + run.start - self.low if run.size else 0
            found[name] = part[at : at + run.size]
        return found

    def _make_master(self, what: str, dtype: torch.dtype) -> Tensor:
        """This rank's part of the parameters as stored, zeros at first. what: of the spec's `offload` it belongs to."""
        self._home = self._offload.room(what, self.flat.part, dtype)
        return (
            self._home.tensor
            if self._home is not None
            else torch.zeros(self.flat.part, dtype=dtype, device=self.mesh.device)
        )

    def _keep(self) -> None:
        """`.owned` is filled."""
        if self._home is not None:
            self._offload.keep(self.owned.values(), self._home)

    def _own_slices(self, part: Tensor, trained: bool) -> None:
        self.owned = {n: nn.Parameter(x, requires_grad=trained) for n, x in self._slices(part).items()}

    def _reduce(self, flat: Tensor, part: Tensor) -> None:
        """Begin to sum flat into part."""
        if self.spec.shard in self.spec.axes:
            self._work = self.mesh.start_reduce_scatter(flat, part, self.spec.shard, direction="backward", tag=self.tag)
        elif self.spec.zero > 1:  # else it is a part of flat
            part.copy_(flat[self.low : self.high])  # all ranks of the axis have the same gradient

    def _rest(self, part: Tensor) -> None:
        """Go on over the other axes."""
        if self.rest and self.mesh.members(self.rest) > 1:
            self._work = self.mesh.start_all_reduce(part, self.rest, direction="backward", tag=self.tag)

    def _give_part(self, part: Tensor) -> None:
        self._give({n: x for n, x in self._slices(part).items() if self.runs[n].size})


class Cut(_Part):
    """zero 1: whole gradients stay in their buffer, this rank's sum in its place there. zero 2: only the sum stays."""

    def __init__(self, program: Program, index: int, mesh: Any, offload: Offload) -> None:
        super().__init__(program, index, mesh, offload)
        self._whole: Tensor | None = None
        self._master: Tensor | None = None
        self._gather = Work()
        self._settled = True

    def adopt(self, name: str, p: nn.Parameter) -> Any:
        if self._whole is None:
            self._whole = torch.zeros(self.flat.padded, dtype=self.spec.compute or p.dtype, device=p.device)
            self._master = self._whole[self.low : self.high]
            if self._whole.dtype != p.dtype:
                self._master = self._make_master("optimizer", p.dtype)
            self._places = dict(
                zip(self.spec.params, views(self._whole, self.flat.starts, self.flat.shapes), strict=True)
            )
        assert self._master is not None
        with torch.no_grad():
            self._places[name].copy_(p)
            run = self.runs[name]
            self._slices(self._master)[name].copy_(p.reshape(-1)[run.start : run.stop])
        self.params[name] = nn.Parameter(self._places[name], requires_grad=p.requires_grad)
        return Held(self)

    def ready(self) -> None:
        assert self._master is not None
        self._own_slices(self._master, trained=True)
        for name, p in self.owned.items():
            p.requires_grad_(self.params[name].requires_grad)
        self._keep()

    # --- gradients

    def launch(self) -> None:
        flat = self._filled()
        if self.spec.zero == 1:
            self._sum = flat[self.low : self.high]
        else:
            self._sum = torch.empty(self.flat.part, dtype=flat.dtype, device=flat.device)
        self._reduce(flat, self._sum)
        self._settled = False

    def settle(self) -> None:
        if not self._settled:
            assert self._sum is not None
            self._work.wait()
            self._settled = True
            if self.spec.zero >= 2:
                self._free()
            self._rest(self._sum)

    def finish(self) -> None:
        self.settle()
        self._work.wait()
        assert self._sum is not None
        self._give_part(self._sum)
        self._sum = None
        self._free()

    # --- parameters

    def publish(self) -> None:
        assert self._whole is not None
        assert self._master is not None
        mine = self._whole[self.low : self.high]
        if self.spec.compute is not None:
            mine.copy_(self._master)
            if self._home is not None:
                self._home.slot.behind()
        self._gather = self.mesh.start_all_gather(mine, self._whole, self.spec.shard, direction="update", tag=self.tag)

    def settled(self) -> None:
        self._gather.wait()

    def updated(self) -> tuple[nn.Parameter, ...]:
        """The whole parameters."""
        self.settled()
        return tuple(self.params[n] for n in self.spec.params)

    def wholes(self) -> dict[str, Tensor]:
        self.settled()
        assert self._master is not None
        if self.spec.compute is None:
            return super().wholes()
        return _gathered(self, self._master.to(self.mesh.device))


class Stored(_Part):
    """zero 3: only this rank's part exists."""

    def __init__(
        self,
        program: Program,
        index: int,
        mesh: Any,
        offload: Offload,
        gathered: Gathered,
        launched: Callable[[Summed], None],
        last: Callable[[Summed], bool],
    ) -> None:
        super().__init__(program, index, mesh, offload)
        self._gathered, self._launched, self._last = gathered, launched, last
        self.prefetch = self.spec.prefetch
        self._master: Tensor | None = None
        self._trained = False
        self._coming: Tensor | None = None  # the sum that is under way, where earlier ones are there already
        self._flying: Tensor | None = None
        self._stays: tuple[Tensor, Work] | None = None  # of `keep`: what was gathered, until the step's last backward
        self._anchor = torch.zeros((), device=mesh.device, requires_grad=True)

    def adopt(self, name: str, p: nn.Parameter) -> Any:
        if self._master is None:
            self._master = self._make_master("parameters", p.dtype)
        self._trained = p.requires_grad
        run = self.runs[name]
        with torch.no_grad():
            self._slices(self._master)[name].copy_(p.reshape(-1)[run.start : run.stop])
        return Held(self)

    def ready(self) -> None:
        assert self._master is not None
        self._own_slices(self._master, self._trained)
        self._keep()

    # --- parameters

    def start_gather(self, direction: str) -> tuple[Tensor, Work]:
        assert self._master is not None
        if self._stays is not None:
            return self._stays
        if self._home is not None:
            part = self._offload.read(self._home, direction, self.spec.compute)
        else:
            part = self._master if self.spec.compute is None else self._master.to(self.spec.compute)
        whole = torch.empty(self.flat.padded, dtype=part.dtype, device=part.device)
        started = whole, self.mesh.start_all_gather(part, whole, self.spec.shard, direction=direction, tag=self.tag)
        if self.spec.keep and torch.is_grad_enabled():
            self._stays = started
        return started

    def reset(self) -> None:
        self._stays = None

    def publish(self) -> None:
        self._stays = None  # it is what was before the update

    def gather(self) -> None:
        """Begin to gather for forward."""
        self._gathered.start(self)

    def used(self) -> tuple[Tensor, ...]:
        """The gathered parameters; backward of them brings the bucket's gradients."""
        if self._trained and torch.is_grad_enabled():
            found: tuple[Tensor, ...] = Use.apply(self._anchor, self)  # type: ignore[no-untyped-call]
            return found
        return self.views()

    def views(self) -> tuple[Tensor, ...]:
        return views(self._gathered.take(self), self.flat.starts, self.flat.shapes)

    def wholes(self) -> dict[str, Tensor]:
        assert self._master is not None
        return _gathered(self, self._master.to(self.mesh.device))

    # --- gradients

    def start(self, first: bool) -> None:
        super().start(first)
        if first:
            self._fresh, self._coming, self._flying = True, None, None
            self._buffer, self._views = None, {}

    def arrived(self, grads: Sequence[Tensor | None]) -> None:
        """Backward has all gradients of this bucket: begin their sum, or wait for those of the microbatches to come."""
        self._gathered.drop(self)
        if fresh := self._buffer is None:
            self._flat().zero_()
        for name, grad in zip(self.spec.params, grads, strict=True):
            if grad is not None:
                self._views[name].copy_(grad) if fresh else self._views[name].add_(grad)
                self.missing.discard(name)
                self.seen.add(name)
        if not self.spec.keep or self._last(self):
            self._stays = None
            self._send()

    def _send(self) -> None:
        flat = self._flat()
        self.settle()
        part = torch.empty(self.flat.part, dtype=flat.dtype, device=flat.device)
        self._flying, self._coming = flat, part
        self._buffer, self._views = None, {}
        self._reduce(flat, part)
        self._launched(self)

    def settle(self) -> None:
        if self._coming is not None:
            self._work.wait()
            if self._fresh or self._sum is None:
                self._sum, self._fresh = self._coming, False
            else:
                self._sum.add_(self._coming)
            self._coming = self._flying = None

    def launch(self) -> None:
        """Of the step's last backward: the sum over the axes that replicate."""
        if self._buffer is not None:  # its last backward did not come here
            self._send()
        self.settle()
        if self._fresh and self.elsewhere:  # other ranks sum with this one
            self._sum = torch.zeros(self.flat.part, dtype=self.spec.dtype, device=self.mesh.device)
            self._fresh = False
        if self._sum is not None and not self._fresh:
            self._rest(self._sum)

    def finish(self) -> None:
        self._stays = None
        self._work.wait()
        if self._sum is not None:
            self._give_part(self._sum)
            self._sum = None
        else:
            self._give({})


def _gathered(bucket: _Part, part: Tensor) -> dict[str, Tensor]:
    whole = torch.empty(bucket.flat.padded, dtype=part.dtype, device=part.device)
    bucket.mesh.start_all_gather(part.detach(), whole, bucket.spec.shard, direction="state", tag=bucket.tag).wait()
    return dict(zip(bucket.spec.params, views(whole, bucket.flat.starts, bucket.flat.shapes), strict=True))


def owned_run(bucket: Summed, name: str) -> Run | None:
    """The stretch of a parameter that this rank updates; None = all of it."""
    return bucket.runs[name] if isinstance(bucket, _Part) else None
