"""Rules of Fourier transforms and complex numbers: transformed dims stay whole, and pairs of reals."""

from __future__ import annotations

import torch

from shardc.rules.core.notation import Dim, Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rule
from shardc.rules.pointwise import broadcast

aten = torch.ops.aten


def transform(call: Call) -> Signature:
    """Keep transformed dims whole (their size may change): fft(x, n, dim), fftn(x, s, dim)."""
    x, y = call.operands[0].shape, call.results[0].shape
    sizes, default = call.arg(1, "s"), [-2, -1] if str(call.target).split(".")[1].endswith("2") else None
    dims = call.arg(2, "dim", -1 if any(a in str(call.target) for a in ("fft.", "rfft.")) else default)
    if dims is None:
        dims = list(range(len(x) - len(sizes), len(x))) if sizes is not None else list(range(len(x)))
    whole = {call.dim(d) for d in ([dims] if isinstance(dims, int) else dims)}
    return _signature(x, y, whole)


def _signature(x: tuple[int, ...], y: tuple[int, ...], whole: set[int]) -> Signature:
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    out: list[Dim] = [(f"o{i}",) if i in whole else n for i, n in enumerate(names)]
    sizes = {f"d{i}": s for i, s in enumerate(x)} | {f"o{i}": y[i] for i in whole}
    return Signature(
        (tuple(names),), (tuple(out),), sizes, frozenset(), frozenset(f"{k}{i}" for i in whole for k in "do")
    )


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    for _kind in ("", "2", "n"):
        rule(getattr(aten, f"fft_{_name}{_kind}").default, transform, linear="0")


def frames(call: Call) -> Signature:
    """Split the batch of stft and istft, x[b, ...] -> [b, ...]; keep time, frequency and window whole."""
    x, y = call.operands[0].shape, call.results[0].shape
    lead = 1 if len(x) > (1 if "istft" not in str(call.target) else 2) else 0
    ins: list[tuple[Dim, ...]] = []
    sizes = {"b": x[0]} if lead else {}
    for j, v in enumerate(call.operands):
        front = lead if j == 0 else 0
        ins.append((*[("b",)] * front, *((f"x{j}_{i}",) for i in range(front, len(v.shape)))))
        sizes |= {f"x{j}_{i}": s for i, s in enumerate(v.shape) if i >= front}
    out: tuple[Dim, ...] = (*[("b",)] * lead, *((f"y{i}",) for i in range(lead, len(y))))
    sizes |= {f"y{i}": s for i, s in enumerate(y) if i >= lead}
    return Signature(tuple(ins), (out,), sizes, frozenset(), frozenset(sizes) - {"b"})


for _op in (aten.stft.default, aten.stft.center, aten.istft.default):
    rule(_op, frames, linear="0")


def pair(call: Call) -> Signature:
    """Split all but the pair: view_as_real c[...] -> f[..., 2]; view_as_complex f[..., 2] -> c[...]."""
    x, y = call.operands[0].shape, call.results[0].shape
    names: tuple[Dim, ...] = tuple((f"d{i}",) for i in range(min(len(x), len(y))))
    two: tuple[Dim, ...] = (*names, ("pair",))
    sizes = {f"d{i}": s for i, s in enumerate(x[: len(names)])} | {"pair": 2}
    ins, outs = (two, names) if len(x) > len(y) else (names, two)
    return Signature((ins,), (outs,), sizes, frozenset(), frozenset({"pair"}))


rule(aten.view_as_real.default, pair, linear="0")
rule(aten.view_as_complex.default, pair, linear="0")
for _op in (aten.real.default, aten.imag.default):
    rule(_op, broadcast, linear="0")
rule(aten.complex.default, broadcast, linear="0 1")
rule(aten.polar.default, broadcast)  # its derivative assumes positive lengths, but summands may be negative
