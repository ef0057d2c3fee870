"""What a dry run of one rank found out, as plain values: storages made and freed, ops, collectives, by part of a step.

Nothing here runs a program: what is known already is priced from these alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardc.ir.units import plural
from shardc.machine.work import Part, Storage
from shardc.runtime.schedule.actions import PAIRS, Action

#: Kinds in the order in which they are shown.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",
    "buffers",
    "inputs",
    "activations",
    "gathered",
    "communication",
    "temporaries",
)
#: The kind of what is kept in the machine's memory or in files: not a part of the device's memory.
HOST = "host"
#: Kinds of what stays from step to step.
RESIDENT = ("parameters", "optimizer", "buffers")


@dataclass(frozen=True)
class DryRun:
    """What one rank does in a step; of a forward-only program that is a forward. at: its coordinate on the pipeline's
    axis. resident: what is stored before a step.

    before: what comes before the first action (taking the batch). actions: those that were run, with what each does.
    after: sums and norms. update: the optimizer's step. optimizer: the name of its class.
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


def parts(r: DryRun, actions: tuple[Action, ...]) -> Iterator[tuple[Action | None, Part]]:
    """The parts of a whole step. An action that was not run does what the same action of another microbatch did."""
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
    """Equal for actions that differ in their microbatches alone."""
    return a.kind, a.stage, a.peer, a.other[0]
