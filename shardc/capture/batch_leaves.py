"""List the tensors of a global batch and their paths. See forward_arguments.py for their arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from shardc.errors import Errors, ShardcError
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
