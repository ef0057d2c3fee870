"""Match names by globs: `*` is any text, with dots; `{a,b}` is alternatives; all else is literal.

>>> match("*.{q,k,v}_proj", "model.layers.3.self_attn.k_proj"), match("lm_head", "model.lm_head")
(True, False)
"""

from __future__ import annotations

import difflib
import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from shardc.errors import Errors, ShardcError

_TRIED = 8  # how many alternatives of a pattern get a "did you mean"
_GROUP = re.compile(r"\{([^{}]*)\}")


#: The most alternatives that a pattern may have: `{a,b}{c,d}` has 4.
ALTERNATIVES = 1000


@functools.lru_cache(maxsize=4096)  # compiling costs more than matching, and every pattern meets every name
def _compiled(pattern: str) -> re.Pattern[str]:
    """Build a regular expression that never tries a `*` twice, so that matching takes linear time.

    In each alternative, the text after a `*` is found as early as possible, and a lookahead keeps that position.
    """
    group = itertools.count()

    def literal(text: str) -> str:
        first, *rest = map(re.escape, re.sub(r"\*+", "*", text).split("*"))
        if not rest:
            return first
        middle = "".join(f"(?=(?P<g{(n := next(group))}>.*?{part}))(?P=g{n})" for part in rest[:-1])
        return f"{first}{middle}.*{rest[-1]}"

    return re.compile("|".join(f"(?:{literal(p)})" for p in expand(pattern)), re.DOTALL)


def match(pattern: str, name: str) -> bool:
    """Return whether the pattern matches the whole name."""
    return _compiled(pattern).fullmatch(name) is not None


def names_weight(pattern: str, weight: str) -> bool:
    """Return whether the pattern matches a weight's name, or the name of the module that has the weight."""
    return match(pattern, weight) or match(pattern, weight.rpartition(".")[0])


def faults(pattern: str) -> str:
    """Return the error in a pattern, as the end of a sentence about it; "" if there is none."""
    if not pattern:
        return "is empty"
    rest = _GROUP.sub("", pattern)
    if "{" in rest or "}" in rest:
        return "has braces that do not pair up (they do not nest)"
    if len(pattern) > 10 * ALTERNATIVES:
        return f"has more than {10 * ALTERNATIVES:,} characters"
    if (n := _alternatives(pattern)) > ALTERNATIVES:
        return f"has {n:,} alternatives, more than {ALTERNATIVES:,}"
    return ""


def _alternatives(pattern: str) -> int:
    return math.prod(choices.count(",") + 1 for choices in _GROUP.findall(pattern))


def siblings(parent: str, names: Sequence[str]) -> str:
    """Return the pattern of names in one module, such as `attn.{q,k,v}`."""
    last = names[0] if len(names) == 1 else "{" + ",".join(names) + "}"
    return f"{parent}.{last}" if parent else last


def expand(pattern: str) -> list[str]:
    """Return the pattern once per choice of alternatives: `{q,k}_proj` becomes `q_proj` and `k_proj`.

    Raises ShardcError for a pattern with very many alternatives.
    """
    if _alternatives(pattern) > ALTERNATIVES:
        raise ShardcError(f"the pattern {faults(pattern)}", where=pattern[:40], fix="use `*`, or several patterns")
    parts = _GROUP.split(pattern)
    return ["".join(p) for p in itertools.product(*(p.split(",") if i % 2 else [p] for i, p in enumerate(parts)))]


def nearest(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return the candidate most similar to `name`, ignoring case; "" if none is similar.

    cutoff: least similarity, from 0 to 1 (difflib). A pattern is compared by its text after the last `*`, and the
    repaired pattern is returned: `*.q_prj` among `model.layers.0.q_proj` becomes `*.q_proj`.
    """
    names, name = list(dict.fromkeys(candidates)), str(name)
    if "*" in name or _GROUP.search(name):
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
            [begin, *difflib.get_close_matches(begin, begins, n=3, cutoff=0.6)],
            [tail, *difflib.get_close_matches(tail, ends, n=3, cutoff=0.6)],
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


# --- modules ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Selector:
    """A pattern of the spec that selects modules. where: its place in the spec.

    shown: how errors quote it, if not as the pattern. group: patterns compete for a module only within their group.
    every: of the modules that the pattern matches, every `every`-th is selected, from the first on.
    """

    pattern: str
    where: str
    shown: str = ""
    group: str = ""
    every: int = 1


def select_modules(
    selectors: Sequence[Selector], modules: Sequence[str], aliases: Mapping[str, Sequence[str]], errors: Errors
) -> list[list[str]]:
    """Return for each selector the outermost modules that match and that no earlier selector has taken.

    They are in the order of `modules`. `layers.*` means the layers and not everything in them, though `*` matches dots
    too. aliases: see `matches`. Adds an error for every pattern that matches nothing, or that never wins.
    """
    taken: set[tuple[str, str]] = set()
    selected = []
    for s in selectors:
        matched = {m for m in modules if matches(s.pattern, m, aliases)}
        outermost = [m for m in modules if m in matched and matched.isdisjoint(enclosing(m)[:-1])]
        shown = repr(s.shown or s.pattern)
        if not outermost:
            fix = did_you_mean(s.pattern, sorted(modules), SEE_NAMES)
            errors.add(f"pattern {shown} matches no module that computes anything", where=s.where, fix=fix)
        elif all((s.group, m) in taken for m in outermost):
            fault = f"pattern {shown} never wins: earlier patterns match all modules that it matches"
            errors.add(fault, where=s.where, fix="delete it, or move it up")
        selected.append([m for m in outermost[:: s.every] if (s.group, m) not in taken])
        taken |= {(s.group, m) for m in selected[-1]}
    return selected


#: The fix that errors offer where the model has no similar name.
SEE_NAMES = "see the model's names with `shardc inspect model.py --before`"


def did_you_mean(name: str, candidates: Iterable[str], otherwise: str) -> str:
    """Return a fix for a name or pattern that matches nothing: the nearest candidate, or else `otherwise`."""
    close = nearest(name, candidates)
    return f"did you mean {close!r}?" if close else otherwise


def matches(pattern: str, module: str, aliases: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a pattern matches any name of a module. aliases: {name: all names of its module}."""
    return any(match(pattern, name) for name in aliases.get(module, [module]))


def enclosing(module: str) -> list[str]:
    """Return a module's name after those around it: "a.b" -> ["a", "a.b"]; [] for the root module, ""."""
    parts = module.split(".") if module else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
