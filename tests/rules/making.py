"""Write the samples of rules, `sample(op, lambda t: call(t.real(4, 12)))`, and prove a rule on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardc.rules.core.registry import Rule
from shardc.rules.core.sample_calls import SAMPLES, Arguments, Sample
from shardc.verify.rules.case import Case, Finding
from shardc.verify.rules.prove import prove_case


def call(*args: Any, **kwargs: Any) -> Arguments:
    """Return (args, kwargs) of one call."""
    return args, kwargs


def sample(op: Any, *makers: Sample) -> None:
    """Add sample calls of an op."""
    SAMPLES.setdefault(op, []).extend(makers)


def samples(*ops_: Any) -> Callable[..., None]:
    """Add the same sample calls to several ops."""

    def add(*makers: Sample) -> None:
        for op in ops_:
            sample(op, *makers)

    return add


def prove(op: Any, sample: Sample, *parts: int, rule: Rule | None = None) -> list[Finding]:
    """Every strategy of one call that is wrong on so many ranks. rule: in place of the registered one."""
    return prove_case(Case.of(op, sample, rule), *parts)
