"""Show memory over a step by kind, as a table and as JSON.

            each rank
parameters    1.8 MiB
activations   2.9 MiB
...
peak         10.1 MiB   at backward of h.3.fc (model.py:31), microbatch 1
"""

from __future__ import annotations

import re
from typing import Any

from shardc.cost import Cost, Memory
from shardc.cost.recorded import KINDS
from shardc.ir.graph import source_of
from shardc.ir.types import op_name
from shardc.ir.units import seconds, size
from shardc.report.aligned import aligned


def table(cost: Cost) -> str:
    """Format live bytes at the peak, by kind and rank, with its place and share of the device's memory.

    Also: offloaded bytes, if any, and the bytes that a GPU must have.
    """
    limit, axis = cost.device.memory, cost.program.axis
    memories = [r.memory for r in cost.ranks]
    names = [f"{axis}={r.at}" if axis else "each rank" for r in cost.ranks]
    used = {k for m in memories for p in (m.kinds, *(point.live for point in m.curve)) for k, n in p.items() if n}
    lines = [["", *names], *([kind, *(size(m[kind]) for m in memories)] for kind in KINDS if kind in used)]
    lines.append(["peak", *(size(m.peak) for m in memories)])
    shares = (f"{100 * m.peak / limit:.1f} %" + (": does not fit" if m.peak > limit else "") for m in memories)
    lines.append([f"of {size(limit)}", *shares])
    if any(m.host for m in memories):
        lines.append(["outside, at most", *(size(m.host) for m in memories)])
    head, *text = aligned(lines, "<>")
    if cost.device.kind == "gpu":  # what torch's allocator and libraries take
        verdict = "fits" if cost.fits else "does not fit"
        total = f"{size(cost.reserved)} and {size(cost.outside)} of {size(limit)}: {verdict}"
        text.append(f"torch's allocator reserves, and libraries take beside it, {total}")
    text += [f"{name}: the peak is at {peak_place(cost, m)}" for name, m in zip(names, memories, strict=True)]
    if waits := [(axes, s) for axes, s in cost.exposed.items() if s > 0]:
        exposed = ", ".join(f"{axes} {seconds(s)}" for axes, s in sorted(waits, key=lambda x: -x[1]))
        text.append(f"{cost.step_words}, waits for collectives over {exposed}")
    return "\n".join([f"live memory of one step on {cost.device.name}, at the peak", head, "-" * len(head), *text])


def peak_place(cost: Cost, m: Memory) -> str:
    """Return the part of a step and the op at the peak, with the module and the line of the model."""
    places = [part_name(m.part, cost), op_place(cost, m.op)]
    if all(x.startswith("backward") for x in places):
        places = [places[1], places[0].removeprefix("backward").removeprefix(" of ")]
    return ", ".join(filter(None, places))


_ACTION = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B|REDUCE)(\d*)")
_WORDS = {
    "F": "forward",
    "B": "backward",
    "I": "backward to inputs",
    "W": "backward to weights",
    "SEND_F": "send activations",
    "RECV_F": "receive activations",
    "SEND_B": "send gradients",
    "RECV_B": "receive gradients",
    "REDUCE": "sum of gradients",
}


def part_name(part: str, cost: Cost) -> str:
    """Return a part of a step in words: `forward`, or, of several, `forward of microbatch 2, stage 3`."""
    action = _ACTION.match(part)
    if action is None:
        return "optimizer" if part == "STEP" else part
    stage, kind, microbatch = action.groups()
    details = [f"microbatch {microbatch}"] if microbatch and cost.program.microbatches > 1 else []
    details += [f"stage {stage}"] if len(cost.program.stages) > 1 else []
    return _WORDS[kind] + (f" of {', '.join(details)}" if details else "")


def op_place(cost: Cost, op: str) -> str:
    """Return an op's module and the model's line: `backward of h.3.fc (model.py:31)`."""
    source = cost.sources.get(op.removeprefix("backward of "))
    if source is None or not source.line:
        return op
    place = f"{source.module or cost.program.meta.get('model', 'the model')} ({source.line})"
    return f"backward of {place}" if op.startswith("backward of ") else place


def to_json(cost: Cost) -> dict[str, Any]:
    """Return the cost as JSON-able values, in bytes and seconds.

    For each rank: live bytes by kind at the peak, its place, the curve; what forward keeps
    (`shardc.cost.kept_activations`); flops; bytes sent by axis and kind.
    """
    ranks = [
        {
            **{name: getattr(r, name) for name in ("at", "rank", "flops", "seconds", "exposed")},
            **{name: getattr(r.memory, name) for name in ("peak", "kinds", "part", "op", "resident", "host")},
            "at_peak": peak_place(cost, r.memory),
            "comm": {f"{a} {k}": n for (a, k), n in r.comm.items()},
            "kept": [
                {
                    "op": x.storage.op,
                    "module": source_of(x.node).module,
                    "bytes": x.storage.nbytes,
                    "type": x.type,
                    "own": x.own,
                    "wanted_by": {n.name: [op_name(again.target) for again in after] for n, after in x.wants.items()},
                }
                for x in kept
            ],
            "curve": [
                {"part": p.part, "op": p.op, "live": {k: n for k, n in p.live.items() if n}} for p in r.memory.curve
            ],
        }
        for r, kept in zip(cost.ranks, cost.kept(), strict=True)
    ]
    return {
        "device": cost.device.name,
        "fits": cost.fits,
        "step_seconds": cost.step_seconds,
        "bubble": cost.bubble,
        "axis": cost.program.axis,
        "peak": cost.memory.peak,
        "reserved": cost.reserved,
        "outside": cost.outside,
        "ranks": ranks,
    }
