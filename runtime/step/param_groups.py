"""Group parameters by name, so that parts of the model get different optimizer settings.

engine = program.engine(model, optimizer=lambda params: torch.optim.AdamW(
    shardc.groups(params, {"*.{bias,norm*.weight}": {"weight_decay": 0.0}}, lr=3e-4, weight_decay=0.1)))
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.ir import patterns, similar_names
from shardc.ir.patterns import names_weight
from shardc.ir.program import Program
from shardc.runtime.zero.named_parameters import NamedParameters, stand_in
from shardc.runtime.zero.several_optimizers import OptimizerList, as_one, members_of

#: How similar an unknown setting must be to one of the optimizer's to count as a misspelling: optimizers may have group
#: settings that are not among their defaults.
_CUTOFF = 0.88


def groups(
    params: Iterable[tuple[str, nn.Parameter]], settings: Mapping[Any, Any], **default: Any
) -> list[dict[str, Any]]:
    """Build parameter groups for a torch optimizer: one per pattern, one for the rest; first match wins.

    params: what `optimizer=` receives, or model.named_parameters(). settings: {glob, or a tuple of them:
    {"lr": ..., "weight_decay": ...}}. Globs match names of parameters, or of modules that have them (`*` any
    characters, `{a,b}` alternatives). default: settings of every group that does not say otherwise. The groups are the
    same on every rank, and may be empty. Raises ShardcError, for all at once, for patterns that match no trainable
    parameter, or only ones that earlier patterns matched.
    """
    pairs = list(params)
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise ShardcError(
                f"groups() needs (name, parameter) pairs, not a {type(pair).__name__}",
                fix="pass what `optimizer=` receives, or model.named_parameters()",
            )
    known = params.known if isinstance(params, NamedParameters) else {name: (name,) for name, _ in pairs}
    keys, errors = list(settings), Errors()
    globs = [key if isinstance(key, tuple) else (key,) for key in keys]
    won: dict[str, int] = {}
    for name, names in known.items():
        hits = [i for i, several in enumerate(globs) if any(names_weight(g, n) for g in several for n in names)]
        won |= {name: hits[0]} if hits else {}
    every = [n for names in known.values() for n in names]
    for i, g in ((i, g) for i, several in enumerate(globs) for g in several):
        where, chosen = f"parameter group {g!r}", settings[keys[i]]
        if wrong := patterns.faults(g):
            errors.add(f"the pattern {wrong}", where=where, fix="write a glob over parameter names, such as '*.bias'")
        elif not isinstance(chosen, Mapping):
            fault = f"its settings are a {type(chosen).__name__}, not a dict"
            errors.add(fault, where=where, fix=f'write {{"{g}": {{"weight_decay": 0.0}}}}')
        elif not any(names_weight(g, n) for n in every):
            other = f"name parameters, such as {every[0]!r}" if every else "leave the group out"
            fix = similar_names.did_you_mean(g, every, other)
            errors.add("it matches no trainable parameter", where=where, fix=fix)
        elif i not in won.values():
            taken = next(globs[k] for name, k in won.items() if any(names_weight(g, n) for n in known[name]))
            fix = "put it first, or leave it out"
            first = taken[0] if len(taken) == 1 else taken
            errors.add(f"earlier patterns match all of its parameters, such as {first!r}", where=where, fix=fix)
    errors.raise_any()
    settled = []
    for i, chosen in [*enumerate(dict(settings[key]) for key in keys), (-1, {})]:
        if i >= 0 or len(won) < len(known):
            members = [(name, p) for name, p in pairs if won.get(name, -1) == i]
            # an empty group must say that it has names: torch sees that from the members
            settled.append({**default, **chosen, "params": members, **({} if members else {"param_names": []})})
    return settled


def matrices(
    params: Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """Split what `optimizer=` receives into two lists: (matrices, all else), for one optimizer each.

    Matrices have two dims or more. Embedding tables and the head, the last product, are not among them. A list may be
    empty, also on a rank of a pipeline; torch's optimizers accept no empty list: leave that optimizer out.
    """
    if not isinstance(params, NamedParameters):
        raise ShardcError(
            f"matrices() needs what `optimizer=` receives, not a {type(params).__name__}: it must know tables and "
            "the head",
            fix="call it in the function that you pass as optimizer=, with its argument",
        )
    inner = [(n, p) for n, p in params if n in params.inner]
    return inner, [(n, p) for n, p in params if n not in params.inner]


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raise ShardcError for an optimizer that the engine cannot step correctly.

    It computes the loss itself, its groups have settings that look misspelt, or two optimizers share a parameter.
    """
    errors, owner, shared = Errors(), dict[int, str](), dict[tuple[str, str], list[str]]()
    for m in members_of(optimizer):
        closure = inspect.signature(m.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            fault = f"{type(m).__name__} computes the loss several times in a step, but the engine computes it once"
            fix = "use program.module(model) in your own loop, and optimizer.step(closure)"
            raise ShardcError(fault, where="optimizer", fix=fix)
        for i, group in enumerate(m.param_groups):
            for key in group.keys() - m.defaults.keys() - {"params", "param_names"}:
                if near := similar_names.nearest(key, m.defaults, cutoff=_CUTOFF):
                    fault = f"{type(m).__name__} has no setting {key!r}, and would ignore it"
                    errors.add(fault, where=f"parameter group {i}", fix=f"did you mean {near!r}?")
            names = group.get("param_names", [])
            for k, p in enumerate(group["params"]):
                if id(p) in owner:
                    name = names[k] if k < len(names) else f"a parameter of shape {list(p.shape)}"
                    if owner[id(p)] == type(m).__name__:
                        fault = f"{name} is in {type(m).__name__} twice, which would update it twice"
                        errors.add(fault, where=f"parameter group {i}", fix="give it once")
                        continue
                    shared.setdefault((owner[id(p)], type(m).__name__), []).append(name)
                owner[id(p)] = type(m).__name__
    for (one, other), names in shared.items():
        more = f", and so are {len(names) - 1} more parameters" if len(names) > 1 else ""
        fault = f"{names[0]} is in {one} and in {other}, which would both update it{more}"
        errors.add(fault, where="optimizer", fix="give each parameter to one of the optimizers")
    errors.raise_any()


#: The groups of each optimizer, with names in place of parameters.
Groups = list[list[dict[str, Any]]]


def groups_of_whole(make: Callable[[NamedParameters], Any], given: NamedParameters, program: Program) -> Groups | None:
    """Return the groups that the user's function makes of whole shapes. given: its pairs on this rank.

    None if these are whole, and if the function does not accept parameters without data.
    """
    shapes = {p.fqn: p.shape for p in program.params}
    if all(tuple(p.shape) == tuple(shapes[n]) for n, p in given):
        return None
    for meta in (True, False):  # some optimizers check the device of their parameters
        like = [(n, torch.empty((), dtype=p.dtype, device="meta") if meta else p) for n, p in given]
        whole = [(n, stand_in(shapes[n], x)) for (n, x), (_, p) in zip(like, given, strict=True)]
        for (_, x), (_, p) in zip(whole, given, strict=True):
            x.requires_grad_(p.requires_grad)
        with contextlib.suppress(Exception):  # the call with the rank's own parameters reports errors
            return _named(as_one(make(NamedParameters(whole, given.known, given.inner))), dict(whole))
    return None


def _named(optimizer: Optimizer, whole: dict[str, nn.Parameter]) -> Groups | None:
    names = {id(p): n for n, p in whole.items()}
    by_member = [
        [{**g, "params": [names.get(id(p)) for p in g["params"]]} for g in m.param_groups]
        for m in members_of(optimizer)
    ]
    return by_member if all(n is not None for groups in by_member for g in groups for n in g["params"]) else None


def regroup(optimizer: Optimizer, groups: Groups, given: NamedParameters) -> None:
    """Give an optimizer the groups of the whole shapes, with this rank's parameters in them."""
    local, members = dict(given), list(members_of(optimizer))
    if len(members) != len(groups):
        return
    for m, whole in zip(members, groups, strict=True):
        for group, like in zip(m.param_groups, whole, strict=False):  # in place: other objects may hold the groups
            group.clear()
            group.update({**like, "params": [local[n] for n in like["params"]]})
        m.param_groups[len(whole) :] = []
        m.param_groups += [{**w, "params": [local[n] for n in w["params"]]} for w in whole[len(m.param_groups) :]]
    if isinstance(optimizer, OptimizerList):
        optimizer.read_groups()
