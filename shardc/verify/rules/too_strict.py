"""Find rules that could be looser: what they forbid although it is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from shardc.rules.core.choices import Choices
from shardc.rules.core.notation import Operand, Signature
from shardc.rules.core.registry import Rule
from shardc.rules.core.sample_calls import Sample
from shardc.rules.core.strategy import Strategy, needs_sum_grad
from shardc.verify.rules.case import Case, Finding, call_text
from shardc.verify.rules.prove import summable
from shardc.verify.rules.variants import exact


def loosened(sig: Signature) -> Iterator[tuple[str, str, Signature]]:
    """Yield (what it would allow, the factor, the looser signature) for every whole factor."""
    before = {f for o in sig.inputs for dim in o for f in dim}
    for f in sorted(sig.whole):
        if sig.sizes[f] < 2 or f.startswith("#"):
            continue
        rest = sig.whole - {f}
        yield f"split {f}", f, replace(sig, whole=rest)
        if not all(sig.places(o, f) for o in sig.outputs):
            yield f"split {f}, sum", f, replace(sig, whole=rest, summed=sig.summed | {f})
        for g in sorted(rest - before):  # a dim of operands and one of results may be the same factor
            if f in before and sig.sizes[g] == sig.sizes[f]:
                yield (
                    f"split {f} = {g}",
                    f,
                    replace(sig, whole=rest - {g}, outputs=tuple(_renamed(o, g, f) for o in sig.outputs)),
                )


def _renamed(operand: Operand, old: str, new: str) -> Operand:
    return tuple(tuple(new if f == old else f for f in dim) for dim in operand)


def unlisted(choices: Choices) -> Iterator[tuple[str, Rule]]:
    """Yield (what it would allow, a rule with only it) for unlisted groups that may be jointly linear."""
    reals = [i for i, v in enumerate(choices.call.operands) if needs_sum_grad(v)]
    known = {frozenset(g) for g in choices.rule.groups(choices.call)}
    for size in range(1, len(reals) + 1):
        for group in combinations(reals, size):
            if frozenset(group) not in known and all(v.dtype.is_floating_point for v in choices.call.results):
                yield f"linear in {' '.join(map(str, group))}", replace(choices.rule, linear=(group,), linear_of=None)


def too_strict(op: Any, samples: Sequence[Sample], rule: Rule | None = None) -> list[Finding]:
    """Find splits and sums that a rule forbids although they are right on two and three ranks.

    Each is tried once, as far as sizes divide. rule: as in `prove`.
    """
    findings: dict[str, Finding] = {}
    for sample in samples:
        case = Case.of(op, exact(op, sample), rule=rule)
        call, sig = case.choices.call, case.choices.signature
        trials: list[tuple[str, list[tuple[int, Strategy | None]]]] = []
        for label, factor, looser in loosened(sig):
            choices = Choices(case.choices.rule, call, looser)
            trials.append((label, [(n, choices.split(factor, 1, n)) for n in (2, 3)]))
        for label, wider in unlisted(case.choices):
            trials.append((label, [(n, Choices(wider, call, sig).partials[0]) for n in (2, 3)]))
        for label, options in trials:
            tried = [(n, s) for n, s in options if s is not None and summable(s, case.choices)]
            if tried and not any(case.on_axis(n, s) for n, s in tried):
                text = "comes out right, but the rule forbids it"
                ranks = max(n for n, _ in tried)
                findings[label] = Finding(case.name, label, ranks, text, call_text(call))
    return list(findings.values())
