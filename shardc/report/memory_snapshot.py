"""Write a step's memory as a snapshot for pytorch.org/memory_viz: allocations with op, part and line.

`shardc run --memory-snapshot STEP` records a GPU's allocator in the same form, so that the two can be compared.
"""

from __future__ import annotations

from typing import Any

from shardc.cost import Cost
from shardc.cost.caching_allocator import ROUND
from shardc.cost.peak_memory import allocations
from shardc.cost.recorded import parts
from shardc.machine.work import Storage
from shardc.report.cost import part_name


def snapshot(cost: Cost) -> dict[str, Any]:
    """Return the snapshot, to pickle. Each rank of `cost.ranks` is a device; no address is used twice."""
    traces = []
    for r in cost.dry_runs:
        step = [(part, part is r.after) for _, part in parts(r, cost.timeline.schedule.actions[r.at])]
        events, addresses, end = [], dict[int, int](), 0
        for sign, storage, number, part in allocations(r.resident, step):
            if sign > 0:
                addresses[number] = end
                end += -(-storage.nbytes // ROUND) * ROUND or ROUND
            frames = _frames(cost, storage, part)
            about = {"addr": addresses[number], "size": storage.nbytes, "stream": 0, "frames": frames}
            actions = ("alloc",) if sign > 0 else ("free_requested", "free_completed")
            events += [{"action": x, **about} for x in actions]
        traces.append(events)
    return {"segments": [], "device_traces": traces}


def _frames(cost: Cost, storage: Storage, part: str) -> list[dict[str, Any]]:
    """Return an allocation's kind, op, model line and part as a stack of frames for the viewer."""
    source = cost.sources.get(storage.op.removeprefix("backward of "))
    file, _, line = source.line.rpartition(":") if source is not None else ("", "", "")
    shape = ", ".join(map(str, storage.shape))
    names = [f"{storage.kind} [{shape}]", storage.op, source.module if source is not None else ""]
    names.append(part_name(part, cost) if part else "between steps")
    return [{"name": n, "filename": file, "line": int(line) if line.isdecimal() else 0} for n in names if n]
