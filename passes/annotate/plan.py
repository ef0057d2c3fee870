"""What a plan comes to: which parameters it splits, on one axis. Made by `plans` (the
model's own) or by `structure`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardc.ir.placement import Shard


@dataclass(frozen=True)
class Plan:
    """splits: parameter's name -> (how, the cause to cite). notes: what a user should know. Parameters not named stay
    whole.
    """

    axis: str
    splits: dict[str, tuple[Shard, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
