"""Compute weights one by one on the host, from a builder that was recorded without memory.

    model, recipe = record(lambda: GPT(config))                     # the model on the meta device; nothing is allocated
    recipe.materialise("blocks.0.qkv.weight", seed=0)               # that parameter, as after torch.manual_seed(0)

Every rank replays the ops of a tensor (init_tape.py), keeps its part and frees the rest. Nothing is broadcast, and
every mesh gets the numbers that the builder makes on one device.
"""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.runtime.state.boxes import Numbers, Sliced, index
from shardc.runtime.state.init_tape import REAL, Recorder, Ref, Tape
from shardc.runtime.state.pretrained import lazily
from shardc.torch_private import pytree

Builder = Callable[[], nn.Module]


@dataclass(frozen=True)
class Recipe:
    """How to compute each tensor of a model. names: FQN (all tied names) -> place on the tape.

    notes: about weights that the builder read from files. folder: where those came from.
    """

    tape: Tape
    names: dict[str, Ref]
    notes: tuple[str, ...] = ()
    folder: Path | None = None

    def tensors(self, seed: int) -> dict[str, Sliced]:
        """Return each tensor as its source by slice, or computed by `materialise`. Tied ones are one object."""
        one: dict[Ref, Sliced] = {}
        for name, ref in self.names.items():
            if ref not in one:
                read = functools.partial(self._computed, name, seed)
                drawn = functools.partial(self.tape.is_drawn, ref.storage)
                one[ref] = self.tape.source(ref) or Sliced(ref.shape, ref.dtype, read, True, drawn=drawn)
        return {name: one[ref] for name, ref in self.names.items()}

    def _computed(self, fqn: str, seed: int, *box: Numbers) -> Tensor:
        return self.materialise(fqn, seed)[index(*box)]

    def materialise(self, fqn: str, seed: int) -> Tensor:
        """Compute the whole tensor of this name, in the builder's dtype; it may be memory of the builder.

        Raises ShardcError if the builder never initialised it, KeyError if there is no such name.
        """
        ref = self.names[fqn]
        writers = [self.tape.entries[i] for i in self.tape.writers.get(ref.storage, ())]
        if 0 not in ref.shape and all(e.name.removeprefix("new_").startswith("empty") for e in writers):
            places = next((str(e.line) for e in writers), "")
            fault = f"{fqn} is never initialised" + (f" (made at {places})" if places else "")
            fix = f"initialise it where the model is built, or {REAL}"
            raise ShardcError(fault, where=fqn.rpartition(".")[0], fix=fix)
        return self.tape.replay([ref], seed)[0].contiguous()


def record(builder: Builder) -> tuple[nn.Module, Recipe]:
    """Run a zero-argument builder without memory; return (model on the meta device, recipe of its values).

    Raises ShardcError, with the line, if building depends on random values or uses other randomness than torch's.
    """
    with Recorder() as recorder, lazily(recorder):
        before = _foreign_randomness()
        model = builder()
        kind = type(model).__name__
        if not isinstance(model, nn.Module):
            raise ShardcError(f"the builder returned a {kind}, not a torch.nn.Module", fix="return the model")
        for name, was, now in zip(("random", "numpy.random"), before, _foreign_randomness(), strict=True):
            if was != now:
                fault = f"building {kind} draws from Python's module {name}, which would differ from rank to rank"
                raise ShardcError(fault, where=kind, fix=f"draw from torch, or {REAL}")
        names = {name: recorder.ref(x) for name, x in named_tensors(model)}
    _settle_attributes(model, recorder)
    return model, Recipe(recorder.tape, names, tuple(recorder.notes), recorder.folder)


def record_reset(model: nn.Module) -> Recipe:
    """Record every module's `reset_parameters` for a model on the meta device, as FSDP does.

    Only for meta tensors. Raises ShardcError for modules without `reset_parameters`, and for models with a custom
    initialisation, which `reset_parameters` would not follow.
    """
    errors, fix = Errors(), "pass the function that builds the model instead of the model"
    for name, module in model.named_modules():
        if any(hasattr(module, method) for method in ("init_weights", "_init_weights")):
            fault = "the model is on the meta device and has its own initialisation, which had no effect there"
            errors.add(fault, where=name or type(module).__name__, fix=fix)
            break
        if any(t.is_meta for t in _tensors_of(module)) and _reset_of(module) is None:
            fault = f"{type(module).__name__} is on the meta device and has no reset_parameters()"
            errors.add(fault, where=name, fix=fix)
    errors.raise_any()
    duplicate = copy.deepcopy(model)

    unset = {id(x) for _, x in named_tensors(duplicate) if x.is_meta}
    todo = [m for m in duplicate.modules() if any(id(x) in unset for x in _tensors_of(m))]
    fresh: dict[int, Tensor] = {}

    def empty(x: Tensor) -> Tensor:
        return fresh.setdefault(id(x), torch.empty(x.shape, dtype=x.dtype)) if id(x) in unset else x

    def build() -> nn.Module:
        duplicate._apply(empty)  # type: ignore[no-untyped-call]  # tied parameters share memory then
        for module in todo:
            if (reset := _reset_of(module)) is not None:
                reset()
        return duplicate

    return record(build)[1]


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    reset: Any = getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))  # attention
    return reset if callable(reset) else None


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    yield from (x for tensors in (module._parameters, module._buffers) for x in tensors.values() if x is not None)


def named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all names of all parameters and buffers, also of tied and non-persistent ones."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _foreign_randomness() -> tuple[str, str]:
    kind, numbers, *rest = np.random.get_state(legacy=True)
    return str(random.getstate()), str((kind, np.asarray(numbers).tobytes(), rest))


def _settle_attributes(model: nn.Module, recorder: Recorder) -> None:
    """Make tensors in plain attributes real: they are constants of the program, not model state."""

    def real(x: Any) -> Any:
        plain = isinstance(x, Tensor) and not isinstance(x, nn.Parameter) and x.is_meta and id(x) not in registered
        return recorder.value(x) if plain else x

    registered = {id(x) for _, x in named_tensors(model)}
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                leaves, form = pytree.tree_flatten(value)
                if any(isinstance(x, Tensor) for x in leaves):  # else it stays the same object
                    vars(module)[name] = pytree.tree_unflatten(map(real, leaves), form)
