"""An optimizer that updates parts of parameters (ZeRO >= 1): any that treats every element by itself, which is proven, not assumed.

The user's function makes its optimizer from stand-ins: parameters of the whole local shapes, whose memory is one element, so that it can
group them by name or shape as ever. Then the groups get what this rank owns of each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.runtime.flat import Run

_STEPS, _SIDE = 3, 4
#: How far a step in pieces may be from the whole one, relative to the update: vector instructions round the last digits differently.
_SLACK = {torch.float64: 1e-9, torch.float32: 1e-3}


def stand_in(shape: tuple[int, ...], like: Tensor) -> nn.Parameter:
    """A parameter of a shape, with the device and dtype of `like`, that takes no memory. It may not be written to."""
    return nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device).expand(shape), requires_grad=like.requires_grad)


def take_over(optimizer: Optimizer, stand_ins: Mapping[str, nn.Parameter], owned: Mapping[str, nn.Parameter], runs: Mapping[str, Run]) -> None:
    """Replace stand-ins by what this rank owns, in the optimizer's groups and in state that it has made already.

    Raises ShardcError for an optimizer that needs whole parameters.
    """
    prove_elementwise(optimizer)
    name_of = {id(p): n for n, p in stand_ins.items()}
    for group in optimizer.param_groups:
        group["params"][:] = [owned[name_of[id(p)]] if id(p) in name_of else p for p in group["params"]]  # the list itself: others may hold it
    for p in [p for p in optimizer.state if id(p) in name_of]:
        name = name_of[id(p)]
        run, state = runs[name], optimizer.state.pop(p)
        alike = {k: x for k, x in state.items() if _alike(k, x, p)}
        cut = {k: x.reshape(-1)[run.start : run.stop].clone() for k, x in alike.items()}
        optimizer.state[owned[name]] = {**state, **cut}


def prove_elementwise(optimizer: Optimizer) -> None:
    """Step copies of the optimizer on small random parameters, whole and cut in two: it must come to the same. Raises ShardcError."""
    kind = type(optimizer).__name__
    fix = f"use an optimizer that updates every element by itself (SGD, Adam, AdamW, ...), or data.zero: 0 with {kind}"
    try:
        whole, pieces = SmallCopy(optimizer), SmallCopy(optimizer)
        samples, grads = whole.data()
        one = whole.run(samples, grads, cut=False)
    except Exception as e:  # the user's own optimizer: whatever it raises is the reason
        what = f"the optimizer {kind} cannot be tried on a small sample ({type(e).__name__}: {e}), so nothing shows that it may update parts"
        raise ShardcError(what, where="data.zero", fix=fix) from e
    try:
        two = pieces.run(samples, grads, cut=True)
    except Exception as e:
        what = f"the optimizer {kind} needs whole parameters ({type(e).__name__} on parts: {e}), but data.zero >= 1 gives each rank a part"
        raise ShardcError(what, where="data.zero", fix=fix) from e
    for x, a, b in zip((x for group in samples for x in group), one, two, strict=True):
        moved = float((a - x).abs().max()) if x.numel() else 0.0
        if not torch.allclose(a, b, rtol=0.0, atol=_SLACK.get(x.dtype, 5e-2) * moved + torch.finfo(x.dtype).tiny, equal_nan=True):
            what = f"the optimizer {kind} needs whole parameters: it updates parts of them otherwise, and data.zero >= 1 gives each rank a part"
            raise ShardcError(what, where="data.zero", fix=fix)


def _sample(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    wide = torch.complex128 if like.dtype.is_complex else torch.float64
    return torch.randn(shape, generator=generator, dtype=wide).to(device=like.device, dtype=like.dtype)


class SmallCopy:
    """A copy of an optimizer, with all it holds, that works on other parameters. members: by group, (small shape, what it stands for)."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.members: list[list[tuple[tuple[int, ...], Tensor]]] = []
        for group in optimizer.param_groups:
            found: dict[tuple[int, ...], Tensor] = {}
            for p in group["params"]:
                found.setdefault(tuple(min(n, _SIDE) for n in p.shape), p)
            self.members.append(list(found.items()))
        # parameters and their state are not copied: new ones take their place
        memo: dict[int, Any] = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        memo |= {id(s): {} for s in optimizer.state.values()}
        made = {k: v for k, v in optimizer.__dict__.items() if k != "step"}  # a scheduler's wrapper of the original's step
        self.optimizer: Optimizer = object.__new__(type(optimizer))
        self.optimizer.__dict__.update(copy.deepcopy(made, memo))
        self.initial = {tuple(min(n, _SIDE) for n in p.shape): s for p, s in optimizer.state.items()}

    def data(self, copies: int = 1) -> tuple[list[list[Tensor]], list[list[list[Tensor]]]]:
        """(parameters by group, gradients by step and group), random. copies: how many parameters of each shape."""
        generator = torch.Generator().manual_seed(0)
        samples = [[_sample(shape, p, generator) for shape, p in members * copies] for members in self.members]
        return samples, [[[_sample(tuple(x.shape), x, generator) for x in group] for group in samples] for _ in range(_STEPS)]

    def step(self) -> None:
        type(self.optimizer).step(self.optimizer)

    def run(self, samples: list[list[Tensor]], grads: list[list[list[Tensor]]], *, cut: bool) -> list[Tensor]:
        """The samples after some steps. cut: each as two parts."""
        state = self.optimizer.state
        state.clear()
        held: list[list[list[nn.Parameter]]] = []
        for group, mine in zip(self.optimizer.param_groups, samples, strict=True):
            held.append([[nn.Parameter(part.clone()) for part in _parts(x, cut)] for x in mine])
            group["params"][:] = [p for parts in held[-1] for p in parts]
            if not group.get("lr", 1.0):
                group["lr"] = 1e-2  # a warm-up may begin at 0, which would show nothing
            for x, parts in zip(mine, held[-1], strict=True):
                for key, made in self.initial.get(tuple(x.shape), {}).items():  # state that it makes in its constructor
                    alike = _alike(key, made[tuple(slice(n) for n in x.shape)] if isinstance(made, Tensor) and made.dim() == x.dim() else None, x)
                    small = made[tuple(slice(n) for n in x.shape)] if alike else made
                    for p, part in zip(parts, _parts(small, cut) if alike else [small] * len(parts), strict=True):
                        state[p][key] = copy.deepcopy(part)
        for step in grads:
            for group_parts, group_grads in zip(held, step, strict=True):
                for parts, grad in zip(group_parts, group_grads, strict=True):
                    for p, g in zip(parts, _parts(grad, cut), strict=True):
                        p.grad = g.clone() if p.numel() else None
            self.step()
        return [
            torch.cat([p.detach().reshape(-1) for p in parts]).view(x.shape)
            for group, mine in zip(held, samples, strict=True) for parts, x in zip(group, mine, strict=True)
        ]  # fmt: skip


def _alike(key: str, x: Any, p: Tensor) -> bool:
    """Does a piece of state lie like its parameter? A scalar's count of steps only looks so."""
    return isinstance(x, Tensor) and x.shape == p.shape and (p.dim() > 0 or key != "step")


def _parts(x: Tensor, cut: bool) -> list[Tensor]:
    """x, or two stretches of its elements, of unequal length."""
    return list(x.reshape(-1).split_with_sizes([n := math.ceil(x.numel() / 3), x.numel() - n])) if cut else [x]
