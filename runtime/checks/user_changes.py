"""Refuse or note changes of a model, a module or its parameters that a captured program would not notice.

A plain model reads `requires_grad`, hooks, and the modes and attributes of its submodules in every run. A program
has read them once, so later changes would silently have no effect.

An engine or a module has copies of the weights. A user who freezes a layer of the model after the first epoch, or loads
weights into it, means to change the training, so each kind of change of the `SourceModel` gets one note. It is no
error: the model may now be used for something else, such as a fixed teacher.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Program
from shardc.runtime.checks.hooks import Model
from shardc.runtime.stage.clip_grad_norm import norm_axes

#: {name of the changed thing: note}.
Notes = dict[str, str]

_PASS_IT = (
    "make the changing value a buffer (register_buffer) or part of the batch; else set it back, or compile again (for "
    "several programs, compile each from its own copy.deepcopy(model))"
)
EVAL_MODE = (
    "the model was in eval mode when it was compiled (from_pretrained returns it so): training has no dropout either, "
    "and batch norm uses its running statistics; call model.train() before compiling"
)
FIX_FREEZE = "set the same requires_grad on all ranks"
_PERHAPS = "; compile again if it matters"
_HOOKED = (
    "a hook was added after the model was compiled, and never runs: add it before shardc.compile, or let the loss"
    " function return the value, which is then returned beside the loss"
)
_NOTHING = object()
_AGAIN = "compile again after the change, and load the weights (save, load) into the new program"
#: {kind of change (`Snapshot.changes`) of the model that weights were taken from: the fix in a note}.
_OF_SOURCE = {
    **dict.fromkeys(("a new module", "another module", "a hook", "a gradient hook", "requires_grad"), _AGAIN),
    **dict.fromkeys(("in training mode", "in eval mode"), _AGAIN),
    "its dtype": "it is the spec's `precision`",
    **dict.fromkeys(
        ("another parameter", "its values"),
        "to train new values, make {made} after they are written, or pass them as `weights`",
    ),
}
_CHANGED = ", but the program is of the model at compile time: the change would not be used or trained"
_CHANGE_BEFORE = (
    "change the model before shardc.compile; trained weights are kept by"
    " program.module(model, weights=old.full_state_dict())"
)
#: {kind of change of a program's module: (error, fix)}.
_OF_MODULE = {
    "a new module": (f"this submodule is new{_CHANGED}", _CHANGE_BEFORE),
    "another module": (f"this submodule was replaced or removed{_CHANGED}", _CHANGE_BEFORE),
    "a new parameter": (f"this parameter is new{_CHANGED}", _CHANGE_BEFORE),
    **dict.fromkeys(
        ("another parameter", "its dtype", "its memory"),
        (
            "the module's parameter, or its memory, was replaced: the program still uses the old one",
            "write into it: load_state_dict without assign=True, or p.copy_(value) under torch.no_grad(); a dtype is"
            " the spec's `precision`; for torch.func.functional_call make a module of these weights,"
            " program.module(model, weights=state_dict)",
        ),
    ),
    "a hook": (
        "a hook on this submodule would never run: the program replaces its forward and backward",
        "let the loss function return the value: it is returned beside the loss",
    ),
}
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


def check_as_compiled(program: Program, model: Any, *, built: bool) -> Notes:
    """Raise ShardcError if parameters of a model were frozen or released since it was compiled.

    model: as passed to an engine; only modules are checked. built: made by a function, in a mode that nobody chose.
    """
    if not isinstance(model, nn.Module):
        return {}
    now = dict(model.named_parameters(remove_duplicate=False))
    errors = Errors()
    notes: Notes = {}
    casts = not built and program.spec.precision.params is None
    owners: dict[int, str] = {}  # id of a tensor -> the program's parameter that holds it
    for p, fqn in ((x, n) for x in program.params for n in x.shapes if n in now):
        trains, dtype = now[fqn].requires_grad, now[fqn].dtype
        if trains != p.requires_grad and not (p.frozen or program.forward_only):
            _add(errors, fqn, trains=trains)
        if (other := owners.setdefault(id(now[fqn]), p.fqn)) != p.fqn:
            fault = f"it is one tensor with {other} now, but the program has two"
            errors.add(fault, where=fqn, fix="tie weights, or untie them, before shardc.compile")
        if casts and dtype.is_floating_point and dtype.itemsize < p.dtype.itemsize:
            old, new = (str(d).removeprefix("torch.") for d in (p.dtype, dtype))
            note = f"its weights were {old} when it was compiled, and are {new} now: they are held as {old} again"
            notes["the model's dtype"] = f"{note}; `precision:` of the spec says in which dtype it computes"
    errors.raise_any()
    if program.eval_mode and model.training and not built:
        fault = "the model was in eval mode when it was compiled, and is in training mode now: a program has no dropout"
        fix = "call it before compiling; to train without dropout, call eval() on the model that is passed here"
        raise ShardcError(fault, where="model.train()", fix=fix)
    if model.training and not built:
        _check_still(program.still, {name: m.training for name, m in model.named_modules()}, "model")
    if program.check_attributes is not None:
        notes |= program.check_attributes(model.named_modules())
    return notes


def version_of(x: Tensor) -> int:
    """Return autograd's count of writes to a tensor; 0 for an inference tensor, which has none."""
    return 0 if x.is_inference() else x._version


class Attributes:
    """Plain values (numbers, strings, bools, None) that forward read while it was captured.

    values: attributes of modules, and of objects that these hold, by the module's name; of_loss: of a loss that is an
    object; tensors: (line that reads it, a constant of the program that is not the model's). Does not keep the model
    alive. A changed object or tensor is only a note: forward may read it for a log, or not at all.
    """

    def __init__(
        self,
        model: nn.Module,
        values: Mapping[str, Mapping[str, Any]],
        of_loss: tuple[Any, Mapping[str, Any]] = (None, {}),
        tensors: Iterable[tuple[str, Tensor]] = (),
    ) -> None:
        self._of_loss = of_loss
        self._tensors = [(line, x, version_of(x)) for line, x in tensors]
        modules = dict(model.named_modules())
        self._hooks = {path: n for path, m in modules.items() if (n := hooks_of(m))}
        self._kinds = {path: _kind(m) for path, m in modules.items()}
        self._values: dict[str, list[tuple[str, tuple[str, ...], Any]]] = {}
        for path, module in ((path, m) for path, m in modules.items() if path in values):
            read = [(f"{path}.{n}" if path else n, tuple(n.split(".")), v) for n, v in values[path].items()]
            # a value that capture itself changed while it ran is no change of the user's
            if kept := [each for each in read if not _differs(_attribute(module, each[1], _NOTHING), each[2])]:
                self._values[path] = kept
        self._modules = [(weakref.ref(modules[path]), path) for path in self._values]

    def check(self, modules: Iterable[tuple[str, nn.Module]] | None = None) -> Notes:
        """Raise ShardcError for changed attributes of modules; return notes on objects and names.

        modules: of another model than the captured one, with paths; what they do not have is not checked.
        """
        if modules is None:
            modules = [(path, m) for ref, path in self._modules if (m := ref()) is not None]
        errors = Errors()
        notes: Notes = {}
        for path, module in modules:
            if hooks_of(module) > self._hooks.get(path, 0) and not getattr(module, "runs_hooks", False):
                notes[path or "the model"] = _HOOKED
            then, now = self._kinds.get(path), _kind(module)
            if then not in (None, now) and not getattr(module, "runs_hooks", False):
                fault = f"it was {then} when the model was compiled, and is {now} now, which a program does not see"
                notes[f"the class of {path or 'the model'}"] = fault + _PERHAPS
            if path not in self._values:
                continue
            for name, parts, then in self._values[path]:
                if not _differs(now := _attribute(module, parts, then), then):
                    continue
                if len(parts) > 1:
                    notes[name] = _changed("forward read it", now, then) + _PERHAPS
                else:
                    errors.add(_changed("forward reads it", now, then), where=name, fix=_PASS_IT)
        errors.raise_any()
        loss, settings = self._of_loss
        for name, then in settings.items():
            if _differs(now := _attribute(loss, (name,), then), then):
                notes[f"{name} of {type(loss).__name__}()"] = _changed("the loss read it", now, then) + _PERHAPS
        for line, x, version in self._tensors:
            if version_of(x) != version:
                notes[line] = (
                    f"a tensor of shape {list(x.shape)} that is read here was written to, and the program has it as it"
                    " was when the model was compiled: make it a buffer of the model, an entry of the batch, or compile"
                    " again"
                )
        return notes


def _kind(m: nn.Module) -> str:
    """Return a module's class, and whether its forward was replaced; parts of a program's module have shardc's."""
    forward = vars(m).get("forward", hooks_of)
    return type(m).__name__ + " with another forward" * (not getattr(forward, "__module__", "").startswith("shardc."))


def _attribute(thing: Any, parts: Iterable[str], otherwise: Any) -> Any:
    """Return an attribute of an attribute, as stored: runs no property and no __getattr__."""
    for name in parts:
        try:
            attributes = vars(thing)
        except TypeError:
            attributes = {}
        if name in attributes:
            thing = attributes[name]
            continue
        thing = next((vars(c)[name] for c in type(thing).__mro__ if name in vars(c)), _NOTHING)
        if thing is _NOTHING or hasattr(type(thing), "__get__"):
            return otherwise
    return thing


def _differs(now: Any, then: Any) -> bool:
    """Compare values. then: a number, string, bool or None. now: anything; an array is not compared."""
    if now is then:
        return False
    return not isinstance(now, (bool, int, float, str)) or (bool(now != then) and not (now != now and then != then))


def _changed(how: str, now: Any, then: Any) -> str:
    then, now = _text(then), _text(now)
    return f"{how}, and it was {then} when the model was compiled; now it is {now}, but a program does not see it"


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


class WatchedParameters:
    """The parameters that an optimizer steps, as they are when the model is new."""

    def __init__(self, model: Model) -> None:
        self._params, program = model.owned, model.program
        #: Those of which a rank has a flat shard (ZeRO): backward sees what they were cut from.
        self._sharded = model.buckets.shards.keys()
        #: Those whose gradient is not whole and final after backward: it is summed later, or is that of a part.
        self._partial = model.buckets.names | {n for n in model.owned if norm_axes(program, n)}
        self._fqns = {p.name: p.fqn for p in program.params}
        self._then = {name: _Parameter.of(p) for name, p in model.owned.items()}

    def check(self) -> None:
        """Raise ShardcError for released parameters, frozen sharded ones, and hooks on partial gradients."""
        errors = Errors()
        for name, p in self._params.items():
            then, (before, after) = self._then[name], hook_counts(p)
            if p.requires_grad != then.trains and (p.requires_grad or name in self._sharded):
                _add(errors, self._fqns[name], trains=p.requires_grad)
            # a hook on a summed gradient runs too early, before the sum over ranks; one on a flat shard never runs
            elif after > then.hooks[1] or (before > then.hooks[0] and name in self._partial):
                fault = "a hook on this parameter's gradient would not see the gradient of the whole batch and of the"
                fault += " whole parameter, or never run"
                errors.add(fault, where=self._fqns[name], fix="remove it, and change .grad after backward")
        errors.raise_any()

    def frozen(self) -> str:
        """Return names of parameters that trained when this was made, and no longer do."""
        return ", ".join(self._fqns[n] for n, p in self._params.items() if self._then[n].trains and not p.requires_grad)


def _check_still(still: Collection[str], training: Mapping[str, bool], model: str) -> None:
    """Raise ShardcError for submodules that train now, and were in eval mode at capture.

    Names the outermost of nested ones.
    """
    woken = [name for name in still if training.get(name)]
    errors = Errors()
    for name in woken:
        if not any(name.startswith(f"{outer}.") for outer in woken):
            fault = "this submodule was in eval mode when the model was compiled, and is in training mode now, which"
            fault += f" would change nothing: {model}.train() does that to all of them"
            fix = f"call {model}.{name}.eval() after {model}.train(); or, to train it, train() before shardc.compile"
            errors.add(fault, where=name, fix=fix)
    errors.raise_any()


def check_module(then: Snapshot, still: Collection[str]) -> None:
    """Raise ShardcError for changes of a module whose submodules only hold a program's parameters.

    then: the module when it was made. still: submodules in eval mode at capture, and in training too.
    """
    root = then.model()
    assert root is not None, "its forward runs"
    (_, _), *others = root.named_modules()
    if root.training:
        _check_still(still, {name: m.training for name, m in others}, "module")
    changed: dict[tuple[str, str], list[str]] = {}
    for kind, name in then.changes():
        if name and kind in _OF_MODULE:  # hooks on the module itself run
            changed.setdefault(_OF_MODULE[kind], []).append(name)
    errors = Errors()
    for (fault, fix), names in changed.items():
        more = f" ({len(names)} such)" if len(names) > 1 else ""
        errors.add(f"{fault}{more}", where=f"module.{names[0]}", fix=fix)
    for name, m in others:
        if m.training != root.training and not any(f"{name}.".startswith(f"{outer}.") for outer in still):
            modes = [f"in {'training' if x.training else 'eval'} mode" for x in (m, root)]
            fault = f"this submodule is {modes[0]} and the module {modes[1]}, which would change nothing"
            errors.add(fault, where=name, fix=f"call eval() on it before shardc.compile; {_AGAIN}")
    errors.raise_any()


def _add(errors: Errors, fqn: str, *, trains: bool) -> None:
    fault = "was frozen when the model was compiled, and" if trains else "was trained when the model was compiled, and"
    now = "now requires a gradient, but the program does not compute one" if trains else "is frozen now"
    errors.add(f"{fault} {now}", where=f"{fqn}.requires_grad", fix=_AGAIN)


def hooks_of(m: nn.Module) -> int:
    """Count the hooks of a module and of the gradients of its direct parameters."""
    return _module_hooks(m) + sum(sum(hook_counts(p)) for p in m._parameters.values() if p is not None)


def _module_hooks(m: nn.Module) -> int:
    return sum(map(len, (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)))


def hook_counts(p: nn.Parameter) -> tuple[int, int]:
    """Count the hooks on a parameter's gradient: (before, after accumulation)."""
    return len(p._backward_hooks or ()), len(getattr(p, "_post_accumulate_grad_hooks", None) or ())


# --- a model as it was ------------------------------------------------------------------------------------------------


class _Parameter(NamedTuple):
    """A parameter as it was. pointer: its address, 0 if it may move."""

    parameter: weakref.ref[Tensor]
    version: int
    trains: bool
    dtype: torch.dtype
    hooks: tuple[int, int]
    pointer: int = 0

    @classmethod
    def of(cls, p: nn.Parameter, *, fixed: bool = False) -> _Parameter:
        at = p.data_ptr() if fixed else 0
        return cls(weakref.ref(p), version_of(p), p.requires_grad, p.dtype, hook_counts(p), at)

    def changes(self, p: nn.Parameter) -> Iterator[str]:
        if p.requires_grad != self.trains:
            yield "requires_grad"
        if sum(hook_counts(p)) > sum(self.hooks):
            yield "a gradient hook"
        if p.dtype != self.dtype:
            yield "its dtype"
        elif self.parameter() is not p:
            yield "another parameter"
        elif self.pointer and p.data_ptr() != self.pointer:
            yield "its memory"
        elif version_of(p) != self.version:
            yield "its values"


class _Module(NamedTuple):
    """A submodule as it was."""

    module: weakref.ref[nn.Module]
    training: bool
    hooks: int
    parameters: dict[str, _Parameter | None]


class Snapshot:
    """A model as it is now, to compare it later; it is not kept alive. fixed: parameters whose memory never moves."""

    def __init__(self, model: nn.Module, fixed: Iterable[nn.Parameter] = ()) -> None:
        self.model, ids = weakref.ref(model), {id(p) for p in fixed}
        self.modules: dict[str, _Module] = {}
        for path, m in model.named_modules(remove_duplicate=False):
            held = {n: p if p is None else _Parameter.of(p, fixed=id(p) in ids) for n, p in m._parameters.items()}
            self.modules[path] = _Module(weakref.ref(m), m.training, _module_hooks(m), held)

    def changes(self) -> Iterator[tuple[str, str]]:
        """Yield (kind of change, name of what changed)."""
        model: Any = self.model()
        modules: dict[str, nn.Module] = dict(model.named_modules(remove_duplicate=False))
        for path, m in modules.items():
            then = self.modules.get(path)
            if then is None or id(then.module()) != id(m):
                yield "a new module" if then is None else "another module", path
                continue
            if _module_hooks(m) > then.hooks:
                yield "a hook", path
            if m.training != then.training:
                yield "in training mode" if m.training else "in eval mode", path
            for name, p in m._parameters.items():
                if (was := then.parameters.get(name)) is not None and p is not None:
                    for kind in was.changes(p):
                        yield kind, f"{path}.{name}" if path else name
                elif p is not None:
                    yield "a new parameter", f"{path}.{name}" if path else name
        for path in self.modules.keys() - modules.keys():
            yield "another module", path


# --- the model that an engine or a module took its weights from -------------------------------------------------------


class SourceModel:
    """A model as it was when `made` was made of it; it is not kept alive.

    Other sources (a builder, a folder) cannot change.
    """

    def __init__(self, model: Any, made: str, rank: int, *, copied: bool = False) -> None:
        """Record the model. copied: `made` is a copy, such as an average of weights, which nobody trains."""
        self._made, self._rank = made, rank
        self._then = Snapshot(model) if isinstance(model, nn.Module) else None
        #: The user got the trained weights, so new values in the model may be these.
        self.weights_were_read = False
        self._used = False
        #: The class of an optimizer that steps the model, whose parameters have no gradients.
        self.idle_optimizer = ""
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
                    if t is not self and t._rank == self._rank and t._then is not None:
                        self._others.setdefault(t, path)
                        t._others.setdefault(self, next(p for p, x in t._then.modules.items() if x.module() is m))
                takers.add(self)

    def stepping(self, optimizer: Optimizer) -> None:
        """Record an optimizer that steps the source model: see optimizer_steps."""
        model = self._then.model() if self._then is not None else None
        if model is None or not self._used or self.idle_optimizer:
            return
        ids = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is None}
        # an engine that steps bucket by bucket calls this often, but its parameters have gradients: `ids` is empty
        if ids and any(id(p) in ids for p in model.parameters()):
            self.idle_optimizer = type(optimizer).__name__

    def notes(self, noted: set[str]) -> Iterator[str]:
        """Yield the notes of kinds that are new. noted: new ones are added."""
        if self._then is None or (model := self._then.model()) is None:
            return
        self._used = True
        with _LOCK:
            shared = next((path for t, path in self._others.items() if t._used), None)
        names: dict[str, list[str]] = {}
        if shared is not None:
            names[_TWICE] = [shared or "the model"]
        if self.idle_optimizer:
            names[_IN_VAIN] = [f"the optimizer {self.idle_optimizer}"]
        left_out = {"another parameter", "its values"} if self.weights_were_read else set[str]()
        if not (model.training and self._then.modules[""].training):  # to use the model, its user calls eval()
            left_out |= {"in training mode", "in eval mode"}
        for kind, name in self._then.changes():
            fault = f"{kind}, changed after {{made}} was made from the model: {{made}} has a copy, and this does not"
            if kind in _OF_SOURCE.keys() - left_out:
                names.setdefault(f"{fault} change it; {_OF_SOURCE[kind]}", []).append(name)
        for fault in [f for f in names if f not in noted]:
            noted.add(fault)
            more = f" and {len(names[fault]) - 1} more" if len(names[fault]) > 1 else ""
            yield f"{names[fault][0]}{more}: {fault.format(made=self._made)}"
