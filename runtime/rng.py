"""Randomness that is the same on every mesh: each number is a function of a key and the *global* element's index.

key = (seed, stream, step, microbatch); stream is the ordinal of the op in the graph. A rank computes the numbers of
just the elements it holds, so that masks and initial weights are the same on every mesh, under recomputation and on one
device.

The generator hashes the index: two rounds of a 32-bit finaliser with full avalanche (Wellons, "Prospecting for hash
functions", 2018: lowbias32), each with key words mixed in. It is not cryptographic; it passes the tests in
tests/runtime/test_rng.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from shardc.ir.cut import chunks, widen
from shardc.ir.placement import Shard

Digits = Sequence[tuple[int, str, int, tuple[int, ...]]]
Paddings = Sequence[tuple[int, int, int]]
_M1, _M2 = 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit numbers
#: int32 numbers hashed at a time on the CPU: with the spare buffer 2 MiB, which halves the time of large tensors.
BLOCK = 1 << 18


class Key(NamedTuple):
    """What is mixed into an index: two 32-bit words. block: how many numbers are hashed at a time on the CPU."""

    low: int
    high: int
    block: int = BLOCK

    @property
    def unsigned(self) -> tuple[int, int]:
        """(low, high) as unsigned 32-bit numbers, which other generators are seeded with."""
        return self.low & 0xFFFFFFFF, self.high & 0xFFFFFFFF


@dataclass
class Rng:
    """The random state of one step. training: False turns dropout off and BatchNorm to its running statistics.

    block: how many numbers are hashed at a time on the CPU; a GPU hashes all at once."""

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    training: bool = True
    block: int = BLOCK

    def key(self, stream: int) -> Key:
        return key(self.seed, stream, self.step, self.microbatch)._replace(block=self.block)


def key(*words: int) -> Key:
    """Two signed 32-bit key words from any integers (splitmix64 over the words)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & (2**64 - 1))) & (2**64 - 1)
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    low, high = state & 0xFFFFFFFF, state >> 32
    return Key(low - (low >> 31 << 32), high - (high >> 31 << 32))


def _avalanche(x: Tensor, spare: Tensor) -> None:
    """lowbias32 in place on int32. The shifts are arithmetic, so the copied sign bits are masked off."""
    for shift, multiply in ((16, _M1), (15, _M2), (16, 0)):
        torch.bitwise_right_shift(x, shift, out=spare)
        spare &= (1 << (32 - shift)) - 1
        x ^= spare
        if multiply:
            x *= multiply


def _hash(x: Tensor, k: Key) -> Tensor:
    """Two keyed rounds in place on contiguous int32; on the CPU in blocks that stay in its cache."""
    flat = x.view(-1)
    pieces = torch.split(flat, k.block) if x.device.type == "cpu" and flat.numel() > k.block else (flat,)
    spare = torch.empty_like(pieces[0])
    for piece in pieces:
        piece ^= k.low
        _avalanche(piece, spare[: piece.numel()])
        piece += k.high
        _avalanche(piece, spare[: piece.numel()])
    return x


def bits(k: Key, indices: Tensor) -> Tensor:
    """int32 tensor of random bits, one number for every index (int32 or int64, >= 0). Overwrites `indices` if they are
    int32.
    """
    if indices.dtype != torch.int64:
        return _hash(indices.contiguous(), k)
    low = indices & 0xFFFFFFFF
    low -= (low >> 31) << 32
    x = low.to(torch.int32)
    high = (indices >> 32).to(torch.int32)
    # below 2^31 both widths give the same numbers. Whether there are others is not worth waiting for a device
    if indices.device.type != "cpu" or bool((high != 0).any()):
        x ^= torch.where(high == 0, 0, _hash(high.clone(), Key(k.high, k.low, k.block)))
    return _hash(x, k)


def uniform(k: Key, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers in [0, 1): 24 random bits each for float32 and narrower, 32 for float64."""
    x = bits(k, indices)
    if dtype == torch.float64:
        return (x.to(dtype) + 2.0**31) * 2.0**-32
    return ((x >> 8).to(torch.float32) + 2.0**23).mul_(2.0**-24).to(dtype)


def normal(k: Key, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers (Box & Muller 1958), computed in float64 from two streams."""
    one = uniform(k, indices.clone(), torch.float64)
    two = uniform(Key(k.low ^ 0x5BD1E995, k.high ^ 0x27D4EB2F, k.block), indices.clone(), torch.float64)
    return ((-2 * torch.log1p(-one)).sqrt_() * torch.cos(2 * math.pi * two)).to(dtype)


def indices(
    shape: Sequence[int],
    digits: Digits = (),
    mesh: Any = None,
    device: torch.device | str | None = None,
    paddings: Paddings = (),
) -> Tensor:
    """Linear indices, within a tensor of the global `shape`, of the elements that this rank holds; of its local shape.

    paddings: (dim, padding, blocks) of each padded dim (shardc.ir.placement.Shard); padding has the index of some real
    element."""
    wide = math.prod(shape) >= 2**31
    total = torch.zeros((), dtype=torch.int64 if wide else torch.int32, device=device)
    stride = 1
    for d in reversed(range(len(shape))):
        own = torch.arange(shape[d], dtype=total.dtype, device=device)
        for _, padding, blocks in (p for p in paddings if p[0] == d):
            own = widen(own, Shard(0, 1, (), padding, blocks))
        # inner digits first, as in Layout.local
        for _, axis, split, sections in sorted((x for x in digits if x[0] == d), key=lambda x: -x[2]):
            own = chunks(own, Shard(0, split, tuple(sections)), mesh.size(axis))[mesh.coordinate(axis)]
        total = total + (own * stride).reshape(-1, *[1] * (len(shape) - 1 - d))
        stride *= shape[d]
    return total


class _Masked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.scale = 1 / (1 - p)
        return (x * keep).mul_(ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Any:
        (keep,) = ctx.saved_tensors
        return (g * keep).mul_(ctx.scale), None, None


def masked(x: Tensor, keep: Tensor | None, p: float) -> Tensor:
    """Dropout with a mask that is there (`dropout_mask`); x itself without one."""
    if keep is None:
        return x
    kept: Tensor = _Masked.apply(x, keep, p)  # type: ignore[no-untyped-call]
    return kept


def dropout_mask(
    p: float,
    rng: Rng | None,
    index: int,
    mesh: Any,
    shape: Sequence[int],
    digits: Digits = (),
    paddings: Paddings = (),
    device: torch.device | str | None = None,
) -> Tensor | None:
    """Which elements `dropout` keeps, bool; None when rng is not training, or p is 0. It depends on no value: only on
    where they are.

    device: default: the mesh's.
    """
    if rng is None or not rng.training or p == 0:
        return None
    where = indices(shape, digits, mesh, mesh.device if device is None else device, paddings)
    # an element is kept where its number, uniform over the int32 range, is below (1 - p) of it
    return bits(rng.key(index), where) < round((1 - p) * 2**32) - 2**31


def dropout(
    x: Tensor,
    p: float,
    rng: Rng | None,
    index: int,
    mesh: Any = None,
    shape: Sequence[int] | None = None,
    digits: Digits = (),
    paddings: Paddings = (),
) -> Tensor:
    """Zero each element with probability p, scale the others by 1 / (1 - p). Identity when rng is not training.

    index: ordinal of this dropout in the graph. shape: the *global* shape (default: x's own); digits: (dim, axis,
    split, sections) of every shard, in global digits, telling which elements x holds; paddings: as in `indices`. Saves
    one byte an element for backward."""
    if p == 1 and rng is not None and rng.training:
        return x * 0
    return masked(
        x, dropout_mask(p, rng, index, mesh, shape if shape is not None else x.shape, digits, paddings, x.device), p
    )
