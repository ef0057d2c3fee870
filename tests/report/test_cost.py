"""`shardc inspect --memory`: the table, the picture and JSON of what a step holds."""

from __future__ import annotations

import functools
import json
import xml.etree.ElementTree as ET

import torch

import shardc
from shardc.cost import Cost
from shardc.report import cost as cost_report
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
    assert lines[-1].startswith("pp=1: the peak is at 1B")


def test_the_picture_has_every_rank_action_and_kind() -> None:
    root = ET.fromstring(cost_report.svg(found()))
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(t.startswith("0F0: ") for t in titles)
    assert any(t.startswith("1B3: ") for t in titles)
    assert any("backward of" in t for t in titles)
    assert {"parameters", "activations"} <= set(titles)


def test_json_is_what_the_table_shows() -> None:
    made = json.loads(json.dumps(cost_report.to_json(found())))
    assert made["axis"] == "pp"
    assert [sum(r["kinds"].values()) for r in made["ranks"]] == [r["peak"] for r in made["ranks"]]
    for r in made["ranks"]:
        assert max(sum(p["live"].values()) for p in r["curve"]) == r["peak"]
    assert made["peak"] == max(r["peak"] for r in made["ranks"])
