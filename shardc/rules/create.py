"""Rules of ops that make tensors from sizes: constants may be split, counters (arange) stay whole."""

from __future__ import annotations

import torch

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rule
from shardc.rules.core.shared_signatures import all_whole, names_of, whole_names
from shardc.rules.pointwise import local_size

aten = torch.ops.aten


def filled(call: Call) -> Signature:
    """Split every dim of the result; keep the operand of `new_*` whole: only its dtype is used."""
    ins = [whole_names(v, f"x{j}_") for j, v in enumerate(call.operands)]
    return call.fit(ins, [names_of(len(call.results[0].shape))])


for _op in (
    *(aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format),
    *(aten.new_full.default, aten.new_zeros.default, aten.new_ones.default, aten.new_empty.default),
):
    rule(_op, filled, local=local_size)
for _op in (
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.linspace.default,
    aten.logspace.default,
    aten.scalar_tensor.default,
    aten.eye.default,
    aten.eye.m,
    aten.tril_indices.default,
    aten.triu_indices.default,
    aten.logspace.Tensor_Tensor,
    aten.logspace.Tensor_Scalar,
    aten.logspace.Scalar_Tensor,
    aten.linspace.Tensor_Scalar,
    aten.linspace.Scalar_Tensor,
    aten.fft_fftfreq.default,
    aten.fft_rfftfreq.default,
    aten.hann_window.default,
    aten.hann_window.periodic,
    aten.hamming_window.default,
    aten.hamming_window.periodic,
    aten.hamming_window.periodic_alpha,
    aten.hamming_window.periodic_alpha_beta,
    aten.kaiser_window.default,
    aten.kaiser_window.periodic,
    aten.kaiser_window.beta,
    aten.blackman_window.default,
    aten.blackman_window.periodic,
    aten.bartlett_window.default,
    aten.bartlett_window.periodic,
):
    rule(_op, all_whole)
rule(aten.linspace.Tensor_Tensor, all_whole, linear="0 1")
