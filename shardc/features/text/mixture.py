"""Mix datasets by weights, in an order that is fixed by seed and epoch alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset

from shardc.errors import ShardcError
from shardc.runtime.data.samples import check_again, is_map_style
from shardc.runtime.rng import key

WHERE = "shardc.text.mix"


def mix(
    datasets: Mapping[str, Any], weights: Mapping[str, float] | None = None, *, seed: int = 0
) -> Mixture | MixedStream:
    """Return several datasets as one, for data(split) and engine.loader: `weights` of its samples are of each.

    datasets: by name; weights: by the same names, of any sum; default: their sizes. An epoch ends when each dataset was
    read at least once; those that end earlier are read again, in another order. Any dataset without a length makes the
    mixture a stream.
    """
    if not datasets:
        raise ShardcError("there is nothing to mix", where=WHERE, fix="give datasets by their names")
    for data in datasets.values():
        check_again(data, WHERE)
    mapped = all(map(is_map_style, datasets.values()))
    if weights is None and not mapped:
        raise ShardcError("a stream has no size", where=WHERE, fix="give weights={name: number, ...}")
    shares = {name: float(w) for name, w in (weights or {n: len(x) for n, x in datasets.items()}).items()}
    if shares.keys() != datasets.keys() or not all(0 < w < float("inf") for w in shares.values()):
        fix = f"give each of {', '.join(datasets)} a weight above 0, and leave out what has none"
        raise ShardcError(f"the weights are {shares}", where=WHERE, fix=fix)
    shares = {name: shares[name] / sum(shares.values()) for name in datasets}
    return (Mixture if mapped else MixedStream)(dict(datasets), shares, seed)


class _Mixed:
    """Datasets and their shares. summary: for a run's header; digest: of the datasets, shares and seed; tokenizer."""

    epoch = 0

    def __init__(self, datasets: dict[str, Any], shares: dict[str, float], seed: int) -> None:
        self.datasets, self.shares, self.seed = datasets, shares, seed
        sizes = {n: f"{len(x):,} samples" if is_map_style(x) else "a stream" for n, x in datasets.items()}
        parts = (f"{n} {shares[n]:.0%} ({getattr(x, 'summary', sizes[n])})" for n, x in datasets.items())
        self.summary = f"a mix: {'; '.join(parts)}"
        words = (getattr(x, "tokenizer", None) for x in datasets.values())
        self.tokenizer = next((x for x in words if x is not None), None)
        facts = [(n, shares[n], getattr(x, "digest", sizes[n])) for n, x in datasets.items()]
        self.digest = xxhash.xxh3_128(repr((facts, seed)).encode()).hexdigest()

    def _order(self, name: str, again: int) -> list[int]:
        """Return the order in which a dataset with a length is read for the first, second, ... time."""
        low, high = key(self.seed, list(self.datasets).index(name), again).unsigned
        generator = torch.Generator().manual_seed(high << 32 | low)
        order: list[int] = torch.randperm(len(self.datasets[name]), generator=generator).tolist()
        return order

    def _drawn(self, opened: Callable[[str, int], Iterator[Any]]) -> Iterator[Any]:
        """Yield elements of the datasets in turn, evenly spread. opened: reads one for the first, second, ... time."""
        drawn, ended = Counter[str](), Counter[str]()
        streams = {name: opened(name, 0) for name in self.datasets}
        sizes = {name: max(1, len(x)) if is_map_style(x) else float("inf") for name, x in self.datasets.items()}
        while True:
            name = min(self.datasets, key=lambda name: (drawn[name] + 0.5) / self.shares[name])
            for element in streams[name]:
                drawn[name] += 1
                yield element
                if all(ended[n] or drawn[n] >= size for n, size in sizes.items()):
                    return
                break
            else:
                ended[name] += 1
                if not drawn[name]:
                    raise ShardcError(f"{name} is empty", where=WHERE, fix="leave it out")
                if len(ended) == len(self.datasets):
                    return
                streams[name] = opened(name, ended[name])


class Mixture(_Mixed, Dataset[Any]):
    """A mixture of datasets with lengths."""

    def __init__(self, datasets: dict[str, Any], shares: dict[str, float], seed: int) -> None:
        super().__init__(datasets, shares, seed)
        number = {name: i for i, name in enumerate(datasets)}
        places = self._drawn(lambda name, again: ((number[name], i) for i in self._order(name, again)))
        self._places = np.fromiter(places, np.dtype((np.int64, 2)))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, i: int) -> Any:
        number, place = self._places[i].tolist()
        return list(self.datasets.values())[number][place]


class MixedStream(_Mixed, IterableDataset[Any]):
    """A mixture of which some datasets have no length."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self._drawn(self._opened)

    def _opened(self, name: str, again: int) -> Iterator[Any]:
        data = self.datasets[name]
        if is_map_style(data):
            return (data[i] for i in self._order(name, self.epoch + again))
        if hasattr(data, "set_epoch"):
            data.set_epoch(self.epoch + again)
        return iter(data)
