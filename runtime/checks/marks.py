"""Mark what is a rank's part of the model: parameters, gradients, and state dicts, so that nobody takes it for another.

The checkpoint of every tutorial (rank 0 saves, all ranks load) would put rank 0's slices, or its moments, into all
ranks: shapes and names fit, and training goes wrong. So the state_dict of a module (in its `_metadata`, which
torch.save keeps) and of an optimizer (in its groups) say which slices they have, and loading compares. An engine's
optimizer is known from the start, the one of a custom loop from its first step: if it loads before, torch copies the
mark into its groups, where that step finds it. A copy of a module's state_dict made by hand, `{k: v.clone() for ...}`,
loses the mark: then the next forward compares what ranks have loaded (`check_loaded`).

torch.distributed.checkpoint takes a plain tensor for the whole one, the same on all ranks, and writes one of them. It
first calls a method of the tensor: parts refuse there, as parameters and in state dicts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.stored import Buffer, Param
from shardc.runtime.checks import tensor_parts
from shardc.runtime.checks.hooks import Model
from shardc.runtime.checks.tensor_parts import Origin, refuse
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import Fact, fingerprint, hashed
from shardc.runtime.stage.clip_grad_norm import norm_axes
from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.several_optimizers import members_of

#: The mark's key in a state_dict.
KEY = "shardc"


# --- parameters and gradients -----------------------------------------------------------------------------------------


def watch_parameters(model: Model) -> None:
    """Make `ParameterPart`s of split parameters: of a module at once; of an engine when somebody reads them."""
    for x, p, dims in _split(model):
        if type(p) is nn.Parameter:  # not a tensor of tensors, such as a quantised weight
            tensor_parts.make_part(p, dims, Origin(x.fqn, tuple(x.shape), grad=False))


def mark_gradients(model: Model) -> None:
    """Make the gradients of split parameters `TensorPart`s."""
    for x, p, dims in _split(model):
        if p.grad is not None and type(p.grad) is Tensor:
            p.grad = tensor_parts.part(p.grad, dims, Origin(x.fqn))


def _split(model: Model) -> Iterator[tuple[Param, nn.Parameter, frozenset[int] | None]]:
    """Yield parameters of which ranks hold different parts, with the split dims; None: a flat shard."""
    for x in model.program.params:
        if x.name in model.owned and norm_axes(model.program, x.name):
            split_dims = frozenset(s.dim for a, s in x.layout.shards() if model.program.mesh.size(a) > 1)
            yield x, model.owned[x.name], None if x.name in model.buckets.shards else split_dims


def refuse_checkpoint(x: Tensor, fqn: str) -> None:
    """Make torch.distributed.checkpoint refuse this part of a plain tensor (state, a buffer)."""
    if not isinstance(x, tensor_parts.TensorPart):
        refusal: Any = functools.partial(_refuse_checkpoint, fqn)
        x.__create_write_items__ = x.__create_chunk_list__ = refusal  # type: ignore[attr-defined]
        x.__getstate__ = _no_state  # type: ignore[method-assign]


def _refuse_checkpoint(fqn: str, *_: Any) -> None:
    refuse("checkpoint", Origin(fqn, grad=False))


def _no_state() -> None:
    """Return no state, so that torch.save writes a plain tensor."""


# --- state dicts ------------------------------------------------------------------------------------------------------


class Slices:
    """This rank's slices of a model's parameters and buffers.

    .split: names of which any rank has a slice, the same on all ranks: at ZeRO one may have all of a weight, and the
    others nothing.
    """

    def __init__(self, model: Model) -> None:
        self._rank, self._text = model.mesh.rank, dict[str, str]()
        self.split: set[str] = set()
        for x in (x for x in model.program.params_and_buffers if x.fqn):
            names = (x.fqn, *x.aliases)
            self._text |= dict.fromkeys(names, _slice(x, model.mesh, model.buckets.shards.get(x.name)))
            if norm_axes(model.program, x.name) if isinstance(x, Param) else x.layout.shards():
                self.split |= set(names)

    def mark(self, names: Iterable[str] | None = None) -> dict[str, Any]:
        """Return the mark of a state_dict with these names; default: with all."""
        return {"rank": self._rank, "slices": {n: self._text[n] for n in (self._text if names is None else names)}}

    def compare(self, mark: Mapping[str, Any], names: Iterable[str], loaded: str, where: str, fix: str) -> None:
        """Raise ShardcError for a mark with other slices of these names than this rank's."""
        saved: Mapping[str, str] = mark["slices"]
        if other := [n for n in names if saved.get(n, self._text[n]) != self._text[n]]:
            fault = f"{loaded} of rank {mark['rank']}: {saved[other[0]]}, where this rank has {self._text[other[0]]}"
            raise ShardcError(f"{fault} ({len(other)} such)", where=f"{where}{other[0]}", fix=fix)

    def check(self, state_dict: Mapping[str, Any], prefix: str, mark: Any) -> bool:
        """Raise ShardcError for a module's state_dict with other slices than this rank's.

        mark: in the state_dict, or None. Returns whether it has slices without a mark.
        """
        present = [n for n in self._text if prefix + n in state_dict]
        if not isinstance(mark, Mapping):
            return not self.split.isdisjoint(present)
        fix = "save with module.save(folder, optimizer) on all ranks, which any mesh loads; or save"
        fix += " module.full_state_dict() of the whole model, and load it with program.module(model, weights=...)"
        self.compare(mark, present, "these are the slices", f"module.load_state_dict: {prefix}", fix)
        return False


def _slice(x: Param | Buffer, mesh: Any, shard: FlatShard | None) -> str:
    """Return this rank's slice of a tensor as text."""
    boxes = list(x.layout.boxes(x.shape, mesh.layout, {a: mesh.coordinate(a) for a in mesh.layout.names}))
    text = " and ".join(f"[{', '.join(f'{start}:{start + n}' for _, start, n in box)}]" for box in boxes) or "nothing"
    if 0 in x.shape or boxes == [tuple((0, 0, n) for n in x.shape)]:
        text = "the whole"
    if shard is not None and shard.size != math.prod(shard.shape):
        text = f"elements {shard.start}:{shard.stop} of {text}"
    return text


def check_loaded(model: Model) -> None:
    """Raise ShardcError, on all ranks, if all loaded the same values into different slices. Collective."""
    by_axes: dict[tuple[str, ...], list[Tensor]] = {}
    for name, p in model.owned.items():
        if axes := norm_axes(model.program, name):
            x, same_axes = p.detach(), by_axes.setdefault(axes, [])
            if x.numel() and bool((x != x.reshape(-1)[0]).any()):  # constants (zeros, ones) may be equal on all ranks
                same_axes.append(x)
    facts = [
        Fact("what was loaded", fingerprint(xs) if xs else hashed("constant", model.mesh.rank), axes)
        for axes, xs in sorted(by_axes.items())
    ]
    equal_facts = agreement.check(model.mesh, facts, "forward")
    if facts and all(f in equal_facts for f in facts):
        fault = "all ranks loaded the same values into parameters of which each rank has a different slice"
        fix = "load what this rank saved; or save with module.save(folder, optimizer) on all ranks, which any mesh"
        fix += " loads"
        raise ShardcError(fault, where="module.load_state_dict", fix=fix)


class OptimizerMarks:
    """Marks and checks states of an optimizer of a model's parameters. fix: how to save and load instead."""

    def __init__(self, model: Model, fix: str) -> None:
        self._slices, self._fix = Slices(model), fix
        here = ((x, model.owned[x.name]) for x in model.program.params if x.name in model.owned)
        self._here = {id(p): (x.fqn, x.shape, tuple(p.shape)) for x, p in here}

    def guard(self, optimizer: Optimizer) -> None:
        """Mark each state that the optimizer saves, and check each that it loads."""
        for m in members_of(optimizer):
            m.register_state_dict_post_hook(self._mark)
            m.register_load_state_dict_pre_hook(self._check)
            m.register_load_state_dict_post_hook(self._check_shapes)

    def check_loaded(self, optimizer: Optimizer) -> None:
        """Raise ShardcError if the optimizer loaded another rank's state before it was guarded."""
        self._compare(optimizer, [group.pop(KEY, None) for group in optimizer.param_groups])
        self._check_shapes(optimizer)

    def _names(self, group: Mapping[str, Any]) -> list[str]:
        return [self._here[id(p)][0] for p in group["params"] if id(p) in self._here]

    def _mark(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        for group, packed in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
            packed[KEY] = self._slices.mark(self._names(group))
        for p, fqn, _, part in self._parts(optimizer):
            for x in optimizer.state.get(p, {}).values():
                if isinstance(x, Tensor) and x.shape == part:
                    refuse_checkpoint(x, fqn)

    def _check(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = state_dict["param_groups"]
        self._compare(optimizer, [saved.get(KEY) for saved in groups])
        return {**state_dict, "param_groups": [{k: x for k, x in g.items() if k != KEY} for g in groups]}

    def _compare(self, optimizer: Optimizer, marks: Iterable[Mapping[str, Any] | None]) -> None:
        where = f"{type(optimizer).__name__}.load_state_dict: "
        for group, mark in zip(optimizer.param_groups, marks, strict=False):  # torch reports another number of groups
            if mark is not None:
                names = self._names(group)
                self._slices.compare(mark, names, "this is the state of the slices", where, self._fix)

    def _parts(self, optimizer: Optimizer) -> Iterator[tuple[Tensor, str, tuple[int, ...], tuple[int, ...]]]:
        """Yield parameters of which this rank has a part, with their names, and shapes of whole and part."""
        for p in (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._here):
            fqn, whole, part = self._here[id(p)]
            if whole != part:
                yield p, fqn, whole, part

    def _check_shapes(self, optimizer: Optimizer) -> None:
        for p, fqn, whole, part in self._parts(optimizer):
            # not for a parameter of one number: a step count has its shape
            if whole and any(isinstance(x, Tensor) and x.shape == whole for x in optimizer.state.get(p, {}).values()):
                where = f"{type(optimizer).__name__}.load_state_dict: {fqn}"
                fault = f"this is state of the whole parameter {list(whole)}, of which this rank has a part"
                fault += f" {list(part)}"
                raise ShardcError(fault, where=where, fix=f"start without it; {self._fix}")
