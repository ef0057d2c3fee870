"""Links lead somewhere, and nothing is named that is not there."""

from __future__ import annotations

import re

import pytest

from tests.docs.pages import PAGES, README, ROOT, Page
from tests.docs.test_words import by_hand

_TOP = "(?:shardc|passes|runtime|specs|tests|docs|examples)"
_PATH = re.compile(rf"(?<![\w/.{{<*-])({_TOP}/[\w./-]+\.(?:py|md|yaml|json|svg|toml)|{_TOP}(?:/\w+)+/?)(?![\w*{{<-])")


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links(page: Page) -> None:
    by_file = {p.file.resolve(): p for p in PAGES}
    wrong = []
    for link in page.links():
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        file = (page.file.parent / path).resolve() if path else page.file.resolve()
        if not file.exists() or (anchor and (file not in by_file or anchor not in by_file[file].anchors)):
            wrong.append(link)
    assert not wrong


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_paths_that_are_named_exist(page: Page) -> None:
    named = {
        p.rstrip(".")
        for p in re.findall(_PATH, re.sub(r"^```python.*?^```", "", page.text, flags=re.DOTALL | re.MULTILINE))
    }
    added = {"passes/square.py", "runtime/schedule/serial.py"}  # by the reader
    new = added if page.file.name == "CONTRIBUTING.md" else set()
    missing = {p for p in named - new if not (ROOT / p).exists() and not (ROOT / f"{p}.py").exists()}
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_stand_alone(page: Page) -> None:
    assert not re.findall(r"\b(?:DESIGN|SPEC\.md|HOUSE|API\.md|STYLE\.md)\b", page.text)


def test_every_page_is_in_the_contents() -> None:
    contents = (ROOT / "docs" / "index.md").read_text()
    listed = set(re.findall(r"[\w/-]+", " ".join(re.findall(r"```\{toctree\}\n(.*?)```", contents, re.DOTALL))))
    there = {str(p.file.relative_to(ROOT / "docs"))[:-3] for p in PAGES if p.file.is_relative_to(ROOT / "docs")}
    assert there - listed == {"index"}


def test_readme_is_short() -> None:
    lines = README.text.splitlines()
    assert len(lines) <= 120
    assert max(len(re.sub(r"\]\([^)]*\)", "]", line)) for line in lines) <= 160  # as one reads it
    assert "`make test`" in README.text  # what CI runs
    assert "make test" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", [p for p in PAGES if "/explanation/" in str(p)], ids=str)
def test_explanations_are_short(page: Page) -> None:
    """Words by hand, without code; decisions are read in one breath."""
    assert len(re.findall(r"\S*\w\S*", by_hand(page))) <= 1500
    assert max(map(len, page.text.splitlines())) <= 200
    assert [d for d in re.findall(r"^\*\*\d+\. .*", page.text, re.MULTILINE) if len(d.split()) > 40] == []


def test_decisions_have_one_number_each() -> None:
    page = (ROOT / "docs/explanation/decisions.md").read_text()
    numbers = [int(n) for n in re.findall(r"^\*\*(\d+)\. ", page, re.MULTILINE)]
    assert sorted(numbers) == list(range(1, len(numbers) + 1))
