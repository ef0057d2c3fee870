"""Ops: which overload is meant, how torch takes it apart; and two that have no public name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table  # torch's own decompositions, by op
from torch._decomp import decompositions as torchs_decompositions  # the module that they are written in
from torch._library import custom_ops  # the functions that torch.library.custom_op made ops of
from torch._library.custom_ops import CustomOpDef  # what torch.library.custom_op returns
from torch._ops import OpOverload, OpOverloadPacket  # types of export's wrappers around regions of code, and of ops


def overload_of(op: Any) -> OpOverload | None:
    """The overload that an op in any form means: itself; `torch.ops.lib.op`'s default, or only one; a custom
    op's; else None.
    """
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
    """A context in which no torch function mode of the user's changes what is called, or with which arguments."""
    found: AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return found


def decompositions(op: OpOverload) -> list[Callable[..., Any]]:
    """How an op is taken apart: by its own code, if it is composed of other ops by definition; by its entry in torch's
    table; by the function that was made an op.
    """
    own = [op.decompose] if op._can_decompose() else []
    table = [decomposition_table[op]] if op in decomposition_table else []
    return own + table + ([body] if (body := body_of(op)) is not None else [])


def body_of(op: OpOverload) -> Callable[..., Any] | None:
    """The Python function that `torch.library.custom_op` made this op of."""
    definition = custom_ops.OPDEFS.get(op._schema.name)
    return None if definition is None else definition._init_fn


def backward_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """torch's decompositions of the ops that backward passes consist of, and of the normalisations whose statistics
    these take.
    """
    names = re.compile(r"_backward(_data)?$|_forward$|^native_\w+_norm$|^_native_batch_norm_legit|^_fused_rms_norm$")
    return {
        op: f
        for op, f in decomposition_table.items()
        if isinstance(op, OpOverload) and names.search(op._schema.name.partition("::")[2])
    }


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each, 0-dim, computed in a real dtype. torch.nn.utils' are in the tensors' own: of bfloat16, right
    to 0.4 %.
    """
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    return list(torch._foreach_norm(real, 2, dtype=dtype))


def assert_on_device(condition: Tensor, message: str) -> None:
    """An assertion that the device checks in its own time: the host does not wait."""
    torch.ops.aten._assert_async.msg(condition, message)


def _mend_lstm() -> None:
    """Torch 2.11 takes a trained LSTM apart, for its shapes, with a dim too many in the last states of each layer."""
    taken_apart: Any = torchs_decompositions.one_layer_lstm

    def one_layer_lstm(x: Tensor, hidden: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
        y, last = taken_apart(x, hidden, *args, **kwargs)
        return y, tuple(state.reshape(begin.shape) for state, begin in zip(last, hidden, strict=True))

    torchs_decompositions.one_layer_lstm = one_layer_lstm  # type: ignore[assignment]


if torch.__version__ < "2.13":
    _mend_lstm()


def multiplies_float8_on_cpu() -> bool:
    """Whether torch has a kernel of `scaled_mm` for the CPU: 2.11 has none."""
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")
