"""The square of attention's scores: who computes which part."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import torch
from torch import Tensor, nn

import shardc
from docs.drawing import Drawing
from shardc.report import attention_scores
from shardc.report.page.data import data

LENGTH = 64
SPACE = "{http://www.w3.org/2000/svg}"


class Attends(nn.Module):
    """Two layers: one sees all before, one a window of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.layers = nn.ModuleList(nn.Linear(16, 48) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x, n = self.table(ids), ids.shape[1]
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        for layer, mask in zip(self.layers, (j <= i, (j <= i) & (j > i - 8)), strict=True):
            q, k, v = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in layer(x).chunk(3, -1))
            y = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask)
            x = x + y.transpose(1, 2).flatten(2)
        return torch.nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def program(**sequence: Any) -> shardc.Program:
    spec = {"shardc": 1, "mesh": {"cp": 4}, "sequence": {"axis": "cp", **sequence}}
    return shardc.compile(Attends(), {"ids": torch.zeros(2, LENGTH, dtype=torch.long)}, spec, prove=False)


def test_a_zigzag_is_drawn_and_counted() -> None:
    full, window = attention_scores.to_json(program(method="ring", balance="zigzag"))
    assert full["method"] == window["method"] == "ring"
    assert full["over"] == {"cp": 4}
    assert sum(full["pairs"]) == LENGTH * (LENGTH + 1) // 2
    assert len(set(full["pairs"])) == 1
    assert sum(window["pairs"]) == 8 * LENGTH - 28
    assert window["bytes"] < full["bytes"]
    cells = full["cells"]
    assert [row[0] for row in cells] == [r for r in (0, 1, 2, 3, 3, 2, 1, 0) for _ in range(4)]
    assert all((cells[i][j] is None) == (j > i) for i in range(32) for j in range(32))
    assert all((window["cells"][i][j] is None) == (j > i or j < i - 4) for i in range(32) for j in range(32))


def test_one_stretch_a_rank_is_uneven() -> None:
    pairs = attention_scores.to_json(program(method="gather", balance="none"))[0]["pairs"]
    assert max(pairs) * len(pairs) > 1.6 * sum(pairs)
    assert "times the mean" in attention_scores.text(program(method="gather", balance="none"))


def test_heads_that_are_split() -> None:
    full, _ = attention_scores.to_json(program(method="ulysses"))
    assert (full["heads_a_rank"], full["heads"]) == (1, 4)
    assert full["over"] == {}
    assert full["method"] == "heads split"
    assert "1 of 4 heads" in attention_scores.text(program(method="ulysses"))


def test_the_picture_has_every_cell() -> None:
    """The page draws the squares as text prints them: a cell for each mark, in the colour of its rank."""
    one = program(method="ring")
    page = Drawing(data(one, None, None))
    full = page.run("D.scores[0]")
    root = ElementTree.fromstring(page.picture("scoresPicture(D.scores[0])", "scores"))
    drawn = [(r.get("style"), t.text) for r in root.iter(f"{SPACE}rect") for t in r.iter(f"{SPACE}title")]
    cells = [rank for row in full["cells"] for rank in row]
    assert [title for _, title in drawn] == ["nothing is computed" if r is None else f"rank {r}" for r in cells]
    assert len({fill for fill, _ in drawn}) == 5  # four ranks, and nobody
    assert {f"rank {r}: {p}" for r, p in enumerate(full["pairs"])} <= {t.text for t in root.iter(f"{SPACE}text")}
    assert page.markup("overviewPanel()").count("Attention of ") == 2


def test_the_page_adds_up_what_a_ring_sends() -> None:
    """Its parts are unequal: a window needs fewer keys of some ranks than of others."""
    one = program(method="ring", balance="zigzag")
    found = data(one, one.cost(), None)
    sent = sum(way["bytes"] for m in found["messages"] for way in m["ways"])
    assert sent == sum(row["bytes"] for row in found["rows"] if row["messages"])
    sizes = {s.record.bytes for s in one.cost().streams[0].spans if s.record.kind == "all_to_all"}
    assert len(sizes) > 1


def test_a_program_without_attention_says_so() -> None:
    spec = {"shardc": 1, "mesh": {"dp": 2}}
    plain = shardc.compile(nn.Linear(4, 4), torch.zeros(4, 4), spec, loss=lambda y, _: y.sum(), prove=False)
    assert "no attention" in attention_scores.text(plain)
    assert attention_scores.to_json(plain) == []
