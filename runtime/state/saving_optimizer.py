"""Save and load the optimizer: its tensors are stored like their parameters, the rest in the index.

"optimizer": {"class": "AdamW", "groups": [{"class": "AdamW", "lr": 1e-3, ..., "params": [FQN, ...]}, ...],
              "numbers": {FQN: {"step": 3}}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.runtime.state.boxes import Part, Runs, by_name, copied, cut_axes, part_of, replicas
from shardc.runtime.state.checkpoint_index import Index
from shardc.runtime.state.owners import Owners
from shardc.runtime.state.sources import check_names
from shardc.runtime.zero.optimizer_kernels import IMPLEMENTATIONS
from shardc.runtime.zero.optimizer_list import class_of, group_classes

#: (parameter, name of a state of it, a tensor with its shape and dtype) -> a tensor to fill
Room = Callable[[Any, str, Tensor], Tensor]


def _groups(program: Program, params: Mapping[str, Tensor], optimizer: Optimizer, owners: Owners) -> list[list[Param]]:
    """Return the program's parameters in the optimizer's groups; none in groups that owners step."""
    known = {id(params[p.name]): p for p in program.params if p.name in params}
    every = zip(optimizer.param_groups, owners.groups(optimizer), strict=True)
    groups = [list(group["params"]) if owned is None else [] for group, owned in every]
    for group in groups:
        for x in group:
            if id(x) not in known:
                raise ShardcError(
                    f"the optimizer holds a tensor of shape {list(x.shape)} that is not a parameter of the program",
                    fix="make the optimizer from the parameters that shardc passes to it",
                )
    return [[known[id(x)] for x in group] for group in groups]


def state_parts(
    program: Program,
    params: Mapping[str, Tensor],
    optimizer: Optimizer,
    runs: Runs,
    mesh: Any,
    owners: Owners,
    *,
    copies: bool = False,
) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return the optimizer's state: tensors as parts, the rest as JSON values.

    copies: also return state that another rank writes, such as a step counter.
    """
    parts, numbers = owners.state_parts(optimizer, mesh)
    groups = _groups(program, params, optimizer, owners)
    for p in (p for group in groups for p in group):
        local, run = params[p.name], runs.get(p.name)
        if run is not None and not run.size:
            continue  # an empty shard has no useful state
        # a number is the same on all ranks; the first that holds some of the parameter writes it
        first = run is None or not run.start
        whole = replicas(program, Layout(), cut_axes(program, p) if run is not None else ())
        for name, x in optimizer.state.get(local, {}).items():
            if not isinstance(x, Tensor):
                for n in _named(p):
                    numbers.setdefault(n, {})[name] = x
                continue
            x = x.as_subclass(Tensor)  # a custom optimizer may keep a gradient's subclass
            if x.shape == local.shape:
                named_parts = by_name(p, part_of(program, p, x, run, mesh))
                parts |= {f"optimizer.{n}.{name}": part for n, part in named_parts.items()}
            elif x.dim() == 0 or (run is None and not p.layout.shards()):
                if first or copies:
                    part = Part(x, tuple(x.shape), replicas=whole, elsewhere=copied(program, p, mesh))
                    parts |= {f"optimizer.{n}.{name}": part for n in _named(p)}
            else:
                raise ShardcError(
                    f"the optimizer's state {name!r} of shape {list(x.shape)} does not have its parameter's shape,"
                    f" {list(local.shape)}",
                    where=p.fqn,
                    fix="use an optimizer whose state has the parameter's shape (SGD, Adam, AdamW, ...)",
                )
    facts = []
    every = zip(optimizer.param_groups, owners.groups(optimizer), group_classes(optimizer), groups, strict=True)
    for group, owned, kind, members in every:
        left_out = ("params", "param_names", *IMPLEMENTATIONS)
        hyper = {k: x.item() if isinstance(x, Tensor) else x for k, x in group.items() if k not in left_out}
        facts.append({**hyper, "class": kind, "params": _names(members, owned)})
    return parts, {"class": class_of(optimizer), "groups": facts, "numbers": numbers}


def _named(p: Param) -> tuple[str, ...]:
    """Return the names under which a checkpoint stores a parameter's state."""
    return p.members or (p.fqn,)


def _names(members: list[Param], owned: Mapping[str, str] | None) -> list[str]:
    """Return the names of a group's parameters in a checkpoint. owned: of those that owners step."""
    return [n for p in members for n in _named(p)] if owned is None else list(owned)


def combine_facts(facts: list[dict[str, Any]]) -> dict[str, Any]:
    """Combine the optimizer's facts of all ranks: of a number, the value of the first rank that has it.

    The n-th groups of all stages are one group, if their settings are the same; else each stays separate (a learning
    rate by layer).
    """
    numbers: dict[str, Any] = {}
    for rank_facts in reversed(facts):
        for fqn, values in rank_facts["numbers"].items():
            numbers[fqn] = {**numbers.get(fqn, {}), **values}
    groups = [dict(group) for group in facts[0]["groups"]]
    for rank_facts in facts[1:]:
        for i, group in enumerate(rank_facts["groups"]):
            if i < len(groups) and _settings(groups[i]) == _settings(group):
                groups[i]["params"] = list(dict.fromkeys([*groups[i]["params"], *group["params"]]))
            elif group not in groups:
                groups.append(group)
    return {**facts[0], "groups": groups, "numbers": numbers}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in group.items() if k != "params"}


def room_for(
    program: Program,
    params: Mapping[str, Tensor],
    optimizer: Optimizer,
    index: Index,
    parts: dict[str, Part],
    folder: str,
    runs: Runs,
    room: Room | None,
    mesh: Any,
    owners: Owners,
) -> dict[str, dict[str, Any]]:
    """Make new state, to be filled, for every parameter: {fqn: {name: tensor or number}}.

    Adds its tensors to `parts`.
    """
    facts, stored = index.optimizer, index.tensors
    if facts is None:
        fix = "save it with its optimizer, or load it with optimizer=None"
        raise ShardcError("the checkpoint has no optimizer state", where=folder, fix=fix)
    groups = _groups(program, params, optimizer, owners)
    of_owners = owners.groups(optimizer)
    names = [_names(*each) for each in zip(groups, of_owners, strict=True)]
    _check_classes(names, optimizer, facts, folder)
    members = {p.fqn: p for group in groups for p in group}
    errors = Errors()
    saved = {
        n: stored[f"model.{n}"].shape for group in facts["groups"] for n in group["params"] if f"model.{n}" in stored
    }
    stepped = {*members, *(program.param(n).fqn for owned in of_owners for n in (owned or {}).values())}
    if idle := [p.fqn for p in program.params if _named(p)[0] in saved and p.name in params and p.fqn not in stepped]:
        fault = (
            f"the checkpoint's optimizer has {', '.join(idle[:5])}{' and others' if len(idle) > 5 else ''}, but this "
            "one does not"
        )
        fix = (
            "train the same parameters, or load it with optimizer=None, and start with that engine's full_state_dict() "
            "as the model"
        )
        errors.add(fault, where=folder, fix=fix)
    check_names(
        errors,
        {n: p.shapes[n] for p in members.values() for n in _named(p)},
        saved,
        [n for p in program.params for n in _named(p)],
        "the checkpoint's optimizer",
    )
    of_others = owners.room_for(optimizer, index, parts, errors, folder)
    for i, group_names in enumerate(names):
        _check_settings(errors, i, group_names, facts["groups"], folder)
    errors.raise_any()
    states = of_others | {n: dict(facts["numbers"].get(_named(p)[0], {})) for n, p in members.items()}
    named = {n: p for p in members.values() for n in _named(p)}
    for key, tensor in stored.items():
        fqn, _, name = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or fqn not in named:
            continue
        p = named[fqn]
        local, shape = params[p.name], p.shapes[fqn]
        like_param = tensor.shape == shape and (bool(shape) or name != "step")
        if name not in states[p.fqn]:
            form = torch.empty(local.shape if like_param else tensor.shape, dtype=tensor.dtype, device="meta")
            if room and name != "step":
                states[p.fqn][name] = room(local, name, form)
            else:
                present = optimizer.state.get(local, {}).get(name)
                states[p.fqn][name] = present_or_zeros(present, form.shape, form.dtype, name, local.device)
        x = states[p.fqn][name]
        part = part_of(program, p, x, runs.get(p.name), mesh) if like_param else Part(x, tensor.shape)
        parts[key] = by_name(p, part)[fqn] if like_param else part
    return states


def present_or_zeros(
    present: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, device: torch.device
) -> Tensor:
    """Return present state if its form fits, else zeros. A step counter is on the CPU."""
    if isinstance(present, Tensor) and (tuple(present.shape), present.dtype) == (tuple(shape), dtype):
        return present  # filled in place: no second state in memory
    return torch.zeros(shape, dtype=dtype, device="cpu" if name == "step" else device)


def _check_classes(names: list[list[str]], optimizer: Optimizer, facts: Mapping[str, Any], folder: str) -> None:
    """Check that every parameter was stepped by its present optimizer class. names: of each group."""
    for kind, group_names in zip(group_classes(optimizer), names, strict=True):
        for name in group_names:
            saved = next((g.get("class", facts["class"]) for g in facts["groups"] if name in g["params"]), kind)
            if saved != kind:
                several = "" if class_of(optimizer) == kind and facts["class"] == saved else f" for {name}"
                raise ShardcError(
                    f"the checkpoint is of the optimizer {saved}, not {kind}{several}",
                    where=folder,
                    fix=f"use {saved}{several}; or start from its weights only: --weights instead of --resume, or"
                    " program.engine(model, weights=folder)",
                )


def _check_settings(errors: Errors, i: int, names: list[str], saved: list[dict[str, Any]], folder: str) -> None:
    """Check that the parameters of a group had the same settings in the checkpoint."""
    first: tuple[str, dict[str, Any]] | None = None
    for name in names:
        theirs = next((_settings(g) for g in saved if name in g["params"]), None)
        if theirs is None:
            continue
        first = first or (name, theirs)
        if other := [k for k in theirs.keys() | first[1].keys() if theirs.get(k) != first[1].get(k)]:
            k = min(other)
            fault = (
                f"parameters of optimizer group {i} had different settings when they were saved: {k} was"
                f" {first[1].get(k)} for {first[0]} and {theirs.get(k)} for {name}"
            )
            errors.add(fault, where=folder, fix="make the same groups as before, or load it with optimizer=None")
            return


def fill(
    program: Program,
    params: Mapping[str, Tensor],
    optimizer: Optimizer,
    facts: Mapping[str, Any],
    states: Mapping[str, dict[str, Any]],
    owners: Owners,
) -> None:
    """Load states by the optimizer's load_state_dict, which knows their device and dtype."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    every = optimizer.param_groups, owners.groups(optimizer), _groups(program, params, optimizer, owners)
    for i, (kind, group, owned, stored) in enumerate(zip(group_classes(optimizer), *every, strict=True)):
        # match groups by name; one without parameters here by its number
        names = _names(stored, owned)
        matching = (
            [g for g in facts["groups"] if names[0] in g["params"]]
            if names
            else [g for g in facts["groups"][i : i + 1] if g.get("class", kind) == kind]
        )
        members = [p.fqn for p in stored] if owned is None else [n for n in owned if n in owners.owned]
        hyper = {k: x for k, x in matching[0].items() if k not in ("class", *IMPLEMENTATIONS)} if matching else {}
        numbered = list(range(len(state), len(state) + len(members)))
        state |= dict(zip(numbered, (states[n] for n in members), strict=True))
        settled = {k: _like(group.get(k), x) for k, x in hyper.items()}
        groups.append({**{k: x for k, x in group.items() if k != "params"}, **settled, "params": numbered})
    optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})


def _like(now: Any, saved: Any) -> Any:
    """Convert a JSON value to a tuple or a tensor (a learning rate may be one), which JSON does not have."""
    if isinstance(now, Tensor):
        return torch.full_like(now, saved)
    return tuple(saved) if isinstance(now, tuple) and isinstance(saved, list) else saved
