"""Rules of Fourier transforms and complex numbers: transformed dims stay whole, and pairs of reals."""

from __future__ import annotations

import torch

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rule, rules
from shardc.rules.core.shared_signatures import broadcast, names_of, whole_names

aten = torch.ops.aten


def transform(call: Call) -> Signature:
    """Keep transformed dims whole (their size may change): fft(x, n, dim), fftn(x, s, dim)."""
    x = call.operands[0].shape
    sizes, whole = call.arg("s"), call.dims()
    if sizes is not None and call.arg("dim") is None:
        whole = set(range(len(x) - len(sizes), len(x)))
    names = names_of(len(x), whole)
    return call.fit([names], [[f"o{i}!" if i in whole else n for i, n in enumerate(names)]])


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    rules(f"fft_{_name} fft_{_name}2 fft_{_name}n", transform, linear="0")


def frames(call: Call) -> Signature:
    """Split the batch of stft and istft, x[b, ...] -> [b, ...]; keep time, frequency and window whole."""
    batched = len(call.operands[0].shape) > (1 if "istft" not in str(call.target) else 2)
    ins = [whole_names(v, f"x{j}_") for j, v in enumerate(call.operands)]
    out = whole_names(call.results[0], "y")
    if batched:
        ins[0][0] = out[0] = "b"
    return call.fit(ins, [out])


rules("stft stft.center istft", frames, linear="0")


def pair(call: Call) -> Signature:
    """Split all but the pair: view_as_real c[...] -> f[..., 2]; view_as_complex f[..., 2] -> c[...]."""
    from_pairs = len(call.operands[0].shape) > len(call.results[0].shape)
    return call.fit("... pair! -> ..." if from_pairs else "... -> ... pair!")


rules("view_as_real view_as_complex", pair, linear="0")
rules("real imag", broadcast, linear="0")
rule(aten.complex.default, broadcast, linear="0 1")
rule(aten.polar.default, broadcast)  # its derivative assumes positive lengths, but summands may be negative
