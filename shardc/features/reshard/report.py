"""Compute which bytes would move between the ranks of two plans (shardc.features.reshard).

    dp=8 to dp=2 × tp=4, 8 ranks: weights, and 2 tensors for each trained one
    545.2 KiB move, of 780.0 KiB that ranks have then (70 %)
    a rank sends 50.1 KiB to 88.7 KiB and receives 50.6 KiB to 85.5 KiB, in 1 round of at most 64.0 MiB
    between ranks that differ on      bytes  pairs
    dp                            234.8 KiB      8
    tp                            155.2 KiB     18
    dp+tp                         155.2 KiB     18
    about 39 µs on h100-80g, were all to send as much as the busiest

Nothing is run. A rank receives only bytes that it lacks, each once. Not counted are the copies of whole parameters at
ZeRO 1 and 2, which are then gathered as after an update.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardc.cost.measured.device_file import device
from shardc.errors import ShardcError
from shardc.features.reshard.conventions import checked
from shardc.features.reshard.engines import sizes, sources, ties, wanted
from shardc.features.reshard.layout import Layout
from shardc.features.reshard.moves import BUCKET
from shardc.features.reshard.places import InPlan, Kept, Plan, Wanted, weights
from shardc.features.reshard.routes import messages
from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.ir.units import plural, seconds, size
from shardc.machine.collectives import collective_seconds
from shardc.machine.device import Device


@dataclass(frozen=True)
class Resharding:
    """The bytes that move between two plans, or to an engine whose ranks are other processes.

    old, new: the meshes, or the engine's layout; moments: tensors of the optimizer for each trained parameter. sent:
    bytes, [from][to]; held: bytes of what may move, on all ranks under the new plan; rounds: all_to_alls, one after the
    other.
    """

    old: Mesh
    new: Mesh | Layout
    moments: int
    sent: tuple[tuple[int, ...], ...] = field(repr=False)
    held: int
    rounds: int

    @property
    def bytes(self) -> int:
        """The bytes that move between all ranks, which is the minimum."""
        return sum(map(sum, self.sent))

    @property
    def sends(self) -> tuple[int, ...]:
        """Bytes that each rank sends."""
        return tuple(map(sum, self.sent))

    @property
    def receives(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*self.sent, strict=True)))

    @property
    def by_axes(self) -> dict[tuple[str, ...], tuple[int, int]]:
        """{axes of the new mesh on which two ranks differ: (bytes between them, how many such pairs)}."""
        nbytes, pairs = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
        if isinstance(self.new, Layout):
            return {}
        coords = [self.new.coords(r) for r in range(self.new.world)]
        for a, row in enumerate(self.sent):
            for b, n in enumerate(row):
                if n:
                    axes = tuple(x for x in self.new.names if coords[a][x] != coords[b][x])
                    nbytes[axes] += n
                    pairs[axes] += 1
        return {axes: (n, pairs[axes]) for axes, n in nbytes.most_common()}

    def seconds(self, on: str | Path | Device = "h100-80g") -> float:
        """Estimate seconds on a device, as if all ranks sent as much as the busiest, evenly to all others.

        Each byte is copied into a message, and out of it.
        """
        most, world = max(self.sends + self.receives), len(self.sent)
        if not most:
            return 0.0
        nbytes = most * world / (world - 1) / self.rounds  # of an all_to_all, with a rank's own part
        machine = device(on)
        sent = self.rounds * collective_seconds(machine, "all_to_all", nbytes, tuple(range(world)))
        return sent + 4 * most / machine.bandwidth  # two copies, each read and written

    def __str__(self) -> str:
        more = f", and {plural(self.moments, 'tensor')} for each trained one" if self.moments else ""
        head = f"{self.old} to {self.new}, {len(self.sent)} ranks: weights{more}"
        if isinstance(self.new, Layout):
            head = f"{self.old}, {self.old.world} ranks, to an engine of {plural(self.new.ranks, 'rank')}: weights"
        if not self.bytes:
            return f"{head}\nnothing moves: each rank has what it needs, {size(self.held)} of all ranks"
        share = 100 * self.bytes / self.held
        senders, receivers = self.sends, self.receives
        if isinstance(self.new, Layout):
            senders, receivers = senders[: self.old.world], receivers[self.old.world :]
        rows = [("+".join(axes), size(n), str(pairs)) for axes, (n, pairs) in self.by_axes.items()]
        rows = [("between ranks that differ on", "bytes", "pairs"), *rows] if rows else []
        wide = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        rounds = f"{plural(self.rounds, 'round')} of at most {size(2 * BUCKET)}"
        return "\n".join(
            [
                head,
                f"{size(self.bytes)} move, of {size(self.held)} that ranks have then ({share:.0f} %)",
                f"a rank sends {_range(senders)} and receives {_range(receivers)}, in {rounds}",
                *(f"{a:{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}" for a, b, c in rows),
                f"about {seconds(self.seconds())} on h100-80g, were all to send as much as the busiest",
            ]
        )


def resharding(old: Program, new: Program | Layout | str | Path, moments: int = 0) -> Resharding:
    """Return what moves: weights, and `moments` optimizer tensors for each trained parameter (AdamW: 2).

    new: a program of the same ranks, or the layout of an engine, or its file: then the weights move to other processes.
    Raises ShardcError if the programs have different numbers of ranks, or different models, and for a wrong layout.
    """
    if isinstance(moments, bool) or not isinstance(moments, int) or moments < 0:
        fault = f"moments must be a number of tensors, not {moments!r}"
        raise ShardcError(fault, where="moments", fix="AdamW has 2, SGD 0 or 1")
    if isinstance(new, Program):
        plans = Plan(old), Plan(new)
        moved = [(w, 1) for w in weights(*plans, all_buffers=False)]
        for name in (n for n, p in plans[1].params.items() if p.requires_grad and moments):
            ends = (Kept(("state", name), x.params[name].dtype, InPlan(x, name, cut=True)) for x in plans)
            moved.append((Wanted(name, *ends), moments))
        return Resharding(old.mesh, new.mesh, moments, *_sent(moved, new.mesh.world))
    layout = new if isinstance(new, Layout) else Layout.load(new)
    checked(layout, sizes(old), ties(old))
    if moments:
        raise ShardcError("an engine has no optimizer", where="moments", fix="leave it out")
    processes = [*[None] * old.mesh.world, *range(layout.ranks)]
    moved = [(w, 1) for w in wanted(layout, sources(Plan(old), layout), processes)]
    return Resharding(old.mesh, layout, 0, *_sent(moved, len(processes)))


def _sent(moved: Sequence[tuple[Wanted, int]], world: int) -> tuple[tuple[tuple[int, ...], ...], int, int]:
    """Return bytes [from][to], the bytes that ranks have then, and the rounds. moved: tensors, and how often each."""
    nbytes, sent = 0, [[0] * world for _ in range(world)]
    by_size = {w.wire.itemsize: [[0] * world for _ in range(2)] for w, _ in moved}
    known: dict[Any, list[tuple[int, int, int]]] = {}
    for turn, (w, times) in enumerate(moved):
        if w.places not in known:
            each = messages(*w.places, world, turn=turn)
            known[w.places] = [(m.source, m.target, m.elements) for m in each if m.source != m.target]
        for source, target, elements in known[w.places]:
            n = elements * w.wire.itemsize * times
            sent[source][target] += n
            for way, r in enumerate((source, target)):
                by_size[w.wire.itemsize][way][r] += n
        boxes = (x for r in range(world) for x in w.need.place.boxes(r))
        nbytes += sum(x.numel for x in boxes) * w.need.dtype.itemsize * times
    rounds = sum(math.ceil(max(map(max, ways)) / BUCKET) for ways in by_size.values())
    return tuple(map(tuple, sent)), nbytes, rounds


def _range(n: tuple[int, ...]) -> str:
    low, high = size(min(n)), size(max(n))
    return low if low == high else f"{low} to {high}"
