"""Batches of every structure: dicts, tuples, named tuples, tensors, nested; and calls
that look like the model's own.
"""

from __future__ import annotations

import collections
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Input
from shardc.runtime.data import inputs
from shardc.runtime.mesh.loopback import loopback
from tests import example_program

Pair = collections.namedtuple("Pair", ["left", "right"])
X, Y = torch.zeros(2), torch.ones(3)


class Model(nn.Module):
    def forward(self, first: Any, second: Any = None, third: Any = None) -> None:
        """Only its names matter."""


def program(*paths: tuple[str | int, ...]) -> Program:
    shapes = [X.shape, Y.shape]
    found = tuple(Input(f"i{i}", path, tuple(shapes[i]), torch.float32) for i, path in enumerate(paths))
    return replace(example_program.program(), inputs=found)


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
def test_calls_look_like_the_models_own(
    paths: list[tuple[str | int, ...]], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    p = program(*paths)
    batch = inputs.from_call(p, inputs.arguments(Model()), args, kwargs)
    taken = loopback(p.mesh, lambda mesh: inputs.take(p, batch, mesh, local=True))[0]
    assert [x.tolist() for x in taken] == [X.tolist(), Y.tolist()][: len(paths)]


def test_a_call_without_the_tensor_is_named() -> None:
    p = program(())
    batch = inputs.from_call(p, inputs.arguments(Model()), (), {})
    with pytest.raises(
        ShardcError, match=r"the batch: the batch gives NoneType, but the program was compiled for f32\[2\]"
    ):
        loopback(p.mesh, lambda mesh: inputs.take(p, batch, mesh, local=True))


class Placed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places, self.head = nn.Embedding(11, 8), nn.Embedding(16, 8), nn.Linear(8, 1)

    def forward(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tokens(ids) + self.places(positions))).square().mean()


@pytest.mark.parametrize(
    "more",
    [{"mesh": {"dp": 2}}, {"mesh": {"dp": 2}, "batch": {"microbatches": 2}}, {"mesh": {"dp": 3}, "uneven": "pad"}],
)
def test_one_row_that_all_rows_share(more: dict[str, Any]) -> None:
    """Positions i64[1, s] are no batch."""
    torch.manual_seed(0)
    model, batch = Placed().double(), {"ids": torch.randint(11, (8, 16)), "positions": torch.arange(16)[None]}
    want = model(**batch)
    program = shardc.compile(model, batch, {"shardc": 1, **more})
    assert "input positions  i64[1, 16]" in str(program)
    assert torch.allclose(shardc.verify.simulate(program, model, batch).loss, want.detach(), rtol=1e-12)
    with pytest.raises(ShardcError, match="the batch of 1 "):
        shardc.compile(model, {k: x[:1] for k, x in batch.items()}, {"shardc": 1, "mesh": {"dp": 2}})


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x).square().mean()


def test_the_part_of_a_batch_that_a_rank_reads() -> None:
    """It is what the rank's own cut of a global batch holds; ranks of a tensor-parallel group share one."""
    batch = {"x": torch.arange(16.0).view(8, 2)}
    spec = {"shardc": 1, "mesh": {"dp": 2, "fsdp": 2, "tp": 2}, "data": {"axis": ["dp", "fsdp"]}}
    p = shardc.compile(Rows(), batch, spec, prove=False)
    found = [inputs.part_of(p, rank) for rank in range(8)]
    assert found == [(i, 4) for i in range(4) for _ in range(2)]
    for rank, (part, parts) in enumerate(found):
        assert torch.equal(p.local(batch, rank)["x"], batch["x"].chunk(parts)[part])


def test_rows_that_are_filled_up_have_no_parts() -> None:
    spec = {"shardc": 1, "mesh": {"dp": 3}, "uneven": "pad"}
    p = shardc.compile(Rows(), {"x": torch.ones(8, 2)}, spec, prove=False)
    with pytest.raises(ShardcError, match="x: its 8 rows are not cut into equal parts in order"):
        inputs.part_of(p, 0)


def test_a_rank_of_nothing_but_padding_has_no_part() -> None:
    spec = {"shardc": 1, "mesh": {"dp": 4}, "uneven": "pad"}
    p = shardc.compile(Rows(), {"x": torch.ones(3, 2)}, spec, prove=False)
    for rank in range(4):
        with pytest.raises(ShardcError, match="x: its 3 rows are not cut into equal parts in order"):
            inputs.part_of(p, rank)


class Flags(nn.Module):
    def forward(self, x: Tensor, temperature: float = 1.0, use_cache: bool | None = None) -> Tensor:
        return x


@pytest.mark.parametrize("flags", [{"temperature": float("1.0")}, {"use_cache": False}, {"use_cache": True}], ids=str)
def test_an_argument_with_its_default_is_taken(flags: dict[str, Any]) -> None:
    x = torch.ones(2)
    assert inputs.from_call(program(("x",)), inputs.arguments(Flags()), (x,), flags)["x"] is x


@pytest.mark.parametrize(
    "flags", [{"temperature": 0.5}, {"temperature": True}, {"use_cache": 2}, {"cold": False}], ids=str
)
def test_an_argument_that_changes_something_is_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(ShardcError, match="was compiled without this argument"):
        inputs.from_call(program(("x",)), inputs.arguments(Flags()), (torch.ones(2),), flags)


@pytest.mark.parametrize(
    ("x", "said"),
    [
        (
            torch.ones(8, 2, dtype=torch.float64),
            r"convert it: x.float\(\), or compile again with a batch of torch.float64",
        ),
        (torch.ones(8, 2, dtype=torch.int64), r"convert it: x.float\(\)"),
        (torch.ones(12, 2), "compile again with a batch of 12 rows, or cut it into batches of at most 8"),
        (torch.ones(0, 2), "leave it out: it has no rows"),
    ],
)
def test_a_batch_that_does_not_fit_is_told_what_to_do(x: Tensor, said: str) -> None:
    p = shardc.compile(Rows(), {"x": torch.ones(8, 2)}, {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    with pytest.raises(ShardcError, match=said):
        p.local({"x": x}, 0)
