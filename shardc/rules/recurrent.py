"""Rules of recurrent layers as one op: only the batch may be split.

Time is sequential, and all hidden units depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from shardc.ir.metadata import Value
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rules
from shardc.rules.core.shared_signatures import whole_names


def recurrent(call: Call) -> Signature:
    """Split b: x[t, b, i] (or [b, t, i]), states [layers, b, h], weights -> y[t, b, o], states."""
    states = len(call.results)
    batch_dims = [0 if call.arg("batch_first") else 1, *[1] * (states - 1)]

    def dims(values: Sequence[Value], mark: str) -> list[list[str]]:
        each = [whole_names(v, f"{mark}{j}_") for j, v in enumerate(values)]
        for names, d in zip(each, batch_dims, strict=False):
            names[d] = "b"
        return each

    return call.fit(dims(call.operands, "x"), dims(call.results, "y"))


def _flops(call: Call) -> int:
    weights = call.operands[len(call.results) :]
    return 2 * math.prod(call.operands[0].shape[:2]) * sum(math.prod(w.shape) for w in weights)


rules("lstm.input gru.input rnn_tanh.input rnn_relu.input", recurrent, flops=_flops)
