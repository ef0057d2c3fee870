"""Prove every strategy that a rule allows against the whole op, and find what it forbids although it is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import torch

from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, Layout, Placement, Shard
from shardc.rules.core.choices import Choices
from shardc.rules.core.notation import Signature
from shardc.rules.core.registry import Rule
from shardc.rules.core.strategy import Strategy, needs_sum_grad
from shardc.rules.core.user_ops import Sample
from shardc.verify.rules.case import Case, Finding
from shardc.verify.rules.variants import exact

#: Numbers of parts. Dims of samples have 12 elements, so that each number meets parts, inner digits and padding
#: somewhere.
PARTS = (2, 3, 4, 6)


def splits(v: Value, n: int, *, deep: bool) -> frozenset[Placement]:
    """Return the splits of a value that the `extra` strategies of a rule are tried with. deep: see `strategies`."""
    shards: set[Placement] = set()
    for d, size in enumerate(v.shape):
        shards |= {Shard(d, k) for k in (range(1, size + 1) if deep else (1,)) if size % (k * n) == 0}
        if deep and size > n:
            shards |= {Shard(d, 1, (n, size - n)), Shard(d, 1, (), -size % n), Shard(d, 2, mirrored=True)}
    return frozenset(p for p in shards if not Layout((("a", p),)).problem(v.shape, Mesh((("a", n),))))


def summable(strategy: Strategy, choices: Choices) -> bool:
    """Return whether everything partial can be added up: truth values cannot."""
    pairs = [
        *zip(strategy.inputs, choices.call.operands, strict=True),
        *zip(strategy.outputs, choices.call.results, strict=True),
    ]
    return not any(p == PARTIAL and v.dtype == torch.bool for p, v in pairs)


def strategies(choices: Choices, n: int, *, deep: bool = True) -> Iterator[Strategy]:
    """Yield every strategy that a rule allows on an axis of n ranks.

    deep: also replicated, and every factor at inner digits, in sections, padded and mirrored.
    """
    if deep:
        yield choices.replicate
    yield choices.partial_grad
    yield from (s for s in choices.partials if summable(s, choices))
    for factor in choices.signature.splittable():
        size = choices.signature.sizes[factor]
        digits = [d for d in range(1, size + 1 if deep else 2) if size % (d * n) == 0]
        tried = [choices.split(factor, d, n) for d in digits]
        if deep:
            sections = [(n, size - n)] if digits and size > n else []
            tried += [choices.split(factor, 1, n, each) for each in sections]
            even = [d for d in digits if d % 2 == 0]  # for a zigzag, the first even number of stretches is enough
            tried += [choices.split(factor, d, n, mirrored=True) for d in even[:1]]
            padded = [d for d in (1, 2) if size % (d * n) and size > 1]
            tried += [choices.split(factor, d, n, (), -size % (d * n), mirrored=d == 2) for d in padded]
        yield from (s for s in tried if s is not None)
    if choices.rule.extra:
        yield from choices.rule.extra(choices.call, n, [splits(v, n, deep=deep) for v in choices.call.operands])


def prove_case(case: Case, *parts: int, deep: bool = True) -> list[Finding]:
    """Compare every strategy of a call with the whole op, on so many ranks: results and gradients.

    deep: see `strategies`.
    """
    tried = [(n, s) for n in parts for s in dict.fromkeys(strategies(case.choices, n, deep=deep))]
    tried = [(n, s) for n, s in tried if s.kind != "replicate" or n == parts[0]]  # it is the same for every n
    return [case.finding(str(s), n, fault) for n, s in tried if (fault := case.on_axis(n, s))]


def prove_pairs(case: Case, sizes: tuple[int, int], *, deep: bool = True) -> list[Finding]:
    """Compare two strategies at once, on two axes, with the whole op.

    This covers a rule's `local` and the digits of shared dims. For strategies of different factors that share no dim,
    one inner digit is enough, and one order if both axes have one size.
    """
    mesh = Mesh((("a", sizes[0]), ("b", sizes[1])))
    findings = []
    firsts, seconds = (list(dict.fromkeys(strategies(case.choices, n, deep=deep))) for n in sizes)
    inner = {s for group in (firsts, seconds) for s in later_digits(group)}
    for (i, first), (j, second) in product(enumerate(firsts), enumerate(seconds)):
        kinds, both = {first.kind, second.kind}, {"a": first, "b": second}
        if "replicate" in kinds or kinds == {"partial_grad"}:
            continue
        again = first in inner or second in inner or (firsts == seconds and j < i)
        if again and (first.kind, first.base) != (second.kind, second.base) and not share_a_dim(first, second):
            continue
        if not case.layouts(mesh, both)[2] and (fault := case.wrong(mesh, both)):
            findings.append(case.finding(f"{first} with {second}", mesh.world, fault))
    return findings


def later_digits(each: Sequence[Strategy]) -> list[Strategy]:
    """Return splits of factors at plain inner digits, and extra strategies, without the first of each factor or dim."""
    extra = [s for s in each if s.kind not in ("replicate", "partial_grad", "partial", "split")]
    plain = [s for s in each if "/" in s.factor and " " not in s.factor]

    def subject(s: Strategy) -> Any:
        return s.base or (s.kind, *(p.dim for p in s.inputs if isinstance(p, Shard)))

    firsts = {subject(s): s for s in reversed([*plain, *extra])}
    return [s for s in (*plain, *extra) if s is not firsts[subject(s)]]


def share_a_dim(first: Strategy, second: Strategy) -> bool:
    """Return whether both split one dim of an operand or result (as rows and columns merged into one dim)."""
    pairs = zip((*first.inputs, *first.outputs), (*second.inputs, *second.outputs), strict=True)
    return any(isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim for p, q in pairs)


# --- what rules forbid although it is right


def loosened(sig: Signature) -> Iterator[tuple[str, str, Signature]]:
    """Yield (what it would allow, the factor, the looser signature) for every whole factor."""
    before = {f for o in sig.inputs for dim in o for f in dim}
    for f in sorted(f for f in sig.whole if sig.sizes[f] > 1):
        rest = sig.whole - {f}
        yield f"split {f}", f, replace(sig, whole=rest)
        if not all(sig.places(o, f) for o in sig.outputs):
            yield f"split {f}, sum", f, replace(sig, whole=rest, summed=sig.summed | {f})
        for g in sorted(rest - before):  # a dim of operands and one of results may be the same factor
            if f in before and sig.sizes[g] == sig.sizes[f]:
                outputs = tuple(tuple(tuple(f if x == g else x for x in dim) for dim in o) for o in sig.outputs)
                yield f"split {f} = {g}", f, replace(sig, whole=rest - {g}, outputs=outputs)


def unlisted(choices: Choices) -> Iterator[tuple[str, Rule]]:
    """Yield (what it would allow, a rule with only it) for unlisted groups that may be jointly linear."""
    reals = [i for i, v in enumerate(choices.call.operands) if needs_sum_grad(v)]
    known = {frozenset(g) for g in choices.rule.groups(choices.call)}
    for size in range(1, len(reals) + 1):
        for group in combinations(reals, size):
            if frozenset(group) not in known and all(v.dtype.is_floating_point for v in choices.call.results):
                yield f"linear in {' '.join(map(str, group))}", replace(choices.rule, linear=" ".join(map(str, group)))


def too_strict(op: Any, samples: Sequence[Sample], rule: Rule | None = None) -> list[Finding]:
    """Find splits and sums that a rule forbids although they are right on two and three ranks.

    Each is tried once, as far as sizes divide. rule: as in `prove`.
    """
    findings: dict[str, Finding] = {}
    for sample in samples:
        case = Case.of(op, exact(op, sample), rule=rule)
        call, sig = case.choices.call, case.choices.signature
        trials: dict[str, Sequence[Strategy | None]] = {}
        for label, factor, looser in loosened(sig):
            choices = Choices(case.choices.rule, call, looser)
            trials[label] = [choices.split(factor, 1, n) for n in (2, 3)]
        for label, wider in unlisted(case.choices):
            trials[label] = Choices(wider, call, sig).partials[:1] * 2
        for label, options in trials.items():
            tried = {n: s for n, s in zip((2, 3), options, strict=True) if s and summable(s, case.choices)}
            if tried and not any(case.on_axis(n, s) for n, s in tried.items()):
                findings[label] = case.finding(label, max(tried), "comes out right, but the rule forbids it")
    return list(findings.values())
