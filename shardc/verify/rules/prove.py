"""Prove every strategy that a rule allows against the whole op (docs/explanation/algebra.md)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.placement import PARTIAL, Layout, Placement, Shard
from shardc.rules.core.choices import Choices
from shardc.rules.core.strategy import Strategy
from shardc.verify.rules.case import Case, Finding, call_text

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
        if deep and digits and size > n:
            tried.append(choices.split(factor, 1, n, (n, size - n)))
        if deep and size % n and size > 1:
            tried.append(choices.split(factor, 1, n, (), -size % n))
        if deep:
            even = [d for d in digits if d % 2 == 0]  # for a zigzag, the first even number of stretches is enough
            tried += [choices.split(factor, d, n, mirrored=True) for d in even[:1]]
            if size % (2 * n) and size > 1:
                tried.append(choices.split(factor, 2, n, (), -size % (2 * n), mirrored=True))
        yield from (s for s in tried if s is not None)
    if choices.rule.extra:
        yield from choices.rule.extra(choices.call, n, [splits(v, n, deep=deep) for v in choices.call.operands])


def prove_case(case: Case, *parts: int, deep: bool = True) -> list[Finding]:
    """Compare every strategy of a call with the whole op, on so many ranks: results and gradients.

    deep: see `strategies`.
    """
    findings = []
    done: set[Strategy] = set()
    for n in parts:
        for s in dict.fromkeys(strategies(case.choices, n, deep=deep)):
            if s in done and s.kind == "replicate":  # the same for every n
                continue
            done.add(s)
            if fault := case.on_axis(n, s):
                findings.append(Finding(case.name, str(s), n, fault, call_text(case.choices.call)))
    return findings


def prove_pairs(case: Case, sizes: tuple[int, int], *, deep: bool = True) -> list[Finding]:
    """Compare two strategies at once, on two axes, with the whole op.

    This covers a rule's `local` and the digits of shared dims. For strategies of different factors that share no dim,
    one inner digit is enough, and one order if both axes have one size.
    """
    mesh = Mesh((("a", sizes[0]), ("b", sizes[1])))
    findings = []
    firsts, seconds = (list(dict.fromkeys(strategies(case.choices, n, deep=deep))) for n in sizes)
    inner = {s for group in (firsts, seconds) for s in later_digits(group)}
    for i, first in enumerate(firsts):
        for j, second in enumerate(seconds):
            trivial = "replicate" in (first.kind, second.kind) or (first.kind, second.kind) == (
                "partial_grad",
                "partial_grad",
            )
            again = first in inner or second in inner or (firsts == seconds and j < i)
            if again and (first.kind, first.base) != (second.kind, second.base) and not share_a_dim(first, second):
                continue
            if (
                not trivial
                and fits(case.choices, mesh, first, second)
                and (fault := case.wrong(mesh, {"a": first, "b": second}))
            ):
                findings.append(
                    Finding(case.name, f"{first} with {second}", mesh.world, fault, call_text(case.choices.call))
                )
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


def fits(choices: Choices, mesh: Mesh, first: Strategy, second: Strategy) -> bool:
    """Return whether two strategies take disjoint digits of every operand and result."""
    sides = (
        (first.inputs, second.inputs, choices.call.operands),
        (first.outputs, second.outputs, choices.call.results),
    )
    return not any(
        Layout.of({"a": p, "b": q}, mesh).problem(v.shape, mesh)
        for ps, qs, vs in sides
        for p, q, v in zip(ps, qs, vs, strict=True)
    )
