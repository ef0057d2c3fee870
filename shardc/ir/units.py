"""Format numbers for people, in the same units everywhere.

Bytes in KiB, MiB, GiB (powers of 1024), operations and rates with SI prefixes (TFLOP/s), counts as k, M, B (10^9), T.
"""

from __future__ import annotations

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_PREFIXES = (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))
_COUNTS = (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3))


def size(nbytes: float) -> str:
    """Format bytes.

    >>> size(12), size(1536), size(80e9), size(-2048)
    ('12 B', '1.5 KiB', '74.5 GiB', '-2.0 KiB')
    """
    for unit in _BINARY[:-1]:
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} {_BINARY[-1]}"


def multiples(n: int, step: int) -> str:
    """Name the nearest multiples of a step that a number is not one of.

    >>> multiples(8, 6), multiples(2, 6)
    ('6 or 12', '6')
    """
    low = n // step * step
    return f"{low} or {low + step}" if low else str(step)


def si(n: float, unit: str) -> str:
    """Format a number with three digits and an SI prefix.

    >>> si(989e12, "FLOP/s"), si(1.5e9, "FLOP"), si(12, "FLOP")
    ('989 TFLOP/s', '1.5 GFLOP', '12 FLOP')
    """
    prefix, scale = next(((p, s) for p, s in _PREFIXES if abs(n) >= s), ("", 1.0))
    return f"{_three(n / scale)} {prefix}{unit}"


def count(n: float) -> str:
    """Format a number of parameters, tokens or samples.

    >>> count(950), count(33088), count(7.2e9)
    ('950', '33.1 k', '7.2 B')
    """
    unit, scale = next(((u, s) for u, s in _COUNTS if abs(n) >= s), ("", 1.0))
    return f"{n / scale:.1f} {unit}" if unit else f"{n:.4g}"


def seconds(s: float) -> str:
    """Format a short time.

    >>> seconds(4.871), seconds(0.0123), seconds(5e-6)
    ('4.87 s', '12.30 ms', '5 µs')
    """
    return f"{s:.2f} s" if s >= 1 else f"{s * 1e3:.2f} ms" if s >= 1e-3 else f"{s * 1e6:.0f} µs"


def per_second(rate: float, unit: str) -> str:
    """Format a rate of tokens or samples per second.

    >>> per_second(363.4, "tokens"), per_second(1.25e6, "samples")
    ('363 tokens/s', '1.2 M samples/s')
    """
    return f"{count(rate) if rate >= 1000 else f'{rate:.3g}'} {unit}/s"


def plural(n: int, noun: str) -> str:
    """Format a number with a noun in singular or plural.

    >>> plural(1, "rank"), plural(4, "rank")
    ('1 rank', '4 ranks')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def _three(n: float) -> str:
    """Format a number with three digits and without an exponent."""
    return f"{n:.0f}" if abs(n) >= 99.95 else f"{n:.3g}"
