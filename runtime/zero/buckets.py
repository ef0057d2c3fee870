"""Gradient buckets: sums over ranks that overlap with backward (Li et al. 2020, "PyTorch Distributed").

When backward has finished a parameter's gradient, it is copied to its place in the bucket's flat buffer; when a bucket
is full, and all before it have started, its sum starts in the background. Which parameters share a bucket, of which
size, in which order, is decided by the pass shardc.passes.gradient_buckets: the order in which backward finishes them,
which the graph shows, so that no warm-up step measures it and all ranks agree. What ZeRO shards is a matter of each
bucket (shardc.runtime.zero.bucket).

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

from shardc.ir.offload import OffloadPlaces
from shardc.ir.program import Program
from shardc.runtime.offload import Offload
from shardc.runtime.zero.bucket import Bucket, follow
from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.gather import Gathered

Reduced = Callable[[Sequence[str]], None]


class Buckets:
    """The buckets of one rank. params: whole local parameters by name, which the buckets take over, one at a time.

    Use: `start()`, backward, `finish()`; after an update of the parameters, `publish()`. Several backwards a step, of
    microbatches and of a pipeline's stages: `start(...)`, backward, `pause()` for each, `reduce()` after a stage's
    last, and `finish()`.

    .given: what the program's graph gets, in order. .owned: what the optimizer works on, and whose `.grad` is reduced:
    the parameters, or this rank's stretch of each (1-d). .runs: which stretch, of those that are sharded.

    A parameter that has a `.grad` when backward starts gets the new sum added to it, as on one device; one that
    backward does not reach counts as zeros in the sum, and keeps the `.grad` it had, also as on one device.

    aliased: for a loop of the user's: see Bucket.
    """

    def __init__(
        self,
        program: Program,
        params: Mapping[str, nn.Parameter] | Iterable[tuple[str, nn.Parameter]],
        mesh: Any,
        offload: Offload | None = None,
        *,
        aliased: bool = False,
    ) -> None:
        self.mesh = mesh
        offload = offload if offload is not None else Offload(OffloadPlaces(), mesh)
        self._gathered = Gathered()
        coordinate_here = mesh.coordinate(program.axis) if program.axis else 0
        here = (
            {s for s, coordinate in enumerate(program.schedule.placement) if coordinate == coordinate_here}
            if program.schedule is not None
            else {0}
        )
        mine = [i for i, b in enumerate(program.buckets) if not here.isdisjoint(b.stages)]
        self._all = [
            Bucket(program, i, mesh, offload, self._gathered, self._is_last, self._launched, aliased=aliased)
            for i in mine
            if program.buckets[i].zero or mesh.members(program.buckets[i].axes) > 1
        ]
        self._stages = {b: here.intersection(b.spec.stages) for b in self._all}
        #: The stages of a bucket whose last backward of a step has not begun.
        self._left: dict[Bucket, set[int]] = {}
        self._of = {n: b for b in self._all for n in b.spec.params}
        #: Those that are summed once a step, in order, and the first whose sum has not begun.
        self._once = [b for b in self._all if not b.scatters]
        self._next = 0
        #: Those with whole parameters that are summed in every backward; of the one that runs, what has not begun.
        self._each = [b for b in self._all if b.scatters and b.whole]
        self._due: deque[Bucket] = deque()
        self._active = False
        self._flying: list[Bucket] = []
        #: Called with a bucket's parameters whose sums are there already while backward runs; None: `finish` gives all.
        self.early: Reduced | None = None
        self._done: set[Bucket] = set()
        self.given: dict[str, Any] = {}
        self.owned: dict[str, nn.Parameter] = {}
        for name, p in params.items() if isinstance(params, Mapping) else params:
            if name in self._of:
                self.given[name], self.owned[name] = self._of[name].adopt(name, p), nn.Parameter()
                continue
            self.given[name] = nn.Parameter(p.detach(), requires_grad=p.requires_grad) if aliased else p
            self.owned[name] = p
        for b in self._all:
            b.ready()
            self.owned |= b.owned
        #: The parameters that are in no bucket.
        self.unsummed = [name for name in self.owned if name not in self._of]
        self.runs: dict[str, FlatShard] = {n: run for b in self._all for n, run in b.runs.items()}
        for b in (*self._once, *self._each):
            for name, p in b.params.items():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(self._hook(b, name))  # type: ignore[no-untyped-call]

    def _is_last(self, bucket: Bucket) -> bool:
        """Is this the step's last backward that reaches a bucket?"""
        return not self._left[bucket]

    @property
    def names(self) -> set[str]:
        """The parameters that are in buckets."""
        return set(self._of)

    @property
    def of_each(self) -> list[Sequence[str]]:
        """The parameters of each bucket, as `finish` gives them."""
        return [b.spec.params for b in self._all]

    @property
    def arrive_apart(self) -> bool:
        """Are some sums still under way when the first are there, after backward, so that a bucket's update hides them?
        Not with ZeRO, where one at a time is under way; nor on a GPU, which queues updates behind backward anyway.
        """
        return len(self._all) > 1 and not self.mesh.streams and not any(b.spec.zero for b in self._all)

    @property
    def active(self) -> bool:
        """Between `start` and `finish`."""
        return self._active

    # --- gradients

    @property
    def sums(self) -> list[Tensor]:
        """The buffers in which gradients are added up now."""
        return [buffer for b in self._all if (buffer := b.buffer) is not None]

    def start(self, stage: int = 0, first: bool = True, last: bool = True) -> None:
        """Before backward, or as its first act. first: of the step on this rank; last: of the step, of this stage of a
        pipeline.
        """
        if first:
            self._next, self._active, self._flying, self._done = 0, True, [], set()
            self._left = {b: set(stages) for b, stages in self._stages.items()}
        for b in self._all:
            if first or stage in self._stages[b]:
                b.start(first)
            if last:
                self._left[b].discard(stage)
        self._due = deque(b for b in self._each if stage in self._stages[b])

    def pause(self) -> None:
        """After a backward that others of the same step may follow."""
        self._scatter(all_of_them=True)

    def reduce(self) -> None:
        """After the last backward of a stage: begin the sums that wait for gradients which did not come."""
        for b in self._once:
            if not self._left[b]:
                b.missing = set()  # what has not come will not come
        self._launch(all_of_them=False)

    def reset(self, *, forward: bool = False) -> None:
        """Forget a backward that failed halfway, and forwards that wait for theirs too. Not while one is running."""
        if self._active or forward:
            self._gathered.finish()
        self._due.clear()
        for b in self._all:
            b.reset()
        self._active = False

    def _hook(self, bucket: Bucket, name: str) -> Callable[[Tensor], None]:
        def arrived(p: Tensor) -> None:
            if self._active and p.grad is not None:  # an op of the user's may give None
                bucket.put(name)

        return arrived

    def launch(self) -> None:
        """Some gradients have come: begin the sums that are due."""
        self._scatter(all_of_them=False)
        self._launch(all_of_them=False)

    def _launch(self, *, all_of_them: bool) -> None:
        """Start the buckets that are due, in order: every rank must start them alike."""
        while self._next < len(self._once):
            bucket = self._once[self._next]
            if self._left[bucket] or ((bucket.missing or bucket.spec.late) and not all_of_them):
                return
            bucket.launch()
            self._next += 1
            self._launched(bucket)

    def _scatter(self, *, all_of_them: bool) -> None:
        """Of the backward that runs: start the buckets that are due, in order: every rank must start them alike."""
        while self._due and (all_of_them or not self._due[0].missing):
            bucket = self._due.popleft()
            bucket.launch()
            self._launched(bucket)

    def _launched(self, bucket: Bucket) -> None:
        """A bucket's sum is under way: go on with the one before it, whose buffer is then free."""
        for other in (b for b in self._flying if b is not bucket):
            other.settle()
            if self.early is not None and other.final and other not in self._done:
                self._done.add(other)
                other.finish()
                self.early(other.spec.params)
        self._flying = [bucket]

    def finish(self, reduced: Reduced | None = None) -> None:
        """After backward: wait for all sums. reduced: called with each bucket's parameters while later ones are still
        under way.
        """
        self._scatter(all_of_them=True)
        self._left = {b: set() for b in self._all}
        self._launch(all_of_them=True)
        self._gathered.finish()
        left = [b for b in self._all if b not in self._done]
        for b in left:
            b.close()
        for b in left:
            b.settle()
        for b in left:
            b.finish()
            if reduced is not None:
                reduced(b.spec.params)
        self._active = False

    def kept_sums(self) -> Callable[[], None]:
        """After `finish`: what makes its sums those of the last step again, for a step that was recorded then
        (shardc.runtime.step.step_graph).
        """
        sums = [(b, b.sums) for b in self._all]

        def again() -> None:
            for b, sums_of in sums:
                b.sums = sums_of

        return again

    def follow(self) -> None:
        """Before a forward of a user's own loop: see Bucket.follow."""
        for b in self._all:
            b.follow()
        for name in self.unsummed:
            follow(self.given[name], self.owned[name])

    def take_unsummed(self) -> list[Tensor | None]:
        """The gradients of `unsummed` that a backward has put into the graph's own leaves, which lose them."""
        leaves = [self.given[name] for name in self.unsummed]
        grads = [leaf.grad for leaf in leaves]
        for leaf in leaves:
            leaf.grad = None
        return grads

    def narrow(self) -> None:
        """After an update, if nobody adds to gradients: they take the memory of their sums, where that is in a narrower
        dtype.
        """
        for b in self._all:
            b.narrow()

    # --- parameters

    def publish(self) -> None:
        """After an update: begin to gather what other ranks updated, first what forward needs first."""
        for b in reversed(self._all):
            b.publish()

    @property
    def written(self) -> bool:
        """Has anybody written to parameters that are to be gathered, since `publish`?"""
        return any(b.written for b in self._all)

    def wait_for_gathers(self) -> None:
        """Wait for what `publish` began."""
        for b in self._all:
            b.wait_for_gather()

    def whole(self, name: str) -> Tensor | None:
        """A parameter's whole local part, in the dtype in which this rank keeps it whole; None at ZeRO 3. After
        `wait_for_gathers`.
        """
        if name not in self._of:
            return self.owned[name].detach()
        bucket = self._of[name]
        return bucket.params[name].detach() if name in bucket.params else None

    def filled(self) -> None:
        """All forms of the parameters were written to, on all ranks: nothing is to be gathered."""
        for b in self._all:
            b.filled()

    def wholes(self) -> Mapping[str, Tensor]:
        """{name: whole local part, as stored, detached}; a bucket is gathered when one of its names is asked for: by
        all ranks alike.
        """
        return _Wholes(self.owned, self._of)


class _Wholes(Mapping[str, Tensor]):
    def __init__(self, owned: Mapping[str, nn.Parameter], of: Mapping[str, Bucket]) -> None:
        self._owned, self._of = owned, of
        self._bucket: Bucket | None = None
        self._there: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._of:
            return self._owned[name].detach()
        if self._bucket is not self._of[name]:
            self._there = {}  # one bucket at a time
            self._bucket, self._there = self._of[name], self._of[name].wholes()
        return self._there[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owned)

    def __len__(self) -> int:
        return len(self._owned)
