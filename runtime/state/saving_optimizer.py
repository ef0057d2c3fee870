"""Save and load the optimizer: its tensors are stored like their parameters, the rest in the index.

"optimizer": {"class": "AdamW", "groups": [{"class": "AdamW", "lr": 1e-3, ..., "params": [FQN, ...]}, ...],
              "numbers": {FQN: {"step": 3}}}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardc.errors import Errors, ShardcError
from shardc.ir.matrices import Matrix
from shardc.ir.placement import Layout
from shardc.ir.stored import Param
from shardc.runtime.state.boxes import Part, RankState, by_name, copied, cut_axes, replicas
from shardc.runtime.state.checkpoint_index import Index, Stored
from shardc.runtime.state.sources import check_names
from shardc.runtime.zero.optimizer_kernels import IMPLEMENTATIONS
from shardc.runtime.zero.optimizer_list import class_of, group_classes

if TYPE_CHECKING:
    from shardc.runtime.matrices.whole import WholeMatrices

# --- state that is no tensor but holds some


#: {KEY: name} replaces a tensor in plain values.
KEY = "tensor"


def flattened(name: str, x: Any) -> tuple[dict[str, Tensor], Any]:
    """Split a value into ({name: tensor}, the rest with {"tensor": name} in their places).

    The tensors of a container are named "name/0" and so on. Without tensors: ({}, the value).
    """
    if isinstance(x, Tensor):
        return {name: x}, {KEY: name}
    items = x.items() if isinstance(x, Mapping) else enumerate(x) if isinstance(x, (list, tuple)) else ()
    tensors: dict[str, Tensor] = {}
    rest: list[tuple[Any, Any]] = []
    for k, value in items:
        inner, plain = flattened(f"{name}/{k}", value)
        tensors |= inner
        rest.append((k, plain))
    if not tensors:
        return {}, x
    kind = "dict" if isinstance(x, Mapping) else "tuple" if isinstance(x, tuple) else "list"
    return tensors, {kind: dict(rest) if kind == "dict" else [v for _, v in rest]}


def restored(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuild what `flattened` took apart."""
    if isinstance(plain, Mapping) and len(plain) == 1:
        ((kind, inside),) = plain.items()
        if kind == KEY and isinstance(inside, str) and inside in tensors:
            return tensors[inside]
        if kind == "dict" and isinstance(inside, Mapping):
            return {k: restored(v, tensors) for k, v in inside.items()}
        if kind in ("list", "tuple") and isinstance(inside, list):
            values = [restored(v, tensors) for v in inside]
            return tuple(values) if kind == "tuple" else values
    return plain


# --- the optimizer

#: (parameter, name of a state of it, a tensor with its shape and dtype) -> a tensor to fill
Room = Callable[[Any, str, Tensor], Tensor]


def _groups(held: RankState, optimizer: Optimizer) -> list[list[Param]]:
    """Return the program's parameters in the optimizer's groups; none in groups of whole matrices."""
    known = {id(held.params[p.name]): p for p in held.program.params if p.name in held.params}
    groups = [group if whole is None else {"params": []} for group, whole in _with_matrices(held, optimizer)]
    for group in groups:
        for x in group["params"]:
            if id(x) not in known:
                raise ShardcError(
                    f"the optimizer holds a tensor of shape {list(x.shape)} that is not a parameter of the program",
                    fix="make the optimizer from the parameters that shardc passes to it",
                )
    return [[known[id(x)] for x in group["params"]] for group in groups]


def _with_matrices(held: RankState, optimizer: Optimizer) -> list[tuple[dict[str, Any], list[Matrix] | None]]:
    """Return each group with its matrices, of any owner; with None if it steps stored parameters."""
    whole = held.matrices.by_group(optimizer) if held.matrices is not None else [None] * len(optimizer.param_groups)
    return list(zip(optimizer.param_groups, whole, strict=True))


def state_parts(
    held: RankState, optimizer: Optimizer, *, copies: bool = False
) -> tuple[dict[str, Part], dict[str, Any]]:
    """Return the optimizer's state: tensors as parts, the rest as JSON values.

    The owner of a matrix that optimizers step whole writes what it has, under the matrix's name. copies: also return
    state that another rank writes, such as a step counter.
    """
    program, mesh = held.program, held.mesh
    parts: dict[str, Part] = {}
    numbers: dict[str, dict[str, Any]] = {}
    groups = _groups(held, optimizer)
    for m, state in _owned_states(held, optimizer):
        away = copied(program, program.param(m.param), mesh)
        for name, x in state.items():
            tensors, rest = flattened(name, x.as_subclass(Tensor) if isinstance(x, Tensor) else x)
            parts |= {f"optimizer.{m.name}.{n}": Part(t, tuple(t.shape), elsewhere=away) for n, t in tensors.items()}
            if not isinstance(x, Tensor):
                numbers.setdefault(m.name, {})[name] = rest
    for p in (p for group in groups for p in group):
        local, run = held.params[p.name], held.runs.get(p.name)
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
                named_parts = by_name(p, held.part(p, x))
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
    every = zip(_with_matrices(held, optimizer), group_classes(optimizer), groups, strict=True)
    for (group, wholes), kind, members in every:
        left_out = ("params", "param_names", *IMPLEMENTATIONS)
        hyper = {k: x.item() if isinstance(x, Tensor) else x for k, x in group.items() if k not in left_out}
        facts.append({**hyper, "class": kind, "params": _names(members, wholes)})
    return parts, {"class": class_of(optimizer), "groups": facts, "numbers": numbers}


def _named(p: Param) -> tuple[str, ...]:
    """Return the names under which a checkpoint stores a parameter's state."""
    return p.members or (p.fqn,)


def _names(members: list[Param], whole: list[Matrix] | None) -> list[str]:
    """Return the names of a group's parameters in a checkpoint."""
    return [n for p in members for n in _named(p)] if whole is None else [m.name for m in whole]


def _owned_states(held: RankState, optimizer: Optimizer) -> list[tuple[Matrix, dict[str, Any]]]:
    """Return the matrices that this rank owns, with the state of each."""
    if (matrices := held.matrices) is None:
        return []
    return [(m, optimizer.state.get(matrices.owned[n], {})) for n, m in matrices.matrices.items()]


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
    held: RankState, optimizer: Optimizer, index: Index, parts: dict[str, Part], folder: str, room: Room | None
) -> dict[str, dict[str, Any]]:
    """Make new state, to be filled, for every parameter: {fqn: {name: tensor or number}}.

    Adds its tensors to `parts`.
    """
    program, params, facts, stored = held.program, held.params, index.optimizer, index.tensors
    if facts is None:
        fix = "save it with its optimizer, or load it with optimizer=None"
        raise ShardcError("the checkpoint has no optimizer state", where=folder, fix=fix)
    groups, wholes_of = _groups(held, optimizer), [whole for _, whole in _with_matrices(held, optimizer)]
    names = [_names(g, whole) for g, whole in zip(groups, wholes_of, strict=True)]
    _check_classes(names, optimizer, facts, folder)
    members = {p.fqn: p for group in groups for p in group}
    wholes = {m.name: m for whole in wholes_of for m in whole or ()}
    errors = Errors()
    saved = {
        n: stored[f"model.{n}"].shape for group in facts["groups"] for n in group["params"] if f"model.{n}" in stored
    }
    stepped = {p.fqn for p in members.values()} | {program.param(m.param).fqn for m in wholes.values()}
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
    saved_names = {n for group in facts["groups"] for n in group["params"]}
    if absent := [n for n in wholes if n not in saved_names]:
        fault = f"the checkpoint's optimizer has no matrix {', '.join(absent[:5])}{' ...' if len(absent) > 5 else ''}"
        fix = "write the `optimizer: {matrices: ...}` that it was saved with, or load it with optimizer=None"
        errors.add(fault, where=folder, fix=fix)
    for i, group_names in enumerate(names):
        _check_settings(errors, i, group_names, facts["groups"], folder)
    errors.raise_any()
    states: dict[str, dict[str, Any]] = {n: dict(facts["numbers"].get(_named(p)[0], {})) for n, p in members.items()}
    owners = {n: p for p in members.values() for n in _named(p)}
    for m, state in _owned_states(held, optimizer):
        numbers = facts["numbers"].get(m.name, {})
        states[m.name] = _room_of_matrix(m, state, numbers, stored, parts, held.matrices)
    for key, tensor in stored.items():
        fqn, _, name = key.removeprefix("optimizer.").rpartition(".")
        if not key.startswith("optimizer.") or fqn not in owners:
            continue
        p = owners[fqn]
        local, shape = params[p.name], p.shapes[fqn]
        like_param = tensor.shape == shape and (bool(shape) or name != "step")
        if name not in states[p.fqn]:
            form = torch.empty(local.shape if like_param else tensor.shape, dtype=tensor.dtype, device="meta")
            if room and name != "step":
                states[p.fqn][name] = room(local, name, form)
            else:
                present = optimizer.state.get(local, {}).get(name)
                states[p.fqn][name] = _present_or_zeros(present, form.shape, form.dtype, name, local.device)
        x = states[p.fqn][name]
        part = held.part(p, x) if like_param else Part(x, tensor.shape)
        parts[key] = by_name(p, part)[fqn] if like_param else part
    return states


def _present_or_zeros(
    present: Any, shape: tuple[int, ...], dtype: torch.dtype, name: str, device: torch.device
) -> Tensor:
    """Return present state if its form fits, else zeros. A step counter is on the CPU."""
    if isinstance(present, Tensor) and (tuple(present.shape), present.dtype) == (tuple(shape), dtype):
        return present  # filled in place: no second state in memory
    return torch.zeros(shape, dtype=dtype, device="cpu" if name == "step" else device)


def _room_of_matrix(
    m: Matrix,
    held: Mapping[str, Any],
    numbers: Mapping[str, Any],
    stored: Mapping[str, Stored],
    parts: dict[str, Part],
    matrices: WholeMatrices | None,
) -> dict[str, Any]:
    """Make new state, to be filled, of a matrix that this rank owns. held: its present state."""
    assert matrices is not None
    device, prefix = matrices.owned[m.name].device, f"optimizer.{m.name}."
    tensors: dict[str, Tensor] = {}
    for key, tensor in stored.items():
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and "." not in name:
            tensors[name] = _present_or_zeros(held.get(name), tensor.shape, tensor.dtype, name, device)
            parts[key] = Part(tensors[name], tensor.shape)
    nested = {name: restored(plain, tensors) for name, plain in numbers.items()}
    return {n: x for n, x in tensors.items() if "/" not in n} | nested


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


def fill(held: RankState, optimizer: Optimizer, facts: Mapping[str, Any], states: Mapping[str, dict[str, Any]]) -> None:
    """Load states by the optimizer's load_state_dict, which knows their device and dtype."""
    state: dict[int, dict[str, Any]] = {}
    groups = []
    every, matrices = _with_matrices(held, optimizer), held.matrices
    of_class = zip(group_classes(optimizer), every, _groups(held, optimizer), strict=True)
    for i, (kind, (group, whole), stored) in enumerate(of_class):
        # match groups by name; one without parameters here by its number
        names = _names(stored, whole)
        matching = (
            [g for g in facts["groups"] if names[0] in g["params"]]
            if names
            else [g for g in facts["groups"][i : i + 1] if g.get("class", kind) == kind]
        )
        members = [p.fqn for p in stored]
        if whole is not None and matrices is not None:
            members = [m.name for m in whole if m.name in matrices.owned]
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
