"""The pages of the documentation, and what is in them: links, headings, code blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCE = re.compile(r"^( *)```(\S*)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"(?<!\!)\[[^\]\n]*\]\(([^)\s]+)\)|!\[[^\]\n]*\]\(([^)\s]+)\)")
_COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A code block. notes: the HTML comments right before it. line: of its fence."""

    page: Page
    line: int
    language: str
    text: str
    notes: tuple[str, ...]

    @property
    def skipped(self) -> bool:
        """It says why it is not run. An empty reason does not count."""
        return any(note.startswith("not run: ") and len(note) > len("not run: ") for note in self.notes)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Page:
    file: Path

    @cached_property
    def text(self) -> str:
        return self.file.read_text(encoding="utf-8")

    @cached_property
    def prose(self) -> str:
        """The text without code blocks, code in a line, and comments."""
        return re.sub(r"`[^`\n]*`", "", _COMMENT.sub("", _FENCE.sub("", self.text)))

    @cached_property
    def anchors(self) -> set[str]:
        """As GitHub and MyST make them of headings: lower case, without punctuation, dashes for spaces."""
        found: set[str] = set()
        for heading in re.findall(r"^#{1,6} +(.*?) *$", _FENCE.sub("", self.text), re.MULTILINE):
            slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
            more, n = slug, 0
            while more in found:
                n += 1
                more = f"{slug}-{n}"
            found.add(more)
        return found

    def links(self) -> Iterator[str]:
        for link in _LINK.finditer(_COMMENT.sub("", _FENCE.sub("", self.text))):
            yield link[1] or link[2]

    def blocks(self, *languages: str) -> list[Block]:
        found = []
        for fence in _FENCE.finditer(self.text):
            if fence[2] not in languages:
                continue
            before = re.search(r"((?:<!--(?:(?!-->).)*-->\s*)+)\Z", self.text[: fence.start()], re.DOTALL)
            notes = tuple(note.strip() for note in _COMMENT.findall(before[1])) if before else ()
            found.append(Block(self, self.text.count("\n", 0, fence.start()) + 1, fence[2], fence[3], notes))
        return found

    def __str__(self) -> str:
        return str(self.file.relative_to(ROOT))


README = Page(ROOT / "README.md")
CONTRIBUTING = Page(ROOT / "CONTRIBUTING.md")
PAGES = [
    *(README, CONTRIBUTING, Page(ROOT / "AGENTS.md"), Page(ROOT / "CHANGELOG.md")),
    *(Page(f) for f in sorted((ROOT / "docs").rglob("*.md"))),
]
