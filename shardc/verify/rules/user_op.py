"""`shardc.check_rule`: prove the rule of one op, on a call or on the samples that it was registered with."""

from __future__ import annotations

from typing import Any

from shardc.errors import Errors, ShardcError
from shardc.rules.core import registry
from shardc.rules.core.sample_calls import SAMPLES, as_sample
from shardc.rules.core.user_ops import resolve_op
from shardc.verify.rules.case import Finding
from shardc.verify.rules.survey import check_op


def check_rule(op: Any, *args: Any, **kwargs: Any) -> list[Finding]:
    """Prove the rule of an op: on this call (the op's own arguments), or on the samples that the rule was registered
    with.

    The whole op is compared with 2, 3, 4 and 6 parts at every factor, partial sums, two splits at once: results and
    gradients, in float64 (1e-10 of the largest number) where the op takes it, in float32 (1e-5) and bfloat16 (5e-2),
    with operands transposed in memory, with factors of size one. Runs on the CPU in well under a second per call.

    Returns what the rule forbids though it comes out right (a hint, no fault). Raises ShardcError that lists everything
    that is wrong."""
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
    report = check_op(overload, samples)
    for f in report.wrong:
        errors.add(str(f), where=rule.where, fix=_fix(f))
    errors.raise_any()
    return report.strict


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
