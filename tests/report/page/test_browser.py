"""The page in a real browser: what lights what, keys, search, both themes, a narrow screen. Skipped where there is no
Chromium.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardc.report import page
from shardc.report.page.data import data
from tests.report.page.browser import Browser, chromium
from tests.report.page.test_page import cost, hostile, line_of, program, shown

pytestmark = pytest.mark.skipif(not chromium(), reason="no Chromium is installed: the page is tested as text only")
CONTRAST = (Path(__file__).parent / "contrast.js").read_text()
PANELS = ("overview", "graph", "timeline", "memory", "comm", "proof", "text")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "page.html"
    path.write_text(page.html(program(), cost(), program().prove()), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def started() -> Iterator[Browser]:
    with Browser() as browser:
        yield browser


@pytest.fixture
def browser(started: Browser) -> Iterator[Browser]:
    """Afterwards nothing may have gone wrong, and nothing may have been asked of a network."""
    started.problems.clear()
    yield started
    assert started.problems == []


def message(cause: str) -> int:
    return next(i for i, m in enumerate(shown()["messages"]) if cause in m["cause"])


LIT = "[...document.querySelectorAll('.lit')].map(e => e.dataset.x)"


def test_the_first_screen_says_what_the_program_is(browser: Browser, file: Path) -> None:
    browser.open(file)
    text = browser.run("document.body.innerText")
    for fact in ("GPT", "dp=2 × pp=2 × tp=2", "8 ranks", "2 stages over pp", "a step", "on h100-80g", "peak", "proven"):
        assert fact in text
    assert browser.run("document.getElementById('facts').getBoundingClientRect().bottom < innerHeight / 3")
    assert browser.run("[...document.querySelectorAll('#tabs [role=tab]')].filter(e => e.offsetParent).length") == len(
        PANELS
    )


@pytest.mark.parametrize("dark", [False, True])
def test_every_panel_is_drawn_and_legible(browser: Browser, file: Path, dark: bool) -> None:
    """Text has the contrast of WCAG 2 AA, 4.5 to 1, in both themes and every panel."""
    browser.open(file, dark=dark)
    for panel in PANELS:
        browser.run(f"show('{panel}')")
        assert (
            browser.run(
                "document.getElementById('panel').textContent.length + document.querySelectorAll('#panel svg *').length"
            )
            > 60
        )
        low = browser.run(CONTRAST)
        assert low == [], (panel, low[:5])


def test_a_line_lights_what_it_caused_and_the_other_way_round(browser: Browser, file: Path) -> None:
    browser.open(file, hash_="#graph/after%3Ah.0")
    line, sent = line_of(".proj"), message("'h.*.proj'")
    browser.move(f"#lines [data-x='l{line}']")
    lit = browser.run(LIT)
    assert {f"l{line}", f"m{sent}"} <= set(lit)
    assert f"m{message(chr(39) + 'h.*.out' + chr(39))}" not in lit
    assert browser.run("document.querySelectorAll('#panel .wire.lit').length") >= 2
    browser.move(f"#panel .box[data-x='m{sent}']")
    lit = set(browser.run(LIT))
    assert f"l{line}" in lit
    assert not {x for x in lit if x and x[0] == "l"} - {f"l{line}"}
    browser.move("h1")
    assert browser.run(LIT) == []


def test_a_click_tells_the_cause(browser: Browser, file: Path) -> None:
    browser.open(file, hash_="#graph/after%3Ah.0")
    sent = message("'h.*.out'")
    browser.click(f"#panel .box[data-x='m{sent}']")
    text = browser.run("document.getElementById('details').innerText")
    m = shown()["messages"][sent]
    op = next(op for op in shown()["after"] if op.get("message") == sent)
    for fact in (
        "all_reduce over tp",
        m["cause"],
        f"line {line_of('.out')}",
        m["before"],
        op["type"],
        op["line"],
        "6 equal layers",
    ):
        assert fact in text
    assert browser.run(f"document.querySelector('#lines [data-x=l{line_of('.out')}]').classList.contains('lit')")
    assert browser.run("location.hash").endswith(f"/m{sent}")
    browser.run("history.back()")
    browser.wait("document.getElementById('details').innerText.startsWith('Nothing is selected')")
    browser.open(file, hash_=f"#comm//m{sent}")  # a link to it
    assert "all_reduce over tp" in browser.run("document.getElementById('details').innerText")


def test_a_link_into_the_text_shows_its_line_from_the_begin(browser: Browser, file: Path) -> None:
    browser.open(file, hash_=f"#text//m{message(chr(39) + 'h.*.out' + chr(39))}")
    assert browser.run("document.activeElement.textContent").lstrip().startswith("linear_")
    assert browser.run("document.getElementById('text').scrollLeft") == 0
    assert browser.run("document.getElementById('text').scrollTop") > 0


def test_every_collective_is_reached_in_every_panel(browser: Browser, file: Path) -> None:
    """From its row, its box, its place in the text and its bars in the timeline, a click tells the cause of each."""
    browser.open(file)
    for i, m in enumerate(shown()["messages"]):
        timed = any(w["seconds"] is not None for w in m["ways"])
        for panel in ["comm", "graph", "text", *(["timeline"] if timed else [])]:
            if panel == "graph" and "buckets" in m:
                continue
            browser.run(f"pick(null); openModule(D.messages[{i}].home); show('{panel}')")
            browser.run("D.timeline.rows.forEach((_, i) => view.open.add(i)); redraw()")
            there = (
                f"document.querySelector('#panel [data-x=m{i}]') || document.querySelector('#panel [data-with~=m{i}]')"
            )
            assert browser.run(f"Boolean({there})"), (m["name"], panel)
            browser.run(f"({there}).dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
            assert browser.run("state.picked") is not None
        browser.run(f"pick('m{i}')")
        assert m["cause"] in browser.run("document.getElementById('details').innerText")


def test_keys_and_search(browser: Browser, file: Path) -> None:
    browser.open(file)
    for i, panel in enumerate(PANELS, 1):
        browser.key(str(i))
        assert browser.run("state.tab") == panel
        assert browser.run("document.querySelector('#tabs [aria-selected=true]').dataset.tab") == panel
    browser.key("/")
    browser.type("h.4.out")  # a layer that stands under an equal one
    assert browser.run("document.querySelector('#found li').innerText").startswith("h.4.out")
    browser.key("Enter")
    assert browser.run("[state.tab, state.module]") == ["graph", "h.0.out"]
    browser.key("u")
    assert browser.run("state.module") == "h.0"
    browser.key("/")
    browser.type("all_reduce 'h.*.proj'")
    browser.key("Enter")
    assert browser.run("state.picked") == f"m{message(chr(39) + 'h.*.proj')}"
    browser.key("Escape")
    assert browser.run("state.picked") is None
    browser.run("document.querySelector('#panel .box').focus()")
    before = browser.run("document.activeElement.getAttribute('aria-label')")
    browser.key("ArrowDown")
    assert browser.run("document.activeElement.getAttribute('aria-label')") != before
    browser.key("Enter")
    assert browser.run("state.picked")
    browser.key("?")
    assert browser.run("document.getElementById('keys').open")
    browser.key("Escape")
    browser.run("document.getElementById('keys').close()")
    dark = "getComputedStyle(document.body).backgroundColor"
    light = browser.run(dark)
    browser.key("d")
    assert browser.run(dark) != light
    browser.run("focusRow('')")
    browser.key("ArrowDown")
    assert browser.run("document.activeElement.dataset.path") not in ("", None)


@pytest.mark.parametrize("words", ["h.4.out", "h 4 out", "4 out", "H.4.OUT"])
def test_a_layer_that_is_not_shown_is_found_by_any_part_of_its_name(browser: Browser, file: Path, words: str) -> None:
    browser.open(file)
    browser.key("/")
    browser.type(words)
    assert browser.run("document.querySelector('#found li').innerText").startswith("h.4.out\n")
    assert browser.run("equalModules('nowhere.4').length + equalModules('99').length + equalModules('h.0').length") == 0
    browser.key("Enter")
    assert browser.run("document.querySelector('#details h2').innerText") == "h.{0-5}.out"  # what its figures are of


def test_figures_of_equal_layers_say_how_many_they_are_of(browser: Browser, file: Path) -> None:
    browser.open(file, hash_="#graph/after%3Ah.0")
    sent = message("'h.*.out'")
    times = sum(w["count"] for w in shown()["messages"][sent]["ways"])
    assert f"for all {times}" in browser.run(f"document.querySelector('#panel .box[data-x=m{sent}]').textContent")
    browser.run(f"pick('m{sent}')")
    assert f"for all {times}\n" in browser.run("document.getElementById('details').innerText")
    browser.run("show('overview')")
    assert f"h.{{0-5}}.out · {times} a step" in browser.run("document.getElementById('panel').innerText")


def test_the_fullest_stage_and_why_stand_first_in_memory(browser: Browser, file: Path) -> None:
    browser.open(file, hash_="#memory")
    table = "document.querySelector('#panel table')"
    heads = browser.run(f"[...{table}.querySelectorAll('th')].map(e => e.innerText)")
    assert heads[:3] == ["rank", "peak", "microbatches kept"]
    kept = browser.run(f"[...{table}.querySelectorAll('tbody tr')].map(e => e.children[2].innerText)")
    assert kept == [str(r["live"]) for r in shown()["timeline"]["rows"]]
    assert browser.run(f"{table}.getBoundingClientRect().bottom < innerHeight")
    cut = "getBoundingClientRect().right <= document.getElementById('panel').getBoundingClientRect().right"
    assert browser.run(f"[...{table}.rows[0].cells].slice(0, 6).every(e => e.{cut})")


def test_the_bubble_is_named_where_it_is_drawn(browser: Browser, file: Path) -> None:
    browser.open(file, hash_="#timeline")
    tip = "document.querySelector('#times .track').dataset.tip"
    bubble = shown()["timeline"]["rows"][0]["bubble"]
    assert f"pp=0 waits for other stages {100 * bubble:.1f} %" in browser.run(tip)
    assert "bubble" in browser.run("document.querySelector('#panel .legend').innerText")


def test_keys_reach_the_spec_and_the_modules(browser: Browser, file: Path) -> None:
    browser.open(file)
    browser.key("s")
    first = browser.run("document.activeElement.dataset.x")
    browser.key("ArrowDown")
    second = browser.run("document.activeElement.dataset.x")
    assert first == f"l{line_of('mesh')}"
    assert second == f"l{line_of('qkv')}"
    assert second in browser.run(LIT)
    browser.key("Enter")
    assert browser.run("state.picked") == second
    browser.key("m")
    assert browser.run("document.activeElement.dataset.path") == ""


def test_a_narrow_screen_has_all_panels_and_no_sideways_scroll(browser: Browser, file: Path) -> None:
    browser.open(file, width=390)
    for panel in (*PANELS, "tree", "spec"):
        browser.run(f"show('{panel}')")
        assert browser.run("document.documentElement.scrollWidth") <= 390, panel
    browser.click(f"#panel [data-x='l{line_of('.proj')}']")
    assert browser.run("document.getElementById('details').getBoundingClientRect().bottom <= innerHeight + 1")
    browser.run("show('overview')")
    assert browser.run("document.querySelectorAll('#lines .line').length") > 5


def test_hostile_names_run_nothing(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    file.write_text(page.of_data(hostile()), encoding="utf-8")
    browser.open(file)
    browser.run("window.hacked = () => { window.was = true }; 1")
    for panel in PANELS:
        browser.run(f"show('{panel}')")
    browser.run("[...D.messages, ...D.weights].forEach((t) => pick(t.x)); found('x').length")
    assert browser.run("document.querySelectorAll('img, iframe, [onerror]').length") == 0
    assert browser.run("window.was") is None
    assert "<img src=x onerror=hacked()>" in browser.run("document.title")


def test_a_program_without_a_proof_has_all_panels(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "unproven.html"
    file.write_text(page.of_data(data(program(), cost(), None)), encoding="utf-8")
    browser.open(file)
    for panel in PANELS:
        browser.run(f"show('{panel}')")
        assert len(browser.run("document.getElementById('panel').textContent")) > 20
    for key in ("before", "after", "both"):
        browser.run(f"state.graph = '{key}'; show('graph')")
        assert browser.run("document.querySelectorAll('#panel .box').length") > 3


def test_a_trace_is_laid_over_the_timeline(browser: Browser, file: Path) -> None:
    browser.open(file, hash_="#timeline")
    event = {"ph": "X", "cat": "user_annotation", "name": "linear_3 h.0.fc", "ts": 5.0, "dur": 700.0}
    trace = json.dumps(json.dumps({"traceEvents": [event], "distributedInfo": {"rank": 0}}))
    browser.run(f"layRun(new File([{trace}], 'trace-step2-rank0.json')).then(() => 1)")
    assert browser.run("[...document.querySelectorAll('#times text')].map(e => e.textContent)").count("measured") == 1
    assert "trace-step2-rank0.json: 700 µs" in browser.run("document.getElementById('panel').innerText")
    browser.run("layRun(new File(['{'], 'no.json')).then(() => 1)")
    assert "no.json is no trace: " in browser.run("document.getElementById('panel').innerText")
