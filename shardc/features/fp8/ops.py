"""List the ops of this feature for core's tables."""

from __future__ import annotations

from shardc.features.fp8.experts import fp8_experts, fp8_experts_apply
from shardc.features.fp8.products import fp8_grad_of_data, fp8_grad_of_weight, fp8_linear
from shardc.features.fp8.rounding import fp8_amax, fp8_grad, fp8_pack, fp8_round, fp8_round_grad

#: The ops that programs call, by name.
OPS = {
    op.__name__: op
    for op in (
        *(fp8_amax, fp8_round, fp8_pack, fp8_grad, fp8_round_grad),
        *(fp8_linear, fp8_grad_of_data, fp8_grad_of_weight),
        *(fp8_experts, fp8_experts_apply),
    )
}
#: See shardc.runtime.ops.factors.
PRODUCTS = {fp8_linear: (0, 1, -1)}
#: Ops whose results a gather sends in 8 bits: how (format, granule), by their arguments.
PACKED = {fp8_round: lambda x, amax, format, granule: (format, tuple(granule))}
