"""The generated blocks of the documentation are what the code gives today. `make table` writes them anew."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from docs import generate
from tests.docs.pages import README, ROOT


@pytest.mark.parametrize("page", generate.PAGES)
def test_blocks(page: str) -> None:
    written = (ROOT / "docs" / page).read_text()
    assert generate.fill(written, generate.PAGES[page]()) == written, "run `make table`, or python docs/generate.py"


def test_pictures() -> None:
    for name, svg in generate.pictures().items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == svg, "run python docs/generate.py"


def test_every_block_is_made_by_something() -> None:
    """What `generate` does not fill, bench.py does, or mutants.py, or `make support`."""
    others = {"bench", "mutants", "support"}
    for page in (ROOT / "docs").rglob("*.md"):
        named = set(re.findall(r"<!-- (\w+):begin -->", page.read_text())) - others
        assert not named or str(page.relative_to(ROOT / "docs")) in generate.PAGES, page.name


def test_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables are those of docs/measured/bench.json, and README's line sums them up."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "bench"))
    kept: dict[str, Any] = json.loads((ROOT / "docs" / "measured" / "bench.json").read_text())
    import bench

    monkeypatch.delitem(sys.modules, "bench", raising=False)
    page = (ROOT / "docs" / "measured/benchmarks.md").read_text()
    assert generate.fill(page, {"bench": "\n\n".join(bench.table(r) for r in kept.values() if r)}) == page
    assert generate.fill(README.text, {"bench": bench.summary(kept)}) == README.text


def test_a_page_without_the_block() -> None:
    with pytest.raises(KeyError, match="the page lacks <!-- a:begin -->"):
        generate.fill("text", {"a": "b"})


def test_fill() -> None:
    assert (
        generate.fill("x\n<!-- a:begin -->\nold\n<!-- a:end -->\ny\n", {"a": "new"})
        == "x\n<!-- a:begin -->\nnew\n<!-- a:end -->\ny\n"
    )


def test_the_example_is_readmes(tmp_path: Path) -> None:
    generate.example(tmp_path)
    assert (tmp_path / "model.py").read_text() in README.text
    assert (tmp_path / "spec.yaml").read_text() in README.text


def test_the_table_of_stages_is_the_pipeline() -> None:
    """docs/explanation/architecture.md, in its order; what comes before and after passes is there, too."""
    from shardc.passes import PIPELINE, with_features

    page = (ROOT / "docs" / "explanation/architecture.md").read_text()
    told = re.findall(r"^\| (\w+) \| `(\S*(?:passes|features)\S*)` \|", page, re.MULTILINE)
    assert [name for name, _ in told] == [entry.name for entry in with_features(PIPELINE)]
    assert [path for _, path in told if not (ROOT / path).exists()] == []
