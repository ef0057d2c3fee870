"""Rules: one line an op, in factor notation (docs/algebra.md). Importing this package registers all of them."""

from importlib import import_module

from shardc.rules.choices import Choices
from shardc.rules.op_call import Call, Operand
from shardc.rules.registry import RULES, LocalCall, Rule, find, rule
from shardc.rules.strategy import Strategy

__all__ = ["FAMILIES", "RULES", "Call", "Choices", "LocalCall", "Operand", "Rule", "Strategy", "find", "rule"]

#: The files of rules here, and of their sample calls in `samples`, by the family of ops.
FAMILIES = (
    "attention",
    "conv",
    "create",
    "experts",
    "fourier",
    "index",
    "linalg",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "random",
    "recurrent",
    "reduce",
    "views",
    "writes",
)
for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
