"""The page of a plan: what it says, and its plot, drawn by the page's own scripts in V8."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from docs.drawing import Drawing
from shardc.ir.units import size
from shardc.plan import Plan
from shardc.plan.page import data
from shardc.plan.table import recompute, zero
from tests.plan.test_plan import blocks, priced_as

SCRIPTS = ("draw.js", "plan.js")
SPACE = "{http://www.w3.org/2000/svg}"


@functools.cache
def drawn(*settings: tuple[float, float]) -> Drawing:
    """The page of a plan with candidates of so many seconds, that need so many times what a device has."""
    one = blocks().candidates[0]
    rows = tuple(priced_as(one, seconds, share * one.target.usable) for seconds, share in settings)
    return Drawing(data(replace(blocks(), candidates=rows)), SCRIPTS)


def dots(picture: ElementTree.Element) -> list[tuple[float, float]]:
    circles = [c for c in picture.iter(f"{SPACE}circle") if c.get("r") == "9"]
    return sorted((float(c.attrib["cx"]), float(c.attrib["cy"])) for c in circles)


def test_the_picture_has_the_limit_and_every_row() -> None:
    page = drawn((2.0, 0.5), (3.0, 0.4), (1.0, 40))
    root = ElementTree.fromstring(page.picture("planPicture()", "plan"))
    texts = ["".join(t.itertext()) for t in root.iter(f"{SPACE}text")]
    assert any("usable of" in t for t in texts)
    assert {"1", "2", "3"} <= set(texts)
    assert any(t.endswith(", does not fit") for t in texts)
    kinds = [c.get("class") for c in root.iter(f"{SPACE}circle") if c.get("r") == "9"]
    assert kinds == ["dot not", "dot fits", "dot best"]
    assert all(0 <= y <= float(root.attrib["height"]) for _, y in dots(root))
    (front,) = (x.attrib["d"] for x in root.iter(f"{SPACE}path"))
    assert front.count("L") == 1  # of the two that fit, one is faster and one needs less


def test_a_picture_of_what_needs_little_tells_the_choices_apart() -> None:
    root = ElementTree.fromstring(drawn((2.0, 0.001), (3.0, 0.0005)).picture("planPicture()", "plan"))
    assert any(str(t.text).endswith(", far above") for t in root.iter(f"{SPACE}text"))
    (_, first), (_, second) = dots(root)
    assert second - first > 100


def test_a_picture_of_numbers_far_apart_has_logarithmic_axes() -> None:
    root = ElementTree.fromstring(drawn((0.02, 0.9), (0.2, 0.09), (2.0, 0.009)).picture("planPicture()", "plan"))
    assert sum(str(t.text).endswith("(logarithmic)") for t in root.iter(f"{SPACE}text")) == 2
    (x1, y1), (x2, y2), (x3, y3) = dots(root)
    assert x2 - x1 == pytest.approx(x3 - x2)  # ten times as much is as far everywhere
    assert y2 - y1 == pytest.approx(y3 - y2)


def texts_of(plan: Plan) -> list[tuple[str, str]]:
    """What the page of a plan says: (element, text)."""
    sections = Drawing(data(plan), SCRIPTS).markup("planSections()")
    root = ElementTree.fromstring(f"<body>{sections}</body>")
    return [(x.tag, "".join(x.itertext()).strip()) for x in root.iter()]


def test_a_page_has_the_spec_the_plot_and_why() -> None:
    one = blocks()
    helps = ({"what": "twice the <links>", "step_seconds": 0.5, "ratio": 0.5, "fits": True},)
    page = texts_of(replace(one, what_if=helps, refused={"tp=3": "8 heads & 3 ranks"}))
    said = [text for _, text in page]
    titles = [text for tag, text in page if tag == "h2"]
    assert titles[:3] == ["The best spec", "Time and memory", "Specs that were priced"]
    assert {"What would help", "Answers", "Not possible"} < set(titles)
    rows = one.candidates
    assert f"{sum(c.fits for c in rows)} of {len(rows)} priced choices fit" in said
    assert one.spec().strip() in said
    assert "twice the <links>" in said
    assert "8 heads & 3 ranks" in said
    for c in rows:
        assert {recompute(c), zero(c), size(c.needs)} <= set(said)
    last = next(text for tag, text in reversed(page) if tag == "td" and text.endswith("%") and "." not in text)
    assert last == "100%"  # the waterfall ends at the step


def test_a_page_says_that_nothing_fits() -> None:
    one = blocks()
    much = tuple(priced_as(c, c.step_seconds, 2 * one.target.usable) for c in one.candidates[:2])
    page = texts_of(replace(one, candidates=much))
    assert ("h2", "Nothing fits") in page
    assert any("nothing fits into" in text for _, text in page)


def test_a_page_is_one_file_that_asks_for_nothing() -> None:
    text = blocks().html()
    data_and_scripts = re.findall(r"<script.*?</script>", text, re.DOTALL)
    assert len(data_and_scripts) == 1 + text.count("'sha256-") == 4
    assert not re.search(r"\b(src|href)=", re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL))
