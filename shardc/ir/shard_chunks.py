"""Cut tensors by one shard (`chunks`), join them (`unchunk`), pad them (`widen`, `trim`).

Shard(0, split=2) over 2 ranks     [a b | c d]  ->  [a c], [b d]      the middle digit of [split, ranks, rest]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from shardc.ir.placement import Shard


def widen(x: torch.Tensor, s: Shard, *, copies: bool = False) -> torch.Tensor:
    """Pad x as the shard needs: with zeros, or with copies of each block's first entries."""
    if not s.padding:
        return x
    d, size = s.dim, x.shape[s.dim]
    block = size // s.blocks
    seen = x.reshape(*x.shape[:d], s.blocks, block, *x.shape[d + 1 :])
    if copies:
        wide = seen.index_select(d + 1, torch.arange(block + s.padding, device=x.device) % block)
    else:
        wide = torch.nn.functional.pad(seen, (*[0, 0] * (x.dim() - 1 - d), 0, s.padding))
    return wide.reshape(*x.shape[:d], s.padded(size), *x.shape[d + 1 :])


def trim(x: torch.Tensor, s: Shard) -> torch.Tensor:
    """Remove the padding: the inverse of `widen`."""
    if not s.padding:
        return x
    d, block = s.dim, x.shape[s.dim] // s.blocks
    seen = x.reshape(*x.shape[:d], s.blocks, block, *x.shape[d + 1 :]).narrow(d + 1, 0, block - s.padding)
    return seen.reshape(*x.shape[:d], s.blocks * (block - s.padding), *x.shape[d + 1 :])


def chunks(x: torch.Tensor, shard: Shard, n: int) -> list[torch.Tensor]:
    """Cut a padded x into n parts: dim = [split, n, rest], part i keeps digit i. Views if possible."""
    d = shard.dim
    if n == 1:
        return [x]
    if shard.sections:
        pieces = [p.chunk(n, d) for p in x.split_with_sizes(list(shard.sections), d)]
        return [torch.cat([p[i] for p in pieces], d) for i in range(n)]
    if shard.split == 1:
        return list(x.chunk(n, d))
    shape, size = x.shape, x.shape[d]
    seen = x.reshape(*shape[:d], shard.split, n, size // (shard.split * n), *shape[d + 1 :])
    if shard.mirrored:
        seen = flip_odd_blocks(seen, d)
    return [seen.select(d + 1, i).reshape(*shape[:d], size // n, *shape[d + 1 :]) for i in range(n)]


def unchunk(parts: Sequence[torch.Tensor], shard: Shard) -> torch.Tensor:
    """Join parts: the inverse of `chunks`. Padding stays."""
    d, n = shard.dim, len(parts)
    if n == 1:
        return parts[0]
    if shard.sections:
        cut = [p.split_with_sizes([s // n for s in shard.sections], d) for p in parts]
        return torch.cat([c[i] for i in range(len(shard.sections)) for c in cut], d)
    if shard.split == 1:
        return torch.cat(list(parts), d)
    shape = parts[0].shape
    seen = [p.reshape(*shape[:d], shard.split, shape[d] // shard.split, *shape[d + 1 :]) for p in parts]
    if shard.mirrored:
        whole = torch.stack([p.reshape(*shape[:d], shard.split, -1, *shape[d + 1 :]) for p in parts], d + 1)
        return flip_odd_blocks(whole, d).reshape(*shape[:d], shape[d] * n, *shape[d + 1 :])
    return torch.cat(seen, d + 1).reshape(*shape[:d], shape[d] * n, *shape[d + 1 :])


def flip_odd_blocks(x: torch.Tensor, d: int) -> torch.Tensor:
    """Reverse dim n of x [..., split, n, rest, ...] in every second block; d is the dim of split.

    It is its own inverse. This is the order of a zigzag, as shardc.ir.placement.runs computes it in numbers.
    """
    pairs = x.reshape(*x.shape[:d], x.shape[d] // 2, 2, *x.shape[d + 1 :])
    even, odd = pairs.unbind(d + 1)
    return torch.stack([even, odd.flip(d + 1)], d + 1).reshape(x.shape)
