"""Sample calls: ops that make tensors."""

from __future__ import annotations

import torch

from shardc.rules.samples.make import call, sample, samples

aten = torch.ops.aten

sample(aten.full.default, lambda t: call([4, 12], 3.0, dtype=torch.float64), lambda t: call([], 3.0))
samples(aten.zeros.default, aten.ones.default, aten.empty.memory_format)(lambda t: call([4, 12], dtype=torch.float64))
sample(aten.new_full.default, lambda t: call(t.real(6), [4, 12], 3.0))
samples(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)(lambda t: call(t.real(6), [4, 12]))
sample(aten.arange.default, lambda t: call(12))
sample(aten.arange.start, lambda t: call(3, 15))
sample(aten.arange.start_step, lambda t: call(0, 24, 2))
sample(aten.linspace.default, lambda t: call(0.0, 1.0, 12, dtype=torch.float64))
sample(aten.scalar_tensor.default, lambda t: call(3.0))
sample(aten.eye.default, lambda t: call(12))
sample(aten.eye.m, lambda t: call(4, 12))
samples(aten.tril_indices.default, aten.triu_indices.default)(lambda t: call(4, 6))
