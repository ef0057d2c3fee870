"""Find the overload of an op and its decompositions, and call two ops without a public name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table  # torch's own decompositions, by op
from torch._decomp import decompositions as torchs_decompositions  # the module that defines them
from torch._library import custom_ops  # the functions from which torch.library.custom_op made ops
from torch._library.custom_ops import CustomOpDef  # what torch.library.custom_op returns
from torch._ops import OpOverload, OpOverloadPacket  # types of ops


def overload_of(op: Any) -> OpOverload | None:
    """Return the overload of any form of an op (of `torch.ops.lib.op` the default or only one), or None."""
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()  # type: ignore[no-untyped-call]
        return (
            getattr(op, "default" if "default" in names else names[0])
            if "default" in names or len(names) == 1
            else None
        )
    return op if isinstance(op, OpOverload) else None


def unintercepted() -> AbstractContextManager[Any]:
    """Return a context in which no torch function mode of the user changes calls or their arguments."""
    context: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return context


def decompositions(op: OpOverload) -> list[Callable[..., Any]]:
    """Return the decompositions of an op.

    They are its own code, if it is composed of other ops; its entry in torch's table; the function of a custom op.
    """
    own = [op.decompose] if op._can_decompose() else []
    table = [decomposition_table[op]] if op in decomposition_table else []
    return own + table + ([body] if (body := body_of(op)) is not None else [])


def body_of(op: OpOverload) -> Callable[..., Any] | None:
    """Return the Python function that `torch.library.custom_op` made this op from."""
    definition = custom_ops.OPDEFS.get(op._schema.name)
    return None if definition is None else definition._init_fn


def backward_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return torch's decompositions of ops of backward passes, and of norms whose statistics they take."""
    names = re.compile(r"_backward(_data)?$|_forward$|^native_\w+_norm$|^_native_batch_norm_legit|^_fused_rms_norm$")
    return {
        op: f
        for op, f in decomposition_table.items()
        if isinstance(op, OpOverload) and names.search(op._schema.name.partition("::")[2])
    }


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the 2-norm of each tensor, 0-dim, computed in a real dtype.

    torch.nn.utils computes it in the tensors' dtype: for bfloat16 that is exact to 0.4 %.
    """
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    return list(torch._foreach_norm(real, 2, dtype=dtype))


def assert_on_device(condition: Tensor, message: str) -> None:
    """Assert a condition on the device, asynchronously: the host does not wait."""
    torch.ops.aten._assert_async.msg(condition, message)


def _mend_lstm() -> None:
    """Correct torch 2.11's decomposition of an LSTM in training, whose last states have one dim too many."""
    taken_apart: Any = torchs_decompositions.one_layer_lstm

    def one_layer_lstm(x: Tensor, hidden: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        y, last = taken_apart(x, hidden, *args, **kwargs)
        return y, tuple(state.reshape(begin.shape) for state, begin in zip(last, hidden, strict=True))

    torchs_decompositions.one_layer_lstm = one_layer_lstm  # type: ignore[assignment]


if torch.__version__ < "2.13":
    _mend_lstm()


def multiplies_float8_on_cpu() -> bool:
    """Return whether torch has a kernel of `scaled_mm` for the CPU: torch 2.11 has none."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
