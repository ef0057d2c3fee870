"""Sample calls of every op that has a rule, a file a family, named like the file of its rules in shardc/rules.
tests/rules/making.py says what makes a good one. An op without one fails the tests.
"""

from importlib import import_module
from pkgutil import iter_modules

from shardc.rules.core.user_ops import SAMPLES, Arguments, Sample
from tests.rules.making import RNG, Tensors, call, made, sample, samples

__all__ = ["RNG", "SAMPLES", "Arguments", "Sample", "Tensors", "call", "made", "sample", "samples"]

for _file in iter_modules(__path__):
    import_module(f"{__name__}.{_file.name}")
import_module("tests.features.fp8.samples")
