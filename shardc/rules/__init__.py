"""Rules: one line an op, in factor notation (docs/algebra.md). Importing this package registers all of them."""

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
from shardc.rules.calls import Call, Operand
from shardc.rules.choices import Choices
from shardc.rules.registry import RULES, LocalCall, Rule, find, rule
from shardc.rules.strategy import Strategy

__all__ = [
    "RULES",
    "Call",
    "Choices",
    "LocalCall",
    "Operand",
    "Rule",
    "Strategy",
    "attention",
    "conv",
    "create",
    "experts",
    "find",
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
    "rule",
    "views",
    "writes",
]
