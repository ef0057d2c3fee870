"""Dry runs as JSON, so that a later question is priced from them: what a rank keeps, computes and sends does not depend
on the device. Equal ops, storages and collectives are written once.

    {"storages": [[bytes, kind, still], ...], "ops": [[flops, traffic, dtype, ...], ...], "records": [...],
     "actions": [[["F", 0, 0, -1], part], ...], ...}
    a part: {"changes": [3, -3, ...], "work": [0, 0, [record, key, after], [key], ...], "sent": [...]}

Only what prices need is kept: not the names of the ops that made something; pairs of two stages are not written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shardc.cost.recorded import DryRun
from shardc.ir.comm_record import CommRecord
from shardc.machine.work import Op, Part, Sent, Storage, Waited
from shardc.runtime.schedule import Action
from shardc.runtime.schedule.actions import PAIRS

#: What is written of an op.
_OP = ("flops", "traffic", "dtype", "matrices", "attention", "masked", "name", "again", "still", "grows", "aligned")


def encoded(run: DryRun) -> dict[str, Any]:
    """A dry run as plain values."""
    tables = _Tables()
    body = {
        "at": run.at,
        "rank": run.rank,
        "resident": [tables.storage(s) for s in run.resident],
        "before": tables.part(run.before),
        "actions": [[_plain(a), tables.part(p)] for a, p in run.actions],
        "after": tables.part(run.after),
        "update": tables.part(run.update),
    }
    return {**body, "storages": tables.storages, "ops": list(tables.ops), "records": list(tables.records)}


def decoded(value: Mapping[str, Any]) -> DryRun:
    """The dry run. Raises KeyError, IndexError, TypeError or ValueError for values that are none."""
    storages = [Storage(n, kind, still=still) for n, kind, still in value["storages"]]
    ops = [Op(**dict(zip(_OP, (*fields[:3], tuple(fields[3]), *fields[4:]), strict=True))) for fields in value["ops"]]
    records = [CommRecord(kind, tuple(axes), n, direction) for kind, axes, n, direction in value["records"]]

    def work(x: Any) -> Op | Sent | Waited:
        if isinstance(x, int):
            return ops[x]
        return Waited(x[0]) if len(x) == 1 else Sent(records[x[0]], x[1], x[2])

    def part(x: Mapping[str, Any]) -> Part:
        changes = [(1 if n > 0 else -1, storages[abs(n) - 1]) for n in x["changes"]]
        return Part(x["name"], changes, [work(w) for w in x["work"]], tuple(records[i] for i in x["sent"]))

    return DryRun(
        value["at"],
        value["rank"],
        tuple(storages[i - 1] for i in value["resident"]),
        part(value["before"]),
        tuple((Action(*a[:4], *map(tuple, a[4:])), part(p)) for a, p in value["actions"]),
        part(value["after"]),
        part(value["update"]),
    )


def _plain(a: Action) -> list[Any]:
    """An action has five fields where it is a pair."""
    return [*a[:4], *([list(a.other)] if a.kind in PAIRS else [])]


@dataclass
class _Tables:
    """What equal values were written as: numbers, storages from 1 on (a minus says that one was freed)."""

    storages: list[list[Any]] = field(default_factory=list)
    ops: dict[tuple[Any, ...], int] = field(default_factory=dict)
    records: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _of: dict[Storage, int] = field(default_factory=dict)

    def storage(self, s: Storage) -> int:
        if s not in self._of:
            self.storages.append([s.nbytes, s.kind, s.still])
            self._of[s] = len(self.storages)
        return self._of[s]

    def part(self, p: Part) -> dict[str, Any]:
        return {
            "name": p.name,
            "changes": [sign * self.storage(s) for sign, s in p.changes],
            "work": [self._work(w) for w in p.work],
            "sent": [self._record(r) for r in p.sent],
        }

    def _work(self, w: Op | Sent | Waited) -> Any:
        if isinstance(w, Op):
            return _numbered(self.ops, tuple(getattr(w, name) for name in _OP))
        return [w.key] if isinstance(w, Waited) else [self._record(w.record), w.key, w.after]

    def _record(self, r: CommRecord) -> int:
        return _numbered(self.records, (r.kind, r.axes, r.bytes, r.direction))


def _numbered(table: dict[tuple[Any, ...], int], value: tuple[Any, ...]) -> int:
    return table.setdefault(value, len(table))
