"""Prove the rule of an op on sample calls: tests, `shardc rules --check`, `shardc.check_rule`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardc.errors import Errors, ShardcError
from shardc.ir.types import full_op_name
from shardc.rules.core import registry
from shardc.rules.core.user_ops import SAMPLES, Sample, as_sample, resolve_op
from shardc.verify.rules.case import Case, Finding, NoCallError, UnfitError
from shardc.verify.rules.prove import PARTS, prove_case, prove_pairs, too_strict
from shardc.verify.rules.variants import exact, variants

#: Makes other calls from a sample, as `variants` does.
Variants = Callable[[Any, Sample, Case], Iterator[tuple[str, Sample]]]


@dataclass
class OpReport:
    """The check of one op.

    calls: how many were run, with the variants of samples. wrong: strategies whose results differ from the whole op's.
    forward_only: why no gradients were compared, "" if they were.
    """

    op: str
    calls: int = 0
    wrong: list[Finding] = field(default_factory=list)
    forward_only: str = ""


def check_op(op: Any, samples: Sequence[Sample], variants: Variants = variants) -> OpReport:
    """Prove the rule of an op on samples and their variants."""
    report = OpReport(full_op_name(op))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about unusual calls that it accepts
        for i, example in enumerate(samples):
            report.calls += 1
            sample = exact(op, example)
            try:
                case = Case.of(op, sample)
            except UnfitError as e:
                report.wrong.append(Finding(report.op, "the call", 1, str(e)))
                continue
            report.forward_only = report.forward_only or case.forward_only
            report.wrong += prove_case(case, *PARTS)
            for label, other in variants(op, sample, case):
                report.wrong += _variant(op, label, other, report)
            if i < 2:  # every pair of factors; at all digits if the rule has code for digits, or the op is large
                if case.choices.rule.local or case.choices.rule.extra or (case.choices.rule.flops and i == 0):
                    report.wrong += prove_pairs(case, (2, 2))
                report.wrong += prove_pairs(case, (2, 3), deep=False)
    return report


def _variant(op: Any, label: str, sample: Sample, report: OpReport) -> list[Finding]:
    """Prove a variant on two ranks, with splits at outer digits only: the sample covers inner digits."""
    try:
        case = Case.of(op, sample)
    except NoCallError:
        return []
    except UnfitError as e:
        return [Finding(report.op, label, 1, str(e))]
    report.calls += 1
    return [Finding(f.op, f"{f.strategy}, {label}", f.ranks, f.what, f.call) for f in prove_case(case, 2, deep=False)]


def check_rule(op: Any, *args: Any, **kwargs: Any) -> list[Finding]:
    """Prove the rule of an op: on this call (the op's own arguments), or on the samples of the rule.

    The whole op is compared with 2, 3, 4 and 6 parts at every factor, partial sums, two splits at once: results and
    gradients, in float64 (1e-10 of the largest number) where the op takes it, in float32 (1e-5) and bfloat16 (5e-2),
    with operands transposed in memory, with factors of size one. Runs on the CPU in well under a second per call.

    Returns what the rule forbids although it is right (a hint, not an error). Raises ShardcError that lists all errors.
    """
    where = registry.caller(__file__)
    overload = resolve_op(op, where)
    rule = registry.find(overload)
    if rule is None:
        raise ShardcError(
            f"{overload} has no rule", where=where, fix=f"shardc.rule({overload}, ...) where the op is defined"
        )
    samples = [as_sample((args, kwargs), where)] if args or kwargs else SAMPLES.get(overload, [])
    if not samples:
        fix = "shardc.check_rule(op, *arguments), or shardc.rule(..., samples=[...])"
        raise ShardcError(f"there is no call of {overload} to check", where=where, fix=fix)
    errors = Errors()
    for f in check_op(overload, samples).wrong:
        errors.add(str(f), where=rule.where, fix=_fix(f))
    errors.raise_any()
    return too_strict(overload, samples)


def _fix(finding: Finding) -> str:
    if finding.strategy.startswith("replicate"):
        return (
            "the op gives other results when it is called again: rules are of ops without randomness and without state"
        )
    if finding.strategy.startswith("split"):
        name = finding.strategy.split()[1].partition("/")[0].rstrip(",")
        return f"mark {name}! (whole), or {name}+ if it is summed; `local` can change a rank's call"
    if finding.strategy.startswith("partial"):
        return "take the operands out of `linear`: the op is not linear in them"
    if "not a call of the op" in finding.what:
        return "give the op's own arguments, one by one: check_rule(op, x, w)"
    return "make the notation fit this call"
