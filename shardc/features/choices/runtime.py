"""Fit given choices to the inputs of a program, and check them where data enter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.similar_names import did_you_mean
from shardc.ir.stored import Input
from shardc.runtime.data.inputs import CHOICES, leaves, name_of, type_name, with_choices
from shardc.torch_private import FakeTensor

#: Values and names that an error shows.
_SHOWN = 8
_WHERE = "choices"
_INT32 = torch.iinfo(torch.int32)


def prepare(program: Program, batch: Any, choices: Mapping[str, Any] | None, *, local: bool) -> Any:
    """Return the batch with its choices in the dtype and shape of the program's inputs.

    choices: beside the batch; None: those in it, by the key `choices`. Integers of any width are taken, and the model's
    own shape where the input has rows and tokens as two dims. Raises ShardcError for names, dtypes and shapes.
    """
    inputs = {str(x.path[1]): x for x in program.inputs if x.choice is not None}
    inside = batch.get(CHOICES) if isinstance(batch, Mapping) else None
    if not inputs and choices is None:
        return batch
    if not inputs:
        fix = 'write `choices: {"*.gate": replay}` in the spec, or leave them out'
        raise ShardcError("choices are given, but the program replays none", where=_WHERE, fix=fix)
    given = choices if choices is not None else inside
    if not isinstance(given, Mapping):
        names = ", ".join(list(inputs)[:_SHOWN]) + (", ..." if len(inputs) > _SHOWN else "")
        fix = f"engine.step(batch, choices={{name: tensor}}), of {names}"
        kind = "it was given none" if given is None else f"they are a {type(given).__name__}"
        raise ShardcError(f"the program replays choices, and {kind}", where=_WHERE, fix=fix)
    errors, fitted, sizes = Errors(), dict[str, Any](), _sizes(program, batch)
    for name in [n for n in given if n not in inputs]:
        fix = did_you_mean(name, [n for n in inputs if n not in given] or inputs, "leave it out")
        errors.add(f"the program replays no choice of this name: {name}", where=_WHERE, fix=fix)
    for name, x in inputs.items():
        if name not in given:
            fix = f"give it, {type_name(x.dtype, x.shape)}: a step with `record` returns all"
            errors.add(f"the choice of {name} is missing", where=_WHERE, fix=fix)
            continue
        with errors.collect():
            fitted[name] = _fitted(x, given[name], sizes, local=local)
    errors.raise_any()
    return with_choices(batch, fitted)


def _sizes(program: Program, batch: Any) -> dict[int, set[int]]:
    """Return the sizes that dims of the batch have, by the size that they were compiled with."""
    by_path, sizes = dict(leaves(batch)), dict[int, set[int]]()
    for x in program.inputs:
        leaf = by_path.get(x.path) if x.choice is None else None
        for n, now in zip(x.shape, leaf.shape if isinstance(leaf, Tensor) else (), strict=False):
            sizes.setdefault(n, set()).add(now)
    return sizes


def _fitted(x: Input, value: Any, sizes: Mapping[int, set[int]], *, local: bool) -> Any:
    """Return a choice in the input's dtype and shape. Raises ShardcError for another kind of number, or of dims."""
    assert x.choice is not None
    name = name_of(x.path)
    if not isinstance(value, Tensor):
        raise ShardcError(f"it is a {type(value).__name__}", where=name, fix="give a torch.Tensor")
    floats = value.dtype.is_floating_point or value.dtype.is_complex
    if (x.dtype == torch.bool) != (value.dtype == torch.bool) or floats != x.dtype.is_floating_point:
        fault = f"it is {type_name(value.dtype, value.shape)}, but the choice is {type_name(x.dtype, x.shape)}"
        kind = "bool" if x.dtype == torch.bool else "floats" if x.dtype.is_floating_point else "integers"
        raise ShardcError(fault, where=name, fix=f"give {kind}")
    if value.dtype != x.dtype:
        if not floats and value.dtype.itemsize > 4 and not isinstance(value, FakeTensor):  # int32 would wrap it
            value = value.clamp(_INT32.min, _INT32.max)
        value = value.to(x.dtype)
    own, shape, given = x.choice.shape, x.shape, tuple(value.shape)
    if value.dim() == len(own) != len(shape):  # rows and tokens are one dim
        tokens = next(iter(sizes.get(shape[1], {shape[1]})))
        if tokens and value.shape[0] % tokens == 0:
            value = value.reshape(value.shape[0] // tokens, tokens, *value.shape[1:])
    fits = value.dim() == len(shape) and all(
        now in sizes.get(n, {n}) or (now == n and d != x.choice.rows)
        for d, (n, now) in enumerate(zip(shape, value.shape, strict=True))
    )
    if not fits and not (local and x.choice.rows is None):
        now = [next(iter(sizes.get(n, {n}))) if d == x.choice.rows or n in sizes else n for d, n in enumerate(shape)]
        fix = f"give {type_name(x.dtype, now)}, as a step with `record` returns it for this batch"
        raise ShardcError(f"it is {type_name(x.dtype, given)}, which does not fit the batch", where=name, fix=fix)
    return value


def check_inputs(program: Program, parts: Mapping[str, Tensor], rank: int) -> None:
    """Raise ShardcError for choices in this rank's part that the op cannot make: too large, negative, or twice."""
    errors = Errors()
    for x in program.inputs:
        part = parts[x.name]
        if x.choice is None or not x.choice.below or part.numel() == 0 or isinstance(part, FakeTensor) or part.is_meta:
            continue
        c, name = x.choice, str(x.path[1])
        wrong = (part < 0) | (part >= c.below)
        if bool(wrong.any()):
            at = wrong.nonzero()[0].tolist()
            value = int(part[tuple(at)])
            fault = f"{name} chooses {value} at {_place(program, x, part, at, rank)}, but there are {c.below}"
            errors.add(fault, where=name_of(x.path), fix=f"give numbers from 0 to {c.below - 1}")
            continue
        if c.distinct is None:
            continue
        ordered, order = part.sort(c.distinct)
        n = ordered.shape[c.distinct] - 1
        twice = ordered.narrow(c.distinct, 0, n) == ordered.narrow(c.distinct, 1, n)
        if bool(twice.any()):
            first = twice.nonzero()[0].tolist()
            value, at = int(ordered[tuple(first)]), list(first)
            at[c.distinct] = int(order.narrow(c.distinct, 1, n)[tuple(first)])
            fault = f"{name} chooses {value} twice at {_place(program, x, part, at, rank)}, and the op gives each once"
            errors.add(fault, where=name_of(x.path), fix="give different numbers")
    errors.raise_any()


def _place(program: Program, x: Input, part: Tensor, at: list[int], rank: int) -> str:
    """Return the place of an element in the global batch as text: row 3, position 17."""
    assert x.choice is not None
    coords = program.mesh.coords(rank)
    for d in range(len(at)):
        cut = Layout(tuple((a, replace(s, dim=0)) for a, s in x.layout.shards(d)))
        whole = cut.local(torch.arange(x.shape[d]), program.mesh, coords, copies=True)
        at[d] = int(whole[at[d]]) if len(whole) == part.shape[d] else at[d]
    names = {x.choice.rows: "row", 1 if x.choice.rows == 0 and len(at) > 2 else None: "position"}
    words = [f"{names[d]} {i}" for d, i in enumerate(at) if d in names]
    rest = [str(i) for d, i in enumerate(at) if d not in names]
    return ", ".join([*words, f"[{', '.join(rest)}]"])
