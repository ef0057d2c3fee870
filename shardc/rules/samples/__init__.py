"""Sample calls of every op that has a rule, a file a family, named like the file of its rules. `make.py` says what
makes a good one.
"""

from shardc.rules.samples import (
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
from shardc.rules.samples.make import RNG, SAMPLES, Arguments, Sample, Tensors, call, sample, samples

__all__ = [
    "RNG",
    "SAMPLES",
    "Arguments",
    "Sample",
    "Tensors",
    "attention",
    "call",
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
    "sample",
    "samples",
    "views",
    "writes",
]
