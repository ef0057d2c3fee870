"""The page as a file, and its data: it holds what the program and its cost say, once for equal layers, and no HTML."""

from __future__ import annotations

import collections
import functools
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.cost import Cost
from shardc.ir.repeats import repeats
from shardc.report import page
from shardc.report.comm import comm_rows
from shardc.report.page.data import data
from shardc.report.page.spec_lines import SpecLines
from shardc.verify.static import Gap, Proof
from tests import example_text, zoo
from tests.equality import OF_BUCKETS

SPEC = """\
shardc: 1
mesh: {dp: 2, pp: 2, tp: 2}
shard:
  "h.*.qkv": column
  "h.*.proj": row
  "h.*.fc": column
  "h.*.out": row
pipeline: {axis: pp, stages: 2}
batch: {microbatches: 2}
data: {zero: 1}
checkpoint:
  - {match: "h.*", recompute: cheap}
"""
LAYERS = 6


def line_of(text: str) -> int:
    return next(i for i, line in enumerate(SPEC.splitlines(), 1) if text in line)


@functools.cache
def program() -> shardc.Program:
    spec = shardc.Spec.parse(SPEC, "spec.yaml")
    return shardc.compile(*zoo.gpt(layers=LAYERS), spec, prove=False)


@functools.cache
def cost() -> Cost:
    return program().cost("h100-80g")


@functools.cache
def shown() -> dict[str, Any]:
    """Through JSON, as the page reads it."""
    found: dict[str, Any] = json.loads(json.dumps(data(program(), cost(), program().prove())))
    return found


class Elements(HTMLParser):
    """opened: the elements, with their attributes; texts: of scripts, by type. Checks that all are closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[tuple[str, dict[str, str | None]]] = []
        self.inside: list[str] = []
        self.texts: dict[str, str] = {}
        self.feed(text)
        assert not self.inside

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.opened.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.inside.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.inside.pop() == tag

    def handle_data(self, text: str) -> None:
        if self.inside and self.inside[-1] == "script":
            kind = self.opened[-1][1].get("type") or "script"
            self.texts[kind] = self.texts.get(kind, "") + text


# --- the file


def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    text = page.html(program(), cost(), program().prove())
    parsed = Elements(text)
    tags = {tag for tag, _ in parsed.opened}
    assert not tags & {"link", "img", "iframe", "object", "embed", "base", "form"}
    assert not any(name in ("src", "srcset", "style") or name.startswith("on") for _, a in parsed.opened for name in a)
    assert [a["href"] for _, a in parsed.opened if "href" in a] == ["#panel"]
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = next(a["content"] for _, a in parsed.opened if a.get("http-equiv") == "Content-Security-Policy") or ""
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; ")
    assert policy.count("'sha256-") == len(page.SCRIPTS)
    assert "'unsafe-eval'" not in policy
    assert json.loads(parsed.texts["application/json"]) == shown() | {
        "proof": json.loads(parsed.texts["application/json"])["proof"]
    }
    assert "Copyright (c) 2012-2014 Chris Pettitt" in text  # dagre's notice goes with it


def test_scripts_make_no_html_from_text() -> None:
    """Names become text. dagre, which makes no elements at all, is not ours to read."""
    made = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc|DOMParser|XMLHttp"
    for name in page.SCRIPTS:
        script = files("shardc.report.page").joinpath(name).read_text()
        assert "</script" not in script
        assert not re.search(made, script) or name == "dagre.min.js", name
    assert "document" not in files("shardc.report.page").joinpath("dagre.min.js").read_text()


HOSTILE = "</script><img src=x onerror=hacked()><!--<script>\u2028\"'&"


def hostile() -> dict[str, Any]:
    """A program whose every name is an attack."""
    p = example_text.program()
    p = replace(
        p, notes=(f"note: {HOSTILE}",), meta={**p.meta, "model": HOSTILE, "spec": {"file": HOSTILE, "text": HOSTILE}}
    )
    p = replace(p, params=tuple(replace(x, fqn=f"{HOSTILE}.{x.fqn}") for x in p.params))
    for graph in (p.graph, *(s.graph for s in p.stages)):
        for n in graph.nodes:
            if "source" in n.meta:
                n.meta["source"] = replace(n.meta["source"], module=HOSTILE, code=HOSTILE, line=HOSTILE)
            if "collective" in n.meta:
                n.meta["collective"] = replace(n.meta["collective"], cause=HOSTILE)
    gap = Gap(HOSTILE, HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    return data(p, None, Proof((gap,), 1, 1, 1, 0.0))


def test_hostile_names_stay_data() -> None:
    found = hostile()
    parsed = Elements(page.of_data(found))
    assert [tag for tag, _ in parsed.opened].count("script") == 1 + len(page.SCRIPTS)
    assert "img" not in {tag for tag, _ in parsed.opened}
    assert json.loads(parsed.texts["application/json"]) == json.loads(json.dumps(found))
    assert "hacked" not in page.of_data(found).replace(parsed.texts["application/json"], "").replace(
        "onerror=hacked()", "", 1
    )


# --- the data


def test_equal_layers_are_shown_once() -> None:
    """The six layers are of one kind, in both stages."""
    layers = repeats(program())
    assert layers.first["h.1"] == "h.0"
    assert layers.shown("h.1.qkv.weight") == "h.0.qkv.weight"
    assert sum(map(len, layers.same_layers.values())) == LAYERS
    found = shown()
    assert sum(w.get("count", 1) for w in found["weights"]) == len(program().params)
    whole = json.loads(json.dumps(data(program(), cost(), None, full=True)))
    assert all(w["count"] == 1 for w in whole["weights"])
    assert not any(op["op"] == "layers" for op in whole["after"])
    assert len(whole["after"]) > 2 * len(found["after"])
    tree = [m for m in found["modules"] if m.get("layers")]
    assert {m["layers"] for m in tree} == {f"0-{LAYERS - 1}"}


def test_layers_that_differ_are_not_equal() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.h = nn.ModuleList([nn.Linear(8, 8, bias=i != 2) for i in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.h:
                x = layer(x).relu()
            return x.sum()

    p = shardc.compile(Model(), {"x": torch.ones(4, 8)}, {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    layers = repeats(p)
    assert dict(layers.first) == {"h.1": "h.0", "h.3": "h.0"}


def totals(rows: Any) -> dict[tuple[str, str, str], tuple[int, int]]:
    found: collections.defaultdict[tuple[str, str, str], list[int]] = collections.defaultdict(lambda: [0, 0])
    for r in rows:
        sums = found[r["axes"], r["direction"], r["kind"]]
        sums[:] = sums[0] + r["count"], sums[1] + r["bytes"]
    return {k: (a, b) for k, (a, b) in found.items()}


def counted(cost: Cost) -> list[dict[str, Any]]:
    """The rows of `inspect --comm`, without the loss, which is no message."""
    return [r.to_json() for r in comm_rows(cost) if r.cause != "the loss, to every rank"]


@pytest.mark.parametrize("of_buckets", [False, True])
def test_messages_are_all_that_a_step_sends(of_buckets: bool) -> None:
    """With equal layers counted as often as there are, every collective of `inspect --comm` belongs to a message."""
    of_page = totals(w for m in shown()["messages"] if ("buckets" in m) == of_buckets for w in m["ways"])
    assert of_page == totals(r for r in counted(cost()) if (r["cause"] in OF_BUCKETS) == of_buckets)


@pytest.mark.parametrize("mesh", [{"dp": 4}, {"dp": 2, "pp": 2}])
def test_gathers_of_zero_3_are_their_buckets(mesh: dict[str, int]) -> None:
    """Each is counted once, by the page as by `inspect --comm`, and its op is drawn with the bucket's message."""
    more = {"pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}} if "pp" in mesh else {}
    p = shardc.compile(*zoo.gpt(), {"shardc": 1, "mesh": mesh, "data": {"zero": 3}, **more}, prove=False)
    found = json.loads(json.dumps(data(p, p.cost(), None)))
    assert totals(w for m in found["messages"] for w in m["ways"]) == totals(counted(p.cost()))
    gathers = [op for op in found["after"] if op["op"] == "gather_start"]
    assert gathers
    assert all("buckets" in found["messages"][op["message"]] for op in gathers)
    assert all(w["seconds"] is not None for m in found["messages"] for w in m["ways"] if w["kind"] != "send_recv")


def test_exposed_time_is_that_of_the_cost() -> None:
    found = shown()
    of_page = sum(w["exposed"] for m in found["messages"] for w in m["ways"] if w["exposed"] is not None)
    rest = sum(s.exposed for each in cost().streams for s in each.spans if s.record.tag == "loss")
    assert of_page + rest == pytest.approx(sum(sum(r.exposed.values()) for r in cost().ranks))
    assert all(
        w["exposed"] <= w["seconds"] + 1e-12 for m in found["messages"] for w in m["ways"] if w["seconds"] is not None
    )


def test_every_message_is_drawn_once_and_knows_its_line() -> None:
    found = shown()
    drawn = [op["message"] for op in found["after"] if "message" in op]
    assert sorted(drawn) == [i for i, m in enumerate(found["messages"]) if "buckets" not in m]
    for op in (*found["before"], *found["after"]):
        assert all(0 <= u < len(found["after"]) for u in op.get("uses", []))
    by_cause = {m["cause"]: m["lines"] for m in found["messages"]}
    assert by_cause[f"spec.yaml:{line_of('.proj')}:3 'h.*.proj': row"] == [line_of(".proj")]
    sent = next(m for m in found["messages"] if m["ways"][0]["kind"] == "send_recv")
    assert sent["lines"] == [line_of("pipeline")]
    bucket = next(m for m in found["messages"] if "buckets" in m)
    assert bucket["lines"] == [line_of("data:"), line_of("mesh")]
    assert all(m.get("lines") for m in found["messages"])


def test_weights_know_the_line_that_splits_them() -> None:
    of = {w["name"]: w for w in shown()["weights"]}
    assert of["h.0.qkv.weight"]["lines"] == [line_of("qkv")]
    assert of["h.0.qkv.weight"]["split"] == [["tp", 0]]
    assert "lines" not in of["h.0.ln_1.weight"]
    assert {tuple(r["lines"]) for r in shown()["regions"]} == {(line_of("match"),)}
    assert re.fullmatch(r"h\.0: keeps .* KiB of a microbatch, computes .* KiB again", shown()["regions"][0]["text"])
    assert {tuple(i["lines"]) for i in shown()["inputs"]} == {(line_of("mesh"),)}


def test_the_graph_goes_through_the_stages() -> None:
    """What a stage receives comes from what another one makes, or from the layers that are one box there."""
    ops = shown()["after"]
    received = [op for op in ops if op["op"] == "receive"]
    assert len(received) == sum(len(s.receives) for s in program().stages)
    for op in received:
        assert op["stage"] == 1
        assert {ops[u]["stage"] for u in op["uses"]} == {0}
    runs = [op for op in ops if op["op"] == "layers"]
    assert runs
    assert all(run["like"].startswith("h.") for run in runs)


def test_the_timeline_is_that_of_the_cost() -> None:
    found = shown()["timeline"]
    assert found["end"] == round(cost().step_seconds * 1e9)
    planned = cost().timeline
    assert planned is not None
    for row, slots in zip(found["rows"], planned.slots, strict=True):
        mine = [(s[0], s[1], s[2], s[3]) for s in row["slots"]]
        right = [(s.action.kind, s.action.microbatch, round(s.start * 1e9), round(s.end * 1e9)) for s in slots]
        for a, b in zip(mine, right, strict=True):
            assert a[:2] == b[:2]
            assert a[2:] == pytest.approx(b[2:], abs=2)
        for spans in row["streams"].values():
            assert all(
                0 <= begin <= end <= found["end"] and exposed <= end - begin for begin, end, exposed, *_ in spans
            )
        busy = sum(end - begin for _, begin, end in row["computing"])
        assert busy <= found["end"]
    assert any(s[3] >= 0 for row in found["rows"] for spans in row["streams"].values() for s in spans)


def test_the_memory_is_that_of_the_cost() -> None:
    found = shown()["memory"]
    assert found["limit"] == cost().device.memory
    assert sorted(at for p in found["panels"] for at in p["at"]) == [r.at for r in cost().ranks]
    for p in found["panels"]:
        m = cost().ranks[p["at"][0]].memory
        assert p["peak"] == sum(p["kinds"].values()) == m.peak
        assert max(map(sum, zip(*p["curve"].values(), strict=True))) == m.peak
        assert len(p["ops"]) == len(m.curve)


# --- the spec


def test_a_spec_of_python_is_shown_as_yaml_and_its_lines_are_found() -> None:
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"up": "column", "down": "row"}}
    p = shardc.compile(*zoo.mlp(), spec, prove=False)
    lines = SpecLines(p)
    assert lines.file == ""
    assert lines.lines == str(p.spec).splitlines()
    found = data(p, None, None)
    row = next(m for m in found["messages"] if "'down'" in m["cause"])
    assert [lines.lines[i - 1].strip() for i in row["lines"]] == ["down: row"]


def test_an_activation_s_line_knows_the_modules_that_it_names() -> None:
    """What it causes cites the weights' lines; without this, nothing would light up."""
    text = 'shardc: 1\nmesh: {tp: 2}\nshard: {use: structure}\nactivations:\n  "h.*": {1: tp}\n'
    p = shardc.compile(*zoo.gpt(), shardc.Spec.parse(text, "s.yaml"), prove=False)
    found = json.loads(json.dumps(data(p, None, None)))
    (entry,) = found["activations"]
    assert entry["lines"] == [5]
    assert entry["modules"] == [m["path"] for m in found["modules"] if m.get("path", "") in ("h.0", "h.1")]
    assert entry["text"] == f"output of {', '.join(entry['modules'])}: dim 1 over tp"


def test_settings_of_the_command_line_are_lines_of_their_own() -> None:
    spec = shardc.Spec.parse(
        "shardc: 1\nmesh: {dp: 2, tp: 2}\nshard: {use: structure}\n",
        "s.yaml",
        mesh={"dp": 4},
        overrides=["data.zero=1"],
    )
    p = shardc.compile(*zoo.mlp(), spec, prove=False)
    found = data(p, p.cost(), None)
    mesh, zero = (found["spec"]["lines"].index(text) + 1 for text in ("--mesh dp=4", "--set data.zero=1"))
    assert {mesh, zero} == {4, 5}
    assert next(m["lines"] for m in found["messages"] if "buckets" in m) == [zero, mesh]
    assert next(m["lines"] for m in found["messages"] if "batch dim 0" in m["cause"]) == [mesh]


def test_a_saved_program_shows_the_spec_as_it_was_written(tmp_path: Path) -> None:
    program().save(tmp_path / "out")
    loaded = shardc.load(tmp_path / "out")
    found = json.loads(json.dumps(data(loaded, loaded.cost("h100-80g"), None)))
    assert found["spec"]["lines"] == SPEC.splitlines()
    assert [m.get("lines") for m in found["messages"]] == [
        m.get("lines") for m in data(program(), cost(), None)["messages"]
    ]


def test_zero_3_gathers_are_messages_with_their_weights() -> None:
    p = shardc.compile(*zoo.gpt(), {"shardc": 1, "mesh": {"dp": 4}, "data": {"zero": 3}}, prove=False)
    found = data(p, p.cost(), p.prove())
    gathers = [i for i, op in enumerate(found["after"]) if op["op"] == "gather_start"]
    assert gathers
    users = [op for op in found["after"] if set(op.get("uses", ())) & set(gathers) and op["op"] != "layers"]
    assert users
    assert all(op.get("params") for op in users)
    assert {op["op"] for op in found["after"]}.isdisjoint({"gather_wait", "getitem", "wait", "updated"})


SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts": ("moe", {"mesh": {"ep": 2}, "shard": {"up": {0: "ep"}, "down": {0: "ep"}}}),
    "one device": ("mlp", {"mesh": {}}),
    "lowered": ("gpt", {"mesh": {"dp": 2}}),
    "sequence": ("gpt", {"mesh": {"dp": 2, "cp": 2}, "sequence": {"axis": "cp"}}),
}


@pytest.mark.parametrize("name", SPECS)
def test_every_kind_of_program_has_a_page(name: str) -> None:
    model, spec = SPECS[name]
    p = shardc.compile(*zoo.ALL[model](), {"shardc": 1, **spec}, prove=False)
    found = data(p, p.cost(), None)
    assert len([op for op in found["after"] if "message" in op]) <= len(found["messages"])
    rows = {r["cause"] for r in found["rows"]} - {
        "outputs beside the loss",
        "the loss, to every rank",
        "new values of buffers",
    }
    cited = {i for r in found["rows"] for i in r["messages"]}
    assert cited == set(range(len(found["messages"])))
    assert bool(rows) == bool(found["messages"])
    Elements(page.of_data(found))


def test_a_program_that_is_not_compiled_has_a_page() -> None:
    p = replace(program(), stages=(), buckets=(), regions=(), prologue=None, schedule=None, axis="")
    found = data(p, None, None)
    assert found["after"] == []
    assert found["messages"] == []
    assert len(found["before"]) == len(shown()["before"])
    assert p.html().startswith("<!doctype html>")
