"""Mixtures: shares hold all along, each sample comes at least once an epoch, and a resume goes on on another mesh."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shardc import text
from shardc.errors import ShardcError
from tests.features.text.chat_folder import TAGGED, chat, tokenizer
from tests.runtime.data.test_datasets import Shaped, Streamed, loaders, read

SHARES = {"a": 3.0, "b": 1.0}


class Named(Shaped):
    def __init__(self, name: str, size: int) -> None:
        super().__init__(size)
        self.name = name

    def __getitem__(self, i: int) -> Any:
        return self.name, super().__getitem__(i)["ids"][0]


class NamedStream:
    epoch = 0

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return ((self.name, (i + self.epoch) % self.size) for i in range(self.size))


@pytest.mark.parametrize("kind", [Named, NamedStream])
def test_shares_hold_all_along_and_each_sample_comes(kind: Any) -> None:
    mixed = text.mix({"a": kind("a", 30), "b": kind("b", 20)}, SHARES)
    samples = list(mixed)
    for end in range(1, len(samples)):
        assert abs(Counter(name for name, _ in samples[:end])["a"] - 0.75 * end) <= 1
    assert set(samples) == {("a", i) for i in range(30)} | {("b", i) for i in range(20)}
    assert abs(len(samples) - 80) <= 2, "b is read once, a twice"
    times = Counter(x for x in samples if x[0] == "a").values()
    assert max(times) - min(times) <= 1, "in turn"
    of_a = [i for name, i in samples if name == "a"]
    assert of_a[:30] != of_a[30:60], "another order"
    assert samples == list(text.mix({"a": kind("a", 30), "b": kind("b", 20)}, SHARES))


def test_default_weights_are_the_sizes() -> None:
    mixed = text.mix({"a": Named("a", 30), "b": Named("b", 10)})
    assert sorted(mixed) == sorted([("a", i) for i in range(30)] + [("b", i) for i in range(10)])
    assert mixed.summary == "a mix: a 75% (30 samples); b 25% (10 samples)"


@pytest.mark.parametrize("stream", [False, True])
def test_a_mixture_goes_on_on_another_mesh(stream: bool) -> None:
    def made() -> Any:
        return text.mix({"a": Streamed(30) if stream else Shaped(30), "b": Shaped(20)}, SHARES)

    order, one, two = read(loaders(1, made())), loaders(1, made()), loaders(2, made(), batch=2, num_workers=2)
    begun = read([list(itertools.islice(one[0], 5))])
    for loader in two:
        loader.load_state_dict(one[0].state_dict())
    assert begun + read(two)[: len(order) - 20] == order


def test_packed_rows_go_on_and_other_data_do_not() -> None:
    """The digest says that texts, tokenizer or settings are others, where the number of rows does not."""
    from shardc.runtime.data.loader import Loader
    from shardc.runtime.data.sampler import Order

    def rows(count: int = 40, seq: int = 96, **options: Any) -> Any:
        return text.chats([chat(i) for i in range(count)], tokenizer(TAGGED), seq, **options)

    def loader(data: Any) -> Any:
        made = Loader.__new__(Loader)
        made.dataset, made.where = data, "loader 'train'"
        made.order = Order(len(data), 4, torch.arange(4), True, 0)
        return made

    state = loader(rows()).state_dict()
    loader(rows()).check(state)
    several = text.mix({"a": rows(), "b": rows(20)}, SHARES)
    mixed = loader(several).state_dict()
    loader(text.mix({"a": rows(), "b": rows(20)}, SHARES)).check(mixed)
    for data, of in (
        (rows(seq=97), state),
        (rows(41), state),
        (text.mix({"a": rows(), "b": rows(20)}, {"a": 2.0, "b": 1.0}), mixed),
        (text.mix({"a": rows(), "b": rows(20)}, SHARES, seed=1), mixed),
    ):
        with pytest.raises(ShardcError, match=r"in the middle of other data: their digest was .*\n  fix: .*--new-data"):
            loader(data).check(of)


@pytest.mark.parametrize(
    ("datasets", "weights", "fault"),
    [
        ({}, None, "there is nothing to mix"),
        ({"a": Shaped(2)}, {"b": 1.0}, r"the weights are {'b': 1.0}\n  fix: give each of a a weight"),
        ({"a": Shaped(2), "b": Shaped(2)}, {"a": 1.0, "b": 0.0}, "above 0"),
        ({"a": Shaped(2), "b": Shaped(0)}, SHARES, "b is empty"),
        ({"a": Streamed(2)}, None, r"a stream has no size\n  fix: give weights"),
    ],
)
def test_what_cannot_be_mixed(datasets: Any, weights: Any, fault: str) -> None:
    with pytest.raises(ShardcError, match=fault):
        text.mix(datasets, weights)


def test_an_empty_stream_ends_with_an_error() -> None:
    with pytest.raises(ShardcError, match="b is empty"):
        list(text.mix({"a": Streamed(5), "b": Streamed(0)}, SHARES))
