"""Suggest the name that a user may have meant: `did you mean ...?`."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterable, Sequence

from shardc.ir.patterns import expand, match

#: How many alternatives of a pattern are repaired.
_TRIED = 8
#: The least similarity of a suggestion, from 0 to 1 (difflib).
_CUTOFF = 0.6
#: The fix that errors offer where the model has no similar name.
SEE_NAMES = "see the model's names with `shardc inspect model.py --before`"


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return a fix for a name or pattern that matches nothing: the nearest candidate, or else `otherwise`."""
    close = nearest(name, candidates)
    return f"did you mean {close!r}?" if close else otherwise


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = _CUTOFF) -> str:
    """Return the candidate most similar to `name`, ignoring case; "" if none is similar.

    cutoff: least similarity. A pattern is compared by its text after the last `*`, and the
    repaired pattern is returned: `*.q_prj` among `model.layers.0.q_proj` becomes `*.q_proj`.
    """
    names, name = list(dict.fromkeys(candidates)), str(name)
    if "*" in name or "{" in name:
        return _nearest_pattern(name, names)
    folded: dict[str, str] = {}
    for n in names:
        folded.setdefault(n.lower(), n)
    close = difflib.get_close_matches(name.lower(), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else ""


def _nearest_pattern(pattern: str, names: Sequence[str]) -> str:
    tried = []
    for option in expand(pattern)[:_TRIED]:
        head, star, tail = option.rpartition("*")
        dots = tail.count(".")
        ends = dict.fromkeys(end for n in names if (end := _end(n, dots, tail.startswith("."))))
        begin = head.partition("*")[0]
        middle = head[len(begin) :]
        begins = dict.fromkeys(start for n in names if (start := _start(n, begin.count("."))))
        for start, end in itertools.product(
            [begin, *difflib.get_close_matches(begin, begins, n=3, cutoff=_CUTOFF)],
            [tail, *difflib.get_close_matches(tail, ends, n=3, cutoff=_CUTOFF)],
        ):
            repaired = start + middle + star + end
            if any(match(repaired, n) for n in names):
                tried.append((difflib.SequenceMatcher(None, option, repaired).ratio(), repaired))
    if not tried and pattern.startswith("*.") and not any(c in pattern[2:] for c in "*{"):
        return nearest(pattern[2:], names)  # a child of the model itself: `*.up` does not match `up`
    return max(tried, key=lambda t: t[0])[1] if tried else ""


def _start(name: str, dots: int) -> str:
    """Return a name up to and with its dot number `dots`; "" if the name is too short or dots is 0."""
    parts = name.split(".")
    return ".".join(parts[:dots]) + "." if 0 < dots < len(parts) else ""


def _end(name: str, dots: int, leading: bool) -> str:
    """Return a name's end with `dots` dots, the first in front if `leading`; "" if the name is too short."""
    parts = name.split(".")
    keep = dots if leading else dots + 1
    if len(parts) < keep + leading or not keep:
        return ""
    return ("." if leading else "") + ".".join(parts[-keep:])
