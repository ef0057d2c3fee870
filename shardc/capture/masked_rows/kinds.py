"""`isinstance(rows, Tensor)` is true where the model asks: what stands for a tensor or number is one to the model.

parts = [p for p in parts if isinstance(p, Tensor)]     chosen rows stay in the list
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from shardc.capture.masked_rows.count import Count
from shardc.capture.masked_rows.rows import Rows
from shardc.ir import source

_KINDS: dict[type, type] = {Rows: Tensor, Count: int}
_isinstance = builtins.isinstance


def _is(x: Any, kinds: Any) -> bool:
    if _isinstance(x, kinds):
        return True
    kind = _KINDS.get(type(x))
    if kind is None or not issubclass(kind, kinds):
        return False
    code = sys._getframe(1).f_code
    return source.is_models(code.co_filename) or code is torch.is_tensor.__code__


@contextmanager
def seen_by_the_model() -> Iterator[None]:
    """While open, the model's `isinstance` and `torch.is_tensor` take chosen rows for tensors, their number for int."""
    with mock.patch.object(builtins, "isinstance", _is):
        yield
