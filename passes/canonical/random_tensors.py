"""Rewrite random tensors to use the counter generator, so that every mesh draws what one device draws.

    randn_like(x)            ->    random('normal', (0.0, 1.0), [8, 16], f32, rng, 2)      2: the op's ordinal
    bernoulli(p)             ->    random('uniform', (0.0, 1.0), ...) < p
    exponential(x, 2.0)      ->    random('exponential', (2.0,), ...)                      gumbel_softmax draws these
    multinomial(p, 1)        ->    argmax(p / random('exponential', ...))

The distributions are torch's, the numbers are not: they depend on the seed, the step and the op, and not on how many
were drawn before.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import value_of
from shardc.ir.metadata import Value
from shardc.passes.canonical.rewrite import Args, Emit, Result, rewrite, shape

aten = torch.ops.aten
#: Numbers of 32 random bits are scaled to a range of integers.
WIDEST = 2**31
#: What `random_()` draws below, of dtypes of at most 2^31 numbers.
_ALL_INTEGERS = {torch.bool: 2, torch.uint8: 2**8, torch.int8: 2**7, torch.int16: 2**15, torch.int32: WIDEST} | {
    torch.bfloat16: 2**8 + 1,
    torch.float16: 2**11 + 1,
    torch.float32: 2**24 + 1,
}


def _random(emit: Emit, a: Args, out: Value, kind: str, *options: float) -> fx.Node:
    if out.dtype.is_complex:
        raise emit.refuse(
            f"{a.op} draws complex numbers",
            "draw real and imaginary parts, torch.complex(torch.randn(..), torch.randn(..))",
        )
    return emit.random(kind, options, out.shape, out.dtype)


@rewrite("rand rand_like uniform")
def uniform(emit: Emit, a: Args, out: Value) -> Result:
    return _random(emit, a, out, "uniform", float(a.get("from", 0.0)), float(a.get("to", 1.0)))


@rewrite("randn randn_like normal normal_functional")
def normal(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite normal draws. mean and std are numbers, or tensors without gradient, as in torch."""
    mean, std = a.get("mean", 0.0), a.get("std", 1.0)
    if not isinstance(mean, fx.Node) and not isinstance(std, fx.Node):
        return _random(emit, a, out, "normal", float(mean), float(std))
    noise = _random(emit, a, out, "normal", 0.0, 1.0)
    mean, std = (emit.detach(x) if isinstance(x, fx.Node) else x for x in (mean, std))
    return emit.cast(emit(aten.add.Tensor, emit(aten.mul.Tensor, noise, std), mean), out.dtype)


#: Distributions, with the names of their numbers.
_NUMBERS = {
    "log_normal": ("mean", "std"),
    "exponential": ("lambd",),
    "geometric": ("p",),
    "cauchy": ("median", "sigma"),
}


@rewrite(*_NUMBERS)
def drawn(emit: Emit, a: Args, out: Value) -> Result:
    return _random(emit, a, out, a.op_name, *(float(a[name]) for name in _NUMBERS[a.op_name]))


@rewrite("randint randint_like random")
def integers(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite draws of integers in [low, high)."""
    low, high = a.get("low", a.get("from")) or 0, a.get("high", a.get("to"))
    if a.op_name == "random" and high is None and out.dtype in _ALL_INTEGERS:
        high = _ALL_INTEGERS[out.dtype]
    if not isinstance(low, int) or not isinstance(high, int):
        raise emit.refuse(
            f"{a.op} draws integers from a range that is wider than 2^31, or no Python numbers",
            "use torch.randint with two numbers",
        )
    if not 0 < high - low <= WIDEST:
        raise emit.refuse(
            f"{a.op} draws integers from a range of {high - low}", f"use a range of at most 2^31 = {WIDEST}"
        )
    return _random(emit, a, out, "integers", low, high)


@rewrite("randperm")
def permutation(emit: Emit, a: Args, out: Value) -> Result:
    return _random(emit, a, out, "permutation")


@rewrite("bernoulli")
def bernoulli(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite bernoulli draws; the probabilities are `p`, or else the operand itself."""
    p = a.get("p")
    p = a.first if p is None else p
    wide = torch.float64 if isinstance(p, fx.Node) and value_of(p).dtype == torch.float64 else torch.float32
    numbers = _random(emit, a, Value(out.shape, wide), "uniform", 0.0, 1.0)
    below = (
        emit(aten.lt.Tensor, numbers, emit.detach(p))
        if isinstance(p, fx.Node)
        else emit(aten.lt.Scalar, numbers, float(p))
    )
    return emit.cast(below, out.dtype)


@rewrite("multinomial")
def multinomial(emit: Emit, a: Args, out: Value) -> Result:
    """Rewrite multinomial draws as an "exponential race" (without replacement: the first n arrivals).

    The first of independent arrivals at rates p is i with probability p_i.
    """
    p, n = emit.detach(a.first), int(a.num_samples)
    size = shape(p)
    several = n > 1 and bool(a.get("replacement", False))
    if several:
        p, size = emit(aten.unsqueeze.default, p, len(size) - 1), (*size[:-1], n, size[-1])
    wide = value_of(p).dtype if value_of(p).dtype.itemsize >= 4 else torch.float32
    race = emit(aten.div.Tensor, p, _random(emit, a, Value(size, wide), "exponential", 1.0))
    if several or n == 1:
        return emit(aten.argmax.default, race, len(size) - 1, not several)
    best = emit(aten.topk.default, race, n, len(size) - 1)
    return emit.typed(best.meta["value"][1], operator.getitem, best, 1)


@rewrite("rrelu rrelu_with_noise rrelu_with_noise_functional")
def rrelu(emit: Emit, a: Args, out: Any) -> Result:
    """Rewrite rrelu: below zero, x times a random slope in training, else times the slopes' mean."""
    x, low, high = a.first, float(a.lower), float(a.upper)
    if not a.training:
        return _with_noise(out, emit(aten.leaky_relu.default, x, (low + high) / 2))
    slope = _random(emit, a, Value(shape(x), value_of(x).dtype), "uniform", low, high)
    above = emit(aten.gt.Scalar, x, 0)
    return _with_noise(out, emit(aten.where.self, above, x, emit(aten.mul.Tensor, x, slope)))


def _with_noise(out: Any, result: fx.Node) -> Result:
    return (result, None) if isinstance(out, tuple) else result
