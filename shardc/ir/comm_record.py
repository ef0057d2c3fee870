"""Define the record of one collective, written by the rank that runs it or by its dry run."""

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
