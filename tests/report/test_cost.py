"""`shardc inspect --memory`: the table and JSON of what a step holds."""

from __future__ import annotations

import functools
import json
import pickle
import re
from dataclasses import replace

import torch
from torch.cuda import _memory_viz

import shardc
from shardc.cost import Cost
from shardc.report import cost as cost_report
from shardc.report.memory_snapshot import snapshot
from tests import zoo


@functools.cache
def found() -> Cost:
    model, batch = zoo.gpt(torch.float32, dropout=0.1)
    pipeline = {"axis": "pp", "schedule": "1f1b"}
    spec = {"shardc": 1, "mesh": {"pp": 2}, "batch": {"microbatches": 4}, "pipeline": pipeline}
    return shardc.compile(model, batch, spec, prove=False).cost()


def test_the_table_adds_up() -> None:
    lines = cost_report.table(found()).splitlines()
    assert lines[1].split() == ["pp=0", "pp=1"]
    rows = {line.split()[0]: line for line in lines[3:]}
    assert {"parameters", "optimizer", "gradients", "activations", "communication", "temporaries", "peak"} <= set(rows)
    assert re.match(r"pp=1: the peak is at backward of [\w.]+ \(__init__\.py:\d+\), microbatch \d, stage 1$", lines[-2])
    assert re.match(
        r"a step of .*, AdamW, without the norm of gradients, waits for collectives over pp.* .s$", lines[-1]
    )


def test_what_does_not_fit_is_said() -> None:
    small = replace(found(), device=found().device.model_copy(update={"memory": 2.0**20}))
    assert ": does not fit" in cost_report.table(small)


def test_json_is_what_the_table_shows() -> None:
    made = json.loads(json.dumps(cost_report.to_json(found())))
    assert made["axis"] == "pp"
    assert [sum(r["kinds"].values()) for r in made["ranks"]] == [r["peak"] for r in made["ranks"]]
    for r in made["ranks"]:
        assert max(sum(p["live"].values()) for p in r["curve"]) == r["peak"]
    assert made["peak"] == max(r["peak"] for r in made["ranks"])


def test_a_snapshot_is_what_torch_s_viewer_reads() -> None:
    """Its traces reach the peak of each rank, and nothing is freed that was not allocated."""
    made = pickle.loads(pickle.dumps(snapshot(found())))
    for r, events in zip(found().ranks, made["device_traces"], strict=True):
        live, most, addresses = 0, 0, set[int]()
        for e in events:
            assert e["action"] == "alloc" or e["addr"] in addresses
            addresses.add(e["addr"])
            live += {"alloc": e["size"], "free_requested": 0, "free_completed": -e["size"]}[e["action"]]
            most = max(most, live)
        assert most == r.memory.peak
        assert 0 < live <= sum(r.memory.resident.values())  # what an update replaces is allocated by the next step
        named = [[f["name"] for f in e["frames"]] for e in events]
        assert any(name[0].startswith("activations [") and name[-1].startswith("forward of ") for name in named)
        assert any(f["filename"].endswith(".py") and f["line"] > 0 for e in events for f in e["frames"])
        text = _memory_viz.trace({"segments": [], "device_traces": [events]})  # it fails for what it does not know
        assert text.count("MEM[") == sum(e["action"] == "alloc" for e in events)
