"""The bytes that are alive while the lines of a lowered text run, in any order of them."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.ir.buckets import Bucket
from shardc.ir.conversions import BY_OP
from shardc.ir.graph import values_of
from shardc.ir.program import Program
from shardc.passes.lower.record import is_view
from shardc.passes.lower.seconds import Work
from shardc.runtime import ops
from shardc.runtime.zero.flat_partition import Flat
from shardc.torch_private import OpOverload

GATHERS = {ops.gather_start: ops.gather_wait, ops.regather_start: ops.regather_wait}
#: To the host and back (shardc.runtime.ops.host_handle). What stands for a value meanwhile has no type, and no bytes.
COPIES = {ops.offload_start: ops.offload_wait, ops.reload_start: ops.reload_wait}
STARTS = {ops.start, ops.transpose_start, *GATHERS, *COPIES}
WAITS = {ops.wait, *GATHERS.values(), *COPIES.values()}


#: Ops whose result is their first operand, perhaps written to.
_SAME = {ops.add_into, *(getattr(ops, op) for op, row in BY_OP.items() if row.forward == "identity")}


def _copies(start: fx.Node) -> bool:
    """Does a collective send a copy of what it is given?"""
    row = BY_OP.get(str(start.args[0])) if start.target in (ops.start, ops.transpose_start) else None
    return row is not None and (row.forward if start.target is ops.start else row.backward) == "all_reduce"


class Sizes:
    """What values of one program's texts take, on one rank. stays: parameters, buffers and inputs, by name, and the
    copies of weights that microbatches share.
    """

    def __init__(self, program: Program) -> None:
        self._layout = program.mesh
        cast = ops.cast_once if program.microbatches > 1 else None
        copies = (n.name for s in program.stages for n in s.graph.nodes if cast is not None and n.target is cast)
        self.stays = frozenset((*(x.name for x in program.stored), *copies))
        self._of = {name: f"bucket{i}" for i, b in enumerate(program.buckets) for name in b.params}
        self.buckets = {
            f"bucket{i}": _bucket(program, b)
            for i, b in enumerate(program.buckets)
            if b.zero or math.prod(map(program.mesh.size, b.axes)) > 1
        }
        #: By gathered bucket.
        self.parts = {f"bucket{i}": _part(program, b) for i, b in enumerate(program.buckets) if b.zero == 3}

    def bytes_of(self, n: fx.Node) -> int:
        """Of its result, or of all results, on one rank."""
        return sum(v.nbytes(self._layout) for v in values_of(n) if v is not None)

    def bucket_of(self, put: fx.Node) -> str:
        """Where a parameter's gradient is put; "": it becomes the parameter's."""
        name = self._of.get(put.meta["param"], "")
        return name if name in self.buckets else ""


@dataclass(frozen=True)
class Buffer:
    """Of a bucket's gradients. whole, part: bytes before their sum over ranks, and of what is left of it here. each:
    they are summed in every backward, and its memory is free soon afterwards.
    """

    whole: int
    part: int
    each: bool


def _bucket(program: Program, b: Bucket) -> Buffer:
    whole = Flat.of(program, b).padded * b.dtype.itemsize
    return Buffer(whole, whole // program.mesh.size(b.shard) if b.shard else whole, b.each)


@dataclass(frozen=True)
class Part:
    """This rank's part of a bucket, as it is sent when the bucket is gathered. copy: its bytes, where that is a copy.
    ahead: which comes from the host while the bucket before is gathered (shardc.runtime.offload).
    """

    copy: int
    ahead: bool


def _part(program: Program, b: Bucket) -> Part:
    away = "parameters" in program.offload.used
    dtype = b.compute or next(p.dtype for p in program.params if p.name == b.params[0])
    copied = away or b.compute is not None
    return Part(Flat.of(program, b).part * dtype.itemsize if copied else 0, away)


class Uses:
    """Whose memory each value of a graph is in, and how often it is used. What the text returns is used to its end."""

    def __init__(self, graph: fx.Graph, sizes: Sizes, work: Mapping[fx.Node, Work]) -> None:
        self.sizes, self.work = sizes, work
        self.owner: dict[fx.Node, fx.Node] = {}
        self.bytes = {n: sizes.bytes_of(n) + work[n].tape for n in graph.nodes}
        #: Bytes that a line makes.
        self.added: dict[fx.Node, int] = {}
        for n in graph.nodes:
            shares = n.op == "call_function" and (is_view(n.target) or n.target in _SAME or n.target in WAITS)
            base = n.args[0] if shares and not self._apart(n) else None
            self.owner[n] = self.owner[base] if isinstance(base, fx.Node) else n
            self.added[n] = self.bytes[n] if self.owner[n] is n else 0
            if self._apart(n):
                self._picked(n)
        self.of = {n: self._used(n) for n in graph.nodes}
        self.counts: Counter[fx.Node] = Counter()
        for n in graph.nodes:
            self.counts.update(self.of[n])
        self.stays = {n for n in graph.nodes if n.op == "placeholder" and n.meta.get("named", n.name) in sizes.stays}
        #: Bytes of copies of parts that are sent: there from the beginning, and gone after a line. (`added` has them.)
        self.parts_at_first, self.parts_gone = 0, dict.fromkeys(graph.nodes, 0)
        self._follow_parts(graph)

    @staticmethod
    def _apart(n: fx.Node) -> bool:
        """Is it one of an op's several results, each with memory of its own?"""
        of: Any = n.args[0] if n.target is operator.getitem else None
        return of is not None and (
            of.target in (ops.taped, ops.untaped) or (isinstance(of.target, OpOverload) and not is_view(of.target))
        )

    def _picked(self, n: fx.Node) -> None:
        """What the op has made, and was its own so far, is this one's."""
        of: Any = n.args[0]
        tape = self.work[of].tape if of.target is ops.taped and n.meta["value"] is None else 0
        self.bytes[n] += tape
        self.bytes[of] = max(self.bytes[of] - self.bytes[n], 0)
        self.added[n] = 0

    def _used(self, n: fx.Node) -> set[fx.Node]:
        """The owners of the memory that a line uses. What a collective sends is there until it is waited for; a sum
        over ranks is made in a copy of it.
        """
        used = list(n.all_input_nodes)
        if n.target in WAITS and not _copies(used[0]):
            used += used[0].all_input_nodes
        return {self.owner[x] for x in used}

    def _follow_parts(self, graph: fx.Graph) -> None:
        """A part is there until its gather is waited for. One that comes from the host is read when the gather before
        begins: that of a backward's first gather, when forward's last one does (it is the same bucket, in most).
        """
        starts = [n for n in graph.nodes if n.target in GATHERS]
        for before, n in zip((None, *starts), starts, strict=False):
            part = self.sizes.parts[n.args[1]]
            made_by = before if part.ahead else n
            if made_by is not None:
                self.added[made_by] += part.copy
            elif n.target is ops.regather_start:
                self.parts_at_first += part.copy
            else:
                self.added[n] += part.copy
            self.parts_gone[next(u for u in n.users if u.target in WAITS)] += part.copy
        if starts and starts[-1].target is ops.gather_start and (last := self.sizes.parts[starts[-1].args[1]]).ahead:
            self.added[starts[-1]] += last.copy

    def alive(self, order: Iterable[fx.Node]) -> list[tuple[int, int]]:
        """The bytes that are alive at each line: in the first backward of a step, which makes gradients, and in one
        that adds to them.
        """
        memory = Memory(self)
        return [memory.run(n) for n in order]

    def peak(self, order: Iterable[fx.Node]) -> tuple[int, int]:
        """The most of both."""
        first, later = zip(*self.alive(order), strict=True)
        return max(first), max(later)


class Memory:
    """live: bytes of what the text takes from forward and makes itself, at some point of an order; gradients: of those
    that are complete, in the first backward of a step.

    A bucket that is summed in every backward has a buffer, from its first gradient (ops.put) or its last (ops.scatter)
    on, until the next one's sum has begun (shardc.runtime.zero.bucket_launch).
    """

    def __init__(self, uses: Uses) -> None:
        self._uses, self._left = uses, Counter(uses.counts)
        given = (n for n in uses.counts if n.op == "placeholder" and n not in uses.stays)
        self.live = uses.parts_at_first + sum(uses.bytes[n] for n in given)
        self.gradients = 0
        self._begun: set[str] = set()
        self._summed = 0  # bytes of the buffer whose sum is under way

    def would_be(self, n: fx.Node) -> tuple[int, int]:
        """What is alive while a line runs: see `Uses.alive`."""
        return self._would_be(n, *self._filled(n))

    def _would_be(self, n: fx.Node, buffer: int, gradients: int) -> tuple[int, int]:
        uses = self._uses
        if gradients and n.target is ops.put and n.kwargs.get("own"):
            gradients = 0  # it is alive already
        later = self.live + uses.added[n] + buffer + uses.work[n].inside
        return later + self.gradients + gradients, later

    def _filled(self, n: fx.Node) -> tuple[int, int]:
        """Bytes that a line takes for gradients: (of a buffer that is summed in every backward, till the step ends)."""
        sizes = self._uses.sizes
        if n.target is ops.put:
            name = sizes.bucket_of(n)
            if not name:
                return 0, sizes.bytes_of(n.args[1])  # type: ignore[arg-type]
        elif n.target is ops.scatter:
            name = str(n.args[2])
        else:
            return 0, 0
        if name in self._begun:
            return 0, 0
        b = sizes.buckets[name]
        return (b.whole, b.part) if b.each else (0, b.whole)

    def run(self, n: fx.Node) -> tuple[int, int]:
        """What is alive while a line runs; afterwards, what it used last is gone."""
        uses = self._uses
        buffer, gradients = self._filled(n)
        most = self._would_be(n, buffer, gradients)
        self.live += uses.added[n] - uses.parts_gone[n] + buffer
        self.gradients += gradients
        if n.target is ops.put:
            self._begun.add(uses.sizes.bucket_of(n))
            self._begun.discard("")
        elif n.target in (ops.scatter, ops.launch):
            b = uses.sizes.buckets[str(n.args[2 if n.target is ops.scatter else 1])]
            self.live -= self._summed
            self._summed = b.whole if b.each else 0
        if uses.owner[n] is n and not uses.counts[n]:
            self.live -= uses.bytes[n]
        for x in uses.of[n]:
            self._left[x] -= 1
            if not self._left[x] and x not in uses.stays:
                self.live -= uses.bytes[x]
        return most
