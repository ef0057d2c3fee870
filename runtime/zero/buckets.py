"""Sum gradients over ranks in buckets, overlapped with backward.

When backward has finished a parameter's gradient, it is copied to its place in the bucket's flat buffer. A full bucket
is summed in the background (Li et al. 2020, "PyTorch Distributed"). The pass shardc.passes.gradient_buckets decides
which parameters share a bucket, in the order of backward: it reads this from the graph, so no warm-up step is needed
and all ranks agree. Each bucket shards itself for ZeRO (shardc.runtime.zero.bucket).

When a sum starts, and when a rank waits for it (`Bucket.launch`, `advance_sum`):

    zero  starts                          sum                                waits
    0     last backward of the step*      all_reduce                         `finish`: all may run at once
    1     the same                        reduce_scatter into this rank's    GPU: `finish`. CPU: when the next bucket
                                          part, a view of the buffer         has started, as each sum copies its buffer
    2     every backward*                 reduce_scatter, added to what      when the next bucket has started, or before
    3     every backward (`keep`: the     the part has already               its own next sum: this frees the buffer
          last), by `Bucket.arrived`

    * when the bucket is full and those before it have started; buckets that did not fill, after the (stage's) backward.
    ZeRO 1 to 3: once a step an all_reduce over the other data axes follows. `late` buckets (of parameters that stages
    on other ranks use too): `finish` starts their sum (ZeRO 0, 1), or only that all_reduce (2, 3). `keep`: gathered
    parameters and whole gradients stay until the last backward. `early`: a bucket is finished when the next one starts.

A step at ZeRO 2 with two microbatches and buckets a, b (the backward graph calls `ops.accumulate` for each gradient and
`ops.launch` where a bucket is full):

    F0 B0     put into a | launch a: reduce-scatter begins | put into b | launch b, wait for a, free a's buffer
    F1 B1     launch a, wait for b | launch b, wait for a: both add up in this rank's part
    finish    wait for b; gradients are in `.owned[name].grad`, flat shards
    update    the optimizer steps flat shards; `publish` begins an all-gather of each bucket
    F0        of the next step: `ops.updated` waits for a bucket's gather where its first parameter is used
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from shardc.ir.program import Program
from shardc.runtime import schedule
from shardc.runtime.offload import Offload
from shardc.runtime.zero.bucket import Bucket, update_alias
from shardc.runtime.zero.flat_partition import FlatShard

Reduced = Callable[[Sequence[str]], None]


class Buckets:
    """The buckets of one rank. params: (name, local part uncut by ZeRO), taken one at a time.

    Use: `start()`, backward, `finish()`; after an update of the parameters, `publish()`. With several backwards a step
    (of microbatches and stages): `start(...)`, backward, `pause()` for each, `start_incomplete()` after a stage's last,
    `finish`.

    .given: what the graph takes for each parameter: the parameter (or an alias of it, for a custom loop), or its
    bucket. .owned: what the optimizer steps, and whose `.grad` is reduced: the parameters, or this rank's shard of each
    (1-d). .shards: where each such shard is.

    A custom loop may add gradients up: if a parameter has a `.grad` when a step starts, the new sum is added to it (an
    engine clears it before). A parameter that no backward reaches counts as zeros in the sum, and keeps its `.grad`.
    """

    def __init__(
        self,
        program: Program,
        params: Iterable[tuple[str, nn.Parameter]],
        mesh: Any,
        offload: Offload | None = None,
        *,
        aliased: bool = False,
    ) -> None:
        self.mesh = mesh
        offload = offload if offload is not None else Offload(program.spec.data, mesh)
        at = mesh.coordinate(program.axis) if program.axis else 0
        stages = {s for s, coordinate in enumerate(schedule.of(program).placement) if coordinate == at}
        self._all = [
            Bucket(program, i, mesh, offload, self._is_last, self._wait_for_earlier, aliased=aliased)
            for i, b in enumerate(program.buckets)
            if not stages.isdisjoint(b.stages) and (b.zero or mesh.members(b.axes) > 1)
        ]
        self._stages = {b: stages.intersection(b.ir.stages) for b in self._all}
        #: By bucket: those of its stages whose last backward of the step has not started.
        self._stages_left: dict[Bucket, set[int]] = {}
        self._bucket_of = {n: b for b in self._all for n in b.ir.params}
        #: ZeRO 0 and 1: buckets that are summed once a step; those of the running step whose sum has yet to start.
        self._summed_once = [b for b in self._all if not b.scatters]
        self._due_in_step: deque[Bucket] = deque()
        #: ZeRO 2: buckets that every backward sums; those of the running backward whose sum has yet to start.
        self._summed_each_time = [b for b in self._all if b.scatters and b.params_whole]
        self._due_in_backward: deque[Bucket] = deque()
        self.active = False  # whether a step is between `start` and `finish`
        self._last_started: Bucket | None = None  # the bucket whose sum started last in this step
        #: Called during backward with the parameters of a bucket whose sum is ready; None: `finish` reports all.
        self.early: Reduced | None = None
        self._finished: set[Bucket] = set()
        self.given: dict[str, Any] = {}
        self.owned: dict[str, nn.Parameter] = {}
        for name, p in params:
            if name in self._bucket_of:
                # a placeholder, so that names keep the program's order: `owned |= b.owned` replaces it
                self.given[name], self.owned[name] = self._bucket_of[name].adopt(name, p), nn.Parameter()
                continue
            self.given[name] = nn.Parameter(p.detach(), requires_grad=p.requires_grad) if aliased else p
            self.owned[name] = p
        for b in self._all:
            b.make_owned()
            self.owned |= b.owned
        #: The parameters that are in no bucket.
        self.unsummed = [name for name in self.owned if name not in self._bucket_of]
        self.shards: dict[str, FlatShard] = {n: s for b in self._all for n, s in b.shards.items()}
        # `ops.accumulate` calls these hooks as autograd would, for each gradient that a backward graph computes
        for b in (*self._summed_once, *self._summed_each_time):
            for name, p in b.params.items():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self._hook(b, name))  # type: ignore[no-untyped-call]

    def _is_last(self, bucket: Bucket) -> bool:
        """Return whether this is the step's last backward that reaches a bucket."""
        return not self._stages_left[bucket]

    @property
    def names(self) -> set[str]:
        """The parameters that are in buckets."""
        return set(self._bucket_of)

    @property
    def names_by_bucket(self) -> list[Sequence[str]]:
        """The parameters of each bucket, as `finish` passes them to `reduced`."""
        return [b.ir.params for b in self._all]

    @property
    def sums_outlast_backward(self) -> bool:
        """Whether sums end one by one after backward, so that updating the first buckets hides later sums.

        Not with ZeRO, where one sum runs at a time; nor on a GPU, which queues updates behind backward anyway.
        """
        return len(self._all) > 1 and not self.mesh.streams and not any(b.ir.zero for b in self._all)

    # --- gradients

    @property
    def buffers(self) -> list[Tensor]:
        """The buffers in which gradients are added up now."""
        return [buffer for b in self._all if (buffer := b.buffer) is not None]

    def start(self, stage: int = 0, first: bool = True, last: bool = True) -> None:
        """Prepare for a backward. first: the step's first on this rank; last: this pipeline stage's last."""
        if first:
            self.active, self._last_started, self._finished = True, None, set()
            self._due_in_step = deque(self._summed_once)
            self._stages_left = {b: set(stages) for b, stages in self._stages.items()}
        for b in self._all:
            if first or stage in self._stages[b]:
                b.start(first)
            if last:
                self._stages_left[b].discard(stage)
        self._due_in_backward = deque(b for b in self._summed_each_time if stage in self._stages[b])

    def pause(self) -> None:
        """End a backward that others of the same step may follow."""
        self._start_sums(self._due_in_backward, all_of_them=True)

    def start_incomplete(self) -> None:
        """Start the sums that wait for gradients which did not come, after a stage's last backward."""
        for b in self._summed_once:
            if not self._stages_left[b]:
                b.missing = set()  # missing gradients will not come any more
        self._start_sums(self._due_in_step)

    def reset(self, *, forward: bool = False) -> None:
        """Forget what a failed step left. No backward may run. forward: also gathers that a forward left."""
        self._due_in_backward.clear()
        for b in self._all:
            if self.active or forward:
                b.finish_gathers()
            b.reset()
        self.active = False

    def _hook(self, bucket: Bucket, name: str) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            if self.active and p.grad is not None:  # a custom op may return None
                bucket.put(name)

        return arrived

    def launch(self) -> None:
        """Start the sums that are due, after some gradients have arrived."""
        self._start_sums(self._due_in_backward)
        self._start_sums(self._due_in_step)

    def _start_sums(self, due: deque[Bucket], *, all_of_them: bool = False) -> None:
        """Start the sums of due buckets, in the same order on every rank, up to the first that is not full."""
        while due and (all_of_them or self._is_full(due[0])):
            bucket = due.popleft()
            bucket.launch()
            self._wait_for_earlier(bucket)

    def _is_full(self, bucket: Bucket) -> bool:
        """Return whether a bucket has all gradients of its next sum."""
        if bucket.missing:
            return False
        return bucket.scatters or not (bucket.ir.late or self._stages_left[bucket])

    def _wait_for_earlier(self, bucket: Bucket) -> None:
        """Wait for the sum that started before `bucket`'s where the table above says so; with `early`, finish it."""
        if (earlier := self._last_started) is not None and earlier is not bucket:
            earlier.advance_sum()
            if self.early is not None and earlier.final and earlier not in self._finished:
                self._finished.add(earlier)
                earlier.finish()
                self.early(earlier.ir.params)
        self._last_started = bucket

    def finish(self, reduced: Reduced | None = None) -> None:
        """Wait for all sums, after backward. reduced: called for each bucket that `early` did not get."""
        self._start_sums(self._due_in_backward, all_of_them=True)
        self._stages_left = {b: set() for b in self._all}
        self._start_sums(self._due_in_step, all_of_them=True)
        for b in self._all:
            b.finish_gathers()
        left = [b for b in self._all if b not in self._finished]
        for b in left:
            b.close()
        for b in left:
            b.advance_sum()
        for b in left:
            b.finish()
            if reduced is not None:
                reduced(b.ir.params)
        self.active = False

    def sums_restorer(self) -> Callable[[], None]:
        """Return a function that restores the sums of this step, for a recorded step (step_graph.py)."""
        sums_by_bucket = [(b, b.sums) for b in self._all]

        def restore() -> None:
            for b, sums in sums_by_bucket:
                b.sums = sums

        return restore

    def update_aliases(self) -> None:
        """Update the graph's leaves before a forward of a custom loop: see Bucket.update_aliases."""
        for b in self._all:
            b.update_aliases()
        for name in self.unsummed:
            update_alias(self.given[name], self.owned[name])

    def take_unsummed(self) -> list[Tensor | None]:
        """Take the gradients of `unsummed` out of the graph's leaves."""
        leaves = [self.given[name] for name in self.unsummed]
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def narrow_grads(self) -> None:
        """Move gradients to the narrower memory of their sums, after an update. Nothing may add to them later."""
        for b in self._all:
            b.narrow_grads()

    # --- parameters

    def publish(self) -> None:
        """Start to gather what other ranks updated, in the order of forward."""
        for b in reversed(self._all):
            b.publish()

    @property
    def written(self) -> bool:
        """Whether anything wrote to shards since `publish`, so that parameters must be gathered again."""
        return any(b.written for b in self._all)

    def version(self) -> int:
        """Return a number that grows with each write to `.owned`."""
        return sum(p._version for p in self.owned.values())

    def wait_for_gathers(self) -> None:
        """Wait for the gathers of `publish`."""
        for b in self._all:
            b.wait_for_gather()

    def kept_whole(self, name: str) -> Tensor | None:
        """Return a parameter's local part uncut by ZeRO; None at ZeRO 3. Wait for gathers first."""
        if name not in self._bucket_of:
            return self.owned[name].detach()
        bucket = self._bucket_of[name]
        return bucket.params[name].detach() if name in bucket.params else None

    def wholes(self) -> Mapping[str, Tensor]:
        """Return {name: local part uncut by ZeRO, as stored, detached}.

        Reading a name gathers its bucket: all ranks must read the same names in the same order.
        """
        return _Wholes(self.owned, self._bucket_of)


class _Wholes(Mapping[str, Tensor]):
    """Local parts uncut by ZeRO, by name; one bucket is gathered at a time."""

    def __init__(self, owned: Mapping[str, nn.Parameter], of: Mapping[str, Bucket]) -> None:
        self._owned, self._bucket_of = owned, of
        self._bucket: Bucket | None = None
        self._wholes: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._bucket_of:
            return self._owned[name].detach()
        if self._bucket is not self._bucket_of[name]:
            self._wholes = {}  # one bucket at a time
            self._bucket, self._wholes = self._bucket_of[name], self._bucket_of[name].wholes()
        return self._wholes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owned)

    def __len__(self) -> int:
        return len(self._owned)
