"""Numbers for people, at the edges between units. (Their examples: test_docstrings.)"""

from __future__ import annotations

from shardc.ir import units


def test_edges() -> None:
    assert [units.size(n) for n in (0, 1023, 1024, 2**40, 3 * 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.0 TiB",
        "3072.0 TiB",
    ]
    assert [units.si(n, "FLOP") for n in (0, 99.96, 1e3, 312e12, 2e21)] == [
        "0 FLOP",
        "100 FLOP",
        "1 kFLOP",
        "312 TFLOP",
        "2000 EFLOP",
    ]
    assert units.per_second(0.0123, "samples") == "0.0123 samples/s"
