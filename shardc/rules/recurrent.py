"""Rules of recurrent layers as one op: only the batch may be split.

Time is sequential, and all hidden units depend on each other.
"""

from __future__ import annotations

import math

import torch

from shardc.rules.core.notation import Dim, Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rule

aten = torch.ops.aten


def recurrent(call: Call) -> Signature:
    """Split b: x[t, b, i] (or [b, t, i]), states [layers, b, h], weights -> y[t, b, o], states."""
    batch_first = bool(call.arg(8, "batch_first"))
    sizes = {"b": call.operands[1].shape[1]}
    states = len(call.results)

    def dims(shape: tuple[int, ...], b: int | None, mark: str) -> tuple[Dim, ...]:
        sizes.update({f"{mark}{i}": s for i, s in enumerate(shape) if i != b})
        return tuple(("b",) if i == b else (f"{mark}{i}",) for i in range(len(shape)))

    batch_dims = [0 if batch_first else 1, *[1] * (states - 1)]
    ins = tuple(dims(v.shape, batch_dims[j] if j < states else None, f"x{j}_") for j, v in enumerate(call.operands))
    outs = tuple(dims(v.shape, batch_dims[j], f"y{j}_") for j, v in enumerate(call.results))
    return Signature(ins, outs, sizes, frozenset(), frozenset(sizes) - {"b"})


def _flops(call: Call) -> int:
    weights = call.operands[len(call.results) :]
    return 2 * math.prod(call.operands[0].shape[:2]) * sum(math.prod(w.shape) for w in weights)


for _op in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
    rule(_op, recurrent, flops=_flops)
