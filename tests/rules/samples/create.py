"""Sample calls: ops that make tensors."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

sample(aten.full.default, lambda t: call([4, 12], 3.0, dtype=torch.float64), lambda t: call([], 3.0))
samples(aten.zeros.default, aten.ones.default, aten.empty.memory_format)(lambda t: call([4, 12], dtype=torch.float64))
sample(aten.new_full.default, lambda t: call(t.real(6), [4, 12], 3.0))
samples(aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default)(lambda t: call(t.real(6), [4, 12]))
sample(aten.arange.default, lambda t: call(12))
sample(aten.arange.start, lambda t: call(3, 15))
sample(aten.arange.start_step, lambda t: call(0, 24, 2))
sample(aten.linspace.default, lambda t: call(0.0, 1.0, 12, dtype=torch.float64))
sample(aten.logspace.default, lambda t: call(0.0, 1.0, 12, dtype=torch.float64))
for _space in (aten.linspace, aten.logspace):  # torch has no gradients of them
    sample(_space.Tensor_Tensor, lambda t: call(t.constant(t.real()), t.constant(t.real()), 12, dtype=torch.float64))
    sample(_space.Tensor_Scalar, lambda t: call(t.constant(t.real()), 2.0, 12, dtype=torch.float64))
    sample(_space.Scalar_Tensor, lambda t: call(2.0, t.constant(t.real()), 12, dtype=torch.float64))
samples(aten.fft_fftfreq.default, aten.fft_rfftfreq.default)(lambda t: call(12, 0.5))
for _window in (aten.hann_window, aten.hamming_window, aten.kaiser_window, aten.blackman_window, aten.bartlett_window):
    sample(_window.default, lambda t: call(12))
    sample(_window.periodic, lambda t: call(12, False))
samples(aten.hamming_window.periodic_alpha, aten.kaiser_window.beta)(lambda t: call(12, True, 0.5))
sample(aten.hamming_window.periodic_alpha_beta, lambda t: call(12, True, 0.5, 0.4))
sample(aten.scalar_tensor.default, lambda t: call(3.0))
sample(aten.eye.default, lambda t: call(12))
sample(aten.eye.m, lambda t: call(4, 12))
samples(aten.tril_indices.default, aten.triu_indices.default)(lambda t: call(4, 6))
