"""Record one collective, as the rank that runs it or a dry run of the rank notes it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CommRecord:
    """One collective that ran on this rank.

    bytes: of the whole (reduced, gathered or exchanged) local tensor, as in shardc.ir.metadata.Collective.
    direction: "forward", "recompute" (of forward, in backward), "backward" or "update". tag: the program's node or
    bucket that it belongs to.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    direction: str
    tag: str = ""

    @property
    def axis(self) -> str:
        return "+".join(self.axes)
