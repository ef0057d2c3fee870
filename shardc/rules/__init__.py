"""Rules: one line an op, in factor notation (docs/algebra.md). Importing this package registers all of them.

notation, op_call       what a rule is written in; what it gets to see of a call
registry                all rules, by op; user_ops: those of users
choices, strategy       the ways to run one call on one mesh axis, derived from its rule
finite_padding          what padding has to hold where an op reads it
shared_signatures       what rules of several families have in common
sample_calls            calls of ops, on which their rules are proven (shardc.verify.rules)
reduce_parts            norms, products and extrema over a dim that stays split

Rules, a file a family: pointwise, reduce, views, writes, create, index, matmul, linalg, conv, norm, attention, experts,
recurrent, random, fourier, softmax, loss, fp8. along_split_dim: cumulative sums and convolutions along a dim that stays
split; attention_methods: what `sequence: {method: ...}` allows attention.
"""

from importlib import import_module

from shardc.rules.choices import Choices
from shardc.rules.op_call import Call, Operand
from shardc.rules.registry import RULES, LocalCall, Rule, find, rule
from shardc.rules.strategy import Strategy

__all__ = ["FAMILIES", "RULES", "Call", "Choices", "LocalCall", "Operand", "Rule", "Strategy", "find", "rule"]

#: The files of rules here, and of their sample calls in tests/rules/samples, by the family of ops.
FAMILIES = (
    "attention",
    "conv",
    "create",
    "experts",
    "fourier",
    "fp8",
    "index",
    "linalg",
    "loss",
    "matmul",
    "norm",
    "pointwise",
    "random",
    "recurrent",
    "reduce",
    "softmax",
    "views",
    "writes",
)
for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
