"""Draw random numbers that are the same on every mesh: functions of a key and the *global* index.

key = (seed, stream, step, microbatch); stream is the ordinal of the op in the graph. A rank computes the numbers of
only its elements, so that masks and initial weights are the same on every mesh, under recomputation and on one device.

The generator hashes the index: two rounds of a 32-bit finaliser with full avalanche (Wellons, "Prospecting for hash
functions", 2018: lowbias32), each with key words mixed in. It is not cryptographic; it passes the tests in
tests/runtime/test_rng.py. ops/dropout/kernel.py repeats `key`, `_avalanche`, `_hash` and `bits` in Triton: change both
(tests/runtime/ops/test_dropout.py compares them bit for bit).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks, widen

#: The `Digit` of every shard of a tensor, as plain tuples, as in a program's text.
Digits = Sequence[tuple[int, str, int, tuple[int, ...]]]
#: (dim, padding, blocks) of each padded dim, as in shardc.ir.placement.Shard.
Paddings = Sequence[tuple[int, int, int]]
_M1, _M2 = 0x7FEB352D, 0x846CA68B - 2**32  # as signed 32-bit numbers
#: int32 numbers hashed at a time on the CPU: with the spare buffer 2 MiB, which halves the time of large tensors.
BLOCK = 1 << 18


class Digit(NamedTuple):
    """A digit of a dim that a mesh axis splits. split: product of the major digits, negative if mirrored.

    sections: see shardc.ir.placement.Shard.
    """

    dim: int
    axis: str
    split: int
    sections: tuple[int, ...]


class Key(NamedTuple):
    """Two 32-bit words that are mixed into an index. block: how many numbers a CPU hashes at a time."""

    low: int
    high: int
    block: int = BLOCK

    @property
    def unsigned(self) -> tuple[int, int]:
        """(low, high) as unsigned 32-bit numbers, to seed other generators."""
        return self.low & 0xFFFFFFFF, self.high & 0xFFFFFFFF


@dataclass
class Rng:
    """The random state of one step. training: False turns off dropout and BatchNorm's batch statistics.

    block: how many numbers are hashed at a time on the CPU; a GPU hashes all at once.
    in_place: `words` are one tensor for all steps, for steps captured as a CUDA graph, which reads its inputs at fixed
    addresses: call `renew` after a change of `step`, before the graph runs. Backward must then come before the next
    change.
    """

    seed: int = 0
    step: int = 0
    microbatch: int = 0
    training: bool = True
    block: int = BLOCK
    in_place: bool = False
    _words: dict[torch.device, tuple[tuple[int, int, int], Tensor]] = field(
        default_factory=dict, repr=False, compare=False
    )
    _offsets: dict[Any, tuple[Any, tuple[Tensor, Tensor]]] = field(default_factory=dict, repr=False, compare=False)

    def key(self, stream: int) -> Key:
        return key_of((self.seed, self.step, self.microbatch), stream)._replace(block=self.block)

    def words(self, device: torch.device) -> Tensor:
        """Return seed, step and microbatch on a device, i64[3]: ops there compute their keys from them.

        It is a new tensor when one of them has changed: a later backward keeps those of its forward. It does not wait
        for the device.
        """
        if device.type != "cpu" and device == torch.device(device.type):  # use its number: of the current device
            device = torch.empty(0, device=device).device
        now = (self.seed, self.step, self.microbatch)
        then, words = self._words.get(device, (None, None))
        if then != now or words is None:
            if words is None or not self.in_place:
                words = torch.empty(3, dtype=torch.int64, device=device)
            for i, word in enumerate(now):
                words[i].fill_(_signed(word, 64))
            self._words[device] = now, words
        return words

    def renew(self) -> None:
        """Update `words` to this step, on all devices where they exist."""
        for device in list(self._words):
            self.words(device)

    def key_words(self, stream: int, device: torch.device) -> Tensor:
        """Return the key of a stream on a device, i32[2], without waiting for it."""
        if device.type == "cpu":
            return torch.tensor(self.key(stream)[:2], dtype=torch.int32)
        return device_key(self.words(device), stream)

    def row_and_column_offsets(
        self,
        shape: Sequence[int],
        digits: Digits,
        mesh: Any,
        device: torch.device,
        paddings: Paddings,
        *,
        last: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Return `row_and_column_offsets` of a rank, cached by shape for the latest microbatch (all layers)."""
        where = tuple((mesh.size(axis), mesh.coordinate(axis)) for _, axis, _, _ in digits)
        part = (tuple(shape), tuple(digits), tuple(paddings), device, last)
        if part not in self._offsets or self._offsets[part][0] != where:
            self._offsets[part] = where, row_and_column_offsets(shape, digits, mesh, device, paddings, last=last)
        return self._offsets[part][1]

    def tensors(self) -> list[Tensor]:
        """Return all cached tensors."""
        return [*(words for _, words in self._words.values()), *(v for _, pair in self._offsets.values() for v in pair)]


def key(*words: int) -> Key:
    """Mix any integers to two signed 32-bit key words (splitmix64 over the words)."""
    state = 0x9E3779B97F4A7C15
    for word in words:
        state = (state ^ (word & (2**64 - 1))) & (2**64 - 1)
        state = (state + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return Key(_signed(state, 32), _signed(state >> 32, 32))


def key_of(words: Sequence[int], stream: int) -> Key:
    """Return the key of a stream of random numbers. words: seed, step, microbatch, as of Rng.words."""
    seed, step, microbatch = words
    return key(seed, stream, step, microbatch)


def device_key(words: Tensor, stream: int) -> Tensor:
    """Compute `key_of` on the device of the words: i32[2]. words: i64[3], of Rng.words."""

    def shifted(x: Tensor, by: int) -> Tensor:  # int64's shift is arithmetic
        return (x >> by) & ((1 << (64 - by)) - 1)

    seed, step, microbatch = words.unbind()
    state: Any = _signed(0x9E3779B97F4A7C15, 64)
    for word in (seed, stream, step, microbatch):
        mixed = (word ^ state) + _signed(0x9E3779B97F4A7C15, 64)
        mixed = (mixed ^ shifted(mixed, 30)) * _signed(0xBF58476D1CE4E5B9, 64)
        mixed = (mixed ^ shifted(mixed, 27)) * _signed(0x94D049BB133111EB, 64)
        state = mixed ^ shifted(mixed, 31)
    both = torch.stack([state, state >> 32]) & 0xFFFFFFFF
    return (both - ((both >> 31) << 32)).to(torch.int32)


def _signed(word: int, bits: int) -> int:
    """Return the signed number with the lowest bits of a word."""
    low = word & ((1 << bits) - 1)
    return low - (low >> (bits - 1) << bits)


def _avalanche(x: Tensor, spare: Tensor) -> None:
    """Compute lowbias32 in place on int32. The shifts are arithmetic, so copied sign bits are masked off."""
    for shift, multiply in ((16, _M1), (15, _M2), (16, 0)):
        torch.bitwise_right_shift(x, shift, out=spare)
        spare &= (1 << (32 - shift)) - 1
        x ^= spare
        if multiply:
            x *= multiply


def _hash(x: Tensor, k: Key) -> Tensor:
    """Hash contiguous int32 in place by two keyed rounds; on the CPU in blocks that stay in its cache."""
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
    """Return random bits, an int32 for every index (int32 or int64, >= 0). Overwrites int32 `indices`."""
    if indices.dtype != torch.int64:
        return _hash(indices.contiguous(), k)
    low = indices & 0xFFFFFFFF
    low -= (low >> 31) << 32
    x = low.to(torch.int32)
    high = (indices >> 32).to(torch.int32)
    # below 2^31 both widths have the same numbers. To test for larger ones is not worth a wait for the device
    if indices.device.type != "cpu" or bool((high != 0).any()):
        x ^= torch.where(high == 0, 0, _hash(high.clone(), Key(k.high, k.low, k.block)))
    return _hash(x, k)


def uniform(k: Key, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return numbers in [0, 1): 24 random bits each for float32 and narrower, 32 for float64."""
    x = bits(k, indices)
    if dtype == torch.float64:
        return (x.to(dtype) + 2.0**31) * 2.0**-32
    return ((x >> 8).to(torch.float32) + 2.0**23).mul_(2.0**-24).to(dtype)


def normal(k: Key, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return standard normal numbers (Box & Muller 1958), computed in float64 from two streams."""
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
    """Return the linear indices of this rank's elements in the global `shape`, as its local shape.

    Padding has the index of some real element.
    """
    total = torch.zeros((), dtype=index_type(shape), device=device)
    for d, vector in enumerate(index_vectors(shape, digits, mesh, device, paddings)):
        total = total + vector.reshape(-1, *[1] * (len(shape) - 1 - d))
    return total


def index_type(shape: Sequence[int]) -> torch.dtype:
    """Return the dtype of indices into a tensor of this global shape: 64 bits where 32 are too few."""
    return torch.int64 if math.prod(shape) >= 2**31 else torch.int32


def index_vectors(
    shape: Sequence[int], digits: Digits, mesh: Any, device: torch.device | str | None, paddings: Paddings = ()
) -> list[Tensor]:
    """Return one vector a dim, of the local size, whose elements add up to `indices`."""
    vectors: list[Tensor] = []
    stride = 1
    for d in reversed(range(len(shape))):
        vector = torch.arange(shape[d], dtype=index_type(shape), device=device)
        for _, padding, blocks in (p for p in paddings if p[0] == d):
            vector = widen(vector, Shard(0, 1, (), padding, blocks))
        # inner digits first, as in Layout.local
        for x in sorted((x for x in map(Digit._make, digits) if x.dim == d), key=lambda x: -abs(x.split)):
            vector = chunks(vector, Shard.of_signed(0, x.split, x.sections), mesh.size(x.axis))[mesh.coordinate(x.axis)]
        vectors.append(vector * stride)
        stride *= shape[d]
    return vectors[::-1]


#: Columns of an unsplit tensor.
COLUMNS = 4096


def row_and_column_offsets(
    shape: Sequence[int],
    digits: Digits,
    mesh: Any,
    device: torch.device | str | None,
    paddings: Paddings = (),
    *,
    last: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return (rows, columns): two short vectors whose sums are the linear indices of a rank's part.

    Element i, in row-major order, has the index rows[i // len(columns)] + columns[i % len(columns)]. The last row may
    be
    longer than the part. last: columns are the last dim.

        [8, 16], nothing split      [0], [0, 1, ... 127]
        [8@dp, 16@tp], rank (1, 1)  [64, 80, 96, 112], [8, 9, ... 15]
    """
    if not digits and not paddings and not last:
        size, dtype = math.prod(shape), index_type(shape)
        columns = torch.arange(min(size, COLUMNS), dtype=dtype, device=device)
        return torch.arange(0, size, COLUMNS, dtype=dtype, device=device), columns
    vectors = index_vectors(shape, digits, mesh, device, paddings)
    sizes = [len(v) for v in vectors]
    shortest = min(range(len(sizes) + 1), key=lambda d: math.prod(sizes[:d]) + math.prod(sizes[d:]))
    cut = len(sizes) - 1 if last else shortest
    return _sums(vectors[:cut], index_type(shape), device), _sums(vectors[cut:], index_type(shape), device)


def _sums(vectors: Sequence[Tensor], dtype: torch.dtype, device: torch.device | str | None) -> Tensor:
    """Return all sums of one element of each vector, the last one's index running fastest."""
    total = torch.zeros(1, dtype=dtype, device=device)
    for v in vectors:
        total = (total.unsqueeze(1) + v).view(-1)
    return total


def threshold(p: float) -> int:
    """Return the bound of kept elements: their numbers, uniform over int32, are below 1 - p of the range."""
    return min(round((1 - p) * 2**32), 2**32 - 1) - 2**31
