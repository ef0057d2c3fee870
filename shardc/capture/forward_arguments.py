"""The arguments of the model's `forward` that a batch is, by name or by position, and the error where they do not fit.

A dict gives forward's arguments by name (keyword-only ones too), a tuple by position; a tensor is the first one. Keys
of a dict that forward does not name are for the loss function alone, if there is one.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardc.errors import ShardcError
from shardc.ir import source


def keys_of_loss(model: nn.Module, batch: Any) -> set[Any]:
    """The batch's keys that forward does not name: labels, when a function computes the loss."""
    named = inspect.signature(model.forward).parameters
    if not isinstance(batch, Mapping) or any(p.kind is p.VAR_KEYWORD for p in named.values()):
        return set()
    return {key for key in batch if key not in named}


def arguments(model: nn.Module, batch: Any, own_loss: bool) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of forward that a batch is. A loss is given the whole batch: keys that forward does not name are
    for it alone.
    """
    if isinstance(batch, Mapping):
        own = keys_of_loss(model, batch) if own_loss else set()
        return (), {key: x for key, x in batch.items() if key not in own}
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise ShardcError, naming forward's line, if it does not take the batch."""
    forward = inspect.signature(model.forward)
    try:
        forward.bind(*args, **kwargs)
    except TypeError as e:
        names, keys = ", ".join(forward.parameters), f" (its keys are {', '.join(kwargs)})" if kwargs else ""
        raise ShardcError(
            f"the batch does not fit the model's forward({names}): {e}{keys}",
            where=source.of_function(model.forward).line,
            fix="a dict gives forward's arguments by name, a tuple by position; a tensor is the first one",
        ) from None
