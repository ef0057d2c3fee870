"""Cut and join the parts of a shard, one for each rank of an axis, in a single copy.

No copy is needed where the ranks' digit of the dim is the outermost one. A shard sees its dim as [split, n, rest]
(shardc.ir.placement). Collectives send and receive *stacks* [n, ...]: the digit moved to the front, part i being what
rank i of the axis holds. Sections, which are no digit, and mirrored digits take the slower way through `chunks`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks, unchunk


def _view(x: Tensor, s: Shard, n: int) -> Tensor:
    """View x[..., d, ...] as [..., split, n, rest, ...]."""
    d, size = s.dim, x.shape[s.dim]
    return x.reshape(*x.shape[:d], s.split, n, size // (s.split * n), *x.shape[d + 1 :])


def stack(x: Tensor, s: Shard, n: int) -> Tensor:
    """Return the parts of the shard as [n, *local], contiguous."""
    if s.sections or s.mirrored:
        return torch.stack(chunks(x, s, n))
    d = s.dim
    return _view(x, s, n).movedim(d + 1, 0).reshape(n, *x.shape[:d], x.shape[d] // n, *x.shape[d + 1 :]).contiguous()


def stacked(whole: Tensor, s: Shard, n: int) -> Tensor:
    """View a contiguous tensor as n parts, without sections: [n, ..., split, d / (split * n), ...]."""
    return _view(whole, s, n).movedim(s.dim + 1, 0)


def unstack(parts: Tensor, s: Shard) -> Tensor:
    """Invert `stack`: return the whole tensor, contiguous."""
    if s.sections or s.mirrored:
        return unchunk(parts.unbind(0), s)
    d, (n, *local) = s.dim, parts.shape
    size = local[d]
    seen = parts.reshape(n, *local[:d], s.split, size // s.split, *local[d + 1 :]).movedim(0, d + 1)
    return seen.reshape(*local[:d], n * size, *local[d + 1 :]).contiguous()


def cut(x: Tensor, s: Shard, n: int, i: int) -> Tensor:
    """Return part i of n, contiguous."""
    if s.sections or s.mirrored:
        return chunks(x, s, n)[i].contiguous()
    d = s.dim
    return _view(x, s, n).select(d + 1, i).reshape(*x.shape[:d], x.shape[d] // n, *x.shape[d + 1 :]).contiguous()


def pad(x: Tensor, s: Shard, n: int, i: int) -> Tensor:
    """Return the whole tensor that has x as its part i and zeros elsewhere."""
    if s.sections or s.mirrored:
        zero = torch.zeros_like(x)
        return unchunk([x if j == i else zero for j in range(n)], s)
    d, size = s.dim, x.shape[s.dim]
    whole = x.new_zeros(*x.shape[:d], n * size, *x.shape[d + 1 :])
    part = _view(whole, s, n).select(d + 1, i)
    part.copy_(x.reshape(part.shape))
    return whole
