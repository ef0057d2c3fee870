"""Order the samples by seed and epoch alone, the same on every rank and mesh; keep the position."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler

from shardc.runtime.rng import key

Key = tuple[int, int]  # epoch, index of the sample


class Order(Sampler[list[Key]]):
    """A batch sampler: what one rank reads of every global batch, from the common position of all ranks.

    size: samples in the dataset; None for a stream, which is only counted. batch: samples in a global batch; mine: the
    places in it that this rank reads, i64[local batch]. rest: all ranks also read samples that fill no batch. epoch,
    consumed: where the next batch begins. arrange: puts the samples of a batch in another order, the same on all ranks;
    take: returns those of a batch that this rank reads.
    """

    def __init__(
        self, size: int | None, batch: int, mine: Tensor, shuffle: bool, seed: int, rest: bool = False
    ) -> None:
        self.rest = rest
        self.size, self.batch, self.mine, self.shuffle, self.seed = size, batch, mine, shuffle, seed
        self.epoch = self.consumed = 0
        self.arrange: Callable[[Tensor], Tensor] = lambda samples: samples
        self.take: Callable[[Tensor], Tensor] | None = None

    def __len__(self) -> int:
        """Return the number of global batches in an epoch."""
        if self.size is None:
            raise TypeError("an iterable dataset has no length")  # list() and tqdm expect this type
        return -(-self.size // self.batch) if self.rest else self.size // self.batch

    def __iter__(self) -> Iterator[list[Key]]:
        """Yield the rest of the epoch. Workers read ahead, so this does not move the position."""
        assert self.size is not None
        order, epoch = self.whole(), self.epoch
        take = self.take or (lambda samples: self.arrange(samples)[self.mine])
        for begin in range(self.consumed, self.size - self.batch + 1, self.batch):
            yield [(epoch, i) for i in take(order[begin : begin + self.batch]).tolist()]
        left = (self.size - self.consumed) % self.batch
        if self.rest and left:
            yield [(epoch, i) for i in order[self.size - left :].tolist()]

    @property
    def at_rest(self) -> bool:
        """Whether the next batch is the rest of an epoch."""
        return self.rest and self.size is not None and self.size - self.consumed < self.batch

    def whole(self) -> Tensor:
        """Return the order of the whole epoch: i64[size]."""
        assert self.size is not None
        if not self.shuffle:
            return torch.arange(self.size)
        low, high = key(self.seed, self.epoch).unsigned
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(high << 32 | low))

    def advance(self) -> None:
        """Move the position after a batch was returned."""
        self.consumed += self.batch
        self._begin_next_epoch()

    def next_epoch(self) -> None:
        self.epoch, self.consumed = self.epoch + 1, 0

    def restart(self) -> None:
        self.epoch = self.consumed = 0

    def _begin_next_epoch(self) -> None:
        """Begin the next epoch, if this one has no whole batch left."""
        if self.size is not None and self.size - self.consumed < (1 if self.rest else self.batch):
            self.next_epoch()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("epoch", "consumed", "seed", "shuffle", "size")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.epoch, self.consumed = int(state["epoch"]), int(state["consumed"])
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self._begin_next_epoch()
