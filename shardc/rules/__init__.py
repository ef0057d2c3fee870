"""Rules: one line an op, in factor notation (DESIGN 2.2). Importing this package registers all of them."""

from shardc.rules import (
    attention,
    conv,
    create,
    experts,
    fourier,
    index,
    linalg,
    loss,
    matmul,
    norm,
    pointwise,
    random,
    recurrent,
    reduce,
    views,
    writes,
)
from shardc.rules.registry import RULES, Call, Choices, LocalCall, Operand, Rule, Strategy, find, rule

__all__ = [
    "RULES", "Call", "Choices", "LocalCall", "Operand", "Rule", "Strategy", "attention", "conv", "create", "experts", "find", "fourier", "index",
    "linalg", "loss", "matmul", "norm", "pointwise", "random", "recurrent", "reduce", "rule", "views", "writes",
]  # fmt: skip
