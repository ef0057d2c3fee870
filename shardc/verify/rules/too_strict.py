"""Rules that could be looser: what they forbid though it comes out right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any

from shardc.rules.core.choices import Choices
from shardc.rules.core.notation import Operand, Signature
from shardc.rules.core.registry import Rule
from shardc.rules.core.sample_calls import Sample
from shardc.rules.core.strategy import Strategy, needs_sum_grad
from shardc.verify.rules.case import TRUSTING, UNDEFINED, Case, Finding, call_text, name_of
from shardc.verify.rules.prove import summable

_HEADS = "fused kernels want q, k and v of one head size"
_CONSTANT = "a constant: its operand gives only shape or dtype"
_WEIGHTS = "a norm's weights that are still to be summed over ranks do not occur"
_EMPTY = "only because the other operands are empty"
#: (op, what) that a rule forbids though it would be right, and why it stays so.
KNOWN = {
    ("aten.scaled_dot_product_attention.default", "split e"): _HEADS,
    ("attention", "split e"): _HEADS,
    ("aten.layer_norm.default", "linear in 1 2"): _WEIGHTS,
    ("aten.layer_norm.default", "linear in 1"): _WEIGHTS,
    ("aten.rms_norm.default", "linear in 1"): _WEIGHTS,
    ("aten.group_norm.default", "linear in 1 2"): _WEIGHTS,
    ("aten.group_norm.default", "linear in 1"): _WEIGHTS,
    ("aten.type_as.default", "linear in 0 1"): "of the second operand only the dtype counts",
    ("aten.zeros_like.default", "linear in 0"): _CONSTANT,
    ("aten.new_zeros.default", "linear in 0"): _CONSTANT,
    ("aten.new_zeros.default", "split x0_0, sum"): _CONSTANT,
    (
        "aten.bucketize.Tensor",
        "split x1_0, sum",
    ): "boundaries are few: counting below a part of them and adding up saves nothing",
    ("aten.cat.default", "linear in 0"): _EMPTY,
    ("aten.cat.default", "linear in 0 2"): _EMPTY,
    ("aten.index.Tensor", "split d0 = o0"): "a mask makes sizes that depend on data: such graphs are not captured",
    ("aten.index_put.default", "split i0, sum"): "one value for all entries would be added for padding too",
    ("aten.searchsorted.Tensor", "split n, sum"): "padding would stand among the sorted numbers",
    ("fp8_experts", "split k, sum"): "a token's choices are few, and its row would be sent to all ranks",
    ("fp8_linear", "linear in 0"): "what is rounded is no sum that is still to be done",
    ("batch_stat", "linear in 0"): "true in training only; outside it is the running statistic, counted once a rank",
    ("batch_stat", "linear in 0 1"): "the statistic is used more than once: it is summed before",
}


def loosened(sig: Signature) -> Iterator[tuple[str, str, Signature]]:
    """(what would be allowed, the factor, the signature that allows it) for every factor that is whole."""
    before = {f for o in sig.inputs for dim in o for f in dim}
    for f in sorted(sig.whole):
        if sig.sizes[f] < 2 or f.startswith("#"):
            continue
        rest = sig.whole - {f}
        yield f"split {f}", f, replace(sig, whole=rest)
        if not all(sig.places(o, f) for o in sig.outputs):
            yield f"split {f}, sum", f, replace(sig, whole=rest, summed=sig.summed | {f})
        for g in sorted(rest - before):  # a dim of operands and one of results that might be the same
            if f in before and sig.sizes[g] == sig.sizes[f]:
                yield (
                    f"split {f} = {g}",
                    f,
                    replace(sig, whole=rest - {g}, outputs=tuple(_renamed(o, g, f) for o in sig.outputs)),
                )


def _renamed(operand: Operand, old: str, new: str) -> Operand:
    return tuple(tuple(new if f == old else f for f in dim) for dim in operand)


def unlisted(choices: Choices) -> Iterator[tuple[str, Rule]]:
    """(what would be allowed, a rule with only it) for groups of operands that might be jointly linear but are not
    listed.
    """
    reals = [i for i, v in enumerate(choices.call.operands) if needs_sum_grad(v)]
    known = {frozenset(g) for g in choices.rule.groups(choices.call)}
    for size in range(1, len(reals) + 1):
        for group in combinations(reals, size):
            if frozenset(group) not in known and all(v.dtype.is_floating_point for v in choices.call.results):
                yield f"linear in {' '.join(map(str, group))}", replace(choices.rule, linear=(group,), linear_of=None)


def too_strict(op: Any, sample: Sample, seed: int = 0, rule: Rule | None = None) -> list[Finding]:
    """What a rule forbids though it comes out right on two and on three ranks, as far as sizes divide. rule: as in
    `prove`.
    """
    if op in UNDEFINED or name_of(op) in TRUSTING:
        return []
    case = Case.of(op, sample, seed, rule)
    call, sig = case.choices.call, case.choices.signature
    trials: list[tuple[str, list[tuple[int, Strategy | None]]]] = []
    for label, factor, looser in loosened(sig):
        choices = Choices(case.choices.rule, call, looser)
        trials.append((label, [(n, choices.split(factor, 1, n)) for n in (2, 3)]))
    for label, more in unlisted(case.choices):
        trials.append((label, [(n, Choices(more, call, sig).partials[0]) for n in (2, 3)]))
    findings = []
    for label, each in trials:
        tried = [(n, s) for n, s in each if s is not None and summable(s, case.choices)]
        if tried and not any(case.on_axis(n, s) for n, s in tried):
            why = KNOWN.get((case.name, label), "")
            findings.append(
                Finding(
                    case.name,
                    label,
                    max(n for n, _ in tried),
                    "comes out right, but the rule forbids it",
                    call_text(call),
                    why,
                )
            )
    return findings
