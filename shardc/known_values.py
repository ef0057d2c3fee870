"""Values that a model's Python asks for while it is captured, where they are known.

    if (mask == causal).all():      # masks made of constants: a traced tensor, but one whose value does not depend on the batch
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardc.torch_private import FakeTensor
from shardc.watch import constant_value, untraced


@contextmanager
def known_values() -> Iterator[None]:
    """While open, Python may ask for the value of a traced tensor that depends on no input and no parameter."""
    with ExitStack() as stack:
        for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist"):
            stack.enter_context(mock.patch.object(Tensor, name, _asking(getattr(Tensor, name))))
        yield


def _asking(original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of Tensor that answers with the constant's value where there is one."""

    def method(self: Tensor) -> Any:
        known = constant_value(self) if isinstance(self, FakeTensor) else None
        return original(self) if known is None else untraced(original, known)

    return method

