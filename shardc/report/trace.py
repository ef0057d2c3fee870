"""Write a step as a trace in Chrome's format, for ui.perfetto.dev and chrome://tracing.

A process for each rank that differs; threads for its actions, its computation, and each communicator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardc.cost import Cost
from shardc.report.page import step


def trace(cost: Cost) -> dict[str, Any]:
    """Return the trace, JSON-able. Times are those of `shardc.report.page.step.timeline`, in microseconds."""
    rows = step.timeline(cost, lambda record: record.tag)["rows"]
    events = [event for row in rows for event in _of_rank(cost.program.axis, row)]
    about = {"device": cost.device.name, "step_seconds": cost.step_seconds, "premises": cost.premises}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _of_rank(axis: str, row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rank, threads = row["rank"], ["actions", "computing", *row["streams"]]

    def event(thread: str, name: str, begin: int, end: int, **args: Any) -> dict[str, Any]:
        place = {"pid": rank, "tid": threads.index(thread)}
        return {"ph": "X", "name": name, **place, "ts": begin / 1e3, "dur": (end - begin) / 1e3, "args": args}

    process = f"rank {rank}" + (f", {axis}={row['at']}" if axis else "")
    for name, about, tid in (("process_name", process, 0), *(("thread_name", t, i) for i, t in enumerate(threads))):
        yield {"ph": "M", "name": name, "pid": rank, "tid": tid, "args": {"name": about}}
    for kind, microbatch, begin, end, stage, *_ in row["slots"]:
        yield event("actions", f"{kind}{microbatch}", begin, end, stage=stage, microbatch=microbatch)
    for thread, spans in (("actions", row["tail"]), ("computing", row["computing"])):
        for name, begin, end in spans:
            yield event(thread, name, begin, end)
    for axes, spans in row["streams"].items():
        for begin, end, exposed, tag, direction, kind in spans:
            yield event(axes, kind, begin, end, of=tag, direction=direction, exposed_us=exposed / 1e3)
