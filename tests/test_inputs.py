"""Batches of every structure: dicts, tuples, named tuples, tensors, nested; and calls that look like the model's own."""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from shardc.errors import ShardcError
from shardc.program import Input, Program
from shardc.runtime import inputs
from shardc.runtime.loopback import loopback
from tests import hand

Pair = collections.namedtuple("Pair", ["left", "right"])
X, Y = torch.zeros(2), torch.ones(3)


class Model(nn.Module):
    def forward(self, first: Any, second: Any = None, third: Any = None) -> None:
        """Only its names matter."""


def program(*paths: tuple[str | int, ...]) -> Program:
    shapes = [X.shape, Y.shape]
    found = tuple(Input(f"i{i}", path, tuple(shapes[i]), torch.float32) for i, path in enumerate(paths))
    return replace(hand.program(), inputs=found)


BATCHES: list[tuple[Any, list[tuple[str | int, ...]]]] = [
    (X, [()]),
    ((X, Y), [(0,), (1,)]),
    ({"a": X, "b": {"c": [None, Y]}}, [("a",), ("b", "c", 1)]),
    (Pair(X, {"d": Y}), [("left",), ("right", "d")]),
    ((X, {"mask": Y}, "flag"), [(0,), (1, "mask")]),
]


@pytest.mark.parametrize(("batch", "paths"), BATCHES, ids=lambda x: str(x)[:20])
def test_leaves_are_found_by_path(batch: Any, paths: list[tuple[str | int, ...]]) -> None:
    p = program(*paths)
    taken = loopback(p.mesh, lambda mesh: inputs.take(p, batch, mesh, local=False))[0]
    assert [x.tolist() for x in taken] == [X.tolist(), Y.tolist()][: len(paths)]


CALLS: list[tuple[list[tuple[str | int, ...]], tuple[Any, ...], dict[str, Any]]] = [
    ([("first",), ("third",)], (), {"first": X, "third": Y}),
    ([("first",), ("third",)], (X, None, Y), {}),
    ([("first",), ("third",)], (X,), {"third": Y}),
    ([(0,), (2,)], (X, None, Y), {}),
    ([(0,), (2,)], (X,), {"third": Y}),
    ([(0,), (2,)], (), {"first": X, "third": Y}),
    ([()], (X,), {}),
    ([()], (), {"first": X}),
]


@pytest.mark.parametrize(("paths", "args", "kwargs"), CALLS, ids=lambda x: str(x)[:20])
def test_calls_look_like_the_models_own(paths: list[tuple[str | int, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    p = program(*paths)
    batch = inputs.from_call(p, Model(), args, kwargs)
    taken = loopback(p.mesh, lambda mesh: inputs.take(p, batch, mesh, local=True))[0]
    assert [x.tolist() for x in taken] == [X.tolist(), Y.tolist()][: len(paths)]


def test_a_call_without_the_tensor_is_named() -> None:
    p = program(())
    batch = inputs.from_call(p, Model(), (), {})
    with pytest.raises(ShardcError, match=r"the batch: the batch gives NoneType, but the program was compiled for f32\[2\]"):
        loopback(p.mesh, lambda mesh: inputs.take(p, batch, mesh, local=True))
