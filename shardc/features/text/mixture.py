"""Mix datasets by weights, in an order that is fixed by seed and epoch alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset

from shardc.errors import ShardcError
from shardc.runtime.data.samples import is_map_style
from shardc.runtime.rng import key


def mix(
    datasets: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, seed: int = 0
) -> Mixture | MixedStream:
    """Return several datasets as one, for data(split) and engine.loader: `weights` of its samples are of each.

    datasets: by name; weights: by the same names, of any sum; default: their sizes. An epoch ends when each dataset was
    read at least once; those that end earlier are read again, in another order. Any dataset without a length makes the
    mixture a stream.
    """
    if not datasets:
        raise ShardcError("there is nothing to mix", where="shardc.text.mix", fix="give datasets by their names")
    mapped = all(map(is_map_style, datasets.values()))
    if weights is None and not mapped:
        raise ShardcError("a stream has no size", where="shardc.text.mix", fix="give weights={name: number, ...}")
    shares = {name: float(w) for name, w in (weights or {n: len(x) for n, x in datasets.items()}).items()}
    if shares.keys() != datasets.keys() or not all(0 < w < float("inf") for w in shares.values()):
        fix = f"give each of {', '.join(datasets)} a weight above 0, and leave out what has none"
        raise ShardcError(f"the weights are {shares}", where="shardc.text.mix", fix=fix)
    total = sum(shares.values())
    shares = {name: shares[name] / total for name in datasets}
    return (Mixture if mapped else MixedStream)(dict(datasets), shares, seed)


class _Mixed:
    """Datasets and their shares. description: for the header of a run; digest: of the datasets, shares and seed."""

    def __init__(self, datasets: dict[str, Any], shares: dict[str, float], seed: int) -> None:
        self.datasets, self.shares, self.seed = datasets, shares, seed
        facts = [(n, shares[n], getattr(x, "digest", len(x) if is_map_style(x) else None)) for n, x in datasets.items()]
        self.digest = xxhash.xxh3_128(repr((facts, seed)).encode()).hexdigest()

    def _described(self, name: str) -> str:
        data = self.datasets[name]
        size = f"{len(data):,} samples" if is_map_style(data) else "a stream"
        return f"{name} {self.shares[name]:.0%} ({getattr(data, 'description', size)})"

    @property
    def description(self) -> str:
        return f"a mix: {'; '.join(map(self._described, self.datasets))}"

    def _order(self, name: str, again: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the order in which a dataset with a length is read for the first, second, ... time."""
        low, high = key(self.seed, list(self.datasets).index(name), again).unsigned
        order: np.ndarray[Any, np.dtype[np.int64]] = torch.randperm(
            len(self.datasets[name]), generator=torch.Generator().manual_seed(high << 32 | low)
        ).numpy()
        return order


class Mixture(_Mixed, Dataset[Any]):
    """A mixture of datasets with lengths."""

    def __init__(self, datasets: dict[str, Any], shares: dict[str, float], seed: int) -> None:
        super().__init__(datasets, shares, seed)
        if empty := [name for name, x in datasets.items() if not len(x)]:
            raise ShardcError(f"{', '.join(empty)} is empty", where="shardc.text.mix", fix="leave it out")
        size = max(-(-len(x) // shares[name]) for name, x in datasets.items())
        of, index, when = [], [], []
        for number, (name, x) in enumerate(datasets.items()):
            count = max(len(x), round(size * shares[name]))
            orders = [self._order(name, again) for again in range(-(-count // len(x)))]
            index.append(np.concatenate(orders)[:count])
            of.append(np.full(count, number))
            when.append((np.arange(count) + 0.5) / shares[name])  # evenly spread
        order = np.argsort(np.concatenate(when), kind="stable")
        self._of, self._index = np.concatenate(of)[order], np.concatenate(index)[order]

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, i: int) -> Any:
        return list(self.datasets.values())[self._of[i]][int(self._index[i])]


class MixedStream(_Mixed, IterableDataset[Any]):
    """A mixture of which some datasets have no length."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        drawn, again = dict.fromkeys(self.datasets, 0), dict.fromkeys(self.datasets, 0)
        streams = {name: self._stream(name, 0) for name in self.datasets}
        while True:
            name = min(self.datasets, key=lambda name: (drawn[name] + 0.5) / self.shares[name])
            for _ in range(2):
                try:
                    sample = next(streams[name])
                    break
                except StopIteration:
                    again[name] += 1
                    if all(again.values()):
                        return
                    streams[name] = self._stream(name, again[name])
            else:
                raise ShardcError(f"{name} is empty", where="shardc.text.mix", fix="leave it out")
            drawn[name] += 1
            yield sample

    def _stream(self, name: str, again: int) -> Iterator[Any]:
        data = self.datasets[name]
        if is_map_style(data):
            return (data[int(i)] for i in self._order(name, self.epoch + again))
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.epoch + again)
        return iter(data)
