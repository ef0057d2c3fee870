"""Conversions between placements under autograd, for tests of ops that are composed of them.

A program differentiates its graphs before it runs (shardc.passes.joint): ops are functions, and their transposes are
too. Here each conversion is a pair of the two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from shardc.ir.conversions import BY_OP
from shardc.runtime import ops as plain
from shardc.runtime.ops.with_backward import with_backward


def _converted(op: str, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    tag = {k: v for k, v in kwargs.items() if k == "tag"}
    result: Tensor = with_backward(
        lambda x: (getattr(plain, op)(x, *args, **kwargs), ()),
        lambda needs, g: (plain.transpose(op, g, *args, **tag),),
        x,
        once=False,
    )
    return result


class _Ops:
    """Ops by name."""

    def __getattr__(self, name: str) -> Any:
        if name not in BY_OP:
            return getattr(plain, name, None) or plain.named(name, joint=True)
        return partial(_converted, name)


ops: Any = _Ops()
