"""What users do to a module or its parameters, and a program, which was captured before, would not notice: refused.

A plain model reads `requires_grad`, hooks, the modes of its submodules and their attributes whenever it runs. A program
has read them once; so what changes them later would change nothing, without a word.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Program

_PASS_IT = (
    "make what changes a buffer (register_buffer) or part of the batch; else set it back, or compile again (several"
    " programs: each of its own copy.deepcopy(model))"
)
EVAL_MODE = (
    "the model was in eval mode when it was compiled (from_pretrained returns it so): there is no dropout in training,"
    " either, and batch norm takes its running statistics; call model.train() before compiling"
)
_AGAIN = "compile again after the change, and load the weights (engine.save, engine.load) into what comes out"


def check_as_compiled(program: Program, model: Any) -> None:
    """Raises ShardcError where parameters of a model have been frozen or released since it was compiled. model: as
    engines take it; what is no module says nothing of that.
    """
    if not isinstance(model, nn.Module):
        return
    now = dict(model.named_parameters(remove_duplicate=False))
    errors = Errors()
    for p in program.params:
        for fqn in p.shapes:
            if fqn in now and now[fqn].requires_grad != p.requires_grad:
                _add(errors, fqn, trains=now[fqn].requires_grad)
    errors.raise_any()
    if program.eval_mode and model.training:
        what = "the model was in eval mode when it was compiled, and is in training mode now: a program has no dropout"
        raise ShardcError(what, where="model.train()", fix="call it before compiling")
    if program.check_attributes is not None:
        program.check_attributes(model)


def tell_eval_mode(program: Program, tell: Callable[[str], None]) -> None:
    """Say of a program that was compiled in this process, of a model in eval mode, what that means. (Of one that was
    read from a folder, the commands print the notes.)
    """
    if program.eval_mode and program.check_attributes is not None:
        tell(EVAL_MODE)


def check_attributes(program: Program) -> None:
    """Raises ShardcError where attributes of the model that was compiled, which forward reads, were changed since."""
    if program.check_attributes is not None:
        program.check_attributes()


@dataclass(frozen=True)
class GlobalRead:
    """A name of a Python module that forward reads, with a copy of its value when the model was captured."""

    namespace: dict[str, Any]
    name: str
    value: Any

    @property
    def now(self) -> Any:
        return self.namespace.get(self.name)


class Attributes:
    """Plain values (numbers, strings, bools, None) that forward read while it was captured: attributes of a model's
    modules, and of objects that these hold, by module's name (`values`); names of Python modules (`names`). It does not
    keep the model alive.
    """

    def __init__(
        self, model: nn.Module, values: Mapping[str, Mapping[str, Any]], names: Sequence[GlobalRead] = ()
    ) -> None:
        self._names = tuple(names)
        self._values: dict[str, dict[str, Any]] = {}
        for path, module in model.named_modules():
            read = values.get(path, {})
            # what capture itself had set to another value while it ran is not the user's
            if kept := {name: v for name, v in read.items() if not _differs(_attribute(module, name, v), v)}:
                self._values[path] = kept
        self._modules = [(weakref.ref(m), path) for path, m in model.named_modules() if path in self._values]

    def check(self, model: nn.Module | None = None) -> None:
        """Raises ShardcError for those that are others now. model: another one than was captured; what it does not have
        is not looked at.
        """
        if model is None:
            modules = [(m, path) for ref, path in self._modules if (m := ref()) is not None]
        else:
            modules = [(m, path) for path, m in model.named_modules() if path in self._values]
        errors = Errors()
        for read in self._names:
            if read.now != read.value and read.value == read.value:
                where = f"{read.name} of {read.namespace.get('__name__', 'the model file')}"
                errors.add(_changed(read.now, read.value), where=where, fix=_PASS_IT)
        for module, path in modules:
            for name, then in self._values[path].items():
                if _differs(now := _attribute(module, name, then), then):
                    errors.add(_changed(now, then), where=f"{path}.{name}" if path else name, fix=_PASS_IT)
        errors.raise_any()


def _attribute(module: nn.Module, name: str, otherwise: Any) -> Any:
    """name: perhaps of an object that the module holds: config.scale."""
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return otherwise


def _differs(now: Any, then: Any) -> bool:
    if now is then:
        return False
    return not isinstance(now, (bool, int, float, str)) or (bool(now != then) and then == then)  # nan is as it was


def _changed(now: Any, then: Any) -> str:
    return (
        f"forward reads it, and it was {_text(then)} when the model was compiled; now it is {_text(now)}, which a"
        " program does not see"
    )


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"a {type(value).__name__}"


class Watched:
    """The parameters that an optimizer works on, as they are when it is made.

    sharded: those of which a rank has a stretch (ZeRO): backward does not see them, but what they were cut from.
    partial: those whose gradient is not whole and final when backward brings it: it is summed over ranks later, or is
    that of a part.
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
        self._hooks = {name: _hooks(p) for name, p in params.items()}

    def check(self) -> None:
        """Raises ShardcError for parameters that were released, or, where they are sharded, frozen; and for hooks that
        see another gradient than the whole batch's of the whole parameter.
        """
        errors = Errors()
        for name, p in self._params.items():
            trains, hooks = p.requires_grad, _hooks(p)
            if trains != self._trained[name] and (trains or name in self._sharded):
                _add(errors, self._fqns[name], trains=trains)
            # a hook on the sum is called too early, as the sum over ranks comes later; one on a stretch never
            elif hooks[1] > self._hooks[name][1] or (hooks[0] > self._hooks[name][0] and name in self._partial):
                what = "a hook on this parameter's gradient would not see the gradient of the whole batch and of the"
                what += " whole parameter, or never run"
                errors.add(what, where=self._fqns[name], fix="remove it, and change .grad after backward")
        errors.raise_any()


def check_submodules(root: nn.Module) -> None:
    """Raises ShardcError for submodules of a module that holds parameters for a program, and runs none of them: hooks
    on them, and a mode of their own.
    """
    errors = Errors()
    for name, m in root.named_modules():
        if m is root:
            continue
        if m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks:
            what = "a hook on this submodule would never run: the program replaces its forward and backward"
            errors.add(what, where=name, fix="let the loss function return the value: it comes back beside the loss")
        elif m.training != root.training:
            what = (
                f"this submodule is in {_mode(m)} mode and the module in {_mode(root)} mode, which would change nothing"
            )
            errors.add(what, where=name, fix=f"call eval() on it before shardc.compile; {_AGAIN}")
    errors.raise_any()


class Held(NamedTuple):
    """A parameter of a module. pointer: where it lies, if it may lie nowhere else; 0 if it may. dtype: when made."""

    parameters: Mapping[str, nn.Parameter | None]
    name: str
    parameter: nn.Parameter
    pointer: int
    dtype: torch.dtype
    fqn: str


def check_held(held: Iterable[Held]) -> None:
    """Raises ShardcError for parameters of a module that were replaced, or whose memory was: the program would go on
    with those that it has.
    """
    errors = Errors()
    for h in held:
        p = h.parameters[h.name]
        if p is not h.parameter or p.dtype != h.dtype or (h.pointer and p.data_ptr() != h.pointer):
            errors.add(
                "the module's parameter, or its memory, was replaced: the program has the one that it was made with",
                where=h.fqn,
                fix="write into it: load_state_dict without assign=True, or p.copy_(value) under torch.no_grad();"
                " a dtype is the spec's `precision`",
            )
    errors.raise_any()


def _add(errors: Errors, fqn: str, *, trains: bool) -> None:
    what = "was frozen when the model was compiled, and" if trains else "was trained when the model was compiled, and"
    now = "now requires a gradient, which the program does not compute" if trains else "is frozen now"
    errors.add(f"{what} {now}", where=f"{fqn}.requires_grad", fix=_AGAIN)


def _hooks(p: nn.Parameter) -> tuple[int, int]:
    return len(p._backward_hooks or ()), len(getattr(p, "_post_accumulate_grad_hooks", None) or ())


def _mode(m: nn.Module) -> str:
    return "training" if m.training else "eval"


class NoWrapper:
    """Wrappers that sum gradients themselves ask a module for this attribute first (DistributedDataParallel)."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        raise ShardcError(
            "DistributedDataParallel would sum gradients that are summed already, and send this rank's parts to others",
            where="DistributedDataParallel(module)",
            fix="use the module as it is: backward() sums over all ranks",
        )
