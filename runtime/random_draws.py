"""Random tensor ops computed from the counter-based generator: what `normal_`, `rand`, `randperm` ... mean in a
replayed tape.

Element i (in row-major order of the op's own result) of a random op is a function of the op's key and i alone, so that
the numbers are the same on every mesh and device, however large the pieces in which they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime import rng
from shardc.runtime.rng import Key

CHUNK = 1 << 20  # elements computed at once: bounds the float64 temporaries


def draw(name: str, out: Tensor, key: Key, args: Mapping[str, Any]) -> None:
    """Fill `out` as the random op `name` would. args: its arguments by their schema names. KeyError on an op that is
    not known.
    """
    if name == "randperm":
        out.copy_(torch.argsort(rng.bits(key, torch.arange(out.numel(), device=out.device)), stable=True))
        return
    sample = SAMPLERS[name](args)
    flat = out.view(-1) if out.is_contiguous() else torch.empty(out.numel(), dtype=out.dtype, device=out.device)
    each = {k: v.expand(out.shape).reshape(-1) for k, v in args.items() if isinstance(v, Tensor) and k in _PER_ELEMENT}
    wide = torch.int64 if out.numel() >= 2**31 else torch.int32
    for start in range(0, out.numel(), CHUNK):
        end = min(start + CHUNK, out.numel())
        index = torch.arange(start, end, dtype=wide, device=out.device)
        flat[start:end] = sample(key, index, {k: v[start:end] for k, v in each.items()}, out.dtype)
    if not out.is_contiguous():
        out.copy_(flat.view(out.shape))


def draw_box(
    name: str,
    whole: torch.Size,
    dtype: torch.dtype,
    key: Key,
    args: Mapping[str, Any],
    box: Sequence[tuple[int, int]],
    device: torch.device | str = "cpu",
) -> Tensor:
    """A box of what `draw` fills a contiguous tensor of shape `whole` with, and nothing else of it. box: (start,
    length) per dim. args: numbers only; not for "randperm".
    """
    sample = SAMPLERS[name](args)
    out = torch.empty([n for _, n in box], dtype=dtype, device=device)
    flat, wide = out.view(-1), torch.int64 if whole.numel() >= 2**31 else torch.int32
    for start in range(0, out.numel(), CHUNK):
        end = min(start + CHUNK, out.numel())
        place = torch.arange(start, end, dtype=torch.int64, device=device)
        index, stride = torch.zeros_like(place), 1
        for size, (first, n) in zip(reversed(whole), reversed(box), strict=True):
            index += (place % n + first) * stride
            place, stride = place // n, stride * size
        flat[start:end] = sample(key, index.to(wide), {}, dtype)
    return out


def known(name: str, args: Mapping[str, Any]) -> bool:
    """Can `draw` compute this op?"""
    if SAMPLERS.get(name) is _integers:
        low, high = args.get("low", args.get("from", 0)), args.get("high", args.get("to"))
        return isinstance(low, int) and isinstance(high, int) and 0 < high - low <= 2**31
    return name in SAMPLERS or name == "randperm"


Sampler = Callable[[Key, Tensor, Mapping[str, Tensor], torch.dtype], Tensor]
_PER_ELEMENT = ("mean", "std", "p", "self")  # arguments that may be tensors, one number for every element


def _float(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which [0, 1) is sampled: a number of a narrower one could round up to 1."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _normal(args: Mapping[str, Any]) -> Sampler:
    mean, std = args.get("mean", 0.0), args.get("std", 1.0)

    def sample(k: Key, i: Tensor, each: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        drawn: Tensor = rng.normal(k, i, torch.float64) * each.get("std", std) + each.get("mean", mean)
        return drawn

    return sample


def _log_normal(args: Mapping[str, Any]) -> Sampler:
    plain = _normal({"mean": args.get("mean", 1.0), "std": args.get("std", 2.0)})
    return lambda k, i, each, dtype: plain(k, i, each, dtype).exp_()


def _uniform(args: Mapping[str, Any]) -> Sampler:
    low, high = float(args.get("from", 0.0)), float(args.get("to", 1.0))
    return lambda k, i, each, dtype: rng.uniform(k, i, _float(dtype)) * (high - low) + low


def _bernoulli(args: Mapping[str, Any]) -> Sampler:
    p = args.get("p")

    def sample(k: Key, i: Tensor, each: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        limit = each.get("p", each["self"] if p is None else p)
        kept: Tensor = rng.uniform(k, i, torch.float64) < limit
        return kept.to(dtype)

    return sample


def _bernoulli_(args: Mapping[str, Any]) -> Sampler:
    return _bernoulli({"p": 0.5, **args})  # in place, `self` is what is overwritten, not the probability


def _integers(args: Mapping[str, Any]) -> Sampler:
    low = args.get("low", args.get("from", 0))
    span = args.get("high", args.get("to", 0)) - low

    def sample(k: Key, i: Tensor, each: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        unsigned = rng.bits(k, i).to(torch.int64) + 2**31
        drawn: Tensor = ((unsigned * span) >> 32) + low
        return drawn

    return sample


def _inverse(name: str) -> Callable[[Mapping[str, Any]], Sampler]:
    """Distributions by the inverse of their distribution function, in float64."""

    def prepare(args: Mapping[str, Any]) -> Sampler:
        def sample(k: Key, i: Tensor, each: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
            u = rng.uniform(k, i, torch.float64) + 2.0**-33  # in (0, 1)
            if name == "exponential":
                return -torch.log1p(-u) / float(args.get("lambd", 1.0))
            if name == "geometric":
                return torch.ceil(torch.log1p(-u) / math.log1p(-args["p"])).clamp_(min=1)
            return torch.tan(math.pi * (u - 0.5)) * float(args.get("sigma", 1.0)) + float(args.get("median", 0.0))

        return sample

    return prepare


def _trunc_normal(args: Mapping[str, Any]) -> Sampler:
    mean, std, a, b = (float(args[n]) for n in ("mean", "std", "a", "b"))
    # the half of the curve that keeps the tail's digits: mirrored, so that both ends lie at or below the middle where
    # possible
    low, high = (a - mean) / std, (b - mean) / std
    sign = -1.0 if low > 0 else 1.0
    if sign < 0:
        low, high = -high, -low
    ends = torch.special.ndtr(torch.tensor([low, high], dtype=torch.float64)).tolist()

    def sample(k: Key, i: Tensor, each: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        u = rng.uniform(k, i, torch.float64) + 2.0**-33
        z: Tensor = torch.special.ndtri(ends[0] + u * (ends[1] - ends[0]))
        return (z * (sign * std) + mean).clamp_(a, b)

    return sample


#: Random ops by the name of their overload packet; "trunc_normal_" is torch.nn.init's, which loops until its numbers
#: fit.
SAMPLERS: dict[str, Callable[[Mapping[str, Any]], Sampler]] = {
    "normal_": _normal,
    "normal": _normal,
    "log_normal_": _log_normal,
    "randn": lambda _: _normal({}),
    "randn_like": lambda _: _normal({}),
    "uniform_": _uniform,
    "rand": lambda _: _uniform({}),
    "rand_like": lambda _: _uniform({}),
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_,
    "randint": _integers,
    "randint_like": _integers,
    "random_": _integers,
    "exponential_": _inverse("exponential"),
    "geometric_": _inverse("geometric"),
    "cauchy_": _inverse("cauchy"),
    "trunc_normal_": _trunc_normal,
}
