"""Sample calls of every op that has a rule, a file a family, named like the file of its rules in shardc/rules.
shardc/rules/core/sample_calls.py says what makes a good one. An op without one fails the tests.
"""

from importlib import import_module

from shardc.rules import FAMILIES
from shardc.rules.core.sample_calls import RNG, SAMPLES, Arguments, Sample, Tensors
from tests.rules.making import call, sample, samples

__all__ = ["RNG", "SAMPLES", "Arguments", "Sample", "Tensors", "call", "sample", "samples"]

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
import_module("tests.features.fp8.samples")
