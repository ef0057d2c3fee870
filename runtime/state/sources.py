"""Where weights come from: a model, a function that builds one, a state_dict, a file. One form for all: names, shapes,
values.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.runtime.state.init import Recipe, named_tensors, record, record_reset

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Weights:
    """what: "model", "state_dict", "file ..." for messages. shapes: by name, global. get(name, device): the whole
    tensor; it may be the source's own memory and lie on another device. tied(names): are these present names one
    tensor, or equal?
    """

    what: str
    shapes: Shapes
    get: Callable[[str, torch.device], Tensor]
    tied: Callable[[Sequence[str]], bool]


def weights(source: Any, seed: int) -> Weights:
    """The weights in a source; see `shardc.runtime.state.local_parameters` for what it may be."""
    if isinstance(source, nn.Module):
        return _of_module(source, seed)
    if isinstance(source, Recipe):
        return _of_recipe(source, seed)
    if isinstance(source, Mapping):
        return _of_tensors({k: x for k, x in source.items() if isinstance(x, Tensor)}, "state_dict")
    if isinstance(source, (str, Path)):
        return _of_files(Path(source))
    if callable(source):
        return _of_recipe(record(source)[1], seed)
    fix = "pass a model, a function that builds it, a state_dict or the path of one"
    raise ShardcError(f"weights cannot come from a {type(source).__name__}", fix=fix)


def _of_tensors(tensors: Mapping[str, Tensor], what: str) -> Weights:
    def tied(names: Sequence[str]) -> bool:
        return all(
            tensors[n] is tensors[names[0]] or torch.equal(tensors[n], tensors[names[0]]) for n in names if n in tensors
        )

    return Weights(what, {k: tuple(x.shape) for k, x in tensors.items()}, lambda name, _: tensors[name], tied)


def _of_recipe(recipe: Recipe, seed: int) -> Weights:
    def tied(names: Sequence[str]) -> bool:
        return len({recipe.names[n] for n in names if n in recipe.names}) <= 1

    shapes = {k: r.shape for k, r in recipe.names.items()}
    return Weights("model", shapes, lambda name, device: recipe.materialise(name, seed, device), tied)


def _of_module(model: nn.Module, seed: int) -> Weights:
    tensors = dict(named_tensors(model))
    recipe = record_reset(model) if any(x.is_meta for x in tensors.values()) else None

    def get(name: str, device: torch.device) -> Tensor:
        x = tensors[name]
        if not x.is_meta:
            return x
        assert recipe is not None
        return recipe.materialise(name, seed, device)

    shapes = {k: tuple(x.shape) for k, x in tensors.items()}
    return Weights("model", shapes, get, lambda names: len({id(tensors[n]) for n in names if n in tensors}) <= 1)


def _of_files(path: Path) -> Weights:
    """A .safetensors file, or a folder with `model.safetensors` or an index of several files."""
    files = _listed(path)
    handles: dict[Path, Any] = {}
    try:
        handles = {f: safe_open(f, framework="pt") for f in dict.fromkeys(files)}
    except (SafetensorError, OSError) as e:
        fix = "pass a .safetensors file or a folder that holds them"
        raise ShardcError(f"the weights cannot be read: {e}", where=str(path), fix=fix) from e
    at = {name: h for h in handles.values() for name in h.keys()}  # noqa: SIM118 (not a dict)
    shapes = {name: tuple(h.get_slice(name).get_shape()) for name, h in at.items()}

    def tied(names: Sequence[str]) -> bool:
        found = [at[n].get_tensor(n) for n in names if n in at]
        return all(torch.equal(x, found[0]) for x in found[1:])

    return Weights(f"file {path.name}", shapes, lambda name, _: at[name].get_tensor(name), tied)


def _listed(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return [path / f for f in dict.fromkeys(json.loads(index.read_text())["weight_map"].values())]
    found = path / "model.safetensors"
    if found.is_file():
        return [found]
    fix = "pass a .safetensors file, or a folder with model.safetensors or its index"
    raise ShardcError("there are no weights at this path", where=str(path), fix=fix)


#: More names than so many that do not fit are another model's.
_SHOWN = 8


def check_names(errors: Errors, wanted: Shapes, present: Shapes, known: Iterable[str], where: str) -> None:
    """Compare names and shapes: every wanted name must be present with its shape, every present name known. Says what
    is near, or, where little fits, that it is another model.
    """
    known = set(known)
    extra = [n for n in present if n not in known]
    missing = [n for n in wanted if n not in present]
    other = [n for n, shape in wanted.items() if n in present and tuple(present[n]) != tuple(shape)]

    def shapes(name: str) -> str:
        return f"{name} has the shape {list(present[name])} in {where}, and {list(wanted[name])} in the program"

    if len(extra) + len(missing) + len(other) > _SHOWN:
        kinds = ((other, "with another shape"), (missing, "missing"), (extra, "unknown to the program"))
        found = ", ".join(
            f"{len(names)} {what} ({names[0]}{', ...' if names[1:] else ''})" for names, what in kinds if names
        )
        first = f"; {shapes(other[0])}" if other else ""
        errors.add(
            f"{where} is of another model: of {len(wanted)} tensors {found}{first}",
            fix="compile the model that was saved, with its config",
        )
        return
    for name in missing:
        near = difflib.get_close_matches(name, extra or list(present), 1)
        errors.add(
            f"{name} is missing in {where}", fix=f"it has {near[0]}: is it that?" if near else "is it of another model?"
        )
    for name in other:
        errors.add(shapes(name), fix="compile the model that was saved, with its config")
    for name in extra:
        near = difflib.get_close_matches(name, missing or list(wanted), 1)
        errors.add(f"{name} in {where} is unknown to the program", fix=f"is it {near[0]}?" if near else "leave it out")
