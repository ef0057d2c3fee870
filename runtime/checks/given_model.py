"""Warn when the source model changes after an engine or a module copied its weights.

They have copies, and the program is what was captured. A user who freezes a layer of the model after the first epoch,
or loads weights into it, means to change the training, so each kind of change gets one note. It is no error: the model
may now be used for something else, such as a fixed teacher.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.runtime.checks.user_changes import Notes, hooks_of, version_of

_LOST = "changed after {made} was made from the model: {made} has a copy, and this does not change it; "
_AGAIN = "compile again after the change, and load the weights (save, load) into the result"
_WEIGHTS = "to train new values, make {made} after they are written, or pass them as `weights`"
_TWICE = (
    "another engine or module was made from it and is used too: it and {made} each have a copy of the weights. To train"
    " one, compile a model that computes both losses; or copy the weights after each step, a.weights_to(b)"
)
_IN_VAIN = (
    "it steps the parameters of the model, which get no gradients: {made} trains a copy of them with its own "
    "optimizer. Pass this one as a function, program.engine(model, optimizer=lambda params: ...), and remove its step"
)
#: {module: the living objects that took weights from it or from a model around it}; ranks may be threads.
_LOCK = threading.Lock()
_TAKERS: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet[SourceModel]] = weakref.WeakKeyDictionary()


class _Parameter(NamedTuple):
    """A parameter as it was when the model's weights were taken."""

    parameter: weakref.ref[Tensor]
    version: int
    trains: bool
    dtype: torch.dtype


class _Module(NamedTuple):
    """A submodule as it was when the model's weights were taken."""

    module: weakref.ref[nn.Module]
    training: bool
    hooks: int
    parameters: dict[str, _Parameter]


class SourceModel:
    """A model as it was when `made` was made of it; it is not kept alive.

    Other sources (a builder, a folder) cannot change.
    """

    def __init__(self, model: Any, made: str, rank: int, *, copied: bool = False) -> None:
        """Record the model. copied: `made` is a copy, such as an average of weights, which nobody trains."""
        self._made, self._rank = made, rank
        self._model = weakref.ref(model) if isinstance(model, nn.Module) else None
        self._then = dict(_modules(model)) if isinstance(model, nn.Module) else {}
        #: The user got the trained weights, so new values in the model may be these.
        self.weights_were_read = False
        self._used = False
        self._idle_optimizer = ""  # the class of an optimizer that steps the model, whose parameters have no gradients
        #: Others that took the same weights, and the shared module: for example a discriminator inside two models.
        self._others: weakref.WeakKeyDictionary[SourceModel, str] = weakref.WeakKeyDictionary()
        if isinstance(model, nn.Module) and not copied:
            self._join(model)

    def _join(self, model: nn.Module) -> None:
        with _LOCK:
            for path, m in model.named_modules():
                if path and not m._parameters:
                    continue
                takers = _TAKERS.setdefault(m, weakref.WeakSet())
                for t in takers:
                    if t is not self and t._rank == self._rank:
                        self._others.setdefault(t, path)
                        t._others.setdefault(self, next(p for p, x in t._then.items() if x.module() is m))
                takers.add(self)

    def stepping(self, optimizer: Optimizer) -> None:
        """Record an optimizer that steps the source model: see every_optimizer."""
        model = self._model() if self._model is not None else None
        if model is None or not self._used or self._idle_optimizer:
            return
        ids = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is None}
        # an engine that steps bucket by bucket calls this often, but its parameters have gradients: `ids` is empty
        if ids and any(id(p) in ids for p in model.parameters()):
            self._idle_optimizer = type(optimizer).__name__

    def notes(self, noted: set[str]) -> Iterator[str]:
        """Yield the notes of kinds that are new. noted: new ones are added."""
        model: nn.Module | None = self._model() if self._model is not None else None
        if model is None:
            return
        self._used = True
        with _LOCK:
            shared = next((path for t, path in self._others.items() if t._used), None)
        twice = {shared or "the model": _TWICE.format(made=self._made)} if shared is not None else {}
        for name, fault in (twice | self._changes(model)).items():
            if fault not in noted:
                noted.add(fault)
                yield f"{name}: {fault}"

    def _changes(self, model: nn.Module) -> Notes:
        """Return {names of changed things: note}, one per kind of change."""
        lost = _LOST.format(made=self._made)
        by_fault: dict[str, list[str]] = {}
        if self._idle_optimizer:
            by_fault[_IN_VAIN.format(made=self._made)] = [f"the optimizer {self._idle_optimizer}"]
        for path, m in model.named_modules():
            then = self._then.get(path)
            same: Any = then.module() if then is not None else None
            if then is None or m is not same:
                by_fault.setdefault(f"another module, {lost}{_AGAIN}", []).append(path)
                continue
            if hooks_of(m) > then.hooks:
                by_fault.setdefault(f"a hook, {lost}{_AGAIN}", []).append(path)
            if model.training and self._then[""].training and m.training != then.training:
                mode = "training" if m.training else "eval"
                by_fault.setdefault(f"in {mode} mode, {lost}{_AGAIN}", []).append(path)
            for name, was in then.parameters.items():
                p, fqn = m._parameters.get(name), f"{path}.{name}" if path else name
                original: Any = was.parameter()
                if p is None:
                    continue
                if p.requires_grad != was.trains:
                    by_fault.setdefault(f"requires_grad, {lost}{_AGAIN}", []).append(fqn)
                if p.dtype != was.dtype:
                    by_fault.setdefault(f"its dtype, {lost}it is the spec's `precision`", []).append(fqn)
                elif not self.weights_were_read and (original is not p or version_of(p) != was.version):
                    by_fault.setdefault(f"its values, {lost}{_WEIGHTS.format(made=self._made)}", []).append(fqn)
        notes: Notes = {}
        for fault, names in by_fault.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            notes[f"{names[0]}{more}"] = fault
        return notes


def _modules(model: nn.Module) -> Iterator[tuple[str, _Module]]:
    for path, m in model.named_modules():
        parameters = {
            name: _Parameter(weakref.ref(p), version_of(p), p.requires_grad, p.dtype)
            for name, p in m._parameters.items()
            if p is not None
        }
        yield path, _Module(weakref.ref(m), m.training, hooks_of(m), parameters)
