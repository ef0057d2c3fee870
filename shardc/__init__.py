"""shardc: a declarative model-sharding compiler for PyTorch. `shardc.compile` is where everything begins."""

from __future__ import annotations

from shardc.artifact import load
from shardc.compile import compile
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.plan import Plan, plan
from shardc.report.coverage import Coverage, coverage
from shardc.rules.user_ops import check_rule, rule
from shardc.runtime.step.param_groups import groups
from shardc.spec import Spec
from shardc.verify.simulate import Simulation, simulate

__all__ = [
    "Coverage",
    "Plan",
    "Program",
    "ShardcError",
    "Simulation",
    "Spec",
    "check_rule",
    "compile",
    "coverage",
    "groups",
    "load",
    "plan",
    "rule",
    "simulate",
]
__version__ = "0.1.0"
