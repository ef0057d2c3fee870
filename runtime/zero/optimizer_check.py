"""Test on small random parameters whether an optimizer may be sharded, or stepped in pieces.

    one by one            `why_all_at_once`   the optimizer steps a bucket while others are summed (`OverlappedStep`),
                                              or pages of its state (offload)
    without the others    `check_sharded`     ranks have other parameters, or other parts of them, than their neighbours
    in parts              `check_sharded`     parameters are split over ranks, or ZeRO leaves each rank a stretch
                          `needs_whole`       where the spec says `optimizer: {matrices: ...}`: on failure, owners

SGD, Adam and all others that treat every element separately pass all three. An optimizer that scales its updates by the
norm of all of them passes none. One that sees a parameter as a matrix (Muon, Adafactor) fails the third. One that
counts its steps in an attribute fails only the first; a count in a group is fine. Without the test each rank would
train by the part that it sees, and ranks that hold the same parameter would drift apart.
"""

from __future__ import annotations

import copy
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
from shardc.runtime.zero.several_optimizers import members_of
from shardc.torch_private import TorchDispatchMode, no_modes, step_hooks

_STEPS, _SIDE = 3, 4
_LR = 1e-2  # the smallest tried rate: with 0, or a rate too small for 16 bits, all trials would look equal
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

    params: local parts uncut by ZeRO, by name, from which it was made. shards: the stretches of those that will be cut.
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
    whole = _check_separate(optimizer, shardings, reason, fix)
    if shards:
        fault = f"the optimizer {kind} fails where a parameter has no gradient (ERROR), and ranks that have no part of"
        skip = "make its step skip a parameter whose .grad is None, as torch's optimizers do"
        with _refused(f"{fault} a small one have none: {reason.why}", reason, skip):
            Trial(optimizer, shardings).step_without_one()
    with _refused(f"the optimizer {kind} needs whole parameters (ERROR on parts), and {reason.why}", reason, fix):
        pieces = Trial(optimizer, shardings, cut=True)
    if (differing := whole.differing(pieces)) is not None and (sharding := differing.sharding) is not None:
        fault = f"the optimizer {kind} needs whole parameters: it updates their parts in another way"
        raise ShardcError(f"{fault}, and {sharding.why}", where=sharding.where, fix=fix)


def check_matrices(optimizer: Optimizer) -> None:
    """Raise ShardcError if whole matrices are updated depending on others, which other ranks own."""
    reason = ParamSharding((), "other ranks own the others", "optimizer", "")
    fix = "use an optimizer that updates each parameter separately, or leave optimizer: {matrices: ...} out"
    _check_separate(optimizer, {}, reason, fix)


def _check_separate(
    optimizer: Optimizer, shardings: Mapping[Tensor, ParamSharding], reason: ParamSharding, fix: str
) -> Trial:
    """Raise ShardcError if the update of a parameter depends on others; return the trial of whole parameters."""
    kind = type(optimizer).__name__
    with _refused(f"{_untried(kind)} whether it may update parts, and {reason.why}", reason, fix):
        # the same parameters, with and without others beside them
        whole, beside_others = Trial(optimizer, shardings), Trial(optimizer, shardings, copies=2)
        if not whole.moved:
            raise ValueError("it moves none of the parameters in its param_groups")
    if whole.differing(beside_others) is not None:
        fault = (
            f"the optimizer {kind} updates a parameter depending on others, and no rank has all of them: {reason.why}"
        )
        clips = "if it clips gradients, use the engine's option: clip_norm=1.0, --clip 1.0; else "
        raise ShardcError(fault, where=reason.where, fix=clips + fix)
    return whole


@contextmanager
def _refused(fault: str, reason: ParamSharding, fix: str) -> Iterator[None]:
    """Convert exceptions of the user's optimizer to ShardcError. fault: with ERROR where its text belongs."""
    try:
        yield
    except Exception as e:  # the user's own optimizer: whatever it raises is the reason
        raise ShardcError(fault.replace("ERROR", f"{type(e).__name__}: {e}"), where=reason.where, fix=fix) from e


def _untried(kind: str) -> str:
    return f"the optimizer {kind} cannot be tried on a small sample (ERROR), so it is unknown"


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
            return Trial(optimizer, shardings).differing(Trial(optimizer, shardings, cut=True)) is not None
        except Exception:  # `check_matrices` reports what is wrong
            return True


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
            trial = Trial(optimizer)
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
    for member in members_of(optimizer):
        kind = type(member).__name__
        try:
            together, one_by_one = Trial(member, copies=2), Trial(member, copies=2, one_by_one=True)
        except Exception as e:  # the user's own optimizer: whatever it raises is the reason
            return f"{_untried(kind)} whether it may step some parameters".replace("ERROR", f"{type(e).__name__}: {e}")
        if together.differing(one_by_one, exactly=True) is not None:
            return f"the optimizer {kind} updates parameters together, not separately"
    return None


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


class OverlappedStep:
    """Steps the parameters of one bucket after the other, while gradients of others are still summed. params: by name.

    An optimizer that, say, scales every update by the norm of all of them steps once.

    In every step: call `begin_if_possible()`; if it is, call `step` with each parameter's name once.
    """

    def __init__(self, optimizer: Optimizer, params: Mapping[str, nn.Parameter]) -> None:
        self.optimizer, self._params = optimizer, params
        self._separable = why_all_at_once(optimizer) is None
        self._settings: list[dict[str, Any]] = []

    def begin_if_possible(self) -> bool:
        """Return whether this step may run in parts; if so, begin it.

        Not where the optimizer has hooks: they run once a step, with all parameters.
        """
        self._settings = group_settings(self.optimizer)
        return self._separable and not any(map(step_hooks, members_of(self.optimizer)))

    def step(self, names: Sequence[str]) -> None:
        """Step those of the named parameters that have gradients."""
        with only_params(self.optimizer, [self._params[n] for n in names], self._settings):
            self.optimizer.step()


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

    def random(self, seed: int) -> list[Tensor]:
        """Return random numbers: the parameter, and its gradient in each step."""
        wide = torch.complex128 if self.like.dtype.is_complex else torch.float64
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn((1 + _STEPS, *self.shape), generator=generator, dtype=wide)
        return list(numbers.to(device=self.like.device, dtype=self.like.dtype))


class Trial:
    """Some steps of a copy of an optimizer, with its whole state, on other parameters.

    members: one for all equal parameters of a group; copies: how many of each. cut: in parts, if it has a sharding;
    else whole. one_by_one: steps every parameter separately. .values: of the members before the steps; .stepped: the
    parts of each after them.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        shardings: Mapping[Tensor, ParamSharding] | None = None,
        *,
        copies: int = 1,
        cut: bool = False,
        one_by_one: bool = False,
    ) -> None:
        self._cut, self._one_by_one = cut, one_by_one
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
        # a scheduler may have wrapped the original's step
        options = {k: v for k, v in optimizer.__dict__.items() if k != "step"}
        self._optimizer: Optimizer = object.__new__(type(optimizer))
        self._optimizer.__dict__.update(copy.deepcopy(options, memo))
        self._optimizer.state.clear()
        numbers = [m.random(seed) for seed, m in enumerate(self.members)]
        self.values = [x for x, *_ in numbers]
        self.stepped = self._run(optimizer.state, [grads for _, *grads in numbers])

    def _run(self, made: Mapping[Tensor, Any], grads: Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
        """Run the steps, and return the members' parts. made: state that the constructor made."""
        copies = [
            [nn.Parameter(part.clone()) for part in m.parts(x, cut=self._cut)]
            for m, x in zip(self.members, self.values, strict=True)
        ]
        for i, group in enumerate(self._optimizer.param_groups):
            group["params"][:] = itertools.chain(
                *(parts for m, parts in zip(self.members, copies, strict=True) if m.group == i)
            )
            if (lr := group.get("lr", _LR)) is None or lr < _LR:
                group["lr"] = torch.full_like(lr, _LR) if isinstance(lr, Tensor) else _LR
        for m, parts in zip(self.members, copies, strict=True):
            for key, state in made.get(m.like, {}).items():
                like_param = has_param_shape(key, state, m.like)
                # clone: with the strides of the part, which fused kernels take for granted
                cut = [x.clone() for x in m.parts(_small(state, m.shape), cut=self._cut)] if like_param else []
                small = cut or [state] * len(parts)
                for p, x in zip(parts, small, strict=True):
                    self._optimizer.state[p][key] = copy.deepcopy(x)
        for step in range(_STEPS):
            for m, parts, of_steps in zip(self.members, copies, grads, strict=True):
                for p, g in zip(parts, m.parts(of_steps[step], cut=self._cut), strict=True):
                    p.grad = g.clone() if p.numel() else None
            self._step()
        return [[p.detach() for p in parts] for parts in copies]

    def _step(self) -> None:
        before = group_settings(self._optimizer)
        every = [p for group in self._optimizer.param_groups for p in group["params"]]
        for some in [[p] for p in every] if self._one_by_one else [every]:
            with only_params(self._optimizer, some, before):
                type(self._optimizer).step(self._optimizer)

    def step_without_one(self) -> None:
        """Step once more, while one parameter has no gradient."""
        self._optimizer.param_groups[0]["params"][0].grad = None
        self._step()

    @property
    def moved(self) -> bool:
        """Whether some parameter changed, of whole ones that have elements."""
        pairs = [(x, after) for x, (after,) in zip(self.values, self.stepped, strict=True) if x.numel()]
        return not pairs or not all(torch.equal(x, after) for x, after in pairs)

    def differing(self, other: Trial, *, exactly: bool = False) -> _Member | None:
        """Return the first of this trial's whole members that moves otherwise in the other trial; None: none does.

        Relative to how far it moved; exactly: bit by bit.
        """
        rows = zip(self.members, self.values, self.stepped, other.stepped, strict=False)  # the other may have copies
        for m, x, (after,), others in rows:
            before, parts = m.parts(x, cut=other._cut), m.parts(after, cut=other._cut)
            slack = 0.0
            if not exactly:
                moves = [
                    float((a - b).abs().nan_to_num(0.0).max()) for a, b in zip(parts, before, strict=True) if a.numel()
                ]
                slack = _SLACK.get(x.dtype, 5e-2) * max(moves, default=0.0) + torch.finfo(x.dtype).tiny
            pairs = zip(parts, others, strict=True)
            if not all(torch.allclose(a, b, rtol=0.0, atol=slack, equal_nan=True) for a, b in pairs):
                return m
        return None


def _small(state: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Cut state of a parameter, or of a stretch of it, to a small shape."""
    if state.dim() == len(shape) and all(n <= m for n, m in zip(shape, state.shape, strict=True)):
        return state[tuple(slice(n) for n in shape)]
    return torch.cat([state.reshape(-1), state.new_zeros(math.prod(shape))])[: math.prod(shape)].reshape(shape)


def has_param_shape(key: str, x: Any, p: Tensor) -> bool:
    """Return whether state is elementwise, with its parameter's shape. A scalar's "step" is not."""
    return isinstance(x, Tensor) and x.shape == p.shape and (p.dim() > 0 or key != "step")
