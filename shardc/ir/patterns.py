"""Match names by globs: `*` is any text, with dots; `{a,b}` is alternatives; all else is literal.

>>> match("*.{q,k,v}_proj", "model.layers.3.self_attn.k_proj"), match("lm_head", "model.lm_head")
(True, False)
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence

from shardc.errors import ShardcError

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


def matches(pattern: str, module: str, aliases: Mapping[str, Sequence[str]]) -> bool:
    """Return whether a pattern matches any name of a module. aliases: {name: all names of its module}."""
    return any(match(pattern, name) for name in aliases.get(module, [module]))


def enclosing(module: str) -> list[str]:
    """Return a module's name after those around it: "a.b" -> ["a", "a.b"]; [] for the root module, ""."""
    parts = module.split(".") if module else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
