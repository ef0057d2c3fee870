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
#: Lines of the product that have such a word. The number only falls: who removes some sets it to what there is.
PRODUCT_LINES = 155
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


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_have_none(page: Page) -> None:
    assert page_lines(page) == [], WORDS


def test_the_product_has_fewer() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("no git repository: the files of the product cannot be listed")
    lines = list(product_lines())
    assert len(lines) <= PRODUCT_LINES, f"write it otherwise ({WORDS}):\n" + "\n".join(lines[-10:])


if __name__ == "__main__":
    print(*product_lines(), *(line for page in PAGES for line in page_lines(page)), sep="\n")
