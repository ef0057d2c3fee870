"""What the page draws, by its own scripts in V8: every panel of a real program, and all that can be selected in it."""

from __future__ import annotations

import functools
import math
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import shardc
from docs.drawing import Drawing
from shardc.ir import units
from shardc.report.page import DRAWING, read, step
from shardc.report.page.data import data
from tests import zoo
from tests.report.page.test_page import cost, hostile, program, shown

SPACE = "{http://www.w3.org/2000/svg}"
TP: dict[str, Any] = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
LAYER = "graphPicture(units(D.after, moduleAt.get('h.0'), 'after'), 'after')"


@functools.cache
def page() -> Drawing:
    return Drawing(shown())


def parsed(markup: str) -> ElementTree.Element:
    return ElementTree.fromstring(f"<body>{markup}</body>")


def texts(root: ElementTree.Element) -> list[str]:
    return ["".join(t.itertext()) for t in root.iter() if t.tag.endswith("text")]


def marked(root: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return [x for x in root.iter() if kind in x.get("class", "").split()]


def test_the_scripts_that_draw_need_no_document() -> None:
    for name in DRAWING[1:]:
        uses = re.sub(r"//.*|typeof document.*", "", read(name))
        assert not re.search(r"\bdocument\b|\bwindow\b|addEventListener|replaceChildren", uses), name


def test_the_overview_has_the_facts() -> None:
    facts = page().markup("factButtons()")
    for text in ("8 ranks", "2 stages over pp, 1f1b", "proven", f"of {page().run('size(F.limit)')}: fits"):
        assert text in facts
    text = page().markup("overviewPanel()")
    fullest = max(shown()["memory"]["panels"], key=lambda p: p["peak"])
    assert all(f"{kind} " in text for kind in fullest["kinds"])
    worst = max(shown()["messages"], key=lambda m: sum(w["exposed"] or 0 for w in m["ways"]))
    assert f"over {'+'.join(worst['axes'])}" in text
    assert all(r["text"] in text for r in shown()["regions"])


def test_everything_that_can_be_selected_tells_its_cause() -> None:
    for i, m in enumerate(shown()["messages"]):
        title, *_ = page().run(f"about('m{i}').slice(0, 1)")
        assert m.get("buckets") or "+".join(m["axes"]) in title
        about = parsed(page().markup(f"about('m{i}').slice(1)"))
        said = "".join(about.itertext())
        assert m["cause"] in said
        assert all(f"line {line}: " in said for line in m["lines"])
        for way in m["ways"]:
            assert f"{way['count']:,}" in said
    for kind, every in (("w", "weights"), ("r", "rows"), ("o", "after"), ("b", "before"), ("t", "modules")):
        for i, one in enumerate(shown()[every]):
            parsed(page().markup(f"about('{kind}{i}').slice(1)"))
            title = page().run(f"about('{kind}{i}')[0]")
            assert kind != "r" or (one["kind"] in title and one["axes"] in title)
    for line in range(1, len(shown()["spec"]["lines"]) + 1):
        assert page().run(f"about('l{line}')[0]") == f"line {line} of spec.yaml"


def test_a_layer_is_drawn_with_its_weights_and_collectives() -> None:
    """Megatron's: what is split, and the sums over tp, each with its bytes and whether a rank waits for it."""
    root = ElementTree.fromstring(page().picture(LAYER, "a layer"))
    said = texts(root)
    assert {"qkv: linear", "fc: linear", "proj: linear", "out: linear", "scaled_dot_product_attention"} <= set(said)
    assert "weight f64[192@tp, 64] ~dp" in said
    boxes = [x for x in marked(root, "box") if "message" in x.get("class", "")]
    of_layer = {op["message"] for op in shown()["after"] if "message" in op and op.get("module", "").startswith("h.0")}
    assert {x.get("data-x") for x in boxes} == {f"m{i}" for i in of_layer}
    assert all(re.search("exposed|hidden", " ".join(texts(x))) for x in boxes)
    wide = float(root.attrib["width"])
    for x in marked(root, "box"):
        (left, top) = map(float, re.findall(r"[-\d.]+", x.attrib["transform"]))
        shape = next(x.iter(f"{SPACE}rect"))
        assert left >= 0
        assert left + float(shape.attrib["width"]) <= wide
        assert top >= 0


def test_every_wire_goes_down_to_a_box_below() -> None:
    root = ElementTree.fromstring(page().picture(LAYER, "a layer"))
    box = re.split(" ", next(x.attrib["viewBox"] for x in root.iter(f"{SPACE}svg") if "x" in x.attrib))
    wires = marked(root, "wire")
    assert len(wires) >= len(marked(root, "box")) - 1
    for wire in wires:
        numbers = [float(n) for n in re.findall(r"-?[\d.]+", wire.attrib["d"])]
        assert numbers[-1] > numbers[1]
        assert float(box[0]) <= min(numbers[::2])
        assert max(numbers[::2]) <= float(box[0]) + float(box[2])


def test_the_graphs_of_one_device_and_of_one_rank() -> None:
    before = texts(parsed(page().markup("graphPicture(units(D.before, moduleAt.get('h.0'), 'before'), 'before')")))
    assert "weight f64[192, 64]" in before
    assert not any("all_reduce" in t for t in before)
    whole = texts(parsed(page().markup("graphPicture(units(D.after, D.modules[0], 'after'), 'after')")))
    assert any(t.startswith("layers 1-") for t in whole)
    assert "send_recv over pp" in whole


def test_a_picture_for_docs_has_types_instead_of_times() -> None:
    p = shardc.compile(*zoo.gpt(), TP, prove=False)
    typed = LAYER.replace("'after'), 'after')", "'after', true), 'after')")
    said = texts(ElementTree.fromstring(Drawing(data(p, p.cost(), None)).picture(typed, "a layer")))
    assert any(re.fullmatch(r"→ f64\[.*@dp, .*\] \+tp grad", t) for t in said)
    assert not any("exposed" in t or "hidden" in t for t in said)


def test_a_module_of_many_ops_is_drawn_as_parts() -> None:
    class Long(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(300):
                x = x.sin()
            return x.sum()

    p = shardc.compile(
        Long(), {"x": torch.ones(4, 2, requires_grad=True)}, {"shardc": 1, "mesh": {"dp": 1}}, prove=False
    )
    drawn = parsed(
        Drawing(data(p, p.cost(), None)).markup("graphPicture(units(D.after, D.modules[0], 'after'), 'after')")
    )
    assert len(marked(drawn, "box")) > 300  # all of one module: nothing is left out


def test_the_timeline_has_every_action_and_collective() -> None:
    page().run("(D.timeline.rows.forEach((_, i) => view.open.add(i)), 0)")
    root = ElementTree.fromstring(page().picture("timelinePicture(1100)", "a step"))
    said = texts(root)
    for row in shown()["timeline"]["rows"]:
        for kind, microbatch, *_ in row["slots"]:
            assert f"{kind}{microbatch}" in said
        assert set(row["streams"]) <= set(said)
    bars = marked(root, "bar-item")
    spans = [s for row in shown()["timeline"]["rows"] for each in row["streams"].values() for s in each]
    assert {x.get("data-x") for x in bars if x.get("data-x", "s") != "s"} == {f"m{s[3]}" for s in spans if s[3] >= 0}
    assert min(float(x.attrib["x"]) for x in bars) >= 118
    assert max(float(x.attrib["x"]) + float(x.attrib["width"]) for x in bars) <= 1100
    waited = sum(float(x.attrib["width"]) for x in bars if "fill:#b3402a" in x.get("style", ""))
    scale = (1100 - 118 - 16) / shown()["timeline"]["end"]
    assert waited == pytest.approx(sum(s[2] for s in spans) * scale, abs=0.6 * len(spans))


def test_a_run_is_laid_over_the_prediction(tmp_path: Path) -> None:
    """A trace of two microbatches, as torch.profiler writes it, with ranges as a run's nodes have them."""
    model, batch = zoo.mlp()
    p = shardc.compile(model, batch, {**TP, "batch": {"microbatches": 2}}, prove=False)
    drawn = Drawing(data(p, p.cost(), None))
    step_ = ["linear up", "linear_1_sum_start down", "linear_1_sum down", "step_context", "down_weight_grad down"]
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        for name in step_ * 2:
            with record_function(name):
                torch.ones(64, 64) @ torch.ones(64, 64)
            with record_function("gloo:all_reduce"):
                torch.ones(8).sum()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    first = drawn.run("D.after.find((o) => !o.input)")
    assert f"{first['name']} {first['module']}" == step_[0]
    run = drawn.run(f"(view.run = runOf({(tmp_path / 'trace.json').read_text()}, 'trace.json'))")
    assert [name for name, *_ in run["ranges"]] == step_ * 2
    assert [backward for *_, backward in run["ranges"]] == [False, False, False, True, True] * 2
    assert [name for name, *_ in run["sends"]] == ["gloo:all_reduce"] * 10
    assert run["ranges"][0][1] == 0
    assert run["end"] == max(end for _, _, end, *_ in [*run["ranges"], *run["sends"]])
    root = parsed(drawn.markup("timelinePicture(1100)"))
    assert {"measured", "… sends"} <= set(texts(root))
    bars = [x for x in marked(root, "bar-item") if x.attrib["data-tip"].startswith("measured: ")]
    assert len(bars) == 20
    assert max(float(x.attrib["x"]) + float(x.attrib["width"]) for x in marked(root, "bar-item")) <= 1100
    up = next(i for i, m in enumerate(drawn.run("D.modules.map((m) => m.path)")) if m == "up")
    assert {x.get("data-x") for x in bars if "linear up" in x.attrib["data-tip"]} == {f"t{up}"}
    assert "of the predicted step" in drawn.markup("timelinePanel()")


def test_a_file_that_is_no_trace_is_said() -> None:
    drawn = Drawing(shown())
    drawn.run("(view.run = runOf({ traceEvents: [] }, 'other.json'))")
    assert "other.json has no ranges of a step: write it with `shardc run --trace STEP`" in drawn.markup(
        "timelinePanel()"
    )
    assert "measured" not in texts(parsed(drawn.markup("timelinePicture(1100)")))


@pytest.mark.parametrize(("end", "most"), [(1.0, 5), (4_540_000, 8), (7e12, 3), (0.003, 6)])
@pytest.mark.parametrize("binary", [False, True])
def test_axes_are_round(end: float, most: int, binary: bool) -> None:
    found = page().run(f"ticks({end}, {most}, {str(binary).lower()})")
    step = found[1]
    digits = math.log2(step) if binary else float(f"{step:e}".partition("e")[0])
    assert digits == round(digits) if binary else digits in (1.0, 2.0, 5.0)
    assert found == pytest.approx([i * step for i in range(len(found))])
    assert 2 <= len(found) <= most + 1
    assert end - step < found[-1] <= end * (1 + 1e-9)


@pytest.mark.parametrize("n", [950, 170 + 2 / 3, 33088, 7.2e9])
def test_counts_are_those_of_the_terminal(n: float) -> None:
    assert page().run(f"count({n})") == units.count(n)


def test_memory_is_stacked_to_its_peak() -> None:
    for i, p in enumerate(shown()["memory"]["panels"]):
        drawn = f"memoryPicture(D.memory.panels[{i}], D.memory, Object.keys(KINDS), {p['peak']}, 1000)"
        root = parsed(page().markup(drawn))
        assert p["where"] in "".join(root.itertext())
        areas = list(root.iter("path"))
        assert len(areas) == len(p["curve"])
        (dot,) = root.iter("circle")
        highest = min(float(y) for x in areas for y in re.findall(r"V([\d.]+)", x.attrib["d"]))
        assert float(dot.attrib["cy"]) == pytest.approx(highest, abs=0.06)
        assert page().run(f"size({p['peak']})") in "".join(next(root.iter("h3")).itertext())


def test_a_device_that_is_too_small_is_told_everywhere() -> None:
    small = replace(cost(), device=cost().device.model_copy(update={"name": "toy", "memory": 2.0 * 2**20}))
    drawn = Drawing(data(program(), small, None))
    assert "toy has 2.0 MiB" in drawn.markup("memoryPanel(900)")
    assert "does not fit" in drawn.markup("factButtons()")
    assert drawn.markup("memoryPanel(900)").count('class="limit"') == len(drawn.run("D.memory.panels"))


def test_ranks_of_equal_memory_share_a_picture() -> None:
    many = replace(cost(), ranks=tuple(replace(cost().ranks[0], at=at) for at in range(5)))
    (panel,) = step.memory(many)["panels"]
    assert panel["at"] == [0, 1, 2, 3, 4]
    assert page().markup("memoryPanel(900)").count("<figure>") == len(shown()["memory"]["panels"])


def test_communication_and_the_text_have_every_row() -> None:
    rows = [x for x in parsed(page().markup("commPanel()")).iter("tr") if "data-x" in x.attrib]
    assert sorted(x.attrib["data-x"] for x in rows) == sorted(f"r{i}" for i in range(len(shown()["rows"])))
    for x in rows:
        one = shown()["rows"][int(x.attrib["data-x"][1:])]
        assert [t.text for t in x][:2] == [one["cause"], f"{one['kind']}, {one['direction']}"]
    lines = parsed(page().markup("textPanel()"))
    (text,) = (x for x in lines.iter("div") if x.get("id") == "text")
    assert ["".join(x.itertext()) for x in text] == [line or " " for line in shown()["text"]]
    sent = {x.get("data-x") for x in text if "message" in x.get("class", "")}
    assert sent == {f"m{i}" for i in range(len(shown()["messages"]))}


def test_the_spec_and_the_tree() -> None:
    lines = parsed(page().markup("specLines()"))
    assert ["".join(x.itertext()) for x in marked(lines, "what")] == shown()["spec"]["lines"]
    caused = {line for m in shown()["messages"] for line in m["lines"]}
    assert {f"l{line}" for line in caused} <= {x.get("data-x") for x in marked(lines, "cause")}
    rows = parsed(page().markup("treeRows()"))
    assert any("".join(x.itertext()).startswith("▾0-5×6") for x in marked(rows, "row"))


@pytest.mark.parametrize("panel", ["overview", "graph", "timeline", "memory", "comm", "proof", "text"])
def test_every_panel_of_a_program_without_a_proof_or_a_step(panel: str) -> None:
    for found in (data(program(), cost(), None), data(replace(program(), stages=(), buckets=()), None, None)):
        assert len("".join(parsed(Drawing(found).markup(f"DRAW.{panel}(900)")).itertext())) > 20


def test_hostile_names_are_text() -> None:
    drawn = Drawing(hostile())
    panels = " ".join(drawn.markup(f"DRAW.{panel}(900)") for panel in drawn.run("Object.keys(DRAW)"))
    tags = {x.tag for x in parsed(panels).iter()}
    assert not tags & {"img", "script"}
    assert "&lt;img src=x onerror=hacked()&gt;" in panels
