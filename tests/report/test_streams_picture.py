"""The picture of a step's streams: what a rank computes and waits for adds up, and every collective is drawn."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import shardc
from shardc.report import streams_picture

WIDTH = 4096


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.down(nn.functional.gelu(self.up(x)))).square().mean()


def cost(**more: Any) -> Any:
    with torch.device("meta"):
        model, batch = Model(), {"x": torch.empty(2048, WIDTH)}
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}, **more}
    return shardc.compile(model, batch, spec, prove=False).cost("h100-80g")


def test_every_collective_is_drawn_once() -> None:
    priced = cost()
    (streams,) = priced.streams()
    computing = sum(end - begin for _, begin, end in streams.computing)
    assert streams.now == pytest.approx(computing + streams.waited + streams.idle)
    drawn = ElementTree.fromstring(streams_picture.svg(priced))
    rects = [r for r in drawn.iter() if r.get("class") == "collective"]
    assert {next(iter(r)).text for r in rects} == {streams_picture._about(s) for s in streams.spans}
    scale = (streams_picture.WIDTH - streams_picture._LEFT - streams_picture._RIGHT) / streams.now
    waited = sum(float(r.get("width", 0)) for r in rects if r.get("fill") == streams_picture._WAITED)
    assert waited == pytest.approx(streams.waited * scale, abs=0.3 * len(rects))
    assert {"dp", "tp"} <= {t.text for t in drawn.iter() if t.text}


def test_stages_of_a_pipeline_stand_below_each_other() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), (torch.ones(4, 8),)
    spec = {"shardc": 1, "mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}}
    priced = shardc.compile(model, batch, spec, loss=lambda out, _: out.square().mean(), prove=False).cost()
    drawn = ElementTree.fromstring(streams_picture.svg(priced))
    texts = [t.text for t in drawn.iter() if t.text]
    assert texts.count("compute") == 2
    assert texts.count("rank 0, of stage 0") == texts.count("rank 1, of stage 1") == 1
