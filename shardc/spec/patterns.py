"""Globs over the model's names: `*` any characters, dots too; `{a,b}` alternatives; everything else stands for itself.

>>> match("*.{q,k,v}_proj", "model.layers.3.self_attn.k_proj"), match("lm_head", "model.lm_head")
(True, False)
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Sequence

_GROUP = re.compile(r"\{([^{}]*)\}")


@functools.lru_cache(maxsize=4096)  # compiling is dearer than matching, and every pattern meets every name
def _compiled(pattern: str) -> re.Pattern[str]:
    def literal(text: str) -> str:
        return ".*".join(map(re.escape, re.sub(r"\*+", "*", text).split("*")))

    parts = _GROUP.split(pattern)  # literal, alternatives, literal, ...
    text = [
        literal(p) if i % 2 == 0 else "(?:" + "|".join(map(literal, p.split(","))) + ")" for i, p in enumerate(parts)
    ]
    return re.compile("".join(text), re.DOTALL)


def match(pattern: str, name: str) -> bool:
    """Does the pattern match the whole name?"""
    return _compiled(pattern).fullmatch(name) is not None


def faults(pattern: str) -> str:
    """What is wrong with a pattern, as the end of a sentence about it; empty if nothing is."""
    if not pattern:
        return "is empty"
    rest = _GROUP.sub("", pattern)
    if "{" in rest or "}" in rest:
        return "has braces that do not pair up (they do not nest)"
    return ""


def expand(pattern: str) -> list[str]:
    """The pattern once per choice of alternatives: `{q,k}_proj` is `q_proj` and `k_proj`."""
    parts = _GROUP.split(pattern)
    return ["".join(p) for p in itertools.product(*(p.split(",") if i % 2 else [p] for i, p in enumerate(parts)))]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """The candidate most like `name`, ignoring case; "" if none is alike.

    A pattern is compared by what stands behind its last `*`, and answered with the pattern repaired:
    `*.q_prj` among `model.layers.0.q_proj` gives `*.q_proj`.
    """
    names = list(dict.fromkeys(candidates))
    if "*" in name or _GROUP.search(name):
        return _nearest_pattern(name, names)
    folded: dict[str, str] = {}
    for n in names:
        folded.setdefault(n.lower(), n)
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=0.6)
    return folded[close[0]] if close else ""


def _nearest_pattern(pattern: str, names: Sequence[str]) -> str:
    tried = []
    for one in expand(pattern):
        head, star, tail = one.rpartition("*")
        dots = tail.count(".")
        ends = dict.fromkeys(end for n in names if (end := _end(n, dots, tail.startswith("."))))
        for end in difflib.get_close_matches(tail, ends, n=3, cutoff=0.6):
            repaired = head + star + end
            if any(match(repaired, n) for n in names):
                tried.append((difflib.SequenceMatcher(None, tail, end).ratio(), repaired))
    return max(tried, key=lambda t: t[0])[1] if tried else ""


def _end(name: str, dots: int, leading: bool) -> str:
    """The end of a name with so many dots in it, one of them in front if `leading`; "" if the name is too short."""
    parts = name.split(".")
    keep = dots if leading else dots + 1
    if len(parts) < keep + leading or not keep:
        return ""
    return ("." if leading else "") + ".".join(parts[-keep:])


def first_match(patterns: Sequence[str], names: Iterable[str]) -> tuple[dict[str, int], list[int], list[int]]:
    """Which pattern wins each name (the first that matches).

    Returns ({name: index of its pattern}, indices of patterns that match no name, indices of those that match but never
    win)."""
    won: dict[str, int] = {}
    hit: set[int] = set()
    for name in names:
        for i, pattern in enumerate(patterns):
            if match(pattern, name):
                hit.add(i)
                won.setdefault(name, i)
    wins = set(won.values())
    unmatched = [i for i in range(len(patterns)) if i not in hit]
    return won, unmatched, sorted(hit - wins)


def of_every_layer(name: str) -> str:
    """A module's or parameter's name with `*` for the numbers in it: "layers.3.fc" -> "layers.*.fc"."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)", "*", name)
