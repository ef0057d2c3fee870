"""Numbers depend on the key and the global index only, and look random to the usual tests."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from shardc.runtime import rng
from shardc.runtime.rng import Rng

N = 1 << 20


def index(n: int = N) -> Tensor:
    return torch.arange(n, dtype=torch.int32)


def test_the_numbers_never_change() -> None:
    """Written down once: another hash would silently change what a seed means."""
    k = rng.key(1, 2, 3, 4)
    assert k[:2] == KEY
    assert rng.bits(k, index(4)).tolist() == BITS
    assert rng.bits(k, torch.tensor([2**31, 2**32, 2**32 + 1, 2**40])).tolist() == WIDE


KEY = (2753532, -1039699411)
BITS = [-769739211, -345632570, -1788190680, -675325788]
WIDE = [-1977231987, 402256607, -1092936728, -107644779]


def test_both_widths_of_index_give_the_same_numbers() -> None:
    k = rng.key(5)
    assert torch.equal(rng.bits(k, index(1000)), rng.bits(k, torch.arange(1000)))
    far = torch.arange(1000) + 2**32 * torch.arange(1, 1001)
    assert len(set(rng.bits(k, torch.cat([torch.arange(1000), far])).tolist())) > 1990


def test_blocks_do_not_matter() -> None:
    k, n = rng.key(5), rng.BLOCK + 17
    assert torch.equal(rng.bits(k, index(n))[-100:], rng.bits(k, index(n)[-100:].clone()))


def chi_square(counts: Tensor) -> float:
    """Standard normal, about, for uniform counts of many cells."""
    expected = counts.sum() / counts.numel()
    chi, freedom = float(((counts - expected) ** 2 / expected).sum()), counts.numel() - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_uniform(seed: int) -> None:
    u = rng.uniform(rng.key(seed, 0, 0, 0), index(), torch.float64)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert abs(float(u.mean()) - 0.5) < 4 * math.sqrt(1 / 12 / N)
    assert abs(float(u.var()) - 1 / 12) < 4 * math.sqrt(1 / 180 / N)
    for cells in (2, 256, 4096):
        assert abs(chi_square(torch.histc(u, cells, 0, 1))) < 4.5
    # low bits too, and pairs of neighbours
    b = rng.bits(rng.key(seed, 0, 0, 0), index())
    assert abs(chi_square(torch.bincount((b & 0xFFF).long(), minlength=4096).double())) < 4.5
    pairs = (b[:-1] >> 26 & 63).long() * 64 + (b[1:] >> 26 & 63).long()
    assert abs(chi_square(torch.bincount(pairs, minlength=4096).double())) < 4.5


def correlation(a: Tensor, b: Tensor) -> float:
    """In standard deviations of what independent numbers give."""
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1]) * math.sqrt(a.numel())


def test_neighbours_in_index_and_key_are_independent() -> None:
    def u(*words: int) -> Tensor:
        return rng.uniform(rng.key(*words), index(), torch.float64)

    base = u(0, 0, 0, 0)
    for lag in (1, 2, 3, 64, 512, 1024, 4096):
        assert abs(correlation(base[:-lag], base[lag:])) < 4.5, lag
    for place, word in itertools.product(range(4), (1, 2, 2**31)):
        words = [0, 0, 0, 0]
        words[place] = word
        other = u(*words)
        assert abs(correlation(base, other)) < 4.5, words
        assert abs(correlation(base[:-1], other[1:])) < 4.5, words


def test_every_bit_of_the_index_changes_half_of_the_bits() -> None:
    k, n = rng.key(3), 1 << 14
    base = rng.bits(k, index(n))
    for bit in range(31):
        changed = (base ^ rng.bits(k, index(n) ^ (1 << bit))).to(torch.int64) & 0xFFFFFFFF
        share = torch.stack([(changed >> i & 1).double().mean() for i in range(32)])
        assert float((share - 0.5).abs().max()) < 5 * 0.5 / math.sqrt(n), bit


def test_keys_differ_in_every_word() -> None:
    keys = {rng.key(*words) for words in itertools.product((0, 1, 2**40), (0, 1), (0, 1, 7), (0, 1))}
    assert len(keys) == 3 * 2 * 3 * 2
    assert Rng(1, 2, 3).key(4) == rng.key(1, 4, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_normal_numbers(dtype: torch.dtype) -> None:
    x = rng.normal(rng.key(7), index(), dtype)
    assert x.dtype == dtype
    x = x.double()
    moments = [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)]  # power, its mean, its variance
    for power, mean, variance in moments:
        slack = 1e-2 * (dtype == torch.bfloat16) * power
        assert abs(float((x**power).mean()) - mean) < 4 * math.sqrt(variance / N) + slack, power
    assert float(x.abs().max()) < 6.7
    assert torch.equal(
        rng.normal(rng.key(7), torch.arange(100), torch.float64), rng.normal(rng.key(7), index(100), torch.float64)
    )


def test_uniform_in_float32_stays_below_one() -> None:
    u = rng.uniform(rng.key(1), index())
    assert u.dtype == torch.float32
    assert float(u.max()) < 1
    torch.testing.assert_close(u.double(), rng.uniform(rng.key(1), index(), torch.float64), rtol=0, atol=2**-24)
