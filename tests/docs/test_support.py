"""docs/reference/support.md has the cells that its features make: the refused ones, and a sample of the others."""

from __future__ import annotations

from docs import support

WRITTEN = support.written(support.PAGE.read_text())
SAMPLE = 60  # every so many of the cells that work


def test_the_table_has_every_pair() -> None:
    assert list(WRITTEN) == [(a.name, b.name) for a, b in support.pairs()], "run `make support`"


def test_cells_are_what_compile_and_the_proof_say() -> None:
    """One cell for each reason, and a sample of those that work."""
    pairs = {(a.name, b.name): (a, b) for a, b in support.pairs()}
    refused = {reason: name for name, reason in WRITTEN.items() if reason}
    works = [name for name, reason in WRITTEN.items() if not reason]
    for name in (*refused.values(), *works[::SAMPLE]):
        assert support.cell(*pairs[name]) == WRITTEN[name], f"{name}: run `make support`"
