"""List the tensors of a global batch and their paths, and match the batch to the arguments of the model's `forward`.

A dict has forward's arguments by name (keyword-only ones too), a tuple by position; a tensor is the first one. Keys
of a dict that forward does not name are for the loss function alone, if there is one.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from shardc.errors import Errors, ShardcError
from shardc.ir import source
from shardc.torch_private import pytree


class Leaves:
    """The tensors of a batch, their paths, and a way to rebuild the batch from other tensors.

    >>> Leaves({"x": torch.zeros(2), "flag": True}).paths
    [('x',)]
    """

    def __init__(self, batch: Any) -> None:
        if callable(batch) and not isinstance(batch, Mapping):
            raise ShardcError("the batch is a function, not a batch", fix="pass what it returns: batch()")
        flat, self.spec = pytree.tree_flatten_with_path(batch)
        self.flat = [x for _, x in flat]
        self.at = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor)]
        self.tensors: list[Tensor] = [self.flat[i] for i in self.at]
        self.paths: list[tuple[str | int, ...]] = [tuple(_key(k) for k in flat[i][0]) for i in self.at]
        self.constants: list[tuple[tuple[str | int, ...], float | str]] = [
            (tuple(_key(k) for k in path), x) for path, x in flat if isinstance(x, (bool, int, float, str))
        ]
        self.nodes: list[fx.Node | None] = []  # of the tensors, while they are traced
        errors = Errors()
        for path, x in flat:
            name = ".".join(str(_key(k)) for k in path) or "it"
            if isinstance(x, np.ndarray):  # baked in, it would be the same in every step
                fault = f"{name} is a numpy array, not a tensor"
                errors.add(fault, where="batch", fix="torch.from_numpy(...) makes a tensor of it")
            if type(x).__name__ == "BlockMask":  # by name: its module takes long to import
                fault = f"{name} is a block mask of flex_attention"
                fix = (
                    "pass the tensors that its mask_mod reads, and make the mask in forward: "
                    "create_block_mask(mask_mod, ...)"
                )
                errors.add(f"{fault}, which would be the same in every step", where="batch", fix=fix)
            if is_dataclass(x):
                fault = f"{name} is a {type(x).__name__}, in which tensors are not found"
                errors.add(fault, where="batch", fix=f"torch.export.register_dataclass({type(x).__name__}), or a dict")
            if isinstance(x, Tensor) and (x.is_nested or x.layout != torch.strided):
                kind, fix = (
                    ("nested", "torch.nested.to_padded_tensor(x, 0)") if x.is_nested else ("sparse", "x.to_dense()")
                )
                errors.add(f"{name} is a {kind} tensor, which cannot be split", where="batch", fix=f"pass {fix}")
        if not self.tensors and not errors.found:
            lists = _lists(batch)
            fault = f": {lists[0]} is a list" if lists else ""
            fix = (
                "make it a tensor: torch.tensor(...)"
                if lists
                else "pass a dict (keyword arguments), a tuple or a tensor"
            )
            errors.add(f"the batch contains no tensor{fault}", where="batch", fix=fix)
        errors.raise_any()

    def named(self, nodes: set[fx.Node]) -> list[str]:
        """Return the names of the tensors that are these nodes in the graph being traced."""
        return [".".join(map(str, path)) for path, node in zip(self.paths, self.nodes, strict=False) if node in nodes]

    def batch(self, tensors: Iterable[Tensor]) -> Any:
        flat = list(self.flat)
        for i, x in zip(self.at, tensors, strict=True):
            flat[i] = x
        return pytree.tree_unflatten(flat, self.spec)


def _lists(batch: Any) -> list[str]:
    """Return the names of entries of a batch that are lists of numbers."""
    entries = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple) else ()
    return [str(key) for key, x in entries if isinstance(x, list)] + (["it"] if isinstance(batch, list) else [])


def _key(key: Any) -> str | int:
    name = getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))
    assert isinstance(name, (str, int)), f"unknown path element {key!r}"
    return name


def with_plain_dicts(batch: Any) -> Any:
    """Convert every mapping of a batch to a dict: pytrees take custom mapping classes for leaves."""
    if isinstance(batch, Mapping) and (type(batch) is dict or type(batch) not in pytree.SUPPORTED_NODES):
        return {k: with_plain_dicts(v) for k, v in batch.items()}
    return type(batch)(map(with_plain_dicts, batch)) if type(batch) in (list, tuple) else batch


# --- forward's arguments ----------------------------------------------------------------------------------------------


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
        fault = f"the batch does not fit the model's forward({names}): {e}{keys}"
        fix = _fitting(forward, args, kwargs, own_loss)
        raise ShardcError(fault, where=source.of_function(model.forward).line, fix=fix) from None


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
