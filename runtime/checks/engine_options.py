"""Check options of engines and modules, and explain what other trainers have instead."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from shardc.errors import Errors, ShardcError
from shardc.ir.program import Program
from shardc.ir.similar_names import nearest

_OF_OPTIMIZERS = ("lr", "weight_decay", "betas", "momentum", "eps")


#: Options that `engine.set` changes during training.
SETTABLE = ("clip_norm", "norm", "nonfinite", "check_every")


def check_options(call: str, made: type, options: Mapping[str, Any]) -> None:
    """Raise ShardcError for an unknown option, with the nearest one. call: of Program; made: its result."""
    known = [n for n in inspect.signature(made).parameters if n not in ("program", "model")]
    errors = Errors()
    for name in (n for n in options if n not in known):
        lr = f"optimizer=lambda params: torch.optim.AdamW(params, {name}=...)" if "optimizer" in known else ""
        _add_unknown(errors, name, f"program.{call}({name}=...)", known, lr)
    errors.raise_any()


def check_settable(made: type, options: Mapping[str, Any]) -> None:
    """Raise ShardcError for options that `engine.set` cannot change, or does not know."""
    errors = Errors()
    for name in (n for n in options if n not in SETTABLE):
        where = f"engine.set({name}=...)"
        if name in _HELD or name in _options(made):
            errors.add("an engine cannot change this once made", where=where, fix=_fix_for(name))
        else:
            lr = f"for g in engine.optimizer.param_groups: g[{name!r}] = ..., on all ranks"
            _add_unknown(errors, name, where, SETTABLE, lr)
    errors.raise_any()


def _add_unknown(errors: Errors, name: str, where: str, known: Sequence[str], of_optimizer: str) -> None:
    """Add the error for an unknown option. of_optimizer: how to set the optimizer's; "": there is no optimizer."""
    sharing = (n for n in known if {*name.split("_")} & {*n.split("_")})  # grad_clip, clip_norm
    near = nearest(name, known) or next(sharing, "")
    fix = f"did you mean {near!r}? ({', '.join(known)})" if near else f"one of {', '.join(known)}"
    if name in _OF_OPTIMIZERS and of_optimizer:
        fix = f"it is an option of the optimizer: {of_optimizer}"
    errors.add("there is no such option", where=where, fix=fix)


def check(
    *, clip_norm: Any, nonfinite: Any, seed: Any, check_every: Any, optimizer: Any, scheduler: Any, norm: Any
) -> None:
    """Raise ShardcError for values that would silently train otherwise than meant."""
    errors = Errors()
    number = isinstance(clip_norm, (int, float)) and not isinstance(clip_norm, bool)
    if clip_norm is not None and not (number and 0 < clip_norm < math.inf):
        fault = f"must be a positive number or None, not {clip_norm!r}"
        errors.add(fault, where="clip_norm", fix="pass a number above 0, or None to clip nothing")
    from shardc.runtime.stage import not_finite  # here: `compile` reads only tables of this file

    if nonfinite not in get_args(not_finite.Action):
        words = ", ".join(map(repr, get_args(not_finite.Action)))
        errors.add(f"must be one of {words}, not {nonfinite!r}", where="nonfinite", fix="write one of these")
    for name, value, takes, makes in (
        ("optimizer", optimizer, "params", "torch.optim.AdamW(params, lr=3e-4)"),
        ("scheduler", scheduler, "optimizer", "torch.optim.lr_scheduler.StepLR(optimizer, 100)"),
    ):
        fix = f"pass a function: {name}=lambda {takes}: {makes}"
        if value is not None and not callable(value):
            fault = f"this {type(value).__name__} is not a function: each rank makes one from its parts of parameters"
            errors.add(fault, where=name, fix=fix)
        elif value is not None and (more := _required_arguments(value)):
            fault = f"{getattr(value, '__name__', 'it')} is called with {takes} only, but also needs {more}"
            errors.add(fault, where=name, fix=fix)
    if not isinstance(norm, bool):
        errors.add(f"must be True or False, not {norm!r}", where="norm", fix="pass True to compute it without clipping")
    for name, value in (("seed", seed), ("check_every", check_every)):
        if isinstance(value, bool) or not isinstance(value, int):
            errors.add(f"must be a whole number, not {value!r}", where=name, fix="pass a whole number, such as 0")
    errors.raise_any()


def _required_arguments(function: Any) -> str:
    """Return the required arguments of a function after the first."""
    try:
        _, *rest = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # no signature, or no argument at all: the call reports it
        return ""
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return ", ".join(p.name for p in rest if p.default is p.empty and p.kind not in variadic)


def _device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def check_program(given: Any, call: str) -> None:
    """Raise ShardcError if `call` (engine.to, program.to) gets neither program nor spec, but a device."""
    spec = isinstance(given, (Mapping, Path)) or hasattr(given, "shard_use")  # a Spec, which this layer cannot import
    if not isinstance(given, Program) and not spec and not (isinstance(given, str) and not _device(given)):
        fault, fix = f"{given!r} is neither a program nor a spec: this call moves to a plan", f"{call}('spec.yaml')"
        if isinstance(given, (str, torch.device, torch.dtype)):
            fix = _NOT_MOVED
        raise ShardcError(fault, where=call, fix=fix)


_NOT_MOVED = "ranks choose their devices, and `precision` of the spec sets the dtype: leave it out"


def by_name(texts: Mapping[str, str]) -> dict[str, str]:
    """Return a table with a row for each name of those that share a text: {"train eval": ...}."""
    return {name: text for names, text in texts.items() for name in names.split()}


MOVES = by_name({"cuda cpu half float double bfloat16": _NOT_MOVED})

#: Attributes of DistributedDataParallel and of models, and what a module has instead.
INSTEAD_OF_MODULE = {
    "no_sync": "backward sums gradients over ranks each time, and they add up in .grad as on one device: leave it out",
    "module": "it is the module already: leave `.module` out",
    "step": "call optimizer.step() in the loop; program.engine(model).step(batch) does a whole step",
    "save_pretrained": "full_state_dict() has the plain model's weights; an engine's export(folder) writes a folder",
    "generate": "program.engine(model).generate(prompts), or program.forward(model) and module.weights_to(it)",
}

#: The attribute that each wrapper reads first: (call, why it is refused, fix).
WRAPPERS = {
    "_ddp_params_and_buffers_to_ignore": (
        "DistributedDataParallel(module)",
        "DistributedDataParallel would sum gradients that are summed already, and send this rank's parts to others",
        "use the module as it is: backward() sums over all ranks",
    ),
    "_torchdynamo_orig_callable": (
        "torch.compile(module)",
        "forward is a program with collectives, which torch.compile would cut into many small pieces",
        "use the module as it is; the spec's `execution: {compile: layers}` compiles all between collectives",
    ),
    "__prepare_scriptable__": (
        "torch.jit.script(module)",
        "forward is a program with collectives, which TorchScript cannot see",
        "script the plain model: model.load_state_dict(...) of full_state_dict(), which every rank calls",
    ),
}

#: Attributes of other trainers, and what an engine has instead.
_OF_ENGINES = {
    "model module": "it holds parts of weights and is not a module: program.module(model) is; see full_state_dict()",
    "train eval": "step(batch) trains, evaluate(batch) evaluates",
    "zero_grad forward": "step(batch) does a whole step; backward(batch) and update() are its halves",
    "save_checkpoint save_pretrained": "save(folder) keeps all of the state, export(folder) weights",
    "load_checkpoint": "load(folder) reads what save(folder) wrote",
    "parameters named_parameters": "engine.params is {name: this rank's part}; program.module(model) is an nn.Module",
    "state_dict": "full_state_dict() has the whole weights, save(folder) and load(folder) all of the state",
    "load_state_dict": "make the engine from weights, program.engine(model, weights=...); load(folder) reads all state",
}
INSTEAD = MOVES | by_name(_OF_ENGINES)


@functools.cache
def _options(made: type) -> frozenset[str]:
    return frozenset(inspect.signature(made).parameters) - {"program", "model", "callbacks"}


#: Attributes that a finished engine keeps, and how to change them instead.
_HELD = {
    "lr": "write it into the optimizer, for g in engine.optimizer.param_groups: g['lr'] = ...; or pass a scheduler",
    "step_count": "engine.load(folder) continues from a checkpoint",
    "program": "engine.to(program) is an engine under another plan",
    **by_name({"params owned": "write into the parameters: with torch.no_grad(): engine.params[name].copy_(value)"}),
}


def check_set(made: type, name: str) -> None:
    """Raise ShardcError if user code assigns an engine's option: it would have no or half an effect."""
    if name in SETTABLE:
        fix = f"call engine.set({name}=...), on all ranks"
        raise ShardcError("all ranks change an option together", where=f"engine.{name} = ...", fix=fix)
    if name in _HELD or name in _options(made):
        raise ShardcError("an engine cannot change this once made", where=f"engine.{name} = ...", fix=_fix_for(name))


def _fix_for(name: str) -> str:
    if name in ("seed", "weights", "broadcast", "mesh"):
        return f"set it when the engine is made: program.engine(model, {name}=...)"
    return _HELD.get(name, f"engine = engine.to(engine.program, {name}=...) continues with another one")


def check_trains(program: Program) -> None:
    """Raise ShardcError if no parameter is trained: a step would silently do nothing."""
    if program.forward_only:
        fault, fix = "the program is forward-only: there is no loss to train by", "compile without forward="
        fix = f"{fix}; program.forward(model) runs it (docs/how-to/forward.md)"
        raise ShardcError(fault, where="engine.step", fix=fix)
    if not any(p.requires_grad for p in program.params):
        fault = f"no parameter of the model is trained: requires_grad is False for all {len(program.params)}"
        fix = "turn it on for some before compiling (p.requires_grad_(True)); engine.evaluate, and --steps 0, train"
        fix, frozen = f"{fix} nothing", any(p.frozen for p in program.params)
        if frozen:
            fix = f"remove some from the spec's freeze; or {fix}"
        raise ShardcError(fault, where="freeze" if frozen else "the model", fix=fix)
