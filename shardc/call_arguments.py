"""Check arguments of the public functions before Python does, and suggest the nearest valid name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from shardc.errors import Errors, ShardcError
from shardc.ir.patterns import nearest

P = ParamSpec("P")
R = TypeVar("R")

_ENGINE = "it is the engine's: program.engine(model, {name}=...)"
_OPTIMIZER = (
    "it is the optimizer's: program.engine(model, optimizer=lambda params: torch.optim.AdamW(params, {name}=...))"
)
_SPEC = 'it belongs into the spec, or overrides=("{path}=...",)'
#: Arguments that people pass to `compile` -> where they belong.
ELSEWHERE = {
    **dict.fromkeys(("optimizer", "scheduler", "clip_norm", "seed", "weights", "callbacks", "nonfinite"), _ENGINE),
    **dict.fromkeys(("lr", "weight_decay", "betas", "momentum"), _OPTIMIZER),
    "device": "it is where the ranks are: CUDA's devices where torch finds them, else the CPU; program.cost(device) and"
    " shardc.plan(..., device=...) take the name of one",
    **{
        name: _SPEC.replace("{path}", path)
        for name, path in (("zero", "data.zero"), ("precision", "precision.compute"))
    },
    "microbatches": _SPEC.replace("{path}", "batch.microbatches"),
    **dict.fromkeys(("dp", "tp", "pp", "cp", "ep"), "it is an axis of the mesh: mesh={{'{name}': ...}}"),
}


def checked(name: str, elsewhere: Mapping[str, str] = ELSEWHERE) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function: wrong or missing arguments raise ShardcError, not TypeError. name: its name."""

    def around(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as e:
                _refuse(name, signature, args, kwargs, elsewhere)
                raise ShardcError(str(e), where=name, fix=_usage(name, signature)) from None
            return function(*args, **kwargs)

        return call

    return around


def _usage(name: str, signature: inspect.Signature) -> str:
    first = [p.name for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return f"{name}({', '.join(first)}, ...); the others are named, as {_example(signature)}=..."


def _example(signature: inspect.Signature) -> str:
    return next((p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY), "name")


def _refuse(
    name: str,
    signature: inspect.Signature,
    args: tuple[object, ...],
    kwargs: Mapping[str, object],
    elsewhere: Mapping[str, str],
) -> None:
    """Raise ShardcError for unknown names, for unnamed arguments that need a name, and for missing ones."""
    errors = Errors()
    for keyword in (n for n in kwargs if n not in signature.parameters):
        near = nearest(keyword, signature.parameters)
        if keyword in elsewhere:
            fix = elsewhere[keyword].format(name=keyword)
        else:
            fix = f"did you mean {near!r}?" if near else f"it takes {', '.join(signature.parameters)}"
        errors.add("there is no such argument", where=f"{name}({keyword}=...)", fix=fix)
    plain = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(args) > len(plain):
        named = _example(signature)
        fault = f"it takes {', '.join(p.name for p in plain)} by place, and {len(args)} arguments came so"
        errors.add(fault, where=name, fix=f"name the others, such as {named}=...")
    missing = [p.name for p in plain[len(args) :] if p.default is p.empty and p.name not in kwargs]
    if missing and not errors.found:
        needs = ", ".join(p.name for p in plain if p.default is p.empty)
        fault, fix = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing", f"{name}({needs})"
        errors.add(fault, where=name, fix=fix)
    errors.raise_any()
