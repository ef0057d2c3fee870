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
from shardc.runtime.state.boxes import Part, copied
from shardc.runtime.state.checkpoint_index import Index, like, plain
from shardc.runtime.state.fitting import check_tensors
from shardc.runtime.state.owners import RankState
from shardc.runtime.zero.several_optimizers import IMPLEMENTATIONS, class_of, group_classes

#: (parameter, name of a state of it, a tensor with its shape and dtype) -> a tensor to fill
Room = Callable[[Any, str, Tensor], Tensor]


@dataclass(frozen=True)
class _Stepped:
    """A tensor that an optimizer steps: a parameter as this rank stores it, or a whole matrix of an owner.

    names: in checkpoints, several of a stack. tensor: as the optimizer has it; None: another rank owns the matrix.
    """

    param: Param
    names: tuple[str, ...]
    tensor: Tensor | None
    matrix: bool

    @property
    def key(self) -> str:
        return self.names[0] if self.matrix else self.param.fqn


@dataclass(frozen=True)
class _Group:
    """A group of an optimizer. kind: its optimizer's class."""

    settings: dict[str, Any]
    kind: str
    stepped: list[_Stepped]

    @property
    def names(self) -> list[str]:
        """Names of its tensors in a checkpoint."""
        return [n for s in self.stepped for n in s.names]

    @property
    def here(self) -> list[tuple[_Stepped, Tensor]]:
        """What this rank steps."""
        return [(s, s.tensor) for s in self.stepped if s.tensor is not None]


def _groups(held: RankState, optimizer: Optimizer) -> list[_Group]:
    known = {id(held.params[p.name]): p for p in held.program.params if p.name in held.params}
    groups, owned = [], held.owners.owned
    every = optimizer.param_groups, group_classes(optimizer), held.owners.groups(optimizer)
    for settings, kind, matrices in zip(*every, strict=True):
        if matrices is not None:
            stepped = [_Stepped(held.program.param(p), (n,), owned.get(n), True) for n, p in matrices.items()]
            groups.append(_Group(settings, kind, stepped))
            continue
        if unknown := [list(x.shape) for x in settings["params"] if id(x) not in known]:
            fault = f"the optimizer holds a tensor of shape {unknown[0]} that is not a parameter of the program"
            raise ShardcError(fault, fix="make the optimizer from the parameters that shardc passes to it")
        params = ((known[id(x)], x) for x in settings["params"])
        groups.append(_Group(settings, kind, [_Stepped(p, _named(p), x, False) for p, x in params]))
    return groups


def state_parts(
    held: RankState, optimizer: Optimizer, *, copies: bool = False
) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return the optimizer's state: tensors as parts, the rest as JSON values.

    copies: also return state that another rank writes, such as a step counter.
    """
    parts: dict[str, Part] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups = _groups(held, optimizer)
    for s, tensor in (each for g in groups for each in g.here):
        shard = held.shards.get(s.param.name)
        if shard is not None and not shard.size and not s.matrix:
            continue  # an empty shard has no useful state
        for name, x in optimizer.state.get(tensor, {}).items():
            tensors, rest = _flattened(name, x)
            if not isinstance(x, Tensor):
                for n in s.names:
                    numbers.setdefault(n, {})[name] = rest
            for key, t in tensors.items():
                parts |= {f"optimizer.{n}.{key}": part for n, part in _parts(held, s, key, t, copies=copies).items()}
    facts = []
    for g in groups:
        left_out = ("params", "param_names", *IMPLEMENTATIONS)
        hyper = {k: plain(x) for k, x in g.settings.items() if k not in left_out}
        facts.append({**hyper, "class": g.kind, "params": g.names})
    return parts, {"class": class_of(optimizer), "groups": facts, "numbers": numbers}


def _parts(held: RankState, s: _Stepped, name: str, x: Tensor, *, copies: bool) -> dict[str, Part]:
    """Return the parts of one tensor of state, by name in a checkpoint; {} if another rank has it too and writes it."""
    x, p = x.as_subclass(Tensor), s.param  # a custom optimizer may keep a gradient's subclass
    if s.matrix:
        return {s.key: Part(x, tuple(x.shape), written=not copied(held.program, p, held.mesh))}
    local, shard = held.params[p.name], held.shards.get(p.name)
    if whole := x.shape != local.shape:
        if x.dim() and (shard is not None or p.layout.shards()):
            fault = f"the optimizer's state {name!r} of shape {list(x.shape)} does not have its parameter's shape,"
            fix = "use an optimizer whose state has the parameter's shape (SGD, Adam, AdamW, ...)"
            raise ShardcError(f"{fault} {list(local.shape)}", where=p.fqn, fix=fix)
        # a number is the same on all ranks; the first that holds some of the parameter writes it
        if not copies and shard is not None and shard.start:
            return {}
    return held.parts(p, x, whole=whole)


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
    program, facts, stored = held.program, index.optimizer, index.tensors
    if facts is None:
        fix = "save it with its optimizer, or load it with optimizer=None"
        raise ShardcError("the checkpoint has no optimizer state", where=folder, fix=fix)
    groups, saved_groups = _groups(held, optimizer), _by_param(facts)
    _check_classes(groups, saved_groups, optimizer, facts, folder)
    every = [s for group in groups for s in group.stepped]
    errors = Errors()
    saved = {n: stored[f"model.{n}"].shape for n in saved_groups if f"model.{n}" in stored}
    stepped = {s.param.fqn for s in every}
    rest = (p for p in program.params if p.name in held.params and p.fqn not in stepped)
    if idle := [p.fqn for p in rest if _named(p)[0] in saved]:
        named = ", ".join(idle[:5]) + (" and others" if len(idle) > 5 else "")
        fix = "train the same parameters, or load it with optimizer=None, and start with that engine's "
        fix += "full_state_dict() as the model"
        errors.add(f"the checkpoint's optimizer has {named}, but this one does not", where=folder, fix=fix)
    wanted = {n: s.param.shapes[n] for s in every if not s.matrix for n in s.names}
    known = [n for p in program.params for n in _named(p)]
    check_tensors(errors, wanted, saved, known, "the checkpoint's optimizer")
    if absent := [s.key for s in every if s.matrix and s.key not in saved_groups]:
        fault = f"the checkpoint's optimizer has no matrix {', '.join(absent[:5])}"
        fix = "write the `optimizer: {matrices: ...}` that it was saved with, or load it with optimizer=None"
        errors.add(fault + (" ..." if len(absent) > 5 else ""), where=folder, fix=fix)
    for i, group in enumerate(groups):
        _check_settings(errors, i, group.names, saved_groups, folder)
    errors.raise_any()
    here = {n: (s, x) for group in groups for s, x in group.here for n in s.names}
    states = {s.key: dict(facts["numbers"].get(s.names[0], {})) for s, _ in here.values()}
    for key, tensor in stored.items():
        fqn, _, name = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or fqn not in here:
            continue
        s, local = here[fqn]
        state, whole = states[s.key], s.matrix or tensor.shape != s.param.shapes[fqn]
        whole = whole or (not tensor.shape and name == "step")
        if name not in state:
            form = torch.empty(tensor.shape if whole else local.shape, dtype=tensor.dtype, device="meta")
            present = optimizer.state.get(local, {}).get(name)
            if room and name != "step" and not s.matrix:
                state[name] = room(local, name, form)
            elif isinstance(present, Tensor) and (present.shape, present.dtype) == (form.shape, form.dtype):
                state[name] = present  # filled in place: no second state in memory
            else:
                state[name] = torch.zeros_like(form, device="cpu" if name == "step" else local.device)
        parts[key] = Part(state[name], tensor.shape) if whole else held.parts(s.param, state[name])[fqn]
    for key, state in states.items():
        inside = {n for n in state if "/" in n and n.partition("/")[0] in state}
        states[key] = {n: _restored(x, state) for n, x in state.items() if n not in inside}
    return states


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
            fix = f"use {before}{several}; or start from its weights only: --weights instead of --resume, or"
            fix += " program.engine(model, weights=folder)"
            fault = f"the checkpoint is of the optimizer {before}, not {kind}{several}"
            raise ShardcError(fault, where=folder, fix=fix)


def _check_settings(
    errors: Errors, i: int, names: Sequence[str], saved: Mapping[str, dict[str, Any]], folder: str
) -> None:
    """Check that the parameters of a group had the same settings in the checkpoint."""
    first, *others = [n for n in names if n in saved] or [""]
    for name in others:
        ours, theirs = _settings(saved[first]), _settings(saved[name])
        if other := [k for k in theirs.keys() | ours.keys() if theirs.get(k) != ours.get(k)]:
            k = min(other)
            fault = f"parameters of optimizer group {i} had different settings when they were saved: {k} was"
            fault += f" {ours.get(k)} for {first} and {theirs.get(k)} for {name}"
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
        hyper = {k: x for k, x in matching.items() if k not in ("class", "params", *IMPLEMENTATIONS)}
        numbered = list(range(len(state), len(state) + len(g.here)))
        state |= dict(zip(numbered, (states[s.key] for s, _ in g.here), strict=True))
        settled = {k: like(g.settings.get(k), x) for k, x in hyper.items()}
        groups.append({**_settings(g.settings), **settled, "params": numbered})
    optimizer.load_state_dict({"state": {i: s for i, s in state.items() if s}, "param_groups": groups})


# --- state that is no tensor but holds some, such as Shampoo's list of a tensor for each dim


def _flattened(name: str, x: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a value into ({name: tensor}, the rest with {"tensor": name} in their places).

    The tensors of a container are named "name/0" and so on. Without tensors: ({}, the value).
    """
    if isinstance(x, Tensor):
        return {name: x}, {"tensor": name}
    items = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (list, tuple)) else ()
    tensors: dict[str, Tensor] = {}
    rest: list[tuple[Any, Any]] = []
    for k, value in items:
        inner, left = _flattened(f"{name}/{k}", value)
        tensors |= inner
        rest.append((k, left))
    if not tensors:
        return {}, x
    kind = "dict" if isinstance(x, Mapping) else "tuple" if isinstance(x, tuple) else "list"
    return tensors, {kind: dict(rest) if kind == "dict" else [v for _, v in rest]}


def _restored(saved: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild what `_flattened` took apart."""
    if isinstance(saved, Mapping) and len(saved) == 1:
        ((kind, inside),) = saved.items()
        if kind == "tensor" and isinstance(inside, str) and inside in tensors:
            return tensors[inside]
        if kind == "dict" and isinstance(inside, Mapping):
            return {k: _restored(v, tensors) for k, v in inside.items()}
        if kind in ("list", "tuple") and isinstance(inside, list):
            values = [_restored(v, tensors) for v in inside]
            return tuple(values) if kind == "tuple" else values
    return saved
