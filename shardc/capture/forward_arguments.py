"""Match a batch to the arguments of the model's `forward`, and report an error if it does not fit.

A dict has forward's arguments by name (keyword-only ones too), a tuple by position; a tensor is the first one. Keys
of a dict that forward does not name are for the loss function alone, if there is one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from shardc.errors import ShardcError
from shardc.ir import source


def keys_of_loss(model: nn.Module, batch: Any) -> set[Any]:
    """Return the batch's keys that forward does not name: labels, when a function computes the loss."""
    named = inspect.signature(beneath_compile(model).forward).parameters
    if not isinstance(batch, Mapping) or any(p.kind is p.VAR_KEYWORD for p in named.values()):
        return set()
    return {key for key in batch if key not in named}


def arguments(model: nn.Module, batch: Any, own_loss: bool) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Return a batch as forward's arguments. own_loss: without keys that only the loss function needs."""
    if isinstance(batch, Mapping):
        loss_keys = keys_of_loss(model, batch) if own_loss else set()
        return (), {key: x for key, x in batch.items() if key not in loss_keys}
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], own_loss: bool = False) -> None:
    """Raise ShardcError, naming forward's line, if it does not take the batch. own_loss: a loss takes all."""
    model = beneath_compile(model)
    forward = inspect.signature(model.forward)
    try:
        forward.bind(*args, **kwargs)
    except TypeError as e:
        names, keys = ", ".join(forward.parameters), f" (its keys are {', '.join(kwargs)})" if kwargs else ""
        raise ShardcError(
            f"the batch does not fit the model's forward({names}): {e}{keys}",
            where=source.of_function(model.forward).line,
            fix=_fitting(forward, args, kwargs, own_loss),
        ) from None


def _fitting(forward: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any], own_loss: bool) -> str:
    """Return a hint how to make the batch fit forward."""
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = [n for n, p in forward.parameters.items() if p.kind in plain]
    if len(args) > len(names):
        example = ", ".join(f'"{n}": ...' for n in (*names, "y"))
        if own_loss:
            return f"make the batch a dict, {{{example}}}: keys that forward does not name go only to the loss"
        return f"pass forward only the arguments {', '.join(names)}; what a loss needs goes into a dict"
    lacking = [
        n for n in names[len(args) :] if n not in kwargs and forward.parameters[n].default is inspect.Parameter.empty
    ]
    unknown = [n for n in kwargs if n not in names]
    if lacking and unknown:
        near = difflib.get_close_matches(lacking[0], unknown, 1, 0.0)[0] if len(unknown) > 1 else unknown[0]
        return f"rename the batch's key {near!r} to {lacking[0]!r}"
    if lacking:
        return f"add {', '.join(map(repr, lacking))} to the batch"
    if unknown:
        fix = f"leave {', '.join(map(repr, unknown))} out of the batch"
        return f"{fix}, or add loss(output, batch), which gets every key (in Python: compile(..., loss=loss))"
    return "a dict passes forward's arguments by name, a tuple by position; a tensor is the first one"


def beneath_compile(model: nn.Module) -> nn.Module:
    """Return the model inside torch.compile(model), whose forward has names for its arguments."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model
