"""Test on small random parameters whether an optimizer may be sharded, or stepped in pieces.

    one by one            `why_all_at_once`   the optimizer steps a bucket while others are summed
                                              (shardc.runtime.zero.early_step), or pages of its state (offload)
    without the others    `check_sharded`     ranks have other parameters, or other parts of them, than their neighbours
    in parts              `check_sharded`     parameters are split over ranks, or ZeRO leaves each rank a stretch
                          `needs_whole`       where the spec says `optimizer: {matrices: ...}`: else they get owners

SGD, Adam and all others that treat every element separately pass all three. An optimizer that scales its updates by the
norm of all of them passes none. One that sees a parameter as a matrix (Muon, Adafactor) fails the third. One that
counts its steps in an attribute fails only the first; a count in a group is fine. Without the test each rank would
train by the part that it sees, and ranks that hold the same parameter would drift apart.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.optional import registered
from shardc.runtime.zero.flat_partition import FlatShard
from shardc.runtime.zero.optimizer_list import members_of
from shardc.torch_private import TorchDispatchMode, no_modes

_STEPS, _SIDE = 3, 4
_LR = 1e-2  # the smallest tried rate: with 0, or a rate too small for 16 bits, all orders would look equal
#: The largest difference of a step in pieces, relative to the update: vector instructions round the last digits
#: differently.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass(frozen=True)
class ParamSharding:
    """The sharding of a parameter. dims: the split ones; () = each rank has a stretch of its elements.

    why, where, instead: for errors: the reason, its place, and what to do except take another optimizer. shape: of the
    whole parameter, where the optimizer already has a stretch (a module's at ZeRO >= 1).
    """

    dims: tuple[int, ...]
    why: str
    where: str
    instead: str
    shape: tuple[int, ...] | None = None

    def parts(self, x: Tensor) -> list[Tensor]:
        """Cut x in two along each split dim; the parts are unequal, perhaps empty."""
        parts = [x] if self.dims else [x.reshape(-1)]
        for d in self.dims or (0,):
            first = math.ceil(parts[0].shape[d] / 3)
            parts = [q for p in parts for q in p.split_with_sizes([first, p.shape[d] - first], d)]
        return parts


def stand_ins_of(program: Program) -> Any:
    """Return the class by which a feature makes the parameters that optimizers get; None: they get a rank's parts."""
    return next(registered("runtime", "StandIns", program.features), None)


def check_sharded(
    program: Program, optimizer: Optimizer, params: Mapping[str, nn.Parameter], shards: Mapping[str, FlatShard]
) -> None:
    """Raise ShardcError if the optimizer updates parts of a parameter differently from the whole.

    params: the whole local parts, by name, from which it was made. shards: the stretches of those that will be cut.
    """
    for member in members_of(optimizer):
        _check_sharded(program, member, params, shards)


def _check_sharded(
    program: Program, optimizer: Optimizer, params: Mapping[str, nn.Parameter], shards: Mapping[str, FlatShard]
) -> None:
    stepped = {id(p) for group in optimizer.param_groups for p in group["params"]}
    shardings: dict[Tensor, ParamSharding] = {
        params[p.name]: how
        for p in program.params
        if p.name in params and id(params[p.name]) in stepped and (how := _sharding(program, p, shards)) is not None
    }
    if not shardings and not program.axis:
        return
    kind = type(optimizer).__name__
    why_stages = f"each rank along {program.axis} has only those of its stages"
    reason = next(iter(shardings.values()), ParamSharding((), why_stages, "pipeline", "remove the pipeline"))
    give_owners = (
        "write optimizer: {matrices: whole} in the spec, which gives each matrix to one rank"
        if stand_ins_of(program) is None
        else "make it by module.optimizer(lambda params: ...), which gives each matrix to one rank"
    )
    fix = "use an optimizer that updates each element separately (SGD, Adam, AdamW, ...), or "
    fix += f"{give_owners}, or {reason.instead}"
    samples, grads, stepped_whole = _try_steps(optimizer, shardings, reason, fix)
    if shards:
        _check_skips(optimizer, shardings, reason, samples, grads)
    pieces = TrialCopy(optimizer, shardings)
    try:
        stepped_parts = pieces.run(samples, grads, cut=True)
    except Exception as e:  # the user's own optimizer: whatever it raises is the reason
        fault = f"the optimizer {kind} needs whole parameters ({type(e).__name__} on parts: {e}), and {reason.why}"
        raise ShardcError(fault, where=reason.where, fix=fix) from e
    for m, before, (after,), parts in zip(pieces.members, samples, stepped_whole, stepped_parts, strict=True):
        if m.sharding is not None and not _same(m.sharding.parts(before), m.sharding.parts(after), parts, _SLACK):
            fault = f"the optimizer {kind} needs whole parameters: it updates their parts in another way"
            raise ShardcError(f"{fault}, and {m.sharding.why}", where=m.sharding.where, fix=fix)


def _check_skips(
    optimizer: Optimizer,
    shardings: Mapping[Tensor, ParamSharding],
    reason: ParamSharding,
    samples: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
) -> None:
    """Raise ShardcError for an optimizer that cannot step where a parameter has no gradient."""
    lacking = TrialCopy(optimizer, shardings)
    try:
        lacking.run(samples, grads)
        lacking.step_without_one()
    except Exception as e:  # the user's own optimizer
        kind = type(optimizer).__name__
        fault = f"the optimizer {kind} fails where a parameter has no gradient ({type(e).__name__}: {e})"
        fault += f", and ranks that have no part of a small one have none: {reason.why}"
        fix = "make its step skip a parameter whose .grad is None, as torch's optimizers do"
        raise ShardcError(fault, where=reason.where, fix=fix) from e


def _closure_of(optimizer: Optimizer) -> str:
    """Return the name of the required argument of `step`, such as LBFGS's closure; "" for others."""
    for member in members_of(optimizer):
        step = inspect.signature(inspect.unwrap(type(member).step)).parameters.values()
        for p in [*step][1:]:
            if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                return p.name
    return ""


def check_matrices(optimizer: Optimizer) -> None:
    """Raise ShardcError if whole matrices are updated depending on others, which other ranks own."""
    reason = ParamSharding((), "other ranks own the others", "optimizer", "")
    fix = "use an optimizer that updates each parameter separately, or leave optimizer: {matrices: ...} out"
    _try_steps(optimizer, {}, reason, fix)


def _try_steps(
    optimizer: Optimizer, shardings: Mapping[Tensor, ParamSharding], reason: ParamSharding, fix: str
) -> tuple[list[Tensor], list[list[Tensor]], list[list[Tensor]]]:
    """Try an optimizer; return (values, gradients by step, values after the steps).

    Raises ShardcError if the update of a parameter depends on others.
    """
    kind = type(optimizer).__name__
    if closure := _closure_of(optimizer):
        fault = f"the optimizer {kind} needs all parameters on one rank: its step({closure}) computes the loss again"
        fix = f"use an optimizer whose step takes no {closure}, such as any optimizer of torch except LBFGS"
        raise ShardcError(f"{fault}, and {reason.why}", where=reason.where, fix=fix)
    try:
        # the same parameters, with and without others beside them
        without, beside_others = TrialCopy(optimizer, shardings), TrialCopy(optimizer, shardings, copies=2)
        samples, grads = beside_others.data()
        stepped_beside_others = beside_others.run(samples, grads)
        n = len(without.members)
        samples, grads = samples[:n], [g[:n] for g in grads]
        stepped = without.run(samples, grads)
        if any(x.numel() for x in samples) and all(
            torch.equal(before, after) for before, (after,) in zip(samples, stepped, strict=True)
        ):
            raise ValueError("it moves none of the parameters in its param_groups")
    except Exception as e:  # the user's own optimizer: whatever it raises is the reason
        fault = f"{_cannot_be_tried(optimizer, e)} whether it may update parts"
        raise ShardcError(f"{fault}, and {reason.why}", where=reason.where, fix=fix) from e
    pairs = zip(samples, stepped, stepped_beside_others[:n], strict=True)
    if not all(_same([before], a, b, _SLACK) for before, a, b in pairs):
        fault = (
            f"the optimizer {kind} updates a parameter depending on others, and no rank has all of them: {reason.why}"
        )
        clips = "if it clips gradients, use the engine's option: clip_norm=1.0, --clip 1.0; else "
        raise ShardcError(fault, where=reason.where, fix=clips + fix)
    return samples, grads, stepped


def _cannot_be_tried(optimizer: Optimizer, error: Exception) -> str:
    tried = f"the optimizer {type(optimizer).__name__} cannot be tried on a small sample"
    return f"{tried} ({type(error).__name__}: {error}), so it is unknown"


#: Classes of optimizers over whole matrices, in lower case: their first steps may not reveal it.
_WHOLE = ("muon", "shampoo", "distributedshampoo", "soap", "adafactor", "lamb", "lars", "kron", "psgd", "dion")


def needs_whole(optimizer: Optimizer) -> bool:
    """Return whether a step of a parameter needs all of it.

    So it is for known names, for declared classes (shardc.whole), and if the trial fails or differs in two stretches.
    """
    known = any(c.__name__.lower() in _WHOLE for c in type(optimizer).__mro__)
    if known or getattr(optimizer, "_shardc_whole", False):
        return True
    stretch = ParamSharding((), "", "", "")
    shardings: dict[Tensor, ParamSharding] = {p: stretch for group in optimizer.param_groups for p in group["params"]}
    with no_modes():  # the cost model runs this on tensors without data, which cannot be compared
        try:
            whole, pieces = TrialCopy(optimizer, shardings), TrialCopy(optimizer, shardings)
            samples, grads = whole.data()
            stepped_whole, stepped_parts = whole.run(samples, grads), pieces.run(samples, grads, cut=True)
        except Exception:  # `check_matrices` reports what is wrong
            return True
        rows = zip(samples, stepped_whole, stepped_parts, strict=True)
        return not all(_same(stretch.parts(x), stretch.parts(after), parts, _SLACK) for x, (after,), parts in rows)


def whole(optimizer: Optimizer) -> Optimizer:
    """Declare that an optimizer's step of a parameter needs all of it: `shardc.whole(Shampoo(matrices))`.

    Needed only where steps on small random parameters do not show it, such as if it starts to precondition at step 100.
    Returns the optimizer. Its parameters then have owners (`optimizer: {matrices: ...}` in the spec).
    """
    optimizer._shardc_whole = True  # type: ignore[attr-defined]
    return optimizer


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the multiplications of matrix products.

    torch's FlopCounterMode also hooks into modules that other threads call: ranks of a loopback mesh.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in _PRODUCTS:
            one, other = args[-2:]
            self.count += one.numel() * other.shape[-1]
        return func(*args, **(kwargs or {}))


_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


def multiplies(optimizer: Optimizer) -> bool:
    """Return whether a step multiplies matrices: its work is cubic in their size.

    Products of a column and a row (Adafactor) do not count.
    """
    with no_modes(), _Products() as products:
        try:
            trial = TrialCopy(optimizer)
            trial.run(*trial.data())
        except Exception:  # the user's own optimizer
            return True
    elements = sum(math.prod(m.shape) for m in trial.members if len(m.shape) > 1)
    return bool(products.count > 2 * _STEPS * elements)


def _sharding(program: Program, p: Param, shards: Mapping[str, FlatShard]) -> ParamSharding | None:
    if p.name in shards:
        return ParamSharding(
            (),
            f"data.zero: {program.buckets[p.bucket].zero} gives each rank a part of them",
            "data.zero",
            "write data.zero: 0",
            tuple(shards[p.name].shape),
        )
    axes = {s.dim: a for a, s in p.layout.shards() if program.mesh.size(a) > 1}
    if p.members and not axes:
        why = f"{p.fqn} is a stack of {len(p.members)} of the model's parameters"
        return ParamSharding((0,), why, p.fqn, "leave `experts:` out of the spec")
    axes |= {0: axes.get(0, "experts")} if p.members else {}
    over = ", ".join(dict.fromkeys(axes.values()))
    if not axes:
        return None
    return ParamSharding(tuple(sorted(axes)), f"{p.fqn} is split over {over}", p.fqn, f"leave {p.fqn} whole")


def why_all_at_once(optimizer: Optimizer) -> str | None:
    """Return why an optimizer must step all parameters at once; None if one by one has the same bits."""
    return next(filter(None, map(_why_all_at_once, members_of(optimizer))), None)


def _why_all_at_once(optimizer: Optimizer) -> str | None:
    try:
        together, one_by_one = TrialCopy(optimizer, copies=2), _OneByOne(optimizer, copies=2)
        samples, grads = together.data()
        rows = zip(samples, together.run(samples, grads), one_by_one.run(samples, grads), strict=True)
    except Exception as e:  # the user's own optimizer: whatever it raises is the reason
        return f"{_cannot_be_tried(optimizer, e)} whether it may step some parameters"
    if all(_same([before], a, b, None) for before, a, b in rows):
        return None
    return f"the optimizer {type(optimizer).__name__} updates parameters together, not separately"


def _same(
    before: Sequence[Tensor], one: Sequence[Tensor], other: Sequence[Tensor], slack: Mapping[torch.dtype, float] | None
) -> bool:
    """Return whether parts moved equally, relative to how far they moved. slack None: bit by bit."""
    atol, dtype = 0.0, before[0].dtype
    if slack is not None:
        moved = max(
            (float((a - b).abs().nan_to_num(0.0).max()) for a, b in zip(one, before, strict=True) if a.numel()),
            default=0.0,
        )
        atol = slack.get(dtype, 5e-2) * moved + torch.finfo(dtype).tiny
    return all(torch.allclose(a, b, rtol=0.0, atol=atol, equal_nan=True) for a, b in zip(one, other, strict=True))


# --- some of an optimizer's parameters --------------------------------------------------------------------------------


def group_settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """Return the settings of every parameter group: all but its parameters."""
    return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


@contextmanager
def only_params(optimizer: Optimizer, some: Sequence[nn.Parameter], before: Sequence[dict[str, Any]]) -> Iterator[None]:
    """Restrict the optimizer's groups to `some` parameters. before: the settings before the whole step.

    So what a step changes in a group, such as a count of steps, changes once.
    """
    kept = {id(p) for p in some}
    every = [list(group["params"]) for group in optimizer.param_groups]
    for group, settings in zip(optimizer.param_groups, before, strict=True):
        for new in group.keys() - settings.keys() - {"params"}:
            del group[new]
        group.update(settings)
        group["params"][:] = [p for p in group["params"] if id(p) in kept]
    try:
        yield
    finally:
        for group, params in zip(optimizer.param_groups, every, strict=True):
            group["params"][:] = params


# --- copies -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    """A small parameter. group: its number; like: an original that it represents; sharding: of that one."""

    group: int
    shape: tuple[int, ...]
    like: Tensor
    sharding: ParamSharding | None

    def parts(self, x: Tensor, *, cut: bool) -> list[Tensor]:
        return self.sharding.parts(x) if cut and self.sharding is not None else [x]


class TrialCopy:
    """A copy of an optimizer, with its whole state, that works on other parameters.

    members: one for all equal parameters of a group; copies: how often all of them.
    """

    def __init__(
        self, optimizer: Optimizer, shardings: Mapping[Tensor, ParamSharding] | None = None, copies: int = 1
    ) -> None:
        self.members: list[_Member] = []
        for i, group in enumerate(optimizer.param_groups):
            members: dict[Any, _Member] = {}
            for p in group["params"]:
                sharding = (shardings or {}).get(p)
                whole = sharding.shape if sharding is not None and sharding.shape is not None else p.shape
                shape = tuple(min(n, _SIDE) for n in whole)
                kind = shape, sharding.dims if sharding is not None else None
                members.setdefault(kind, _Member(i, shape, p, sharding))
            self.members += members.values()
        self.members *= copies
        # parameters and their state are not copied but replaced
        memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        memo |= {id(s): {} for s in optimizer.state.values()}
        options = {
            k: v for k, v in optimizer.__dict__.items() if k != "step"
        }  # a scheduler may have wrapped the original's step
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(copy.deepcopy(options, memo))
        self._made = optimizer.state  # state that the constructor made

    def data(self) -> tuple[list[Tensor], list[list[Tensor]]]:
        """Return random (values of the members, gradients by step)."""
        generator = torch.Generator().manual_seed(0)
        values, *grads = [[_random(m, generator) for m in self.members] for _ in range(1 + _STEPS)]
        return values, grads

    def step(self) -> None:
        type(self.optimizer).step(self.optimizer)

    def run(
        self, values: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], *, cut: bool = False
    ) -> list[list[Tensor]]:
        """Run some steps and return the members' parts. cut: as ranks have them; else each is whole."""
        self.optimizer.state.clear()
        copies = [
            [nn.Parameter(part.clone()) for part in m.parts(x, cut=cut)]
            for m, x in zip(self.members, values, strict=True)
        ]
        for i, group in enumerate(self.optimizer.param_groups):
            group["params"][:] = itertools.chain(
                *(parts for m, parts in zip(self.members, copies, strict=True) if m.group == i)
            )
            if (lr := group.get("lr", _LR)) is None or lr < _LR:
                group["lr"] = torch.full_like(lr, _LR) if isinstance(lr, Tensor) else _LR
        for m, parts in zip(self.members, copies, strict=True):
            self._begin(m, parts, cut)
        for step in grads:
            for m, parts, grad in zip(self.members, copies, step, strict=True):
                for p, g in zip(parts, m.parts(grad, cut=cut), strict=True):
                    p.grad = g.clone() if p.numel() else None
            self.step()
        return [[p.detach() for p in parts] for parts in copies]

    def step_without_one(self) -> None:
        """Step once more after `run`, while one parameter has no gradient."""
        self.optimizer.param_groups[0]["params"][0].grad = None
        self.step()

    def _begin(self, m: _Member, parts: Sequence[nn.Parameter], cut: bool) -> None:
        """Copy state that the optimizer's constructor has made, in the small shape."""
        for key, state in self._made.get(m.like, {}).items():
            like_param = has_param_shape(key, state, m.like)
            small = m.parts(_small(state, m.shape), cut=cut) if like_param else [state] * len(parts)
            for p, x in zip(parts, small, strict=True):
                self.optimizer.state[p][key] = copy.deepcopy(x)


def _small(state: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Cut state of a parameter, or of a stretch of it, to a small shape."""
    if state.dim() == len(shape) and all(n <= m for n, m in zip(shape, state.shape, strict=True)):
        return state[tuple(slice(n) for n in shape)]
    return torch.cat([state.reshape(-1), state.new_zeros(math.prod(shape))])[: math.prod(shape)].reshape(shape)


class _OneByOne(TrialCopy):
    """A small copy of an optimizer that steps every parameter separately."""

    def step(self) -> None:
        before = group_settings(self.optimizer)
        for p in [p for group in self.optimizer.param_groups for p in group["params"]]:
            with only_params(self.optimizer, [p], before):
                super().step()


def has_param_shape(key: str, x: Any, p: Tensor) -> bool:
    """Return whether state is elementwise, with its parameter's shape. A scalar's "step" is not."""
    return isinstance(x, Tensor) and x.shape == p.shape and (p.dim() > 0 or key != "step")


def _random(m: _Member, generator: torch.Generator) -> Tensor:
    wide = torch.complex128 if m.like.dtype.is_complex else torch.float64
    return torch.randn(m.shape, generator=generator, dtype=wide).to(device=m.like.device, dtype=m.like.dtype)
