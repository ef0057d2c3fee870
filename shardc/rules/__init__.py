"""Define the rules of all ops, one line each, in factor notation (docs/explanation/algebra.md).

Importing this package registers all of them, also those of optional features. core: what rules are made of.

Rules, one file per family: pointwise, reduce, views, writes, create, index, matmul, linalg, conv, norm, attention,
experts, recurrent, random, fourier, softmax, loss.
"""

from importlib import import_module
from pkgutil import iter_modules

from shardc.optional import registered
from shardc.rules.core.choices import Choices
from shardc.rules.core.op_call import Call, Operand
from shardc.rules.core.registry import RULES, LocalCall, Rule, find, rule
from shardc.rules.core.strategy import Strategy

__all__ = ["RULES", "Call", "Choices", "LocalCall", "Operand", "Rule", "Strategy", "find", "rule"]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
for _ in registered("rules", "__name__"):  # their import registers them
    pass
