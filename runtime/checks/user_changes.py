"""Refuse changes of a module or its parameters that a captured program would not notice.

A plain model reads `requires_grad`, hooks, and the modes and attributes of its submodules in every run. A program
has read them once, so later changes would silently have no effect.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from traceback import walk_stack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Program

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
_AGAIN = "compile again after the change, and load the weights (engine.save, engine.load) into the new program"


def check_as_compiled(program: Program, model: Any, *, built: bool) -> Notes:
    """Raise ShardcError if parameters of a model were frozen or released since it was compiled.

    model: as passed to an engine; only modules are checked. built: made by a function, in a mode that nobody chose.
    """
    if not isinstance(model, nn.Module):
        return {}
    now = dict(model.named_parameters(remove_duplicate=False))
    errors = Errors()
    owners: dict[int, str] = {}  # id of a tensor -> the program's parameter that holds it
    for p in program.params:
        for fqn in p.shapes:
            if fqn in now and now[fqn].requires_grad != p.requires_grad and not (p.frozen or program.forward_only):
                _add(errors, fqn, trains=now[fqn].requires_grad)
            if fqn in now and (other := owners.setdefault(id(now[fqn]), p.fqn)) != p.fqn:
                fault = f"it is one tensor with {other} now, but the program has two"
                errors.add(fault, where=fqn, fix="tie weights, or untie them, before shardc.compile")
    errors.raise_any()
    if program.eval_mode and model.training and not built:
        fault = "the model was in eval mode when it was compiled, and is in training mode now: a program has no dropout"
        fix = "call it before compiling; to train without dropout, call eval() on the model that is passed here"
        raise ShardcError(fault, where="model.train()", fix=fix)
    if model.training and not built:
        _check_still(program.still, {name: m.training for name, m in model.named_modules()}, "model")
    notes = program.check_attributes(model.named_modules()) if program.check_attributes is not None else {}
    return notes if built else {**notes, **_other_dtype(program, now)}


def _other_dtype(program: Program, now: Mapping[str, nn.Parameter]) -> Notes:
    """Return a note if the model was cast to fewer bits since compiling: the program keeps its dtypes."""
    if program.spec is None or program.spec.precision.params is not None:
        return {}
    for p in program.params:
        x = now.get(p.fqn)
        if x is not None and x.dtype.is_floating_point and x.element_size() < p.dtype.itemsize:
            old, new = (str(d).removeprefix("torch.") for d in (p.dtype, x.dtype))
            note = f"its weights were {old} when it was compiled, and are {new} now: they are held as {old} again"
            return {"the model's dtype": f"{note}; `precision:` of the spec says in which dtype it computes"}
    return {}


@dataclass(frozen=True)
class TensorRead:
    """A tensor of neither model nor batch that forward or the loss reads: a constant of the program.

    version: autograd's write count at capture. line: where it is read.
    """

    tensor: Tensor
    version: int
    line: str

    @classmethod
    def of(cls, tensor: Tensor, line: str) -> TensorRead:
        return cls(tensor, version_of(tensor), line)

    @property
    def changed(self) -> bool:
        return version_of(self.tensor) != self.version


def version_of(x: Tensor) -> int:
    """Return autograd's count of writes to a tensor; 0 for an inference tensor, which has none."""
    return 0 if x.is_inference() else x._version


class Attributes:
    """Plain values (numbers, strings, bools, None) that forward read while it was captured.

    values: attributes of modules, and of objects that these hold, by the module's name; of_loss: of a loss that is an
    object; tensors: not the model's. Does not keep the model alive. A changed object or tensor is only a note: forward
    may read it for a log, or not at all.
    """

    def __init__(
        self,
        model: nn.Module,
        values: Mapping[str, Mapping[str, Any]],
        of_loss: tuple[Any, Mapping[str, Any]] = (None, {}),
        tensors: Sequence[TensorRead] = (),
    ) -> None:
        self._of_loss, self._tensors = of_loss, tuple(tensors)
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
        for tensor in self._tensors:
            if tensor.changed:
                shape = list(tensor.tensor.shape)
                notes[tensor.line] = (
                    f"a tensor of shape {shape} that is read here was written to, and the program has it as it was when"
                    " the model was compiled: make it a buffer of the model, an entry of the batch, or compile again"
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
    """The parameters of an optimizer, as they are when it is made.

    sharded: those of which a rank has a flat shard (ZeRO): backward sees what they were cut from. partial: those whose
    gradient is not whole and final after backward: it is summed over ranks later, or is that of a part.
    """

    def __init__(
        self,
        program: Program,
        params: Mapping[str, nn.Parameter],
        sharded: Collection[str],
        partial: Collection[str],
    ) -> None:
        self._params, self._sharded, self._partial = params, sharded, partial
        self._fqns = {p.name: p.fqn for p in program.params}
        self._trained = {name: p.requires_grad for name, p in params.items()}
        self._hooks = {name: hook_counts(p) for name, p in params.items()}

    def check(self) -> None:
        """Raise ShardcError for released parameters, frozen sharded ones, and hooks on partial gradients."""
        errors = Errors()
        for name, p in self._params.items():
            trains, hooks = p.requires_grad, hook_counts(p)
            if trains != self._trained[name] and (trains or name in self._sharded):
                _add(errors, self._fqns[name], trains=trains)
            # a hook on a summed gradient runs too early, before the sum over ranks; one on a flat shard never runs
            elif hooks[1] > self._hooks[name][1] or (hooks[0] > self._hooks[name][0] and name in self._partial):
                fault = "a hook on this parameter's gradient would not see the gradient of the whole batch and of the"
                fault += " whole parameter, or never run"
                errors.add(fault, where=self._fqns[name], fix="remove it, and change .grad after backward")
        errors.raise_any()

    def frozen(self) -> str:
        """Return names of parameters that trained when this was made, and no longer do."""
        return ", ".join(self._fqns[n] for n, p in self._params.items() if self._trained[n] and not p.requires_grad)


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


def check_submodules(modules: Iterable[tuple[str, nn.Module]], still: Collection[str]) -> None:
    """Raise ShardcError for hooks and different modes of submodules that only hold a program's parameters.

    modules: with names, the root first. still: in eval mode at capture, and in training too.
    """
    (_, root), *others = modules
    if root.training:
        _check_still(still, {name: m.training for name, m in others}, "module")
    errors = Errors()
    for name, m in others:
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            fault = "a hook on this submodule would never run: the program replaces its forward and backward"
            errors.add(fault, where=name, fix="let the loss function return the value: it is returned beside the loss")
        elif m.training != root.training and not any(f"{name}.".startswith(f"{outer}.") for outer in still):
            fault = (
                f"this submodule is in {_mode(m)} mode and the module in {_mode(root)} mode, which would change nothing"
            )
            errors.add(fault, where=name, fix=f"call eval() on it before shardc.compile; {_AGAIN}")
    errors.raise_any()


class ModuleParam(NamedTuple):
    """A parameter of a module. pointer: its address, 0 if it may move. dtype: when made."""

    parameters: Mapping[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter
    pointer: int
    dtype: torch.dtype
    fqn: str


def check_not_replaced(held: Iterable[ModuleParam]) -> None:
    """Raise ShardcError if a module's parameter or its memory was replaced: the program uses the old."""
    replaced: list[ModuleParam] = []
    for h in held:
        p = h.parameters.get(h.name)
        if p is not h.parameter or p.dtype != h.dtype or (h.pointer and p.data_ptr() != h.pointer):
            replaced.append(h)
    if replaced:
        if _within("functional_call"):
            raise ShardcError(
                "it replaces parameters by other tensors, but the program uses its own",
                where=f"torch.func.functional_call(module, {{{replaced[0].fqn!r}: ...}})",
                fix="write them in, and back after the call: p.copy_(value) under torch.no_grad(); for whole weights "
                "make a separate module, program.module(model, weights=state_dict)",
            )
        more = f" ({len(replaced)} such)" if len(replaced) > 1 else ""
        raise ShardcError(
            f"the module's parameter, or its memory, was replaced: the program still uses the old one{more}",
            where=replaced[0].fqn,
            fix="write into it: load_state_dict without assign=True, or p.copy_(value) under torch.no_grad();"
            " a dtype is the spec's `precision`",
        )


def _within(name: str) -> bool:
    """Return whether a torch function of this name is on the call stack."""
    return any(
        f.f_code.co_name == name and f.f_globals.get("__name__", "").startswith("torch.") for f, _ in walk_stack(None)
    )


def _add(errors: Errors, fqn: str, *, trains: bool) -> None:
    fault = "was frozen when the model was compiled, and" if trains else "was trained when the model was compiled, and"
    now = "now requires a gradient, but the program does not compute one" if trains else "is frozen now"
    errors.add(f"{fault} {now}", where=f"{fqn}.requires_grad", fix=_AGAIN)


def hooks_of(m: nn.Module) -> int:
    """Count the hooks of a module and of the gradients of its direct parameters."""
    hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
    return sum(map(len, hooks)) + sum(sum(hook_counts(p)) for p in m._parameters.values() if p is not None)


def hook_counts(p: nn.Parameter) -> tuple[int, int]:
    """Count the hooks on a parameter's gradient: (before, after accumulation)."""
    return len(p._backward_hooks or ()), len(getattr(p, "_post_accumulate_grad_hooks", None) or ())


def _mode(m: nn.Module) -> str:
    return "training" if m.training else "eval"
