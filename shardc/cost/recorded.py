"""Define the results of one rank's dry run as plain values: storages, ops and collectives, by part.

Nothing here runs a program: a known dry run is priced from these values alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardc.ir.units import plural
from shardc.machine.work import Part, Storage
from shardc.runtime.schedule.actions import PAIRS, Action

#: Kinds in the order in which they are shown.
KINDS = (
    *("parameters", "optimizer", "gradients", "buffers", "inputs", "activations", "gathered", "communication"),
    "temporaries",
)
#: The kind of storages in the machine's memory or in files: not a part of the device's memory.
HOST = "host"
#: Kinds of storages that stay from step to step.
RESIDENT = ("parameters", "optimizer", "buffers")


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step (or in a forward-only program's forward). at: the pipeline coordinate.

    resident: what is stored before a step. before: work before the first action (taking the batch). actions: those that
    were run, with the work of each. after: sums and norms. update: the optimizer's step. optimizer: its class name.
    """

    at: int
    rank: int
    resident: tuple[Storage, ...]
    before: Part
    actions: tuple[tuple[Action, Part], ...]
    after: Part
    update: Part
    optimizer: str = ""

    def __repr__(self) -> str:
        return f"<DryRun of rank {self.rank}: {plural(len(self.actions), 'action')}>"

    @property
    def ran(self) -> list[tuple[Action | None, Part]]:
        """All parts that were run, in order."""
        return [(None, self.before), *self.actions, (None, self.after), (None, self.update)]


def parts(r: DryRun, actions: tuple[Action, ...]) -> Iterator[tuple[Action | None, Part]]:
    """Yield the parts of a whole step. An action that was not run has the part of another microbatch's."""
    ran = dict(r.actions)
    microbatches = sorted({a.microbatch for a, _ in r.actions if a.microbatch >= 0})
    middle = microbatches[len(microbatches) // 2]  # neither the first one, which makes gradients, nor the last
    by_kind: dict[tuple[str, int, int, int], Part] = {}
    for a, part in r.actions:
        of_pair = a.kind in PAIRS and microbatches[-1] not in (a.microbatch, a.other[1])
        if _kind(a) not in by_kind or a.microbatch == middle or of_pair:
            by_kind[_kind(a)] = part
    yield None, r.before
    for a in actions:
        yield a, ran[a] if a in ran else by_kind[_kind(a)]
    yield None, r.after
    yield None, r.update


def _kind(a: Action) -> tuple[str, int, int, int]:
    """Return a key that is equal for actions that differ only in their microbatches."""
    return a.kind, a.stage, a.peer, a.other[0]
