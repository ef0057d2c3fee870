"""Rules of ops that make tensors from sizes: constants may be split, counters (arange) stay whole."""

from __future__ import annotations

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rules
from shardc.rules.core.shared_signatures import all_whole, names_of, whole_names
from shardc.rules.pointwise import local_size


def filled(call: Call) -> Signature:
    """Split every dim of the result; keep the operand of `new_*` whole: only its dtype is used."""
    ins = [whole_names(v, f"x{j}_") for j, v in enumerate(call.operands)]
    return call.fit(ins, [names_of(len(call.results[0].shape))])


rules("full zeros ones empty.memory_format new_full new_zeros new_ones new_empty", filled, local=local_size)
rules(
    "arange arange.start arange.start_step linspace logspace scalar_tensor eye eye.m tril_indices triu_indices "
    "logspace.Tensor_Tensor logspace.Tensor_Scalar logspace.Scalar_Tensor linspace.Tensor_Scalar "
    "linspace.Scalar_Tensor fft_fftfreq fft_rfftfreq hann_window hann_window.periodic hamming_window "
    "hamming_window.periodic hamming_window.periodic_alpha hamming_window.periodic_alpha_beta kaiser_window "
    "kaiser_window.periodic kaiser_window.beta blackman_window blackman_window.periodic bartlett_window "
    "bartlett_window.periodic",
    all_whole,
)
rules("linspace.Tensor_Tensor", all_whole, linear="0 1")
