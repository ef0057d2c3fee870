"""Implement a bucket of parameters on one rank: its flat buffer, gradients and shards.

    zero   params_whole  scatters    whole on every rank       sharded over the axis
    0      yes           no          everything
    1      yes           no          parameters, gradients     optimizer state
    2      yes           yes         parameters                optimizer state, gradients
    3      no            yes                                   optimizer state, gradients, parameters

    a a a a | a - - - | b b b - | c c c c      parameters of 5, 3 and 4 elements, aligned to 4, on 4 ranks:
                                               rank 1 owns a[4:5], rank 2 b[0:3] (flat_partition.py)

Gradients are copied into one flat buffer. Without `scatters` (or with `keep`) they add up there over microbatches, and
are summed over ranks once a step. With `scatters` they add up in this rank's part: the whole gradients of a few buckets
exist at a time, however many microbatches a step has. buckets.py has a table of when each sum starts and is waited for;
shardc.ir.stored explains `keep`, `late`, `compute` and `prefetch`. (Rajbhandari et al. 2020, "ZeRO")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardc.ir import stored as ir
from shardc.ir.program import Program
from shardc.optional import needed
from shardc.runtime.mesh import Work
from shardc.runtime.offload import Offload
from shardc.runtime.offload.copies import Home
from shardc.runtime.zero.flat_partition import Flat, FlatShard
from shardc.runtime.zero.trained_params import trained_params


class Bucket:
    """A bucket of parameters. Call `adopt` for each parameter, then `make_owned`; after an update `publish`.

    In each step: `start`, `put` for each gradient (ZeRO 3: `arrived`), `launch`, `advance_sum`, `close`, `finish`.
    is_last: whether this is the step's last backward that reaches the bucket. launched: called when ZeRO 3 starts a
    sum.
    aliased: for a custom loop, whose loss may have other terms, such as `0.1 * w.norm()`. At ZeRO 0 the graph gets
    separate leaves on the parameters' memory, so ranks do not sum the gradient of such a term: it is whole on every
    rank. A shard without elements gets a gradient without elements, which a loop can read (in an engine: None).
    """

    def __init__(
        self,
        program: Program,
        index: int,
        mesh: Any,
        offload: Offload,
        is_last: Callable[[Bucket], bool],
        launched: Callable[[Bucket], None],
        *,
        aliased: bool = False,
    ) -> None:
        self.ir: ir.Bucket = program.buckets[index]
        zero = self.ir.zero
        self.sharded, self.params_whole, self.scatters = zero > 0, zero < 3, zero > 1
        self.tag, self.mesh, self._aliased = f"bucket{index}", mesh, aliased
        self._offload, self._is_last, self._launched = offload, is_last, launched
        # of a late bucket (tied weights: stages on other ranks use them too): the parameters that are trained anywhere
        self.trained_by_any = trained_params(program).intersection(self.ir.params) if self.ir.late else frozenset()
        self.flat = Flat.of(program, self.ir)
        self.params: dict[str, nn.Parameter] = {}  # local parts uncut by ZeRO, as the graph has them; none at ZeRO 3
        self.owned: dict[str, nn.Parameter] = {}
        self.missing: set[str] = set()  # gradients that this backward still has to produce
        self.seen: set[str] = set()  # gradients that some backward of this step has produced
        self.sums: dict[str, Tensor] = {}  # sums of the last step, where their dtype is not the gradients'
        self._grads_before: dict[str, Tensor] = {}  # gradients from before this step
        self.buffer: Tensor | None = None
        self._views: dict[str, Tensor] = {}
        self._in_buffer: set[str] = set()  # gradients that are in the buffer (its other elements are not written yet)
        self._work, self._gather = Work(), Work()  # the running sum; the gather that `publish` started
        self._other_axes_work, self._other_axes_started = Work(), False  # the sum over the other data axes
        self._final = False  # the running sum is the step's last
        self._sum: Tensor | None = None  # this rank's part of the gradients
        self._sum_output: Tensor | None = None  # the result of the running sum, to add to earlier ones
        self._sum_input: Tensor | None = None  # the buffer that the running sum reads: not freed before
        # parameters
        self.rank = mesh.coordinate(self.ir.shard) if self.sharded else 0
        self.shards: dict[str, FlatShard] = self.flat.shards(self.rank) if self.sharded else {}
        self.other_axes = tuple(a for a in self.ir.axes if a != self.ir.shard)
        self.low, self.high = self.rank * self.flat.part, (self.rank + 1) * self.flat.part
        rounds = bool(self.ir.rounded) and not self.params_whole
        args = self.ir, self.flat, self.shards, mesh, self.tag
        self._rounded = needed("fp8", "runtime", "RoundedGather")(*args) if rounds else None
        self._trains: dict[str, bool] = {}
        self._flat_params: Tensor | None = None  # ZeRO 1 and 2: all parameters, as ops take them
        self._master: Tensor | None = None  # this rank's part, as stored
        self._home: Home | None = None  # where the master is, if it is not on the device
        self._versions = 0
        self._held_gather: tuple[Tensor, Work] | None = None  # `keep`: gathered parameters, until the last backward
        self._forward_gather: tuple[Tensor, Work] | None = None  # running, or not used yet
        self._backward_gathers: list[Work] = []

    # --- parameters

    def adopt(self, name: str, p: nn.Parameter) -> Any:
        """Take over a parameter; return what the program's graph gets.

        That is the parameter (or an alias of it, for a custom loop), or its bucket, which `ops.gather_start` and
        `ops.updated` take.
        """
        if not self.sharded:
            self.owned[name] = p
            self.params[name] = nn.Parameter(p.detach(), requires_grad=p.requires_grad) if self._aliased else p
            return self.params[name]
        if self._master is None:
            self._master = self._make_master(p)
        with torch.no_grad():
            if self._flat_params is not None:
                place = self._named_views(self._flat_params)[name]
                place.copy_(p)
                self.params[name] = nn.Parameter(place, requires_grad=p.requires_grad)
            shard = self.shards[name]
            self._slices(self._master)[name].copy_(p.reshape(-1)[shard.start : shard.stop])
        self._trains[name] = p.requires_grad
        return self

    def _make_master(self, p: nn.Parameter) -> Tensor:
        """Allocate whole parameters (ZeRO 1, 2) and this rank's part, perhaps a view of them. All are zeros."""
        if self.params_whole:
            self._flat_params = torch.zeros(self.flat.padded, dtype=self.ir.compute or p.dtype, device=p.device)
            if self._flat_params.dtype == p.dtype:
                return self._flat_params[self.low : self.high]
        self._home = self._offload.room("optimizer" if self.params_whole else "parameters", self.flat.part, p.dtype)
        if self._home is not None:
            return self._home.tensor
        return torch.zeros(self.flat.part, dtype=p.dtype, device=self.mesh.device)

    def make_owned(self) -> None:
        """Build `.owned`. Call it after `adopt` of all parameters."""
        if self._master is None:
            return
        # `.data` has its own version counter: in an engine gathers do not change `_version`, so `written` sees only
        # other writes. In a custom loop autograd must see all writes between forward and backward.
        master = self._master.data if self.params_whole and not self._aliased else self._master
        self.owned = {n: nn.Parameter(x, requires_grad=self._trains[n]) for n, x in self._slices(master).items()}
        if self._home is not None:
            self._offload.keep(self.owned.values(), self._home)
        self._versions = self._version()

    def update_aliases(self) -> None:
        """Update the graph's leaves if parameters were frozen, or got other memory, since the last forward."""
        for name, p in self.owned.items() if self._aliased and not self.sharded else ():
            update_alias(self.params[name], p)

    def _named_views(self, whole: Tensor) -> dict[str, Tensor]:
        """Return {name: view of the parameter} of a flat tensor of all parameters."""
        return dict(zip(self.ir.params, self.views(whole), strict=True))

    def _slices(self, part: Tensor) -> dict[str, Tensor]:
        """Return this rank's shard of every parameter in its part of the flat buffer."""
        starts = dict(zip(self.ir.params, self.flat.starts, strict=True))
        slices = {}
        for name, shard in self.shards.items():
            first = starts[name] + shard.start - self.low if shard.size else 0
            slices[name] = part[first : first + shard.size]
        return slices

    def _version(self) -> int:
        return sum(p._version for p in self.owned.values())

    @property
    def written(self) -> bool:
        """Whether anything wrote to this rank's part since it was last gathered.

        torch does not count writes by `.data`. Only valid for an engine: in a custom loop, gathers count too.
        """
        return self.sharded and self.params_whole and self._version() != self._versions

    def publish(self) -> None:
        """Start to gather the other ranks' parts, after an update."""
        self._held_gather = None  # it has the values from before the update
        if (flat := self._flat_params) is None:
            return
        assert self._master is not None
        self._gather.wait()  # of two running gathers the first may end last
        part = flat[self.low : self.high]
        if self.ir.compute is not None:
            part.copy_(self._master)
            if self._home is not None:
                self._home.slot.release()  # until the next update
        self._gather = self.mesh.start_all_gather(part, flat, self.ir.shard, direction="update", tag=self.tag)
        self._versions = self._version()

    def wait_for_gather(self) -> None:
        """Wait for the gather of `publish`."""
        self._gather.wait()

    def updated(self) -> tuple[nn.Parameter, ...]:
        """Return the whole parameters, after the gather."""
        self.wait_for_gather()
        return tuple(self.params[n] for n in self.ir.params)

    def wholes(self) -> dict[str, Tensor]:
        """Return {name: local part uncut by ZeRO, as stored}. Collective if the bucket is sharded."""
        self.update_aliases()
        self.wait_for_gather()
        if not self.sharded or (self.params_whole and self.ir.compute is None):
            return {n: p.detach() for n, p in self.params.items()}
        assert self._master is not None
        part = self._master.to(self.mesh.device)
        whole = torch.empty(self.flat.padded, dtype=part.dtype, device=part.device)
        self.mesh.start_all_gather(part.detach(), whole, self.ir.shard, direction="state", tag=self.tag).wait()
        return self._named_views(whole)

    # --- ZeRO 3: gathered for every use

    def start_gather(self, direction: str) -> tuple[Tensor, Work]:
        """Start to gather; return a flat tensor, and the work after which it holds the parameters."""
        if self._held_gather is not None:
            return self._held_gather
        assert self._master is not None
        if self._home is not None:
            part = self._offload.read(self._home, direction, self.ir.compute)
        else:
            part = self._master if self.ir.compute is None else self._master.to(self.ir.compute)
        if self._rounded is not None:
            started: tuple[Tensor, Work] = self._rounded.start(part, self._slices(part), direction)
        else:
            whole = torch.empty(self.flat.padded, dtype=part.dtype, device=part.device)
            work = self.mesh.start_all_gather(part, whole, self.ir.shard, direction=direction, tag=self.tag)
            started = whole, work
        if self.ir.keep and self.mesh.step.trains:
            self._held_gather = started
        return started

    def reset(self) -> None:
        """Drop a gather that was kept for the rest of the step."""
        self._held_gather = None

    def gather(self) -> None:
        """Start to gather for forward, unless the gather is already running."""
        if self._forward_gather is None:
            self._forward_gather = self.start_gather("forward")

    def gathered(self) -> tuple[Tensor, ...]:
        """Return the gathered parameters: views of a tensor that is freed with the last view."""
        self.gather()
        assert self._forward_gather is not None
        (whole, work), self._forward_gather = self._forward_gather, None
        work.wait()
        return self.views(whole)

    def regather(self) -> Callable[[], tuple[Tensor, ...]]:
        """Start to gather for a backward graph; return a function that waits, and returns the parameters."""
        whole, work = self.start_gather("backward")
        self._backward_gathers.append(work)

        def wait() -> tuple[Tensor, ...]:
            if work in self._backward_gathers:
                self._backward_gathers.remove(work)
            work.wait()
            return self.views(whole)

        return wait

    def finish_gathers(self) -> None:
        """Wait for the running gathers, and forget them: a step has ended, or failed halfway."""
        for work in (*(self._forward_gather or ())[1:], *self._backward_gathers):
            work.wait()
        self._forward_gather, self._backward_gathers = None, []

    def views(self, whole: Tensor) -> tuple[Tensor, ...]:
        """Return the parameters as views of a gathered tensor."""
        each = zip(self.flat.starts, self.flat.sizes, self.flat.shapes, strict=True)
        return tuple(whole[start : start + size].view(shape) for start, size, shape in each)

    # --- gradients

    def start(self, first: bool) -> None:
        """Prepare for a backward. first: of the step; earlier gradients in `.grad` are added to the new ones."""
        self.missing = set(self.ir.params)
        if not first:
            return
        self._work.wait()  # it may remain from a step that failed halfway
        self._other_axes_work.wait()
        self._other_axes_started = self._final = False
        self.seen, self._in_buffer, self.sums = set(), set(), {}
        self._sum = self._sum_output = self._sum_input = None
        if self.scatters:
            self._free()
        self._grads_before = {n: p.grad for n, p in self.owned.items() if p.grad is not None}
        for p in self.owned.values():
            p.grad = None

    def _ensure_buffer(self) -> Tensor:
        """Return the buffer of whole gradients; make it when the first one arrives."""
        if self.buffer is None:
            self.buffer = torch.empty(self.flat.padded, dtype=self.ir.dtype, device=self.mesh.device)
            for start, stop in self.flat.gaps:
                self.buffer[start:stop].zero_()
            self._views, self._in_buffer = self._named_views(self.buffer), set()
        return self.buffer

    def put(self, name: str) -> None:
        """Copy an arrived gradient into the buffer, and free the gradient's memory."""
        assert name in self.missing, f"the gradient of {name} was computed twice in one backward"
        p = self.params[name]
        assert p.grad is not None
        self._add(name, p.grad)
        p.grad = None

    def arrived(self, grads: Sequence[Tensor | None]) -> None:
        """Add all gradients of a gathered bucket, and start their sum; with `keep`, after the last microbatch."""
        for name, grad in zip(self.ir.params, grads, strict=True):
            if grad is not None:
                self._add(name, grad)
        if not self.ir.keep or self._is_last(self):
            self._held_gather = None
            self.launch()
            self._launched(self)

    def _add(self, name: str, grad: Tensor) -> None:
        self._ensure_buffer()
        if name in self._in_buffer:
            self._views[name].add_(grad)
        else:
            self._views[name].copy_(grad)
        self._in_buffer.add(name)
        self.missing.discard(name)
        self.seen.add(name)

    def _with_zeros(self) -> Tensor:
        """Return the buffer, with zeros for the gradients that did not arrive."""
        buffer = self._ensure_buffer()
        for name in self.ir.params:
            if name not in self._in_buffer:
                self._views[name].zero_()
        return buffer

    def launch(self) -> None:
        """Start the sum of the buffer over ranks, in the background: see buckets.py."""
        buffer = self._with_zeros()
        if not self.sharded:
            self._work = self.mesh.start_all_reduce(buffer, self.ir.axes, direction="backward", tag=self.tag)
            return
        if not self.scatters:
            self._sum = buffer[self.low : self.high]
            self._reduce(buffer, self._sum)
            self._sum_other_axes(self._sum, without_waiting=True)
            return
        self.advance_sum()
        self._sum_input = buffer
        self._sum_output = torch.empty(self.flat.part, dtype=buffer.dtype, device=buffer.device)
        self._free()
        self._reduce(buffer, self._sum_output)
        self._final = not self.ir.late and self._is_last(self)  # late: see `close`, as another rank may be the last
        if self._final and self._sum is None:
            self._sum_other_axes(self._sum_output, without_waiting=True)

    def _reduce(self, full: Tensor, part: Tensor) -> None:
        """Start to sum the full buffer into this rank's part."""
        if self.ir.shard in self.ir.axes:
            self._work = self.mesh.start_reduce_scatter(full, part, self.ir.shard, direction="backward", tag=self.tag)
        elif self.scatters:  # else part is a view of full
            part.copy_(full[self.low : self.high])  # all ranks of the axis have the same gradient

    @property
    def _other_axes_due(self) -> bool:
        """Whether a sum over the other axes has still to start."""
        return not self._other_axes_started and bool(self.other_axes) and self.mesh.members(self.other_axes) > 1

    def _sum_other_axes(self, part: Tensor, *, without_waiting: bool = False) -> None:
        """Start the sum over the other axes, once a step.

        without_waiting: queue it behind the sum over the shard axis, on a mesh with streams; else do nothing.
        """
        if not self._other_axes_due or (without_waiting and not self.mesh.streams):
            return
        with self.mesh.after(self._work) if without_waiting else nullcontext():
            self._other_axes_work = self.mesh.start_all_reduce(
                part, self.other_axes, direction="backward", tag=self.tag
            )
        self._other_axes_started = True

    def advance_sum(self) -> None:
        """Wait for the running sum (ZeRO 1 to 3). After a step's last one, start the sum over the other axes."""
        if self._sum_output is not None:
            self._work.wait()
            self._sum = self._sum_output if self._sum is None else self._sum.add_(self._sum_output)
            self._sum_output = self._sum_input = None
            if self._final:
                self._sum_other_axes(self._sum)
            return
        if self.scatters or self._sum is None:
            return
        if self._other_axes_due or not self.mesh.streams:  # ZeRO 1 on a CPU: a sum copies its buffer
            self._work.wait()
            self._sum_other_axes(self._sum)

    @property
    def final(self) -> bool:
        """Whether no other sum of this bucket follows in this step."""
        return self._final if self.scatters else not self.ir.late

    def close(self) -> None:
        """Start the sums that remain, after the step's last backward. Only with `scatters`."""
        if not self.scatters:
            return
        if self.buffer is not None:  # the last backward did not reach this bucket
            self.launch()
        self.advance_sum()
        if self._sum is None and self.trained_by_any:  # ranks of other stages sum with this one
            self._sum = torch.zeros(self.flat.part, dtype=self.ir.dtype, device=self.mesh.device)
        if self._sum is not None:
            self._sum_other_axes(self._sum)

    def finish(self) -> None:
        """Wait for the sums and set `.grad` of `.owned`. Only `.sums` may still hold sums, of another dtype."""
        self._held_gather = None
        self._work.wait()
        self.advance_sum()
        self._other_axes_work.wait()
        part, self._sum = self._sum, None
        if not self.sharded:
            self._set_grads(self._views)
        elif part is None:
            self._set_grads({})
        else:
            self._set_grads({n: x for n, x in self._slices(part).items() if self.shards[n].size or self._aliased})
        self._free()

    def _free(self) -> None:
        self.buffer, self._views = None, {}

    def _set_grads(self, sums: dict[str, Tensor]) -> None:
        """Set `.grad`: this step's sum, earlier gradients, and (custom loop) those of other loss terms."""
        for name, p in self.owned.items():
            # the new sum, plus gradients from before the step, plus those of loss terms outside of the graph (aliased)
            others = [g for g in (self._grads_before.get(name), p.grad) if g is not None]
            if name in (self.seen | self.trained_by_any) and name in sums:
                others.insert(0, sums[name].to(p.dtype))
            p.grad = others[0] if others else None
            for g in others[1:]:
                others[0].add_(g)
        self._grads_before, self.sums = {}, {n: x for n, x in sums.items() if x.dtype != self.owned[n].dtype}

    def narrow_grads(self) -> None:
        """Store gradients in the dtype and memory of their sums again: only the update needs the parameters' dtype."""
        for name, p in self.owned.items():
            if p.grad is not None and p.grad.dtype != self.ir.dtype and name in self.sums:
                grad, p.grad = p.grad, None
                p.grad_dtype = None  # any
                p.grad = self.sums[name].copy_(grad)
        self.sums = {}


def update_alias(alias: nn.Parameter, p: nn.Parameter) -> None:
    """Give a leaf the memory and requires_grad of the parameter that it aliases."""
    if alias.data_ptr() != p.data_ptr():
        alias.data = p.data
    if alias.requires_grad != p.requires_grad:
        alias.requires_grad_(p.requires_grad)
