"""Compute what no single aten op does locally: losses on split classes, look-ups in a part of a table."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardc.ir.placement import Shard
from shardc.ir.shard_chunks import chunks, widen
from shardc.runtime.ops.host_copy import to_device
from shardc.runtime.ops.with_backward import with_backward
from shardc.torch_private import FakeTensor, assert_on_device

Mesh = Any
Digits = Sequence[tuple[str, int]]


def locate(index: Any, size: int, digits: Digits, mesh: Mesh) -> tuple[Any, Any]:
    """Return the local places of global indices in a split dim of `size`, and whether this rank has them.

    index: global, an int or a tensor of ints. digits: (axis, split) of each shard of the dim
    (shardc.ir.placement.Shard), split negative where it is mirrored. Where `has` is False the local index is
    meaningless.
    """
    has: Any = True
    for axis, signed in sorted(
        digits, key=lambda d: -abs(d[1])
    ):  # inner digits first: removing one does not change the outer ones
        n, split = mesh.size(axis), abs(signed)
        rest = size // (split * n)
        if split == 1:  # the outermost digit: a range
            local = index - mesh.coordinate(axis) * rest
            has = has & (local >= 0) & (local < rest)
        else:
            high = index // rest
            block, digit = high // n, high % n
            if signed < 0:
                digit = digit + block % 2 * (n - 1 - 2 * digit)
            local = block * rest + index % rest
            has = has & (digit == mesh.coordinate(axis))
        index, size = local, size // n
    return index, has


def check_range(index: Tensor, size: int, name: str, ignore: int | None = None) -> None:
    """Raise IndexError for a global index outside 0 ... size - 1 that is not `ignore`.

    No rank has it, and each would assume that another has. name: of the index, for the message. It does not wait for a
    GPU: as in torch's own look-ups, an assertion there ends the process.
    """
    if isinstance(index, FakeTensor):
        return
    outside = (index < 0) | (index >= size)
    if ignore is not None:
        outside &= index != ignore
    if index.device.type != "cpu":
        assert_on_device(~outside.any(), f"{name} out of range: it must be at least 0 and less than {size}")
    elif outside.any():
        raise IndexError(f"{name} {int(index[outside][0])} is out of range: it must be at least 0 and less than {size}")


def fill_padding(
    x: Tensor, mesh: Mesh, dim: int, digits: Digits, size: int, padding: int, blocks: int = 1, fill: float = 0.0
) -> Tensor:
    """Return x with `fill` where its dim is padding; the gradient there is zero. (ir.placement.Shard)

    The result is contiguous, also on ranks without padding, as the code that follows is the same on all. digits: (axis,
    split) of each shard of the dim, split negative where it is mirrored; the dim's global size is `size` without
    padding.
    """
    inner_first = sorted(digits, key=lambda d: -abs(d[1]))
    cuts = tuple((split, mesh.size(axis), mesh.coordinate(axis)) for axis, split in inner_first)
    make = (
        _real.__wrapped__ if isinstance(x, FakeTensor) else _real
    )  # tensors made in a dry run have no data: do not cache them
    real = make(size, cuts, padding, blocks, x.device)
    return x.contiguous() if real is None else x.masked_fill(~real.view(-1, *[1] * (x.dim() - 1 - dim)), fill)


@lru_cache(maxsize=1024)
def _real(
    size: int, cuts: tuple[tuple[int, int, int], ...], padding: int, blocks: int, device: torch.device
) -> Tensor | None:
    """Return bool by local place: whether it is no padding; None if no place is padding.

    It is cached, as it is the same in every step. cuts: (split, ranks, this rank's part), inner digits first.
    """
    real = widen(torch.ones(size, dtype=torch.bool), Shard(0, 1, (), padding, blocks))
    for split, ranks, part in cuts:
        real = chunks(real, Shard.of_signed(0, split), ranks)[part]
    return None if bool(real.all()) else to_device(real, device)


def batch_stat(batch: Tensor, running: Tensor, rng: Any) -> Tensor:
    """Select BatchNorm's statistics: the batch's when training, else the running ones in its dtype."""
    return batch if rng is None or rng.training else running.to(batch.dtype).reshape(batch.shape)


def total(mesh: Mesh, index: int, axes: tuple[str, ...] = (), tag: str = "") -> Tensor:
    """Return the sum of a prologue's value over the microbatches, here or over `axes` (passes.accumulate)."""
    running = mesh.step.running
    if index in running.works:
        running.works[index].wait()
    result: Tensor = running.totals[index]
    return result


def summed(x: Tensor, mesh: Mesh, index: int) -> Tensor:
    """Return the sum of x over a step's microbatches, which an earlier forward of all of them computed.

    See Interpreter.compute_totals. Backward: identity, so that each microbatch has the gradient of its summand.
    """

    def forward(x: Tensor) -> tuple[Tensor, tuple[()]]:
        sums = mesh.step.sums
        if sums is None:
            return mesh.step.running.totals[index].clone(), ()
        sums[index] = sums[index] + x if index in sums else x
        return x.clone(), ()

    result: Tensor = with_backward(forward, lambda needs, g: (g,), x)
    return result


def partial_mean(x: Tensor, dims: list[int], keepdim: bool, count: int) -> Tensor:
    """Compute this rank's share of a mean over `count` elements in all: its sum over `dims` / count."""
    return x.sum(dims, keepdim) / count


def nll(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Compute the negative log likelihood, 0 where ignored: [n, c, ...] (or [c]), [n, ...] -> [n, ...]."""
    return F.cross_entropy(logits, target, ignore_index=ignore_index, reduction="none")


def _nll_stats(logits: Tensor, local: Tensor, here: Tensor, overwrite: bool) -> tuple[Tensor, tuple[Any, ...]]:
    c = 1 if logits.dim() > 1 else 0
    # a rank may have only padding: -inf
    largest = logits.amax(c, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
    local = local.masked_fill(~here, 0).unsqueeze(c)
    picked = (logits.gather(c, local) - largest).squeeze(c).masked_fill_(~here, 1)
    exps = (logits.detach().sub_(largest) if overwrite else logits - largest).exp_()
    return torch.stack([largest.squeeze(c), exps.sum(c), picked]), (exps, local, here, c)


def _nll_stats_backward(needs: Any, g: Tensor, exps: Tensor, local: Tensor, here: Tensor, c: int) -> tuple[Tensor]:
    grad = exps.mul_(g[1].unsqueeze(c))
    grad.scatter_add_(c, local, torch.where(here, g[2], 0).unsqueeze(c))
    return (grad,)


def nll_stats(
    logits: Tensor,
    target: Tensor,
    mesh: Mesh,
    digits: Digits,
    classes: int,
    ignore_index: int = -100,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Return what the loss needs of this rank's classes, [3, n, ...]: the largest logit, a sum, the target's logit.

    The sum is of exp(logit - largest). The target's logit is without the largest one too: at most 0; 1 if another rank
    has that class. The largest one is a constant. logits [n, c/ranks, ...]: this rank's of all `classes`, split by
    `digits` (see `locate`); target [n, ...]: global class indices. Saves one buffer of the size of the logits.
    overwrite: the logits' own. Backward works on it in place: it runs once.
    """
    check_range(target, classes, "target", ignore_index)
    local, inside = locate(target, classes, digits, mesh)
    inside = inside & (target != ignore_index)
    stats: Tensor = with_backward(_nll_stats, _nll_stats_backward, logits, local, inside, overwrite)
    return stats


def nll_top(stats: Tensor) -> Tensor:
    """Return the largest logit of each position over this rank's classes; detached."""
    return stats[0].detach()


def nll_parts(stats: Tensor, top: Tensor) -> Tensor:
    """Return this rank's summands of the loss, [2, n, ...]: sum of exp(logit - top), target's logit - top or 0.

    top [n, ...]: the largest logit over all classes.
    """
    below = stats[0].detach() - top
    return torch.stack([stats[1] * below.exp(), torch.where(stats[2] > 0, 0, stats[2] + below)])


def nll_join(parts: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Compute log(sum of exponentials) - target's logit, from the summed parts; 0 where ignored."""
    return (parts[0].log() - parts[1]).masked_fill(target == ignore_index, 0)


def nll_overwriting(logits: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
    """Compute `nll` of [n, c] in the memory of the logits, which are lost."""
    stats = nll_stats(logits, target, None, (), logits.shape[1], ignore_index, overwrite=True)
    return nll_join(stats[1:], target, ignore_index)


def select_partial(x: Tensor, mesh: Mesh, dim: int, digits: Digits, size: int, index: int) -> Tensor:
    """Return x's entry `index` of a dim of `size` split by `digits` (see `locate`); zeros on other ranks."""
    local, inside = locate(index, size, digits, mesh)
    entry = x.select(dim, local if inside else 0)
    # zeros that still depend on x: every rank has to run the collectives of backward
    return entry if inside else entry.masked_fill(torch.ones((), dtype=torch.bool, device=x.device), 0)


def gather_partial(x: Tensor, index: Tensor, mesh: Mesh, dim: int, digits: Digits, size: int) -> Tensor:
    """Gather by global index in a dim of `size` split by `digits` (see `locate`); zeros for other ranks'."""
    check_range(index, size, "index")
    local, inside = locate(index, size, digits, mesh)
    return x.gather(dim, local.masked_fill(~inside, 0)).masked_fill(~inside, 0)


def embedding_partial(
    weight: Tensor, ids: Tensor, mesh: Mesh, digits: Digits, rows: int, padding_idx: int = -1
) -> Tensor:
    """Look up global ids in this rank's rows of a table of `rows`; zeros for rows of other ranks.

    weight [rows/ranks, d]: split by `digits` (see `locate`). Returns [..., d].
    """
    check_range(ids, rows, "index")
    local, inside = locate(ids, rows, digits, mesh)
    padding, has_padding = locate(padding_idx, rows, digits, mesh)
    # padding's row gets no gradient in `embedding`, and rows of other ranks none through the mask
    result: Tensor = torch.ops.aten.embedding.default(
        weight, local.masked_fill(~inside, 0), padding if has_padding and padding_idx >= 0 else -1
    )
    return result.masked_fill(~inside.unsqueeze(-1), 0)


#: Ops that return their operand, or a view of it, on some ranks, and a new tensor on others.
UNEQUAL = {fill_padding, select_partial}
