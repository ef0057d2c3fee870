"""Words that readers stumble over: the pages have none, and the product has fewer with each change.

The readers are engineers whose first language is not English. `python -m tests.docs.test_words` prints the lines.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import pytest

from tests.docs.pages import PAGES, ROOT, Page

#: What to avoid -> what to write.
WORDS = {
    r"told|tells?|telling|foretold|foretells?": "warn, log, say, predict",
    r"asked for|asks for|ask for": "request, need",
    r"stands?(?!-)|stood": "is, is written, is stored",
    r"lies|lay|lain": "is, is stored, is laid out",
    r"of one's own": "custom",
    r"by itself|by themselves": "separately, alone",
    r"alike": "equal, identical, consistent",
    r"hands? out": "return",
    r"anew": "again",
}
_AVOID = re.compile(rf"\b(?:{'|'.join(WORDS)})\b")
#: Lines that have such a word: of the product, and of pages that are still to be rewritten. The numbers only fall: a
#: commit that removes some sets them to what there is.
PRODUCT_LINES, LATER_LINES = 155, 66
LATER = ("README.md", "docs/how-to")
PRODUCT = ("shardc", "passes", "runtime", "specs")


def by_hand(page: Page) -> str:
    """A page without generated blocks and code."""
    own = re.sub(r"<!-- (\w+):begin -->.*?<!-- \1:end -->", "", page.text, flags=re.DOTALL)
    own = re.sub(r"^( *)```.*?^\1```", "", own, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"`[^`\n]*`|<!--.*?-->", "", own, flags=re.DOTALL)


def product_lines() -> Iterator[str]:
    for name in subprocess.run(
        ["git", "ls-files", *(f"{top}/*.py" for top in PRODUCT)], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split():
        if (ROOT / name).exists():
            for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
                if _AVOID.search(line):
                    yield f"{name}:{number}: {line.strip()}"


def page_lines(page: Page) -> list[str]:
    return [f"{page}: {line}" for line in by_hand(page).splitlines() if _AVOID.search(line)]


@pytest.mark.parametrize("page", [p for p in PAGES if not str(p).startswith(LATER)], ids=str)
def test_pages_have_none(page: Page) -> None:
    assert page_lines(page) == [], WORDS


def test_other_pages_have_fewer() -> None:
    lines = [line for page in PAGES if str(page).startswith(LATER) for line in page_lines(page)]
    assert len(lines) <= LATER_LINES, f"write it otherwise ({WORDS}):\n" + "\n".join(lines)


def test_the_product_has_fewer() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository: the files of the product cannot be listed")
    lines = list(product_lines())
    assert len(lines) <= PRODUCT_LINES, f"write it otherwise ({WORDS}):\n" + "\n".join(lines[-10:])


if __name__ == "__main__":
    print(*product_lines(), *(line for page in PAGES for line in page_lines(page)), sep="\n")
