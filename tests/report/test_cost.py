"""`shardc inspect --memory`: the table, the picture and JSON of what a step holds."""

from __future__ import annotations

import functools
import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace

import torch

import shardc
from shardc.cost import Cost, RankCost
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
    assert re.match(r"pp=1: the peak is at backward of [\w.]+ \(__init__\.py:\d+\), microbatch \d, stage 1$", lines[-2])
    assert re.match(
        r"a step of .*, AdamW, without the norm of gradients, waits for collectives over pp.* .s$", lines[-1]
    )


def test_what_does_not_fit_is_said() -> None:
    small = replace(found(), device=found().device.model_copy(update={"memory": 2.0**20}))
    assert ": does not fit" in cost_report.table(small)
    assert " of 1.0 MiB, does not fit" in cost_report.svg(small)


def test_the_picture_has_every_rank_action_and_kind() -> None:
    """In words; with the device's capacity, and colours as attributes, which every renderer knows."""
    toy = found().device.model_copy(update={"name": "toy", "memory": 2 * 2.0**20})
    root = ET.fromstring(cost_report.svg(replace(found(), device=toy)))
    words = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("toy has 2.0 MiB") == 2 * len(found().ranks)  # on an edge of its own, which no line crosses
    assert any((w or "").startswith("ops of one step, in the order") for w in words)
    assert all(
        x.get("fill") for tag in ("rect", "path", "text") for x in root.iter(f"{{http://www.w3.org/2000/svg}}{tag}")
    )
    titles = [t.text or "" for t in root.iter("{http://www.w3.org/2000/svg}title")]
    assert any(t.startswith("forward of microbatch 0, stage 0: ") for t in titles)
    assert any(t.startswith("backward of microbatch 3, stage 1: ") for t in titles)
    assert any("backward of" in t for t in titles)
    assert {"parameters", "activations"} <= set(titles)


def test_json_is_what_the_table_shows() -> None:
    made = json.loads(json.dumps(cost_report.to_json(found())))
    assert made["axis"] == "pp"
    assert [sum(r["kinds"].values()) for r in made["ranks"]] == [r["peak"] for r in made["ranks"]]
    for r in made["ranks"]:
        assert max(sum(p["live"].values()) for p in r["curve"]) == r["peak"]
    assert made["peak"] == max(r["peak"] for r in made["ranks"])


def test_ranks_that_are_equal_share_a_panel() -> None:
    many = replace(found(), ranks=tuple(replace(found().ranks[0], at=at) for at in range(5)))
    texts = ET.fromstring(cost_report.svg(many)).iter("{http://www.w3.org/2000/svg}text")
    words = ["".join(t.itertext()) for t in texts]
    assert all(w.startswith("pp=0-4: ") for w in words if w.startswith("pp="))
    assert len([w for w in words if w.startswith("pp=")]) == 1


def test_many_ranks_are_small_panels() -> None:
    def rank(at: int) -> RankCost:
        one = found().ranks[0]
        return replace(one, at=at, memory=replace(one.memory, kinds={**one.memory.kinds, "inputs": at}))

    svg = ET.fromstring(cost_report.svg(replace(found(), ranks=tuple(map(rank, range(64))))))
    assert float(svg.attrib["width"]) == cost_report.WIDTH
    assert float(svg.attrib["height"]) < 1200
