"""Sample calls of every op that has a rule, a file a family, named like the file of its rules. `make.py` says what
makes a good one.

pointwise, reduce, views, writes, create, index, matmul, linalg, conv, norm, attention, experts, recurrent, random,
fourier, softmax, loss, fp8; own: as users write them
"""

from importlib import import_module

from shardc.rules import FAMILIES
from shardc.rules.samples.make import RNG, SAMPLES, Arguments, Sample, Tensors, call, sample, samples

__all__ = ["RNG", "SAMPLES", "Arguments", "Sample", "Tensors", "call", "sample", "samples"]

for _family in FAMILIES:
    import_module(f"{__name__}.{_family}")
