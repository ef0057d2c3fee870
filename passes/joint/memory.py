"""Count the bytes that are alive while the lines of a step's graph run, in any order of the lines."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import fx

from shardc.ir.conversions import BY_OP
from shardc.ir.graph import values_of
from shardc.ir.program import Program
from shardc.ir.stored import Bucket
from shardc.passes.joint.derivatives.record import is_view
from shardc.passes.joint.seconds import Work
from shardc.runtime import ops
from shardc.runtime.zero.flat_partition import Flat
from shardc.torch_private import OpOverload

# Targets that are an OpOverload are not searched in these sets: their hash runs Python code, which is slow.
GATHERS = {ops.gather_start: ops.gather_wait, ops.regather_start: ops.regather_wait}
#: Copies to the host and back (shardc.runtime.ops.host_handle). A handle has no type, and no bytes.
COPIES = {ops.offload_start: ops.offload_wait, ops.reload_start: ops.reload_wait}
STARTS = {ops.start, ops.transpose_start, *GATHERS, *COPIES}
WAITS = {ops.wait, *GATHERS.values(), *COPIES.values()}


#: Ops whose result is their first operand, perhaps written to.
_SAME = {ops.add_into, *(getattr(ops, op) for op, row in BY_OP.items() if row.forward == "identity")}


def _copies(start: fx.Node) -> bool:
    """Return whether a collective copies its operand, which may then be freed."""
    row = BY_OP.get(str(start.args[0])) if start.target in (ops.start, ops.transpose_start) else None
    return row is not None and (row.forward if start.target is ops.start else row.backward) == "all_reduce"


class Sizes:
    """The bytes of values in one program's graphs, on one rank.

    stays: names of parameters, buffers, inputs, and the copies of weights that microbatches share.
    """

    def __init__(self, program: Program) -> None:
        self._mesh = program.mesh
        cast = ops.cast_once if program.microbatches > 1 else None
        copies = (n.name for s in program.stages for n in s.graph.nodes if cast is not None and n.target is cast)
        self.stays = frozenset((*(x.name for x in program.stored), *copies))
        self._of = {name: f"bucket{i}" for i, b in enumerate(program.buckets) for name in b.params}
        self.buckets = {
            f"bucket{i}": _bucket(program, b)
            for i, b in enumerate(program.buckets)
            if b.zero or math.prod(map(program.mesh.size, b.axes)) > 1
        }
        #: This rank's part, by gathered bucket.
        self.parts = {f"bucket{i}": _part(program, b) for i, b in enumerate(program.buckets) if b.zero == 3}
        #: (type, bytes), by the identity of a type, which equal lines share.
        self._known: dict[int, tuple[Any, int]] = {}

    def bytes_of(self, n: fx.Node) -> int:
        """Return the bytes of a node's result, or of all its results, on one rank."""
        value = n.meta.get("value")
        known = self._known.get(id(value))
        if known is None:
            nbytes = sum(v.nbytes(self._mesh) for v in values_of(n) if v is not None)
            known = self._known[id(value)] = value, nbytes
        return known[1]

    def bucket_of(self, put: fx.Node) -> str:
        """Return the bucket of a parameter's gradient; "" if the gradient stays with the parameter."""
        name = self._of.get(put.meta["param"], "")
        return name if name in self.buckets else ""


@dataclass(frozen=True)
class GradientBuffer:
    """The buffer of a bucket's gradients. whole, part: bytes before and after their sum over ranks.

    each: summed in every backward and freed; else kept for the step.
    """

    whole: int
    part: int
    each: bool


def _bucket(program: Program, b: Bucket) -> GradientBuffer:
    whole = Flat.of(program, b).padded * b.dtype.itemsize
    return GradientBuffer(whole, whole // program.mesh.size(b.shard) if b.shard else whole, b.each)


@dataclass(frozen=True)
class SentPart:
    """This rank's part of a bucket, as it is sent when the bucket is gathered. copy: bytes; 0 if no copy.

    ahead: it comes from the host during the gather before (shardc.runtime.offload).
    """

    copy: int
    ahead: bool


def _part(program: Program, b: Bucket) -> SentPart:
    away = "parameters" in program.spec.data.offload.used
    dtype = b.compute or program.params_by_name[b.params[0]].dtype
    copied = away or b.compute is not None
    return SentPart(Flat.of(program, b).part * dtype.itemsize if copied else 0, away)


@dataclass(slots=True)
class MemoryStep:
    """A line's effect on the bytes that are alive, in any order.

    most: extra bytes while it runs
    left: extra bytes afterwards, before values are freed
    uses: numbers of the values that it uses
    fills, sums: the bucket that gets gradients, or whose sum begins
    put: bytes of a gradient that stays separate
    own: the gradient is alive already
    gradients: fills, sums or put is set
    """

    most: int
    left: int
    uses: tuple[int, ...]
    fills: str = ""
    sums: str = ""
    put: int = 0
    own: bool = False
    gradients: bool = False


class Uses:
    """Owners of values' memory, and their uses. Returned values stay alive to the end."""

    def __init__(self, graph: fx.Graph, sizes: Sizes, work: Mapping[fx.Node, Work]) -> None:
        self.sizes, self._work = sizes, work
        self.taken = {n: n.all_input_nodes for n in graph.nodes}
        self.owner: dict[fx.Node, fx.Node] = {}
        self.bytes = {n: sizes.bytes_of(n) + work[n].tape for n in graph.nodes}
        #: Bytes that a line makes.
        self._added: dict[fx.Node, int] = {}
        for n in graph.nodes:
            self._find_owner(n)
        self.of = {n: self._used(n) for n in graph.nodes}
        self._counts: dict[fx.Node, int] = {}
        for used in self.of.values():
            for x in used:
                self._counts[x] = self._counts.get(x, 0) + 1
        self._stays = {n for n in graph.nodes if n.op == "placeholder" and n.meta.get("named", n.name) in sizes.stays}
        #: Bytes of copies of parts that are sent: at the beginning, and freed after a line. (`_added` has the others.)
        self._parts_at_first = 0
        self._sent_parts: dict[fx.Node, int] = {}
        self._follow_parts(graph)
        freed = [n for n in self._counts if n not in self._stays]
        self._number = {n: i for i, n in enumerate(freed)}
        #: By number of a value: how often it is used, and its bytes.
        self.left, self.freed = [self._counts[n] for n in freed], [self.bytes[n] for n in freed]
        self.at_first = self._parts_at_first + sum(self.bytes[n] for n in freed if n.op == "placeholder")
        self.steps = {n: self._step(n) for n in graph.nodes if n.op == "call_function"}

    def _find_owner(self, n: fx.Node) -> None:
        """Find the owner of the memory of a line's result, and the bytes that the line makes."""
        separate = n.op == "call_function" and self._is_separate(n)
        shares = n.op == "call_function" and not separate and shares_operand(n.target)
        base = n.args[0] if shares else None
        self.owner[n] = self.owner[base] if isinstance(base, fx.Node) else n
        self._added[n] = self.bytes[n] if self.owner[n] is n else 0
        if separate:
            self._split_bytes(n)

    @staticmethod
    def _is_separate(n: fx.Node) -> bool:
        """Return whether it is one of an op's several results, each with its own memory."""
        source: Any = n.args[0] if n.target is operator.getitem else None
        return source is not None and (
            source.target in (ops.opaque, ops.opaque_backward)
            or (isinstance(source.target, OpOverload) and not is_view(source.target))
        )

    def _split_bytes(self, n: fx.Node) -> None:
        """Count this result's bytes at the `getitem`, not at the op."""
        source: Any = n.args[0]
        tape = self._work[source].tape if source.target is ops.opaque and n.meta["value"] is None else 0
        self.bytes[n] += tape
        self.bytes[source] = max(self.bytes[source] - self.bytes[n], 0)
        self._added[n] = 0

    def _used(self, n: fx.Node) -> set[fx.Node]:
        """Return the owners of the memory that a line uses, including what an awaited collective still sends."""
        used = self.taken[n]
        if not isinstance(n.target, OpOverload) and n.target in WAITS and not _copies(used[0]):
            used = used + used[0].all_input_nodes
        return {self.owner[x] for x in used}

    def _follow_parts(self, graph: fx.Graph) -> None:
        """Count the copy of each bucket's part until the bucket's gather is waited for.

        A part from the host is read when the gather before begins: for a backward's first gather, forward's last one
        (mostly the same bucket).
        """
        starts = [n for n in graph.nodes if not isinstance(n.target, OpOverload) and n.target in GATHERS]
        for before, n in zip((None, *starts), starts, strict=False):
            part = self.sizes.parts[n.args[1]]
            made_by = before if part.ahead else n
            if made_by is not None:
                self._added[made_by] += part.copy
            elif n.target is ops.regather_start:
                self._parts_at_first += part.copy
            else:
                self._added[n] += part.copy
            wait = next(u for u in n.users if u.target in WAITS)
            self._sent_parts[wait] = self._sent_parts.get(wait, 0) + part.copy
        if starts and starts[-1].target is ops.gather_start and (last := self.sizes.parts[starts[-1].args[1]]).ahead:
            self._added[starts[-1]] += last.copy

    def _step(self, n: fx.Node) -> MemoryStep:
        added = self._added[n]
        unused = self.bytes[n] if self.owner[n] is n and n not in self._counts else 0
        uses = tuple(self._number[x] for x in self.of[n] if x in self._number)
        step = MemoryStep(added + self._work[n].inside, added - self._sent_parts.get(n, 0) - unused, uses)
        if isinstance(n.target, OpOverload):
            return step
        if n.target is ops.accumulate:
            step.fills, step.own = self.sizes.bucket_of(n), bool(n.kwargs.get("own"))
            step.put = 0 if step.fills else self.sizes.bytes_of(n.args[1])  # type: ignore[arg-type]
        elif n.target is ops.scatter:
            step.fills = step.sums = str(n.args[2])
        elif n.target is ops.launch:
            step.sums = str(n.args[1])
        step.gradients = bool(step.fills or step.put or step.sums)
        return step

    def alive(self, order: Iterable[fx.Node]) -> list[tuple[int, int]]:
        """Return each line's live bytes: (a step's first backward, later ones without earlier gradients)."""
        memory = Memory(self)
        return [memory.run(self.steps[n]) for n in order]

    def peak(self, order: Iterable[fx.Node]) -> tuple[int, int]:
        """Return the peaks of `alive`."""
        first, later = zip(*self.alive(order), strict=True)
        return max(first), max(later)


@cache
def shares_operand(target: Any) -> bool:
    """Return whether a call's result is in the memory of its first operand."""
    return is_view(target) or target in _SAME or target in WAITS


class Memory:
    """The bytes that are alive at some point of an order, and those of complete gradients.

    A bucket that is summed in every backward has a buffer, from its first gradient (ops.accumulate) or its last
    (ops.scatter) on, until the next one's sum has begun (shardc.runtime.zero.buckets).
    """

    def __init__(self, uses: Uses) -> None:
        self._left, self._freed, self._buckets = uses.left.copy(), uses.freed, uses.sizes.buckets
        self.live, self.gradients = uses.at_first, 0
        self._begun: set[str] = set()
        self._summed = 0  # bytes of the buffer whose sum is under way

    def would_be(self, step: MemoryStep) -> tuple[int, int]:
        """Return the bytes alive while a line runs: see `Uses.alive`."""
        later = self.live + step.most
        if not step.gradients:
            return later + self.gradients, later
        buffer, gradients = self._filled(step)
        later += buffer
        return later + self.gradients + (0 if step.own else gradients), later

    def _filled(self, step: MemoryStep) -> tuple[int, int]:
        """Return a line's new bytes of gradients: (in a buffer that every backward sums, until the step ends)."""
        if not step.fills or step.fills in self._begun:
            return 0, step.put
        b = self._buckets[step.fills]
        return (b.whole, b.part) if b.each else (0, b.whole)

    def _gradients(self, step: MemoryStep) -> int:
        """Count the gradients that a line completes, and return the extra bytes in their buffers."""
        live = 0
        if step.fills or step.put:
            live, gradients = self._filled(step)
            self.gradients += gradients
            if not step.sums:
                self._begun.add(step.fills)
        if step.sums:
            b = self._buckets[step.sums]
            live -= self._summed
            self._summed = b.whole if b.each else 0
        return live

    def run(self, step: MemoryStep) -> tuple[int, int]:
        """Run a line and return the bytes alive meanwhile; afterwards, free what it used last."""
        live = self.live
        if step.gradients:
            most = self.would_be(step)
            live += step.left + self._gradients(step)
        else:
            later = live + step.most
            most = later + self.gradients, later
            live += step.left
        left, freed = self._left, self._freed
        for x in step.uses:
            left[x] -= 1
            if not left[x]:
                live -= freed[x]
        self.live = live
        return most
