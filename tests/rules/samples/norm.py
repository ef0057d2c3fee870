"""Sample calls: normalisations."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

sample(
    aten.layer_norm.default,
    lambda t: call(t.real(4, 6, 12), [12], t.real(12), t.real(12)),
    lambda t: call(t.real(4, 6, 12), [6, 12], t.real(6, 12)),
    lambda t: call(t.real(4, 12), [12], None, t.real(12)),
)
sample(
    aten.native_layer_norm.default,
    lambda t: call(t.real(4, 6, 12), [12], t.real(12), t.real(12), 1e-5),
    lambda t: call(t.real(4, 6, 12), [6, 12], None, None, 1e-5),
)
sample(
    aten.rms_norm.default,
    lambda t: call(t.real(4, 6, 12), [12], t.real(12), 1e-6),
    lambda t: call(t.real(4, 6, 12), [6, 12]),
)
if hasattr(aten, "_fused_rms_norm"):
    sample(aten._fused_rms_norm.default, lambda t: call(t.real(4, 6, 12), [12], t.real(12), 1e-6))
sample(
    aten.group_norm.default,
    lambda t: call(t.real(4, 24, 6), 12, t.real(24), t.real(24)),
    lambda t: call(t.real(12, 12, 2, 3), 4),
    lambda t: call(t.real(4, 12), 1, t.real(12)),
)
sample(
    aten.instance_norm.default,
    lambda t: call(t.real(4, 12, 6), t.real(12), t.real(12), None, None, True, 0.1, 1e-5, False),
    lambda t: call(t.real(12, 4, 3, 2), None, None, None, None, True, 0.1, 1e-5, False),
)
samples(aten._weight_norm.default, aten._weight_norm_interface.default)(
    lambda t: call(t.real(12, 4, 3), t.positive(12, 1, 1)), lambda t: call(t.real(4, 3, 12), t.positive(1, 1, 12), 2)
)
sample(aten._weight_norm.default, lambda t: call(t.real(4, 12), t.positive(), -1))
