"""Buffers as large as the logits that a forward saves, and its backward writes over: the gradient takes their place.

An engine runs each backward once. Behind a module's loss a user may run it again, `loss.backward(retain_graph=True)`:
then all but the last one, which autograd knows, work on a copy. A schedule that splits backward in two keeps its graphs
too, and runs no op of these twice; so it is a forward that says whether its backward may be run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from shardc.torch_private import keeps_graph

_AGAIN = ContextVar("again", default=False)


@contextmanager
def backward_by_user() -> Iterator[None]:
    """The backward of forwards in here may be run again."""
    token = _AGAIN.set(True)
    try:
        yield
    finally:
        _AGAIN.reset(token)


def save(ctx: Any, buffer: Tensor, *others: Tensor) -> None:
    """In a Function's forward: `save_for_backward`, of a buffer that its backward may write over."""
    ctx.save_for_backward(buffer, *others)
    ctx.again = _AGAIN.get()


def writable(ctx: Any, buffer: Tensor) -> Tensor:
    """In its backward: that buffer, or a copy where it is needed again."""
    return buffer.clone() if ctx.again and keeps_graph() else buffer
