"""Rewrite constants to take shape and dtype from the graph, not from a tensor.

    zeros_like(x), new_full(x, [8, 1], 0.0)      ->      full([8, 16], 0.0, dtype=f32), full([8, 1], 0.0, dtype=f32)

So a constant depends on nothing, and no rank gathers a value just to read its shape.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite

aten = torch.ops.aten


@rewrite(
    "zeros_like new_zeros empty_like new_empty new_empty_strided empty_strided empty_permuted empty ones_like new_ones "
    "full_like new_full"
)
def filled(emit: Emit, a: Args, out: Value) -> Result:
    fill = a.fill_value if "full" in a.op_name else int("ones" in a.op_name)
    if isinstance(fill, fx.Node):
        return emit(a.op, *a.named.values())
    return emit(aten.full.default, list(out.shape), fill, dtype=out.dtype)


@rewrite(
    "eye linspace logspace scalar_tensor zeros ones full arange fft_fftfreq fft_rfftfreq hann_window hamming_window "
    "kaiser_window blackman_window bartlett_window"
)
def write_dtype(emit: Emit, a: Args, out: Value) -> Result:
    """Write a floating dtype down: else the default dtype of the process that runs the program applies."""
    positional = [a.named[x.name] for x in a.op._schema.arguments if not x.kwarg_only]
    dtype = out.dtype if a.get("dtype") is not None or out.dtype.is_floating_point or out.dtype.is_complex else None
    return emit.typed(out, a.op, *positional, **({} if dtype is None else {"dtype": dtype}))
