"""Save and load the optimizer: its tensors are stored like their parameters, the rest in the index.

"optimizer": {"class": "AdamW", "groups": [{"class": "AdamW", "lr": 1e-3, ..., "params": [FQN, ...]}, ...],
              "numbers": {FQN: {"step": 3}}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.ir.stored import Param
from shardc.runtime.state.boxes import Part
from shardc.runtime.state.checkpoint_index import Index, like, plain
from shardc.runtime.state.fitting import check_tensors
from shardc.runtime.state.owners import RankState
from shardc.runtime.zero.optimizer_list import IMPLEMENTATIONS, class_of, group_classes

#: (parameter, name of a state of it, a tensor with its shape and dtype) -> a tensor to fill
Room = Callable[[Any, str, Tensor], Tensor]


@dataclass(frozen=True)
class _Group:
    """A group of an optimizer.

    kind: its optimizer's class; params: the program's. owned: if owners step it, {name in checkpoints: placeholder}.
    """

    settings: dict[str, Any]
    kind: str
    params: list[Param]
    owned: Mapping[str, str] | None

    @property
    def names(self) -> list[str]:
        """Names of its parameters in a checkpoint."""
        return [n for p in self.params for n in _named(p)] if self.owned is None else list(self.owned)


def _groups(held: RankState, optimizer: Optimizer) -> list[_Group]:
    known = {id(held.params[p.name]): p for p in held.program.params if p.name in held.params}
    groups = []
    every = optimizer.param_groups, group_classes(optimizer), held.owners.groups(optimizer)
    for settings, kind, owned in zip(*every, strict=True):
        stored = settings["params"] if owned is None else []
        for x in stored:
            if id(x) not in known:
                raise ShardcError(
                    f"the optimizer holds a tensor of shape {list(x.shape)} that is not a parameter of the program",
                    fix="make the optimizer from the parameters that shardc passes to it",
                )
        groups.append(_Group(settings, kind, [known[id(x)] for x in stored], owned))
    return groups


def state_parts(
    held: RankState, optimizer: Optimizer, *, copies: bool = False
) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return the optimizer's state: tensors as parts, the rest as JSON values.

    copies: also return state that another rank writes, such as a step counter.
    """
    parts, numbers = held.owners.state_parts(optimizer, held.mesh)
    groups = _groups(held, optimizer)
    for p in (p for group in groups for p in group.params):
        local, shard = held.params[p.name], held.shards.get(p.name)
        if shard is not None and not shard.size:
            continue  # an empty shard has no useful state
        # a number is the same on all ranks; the first that holds some of the parameter writes it
        first = shard is None or not shard.start
        for name, x in optimizer.state.get(local, {}).items():
            if not isinstance(x, Tensor):
                for n in _named(p):
                    numbers.setdefault(n, {})[name] = x
                continue
            x = x.as_subclass(Tensor)  # a custom optimizer may keep a gradient's subclass
            whole = x.shape != local.shape
            if not whole or x.dim() == 0 or (shard is None and not p.layout.shards()):
                if not whole or first or copies:
                    parts |= {f"optimizer.{n}.{name}": part for n, part in held.parts(p, x, whole=whole).items()}
            else:
                raise ShardcError(
                    f"the optimizer's state {name!r} of shape {list(x.shape)} does not have its parameter's shape,"
                    f" {list(local.shape)}",
                    where=p.fqn,
                    fix="use an optimizer whose state has the parameter's shape (SGD, Adam, AdamW, ...)",
                )
    facts = []
    for g in groups:
        left_out = ("params", "param_names", *IMPLEMENTATIONS)
        hyper = {k: plain(x) for k, x in g.settings.items() if k not in left_out}
        facts.append({**hyper, "class": g.kind, "params": g.names})
    return parts, {"class": class_of(optimizer), "groups": facts, "numbers": numbers}


def _named(p: Param) -> tuple[str, ...]:
    """Return the names under which a checkpoint stores a parameter's state."""
    return p.members or (p.fqn,)


def combined(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine `extra` and the facts of the optimizer of all ranks: of a value, that of the first rank that has it.

    The n-th groups of all stages are one group, if their settings are the same; else each stays separate (a learning
    rate by layer).
    """
    extra: dict[str, Any] = {}
    for report in reversed(reports):
        extra |= report["extra"]
    facts = [report["optimizer"] for report in reports if report["optimizer"] is not None]
    if not facts:
        return {"extra": extra, "optimizer": None}
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
    return {"extra": extra, "optimizer": {**facts[0], "groups": groups, "numbers": numbers}}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {k: x for k, x in group.items() if k != "params"}


def room_for(
    held: RankState, optimizer: Optimizer, index: Index, parts: dict[str, Part], folder: str, room: Room | None
) -> dict[str, dict[str, Any]]:
    """Make new state, to be filled, for every parameter: {fqn: {name: tensor or number}}.

    Adds its tensors to `parts`.
    """
    program, params, facts, stored = held.program, held.params, index.optimizer, index.tensors
    if facts is None:
        fix = "save it with its optimizer, or load it with optimizer=None"
        raise ShardcError("the checkpoint has no optimizer state", where=folder, fix=fix)
    groups, saved_groups = _groups(held, optimizer), _by_param(facts)
    _check_classes(groups, saved_groups, optimizer, facts, folder)
    members = {p.fqn: p for group in groups for p in group.params}
    errors = Errors()
    saved = {n: stored[f"model.{n}"].shape for n in saved_groups if f"model.{n}" in stored}
    stepped = {*members, *(program.param(n).fqn for group in groups for n in (group.owned or {}).values())}
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
    check_tensors(
        errors,
        {n: p.shapes[n] for p in members.values() for n in _named(p)},
        saved,
        [n for p in program.params for n in _named(p)],
        "the checkpoint's optimizer",
    )
    of_others = held.owners.room_for(optimizer, index, parts, errors, folder)
    for i, group in enumerate(groups):
        _check_settings(errors, i, group.names, saved_groups, folder)
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
        parts[key] = held.parts(p, x)[fqn] if like_param else Part(x, tensor.shape)
    return states


def present_or_zeros(
    present: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, device: torch.device
) -> Tensor:
    """Return present state if its form fits, else zeros. A step counter is on the CPU."""
    if isinstance(present, Tensor) and (tuple(present.shape), present.dtype) == (tuple(shape), dtype):
        return present  # filled in place: no second state in memory
    return torch.zeros(shape, dtype=dtype, device="cpu" if name == "step" else device)


def _by_param(facts: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the saved group of each parameter, by its name in the checkpoint."""
    return {name: group for group in reversed(facts["groups"]) for name in group["params"]}


def _check_classes(
    groups: Sequence[_Group],
    saved: Mapping[str, Mapping[str, Any]],
    optimizer: Optimizer,
    facts: Mapping[str, Any],
    folder: str,
) -> None:
    """Check that every parameter was stepped by its present optimizer class. saved: each parameter's group."""
    for kind, name in ((g.kind, n) for g in groups for n in g.names if n in saved):
        before = saved[name].get("class", facts["class"])
        if before != kind:
            several = "" if class_of(optimizer) == kind and facts["class"] == before else f" for {name}"
            raise ShardcError(
                f"the checkpoint is of the optimizer {before}, not {kind}{several}",
                where=folder,
                fix=f"use {before}{several}; or start from its weights only: --weights instead of --resume, or"
                " program.engine(model, weights=folder)",
            )


def _check_settings(
    errors: Errors, i: int, names: Sequence[str], saved: Mapping[str, dict[str, Any]], folder: str
) -> None:
    """Check that the parameters of a group had the same settings in the checkpoint."""
    first, *others = [n for n in names if n in saved] or [""]
    for name in others:
        ours, theirs = _settings(saved[first]), _settings(saved[name])
        if other := [k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k)]:
            k = min(other)
            fault = (
                f"parameters of optimizer group {i} had different settings when they were saved: {k} was"
                f" {ours.get(k)} for {first} and {theirs.get(k)} for {name}"
            )
            errors.add(fault, where=folder, fix="make the same groups as before, or load it with optimizer=None")
            return


def fill(held: RankState, optimizer: Optimizer, facts: Mapping[str, Any], states: Mapping[str, dict[str, Any]]) -> None:
    """Load states by the optimizer's load_state_dict, which knows their device and dtype."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    saved = _by_param(facts)
    for i, g in enumerate(_groups(held, optimizer)):
        names = g.names
        # match groups by name; one without parameters here by its number
        same_number = (x for x in facts["groups"][i : i + 1] if x.get("class", g.kind) == g.kind)
        matching: dict[str, Any] = saved.get(names[0], {}) if names else next(same_number, {})
        members = [p.fqn for p in g.params] if g.owned is None else [n for n in g.owned if n in held.owners.owned]
        hyper = {k: x for k, x in matching.items() if k not in ("class", "params", *IMPLEMENTATIONS)}
        numbered = list(range(len(state), len(state) + len(members)))
        state |= dict(zip(numbered, (states[n] for n in members), strict=True))
        settled = {k: like(g.settings.get(k), x) for k, x in hyper.items()}
        groups.append({**_settings(g.settings), **settled, "params": numbered})
    optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})
