"""Everything that is known to go wrong with rules, tried on many ops: what `shardc rules --check` and the tests run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardc.rules.core.registry import Rule, find
from shardc.rules.core.sample_calls import SAMPLES, Sample
from shardc.verify.rules.case import Case, Finding, NoCallError, UnfitError, name_of
from shardc.verify.rules.prove import PARTS, prove, prove_case, prove_pairs
from shardc.verify.rules.too_strict import too_strict
from shardc.verify.rules.variants import exact, variants


@dataclass
class OpReport:
    """What was found of one op. calls: how many calls were run, variants of samples included.

    wrong: does not give what the whole op gives. strict: forbidden though right; with `why`, for a reason.
    forward_only: why no gradients were compared, "" if they were.
    """

    op: str
    calls: int = 0
    wrong: list[Finding] = field(default_factory=list)
    strict: list[Finding] = field(default_factory=list)
    forward_only: str = ""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return {
            "op": self.op,
            "calls": self.calls,
            "seconds": round(self.seconds, 3),
            "forward_only": self.forward_only,
            "wrong": [vars(f) for f in self.wrong],
            "too_strict": [vars(f) for f in self.strict],
        }


def check_op(op: Any, samples: Sequence[Sample], rule: Rule | None = None) -> OpReport:
    """Prove the rule of an op on samples and their variants; every finding once. rule:
    instead of the registered one.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about odd calls that it takes all the same
        return _check_op(op, samples, rule)


def _check_op(op: Any, samples: Sequence[Sample], rule: Rule | None) -> OpReport:
    started = time.perf_counter()
    report = OpReport(name_of(op))
    if not samples:
        report.wrong.append(Finding(report.op, "no call", 1, "there is no sample call to prove the rule on"))
    for i, example in enumerate(samples):
        report.calls += 1
        sample = example if report.op.startswith("aten.") else exact(op, example)
        try:
            case = Case.of(op, sample, rule=rule)
        except (NoCallError, UnfitError):
            report.wrong += prove(op, sample, rule=rule)
            continue
        report.forward_only = report.forward_only or case.forward_only
        report.wrong += prove_case(case, *PARTS)
        for label, other in variants(op, sample, case):
            report.wrong += _variant(op, label, other, rule, report)
        if i < 2:  # every factor with every other; at all digits where a rule has code for them, or the op is large
            if case.choices.rule.local or case.choices.rule.extra or (case.choices.rule.flops and i == 0):
                report.wrong += prove_pairs(op, sample, (2, 2), rule=rule)
            report.wrong += prove_pairs(op, sample, (2, 3), deep=False, rule=rule)
        report.strict += too_strict(op, sample, rule=rule)
    report.strict = list({(f.op, f.strategy): f for f in report.strict}.values())
    report.seconds = time.perf_counter() - started
    return report


def _variant(op: Any, label: str, sample: Sample, rule: Rule | None, report: OpReport) -> list[Finding]:
    """A variant on two ranks, splits at outer digits only: what inner digits do wrong shows in the sample itself."""
    try:
        case = Case.of(op, sample, rule=rule)
    except NoCallError:
        return []
    except UnfitError as e:
        return [Finding(report.op, label, 1, f"the rule does not fit the call: {e}")]
    report.calls += 1
    return [Finding(f.op, f"{f.strategy}, {label}", f.ranks, f.what, f.call) for f in prove_case(case, 2, deep=False)]


def check_ops(ops: Iterable[Any], started: Callable[[str], None] | None = None) -> Iterator[OpReport]:
    """Check ops one after the other. started: called with the name of each op before its turn."""
    for op in ops:
        if started:
            started(name_of(op))
        if find(op) is None:
            yield OpReport(name_of(op), wrong=[Finding(name_of(op), "no rule", 1, "the op has samples but no rule")])
        else:
            yield check_op(op, SAMPLES.get(op, ()))
