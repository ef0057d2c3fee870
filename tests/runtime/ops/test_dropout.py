"""Dropout: one kernel and the form that it is equal to; masks that do not know the mesh; nothing kept for backward."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.runtime import ops, rng
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.ops.dropout import by_blocks, by_kernel
from shardc.runtime.rng import Rng, threshold
from shardc.torch_private import FakeTensorMode
from tests.triton_interpreter import interpreted

CPU = torch.device("cpu")
SHAPE = (4, 24, 6)
LAYOUTS: list[dict[str, Shard]] = [
    {},
    {"a": Shard(0)},
    {"a": Shard(1)},
    {"a": Shard(2)},
    {"a": Shard(1, 3)},
    {"a": Shard(1, 1, (16, 8))},
    {"a": Shard(0), "b": Shard(2)},
    {"a": Shard(1), "b": Shard(1, 2)},
    {"a": Shard(1, 3), "b": Shard(1)},
]


def digits(layout: Layout) -> Any:
    return tuple((s.dim, a, s.split, s.sections) for a, s in layout.shards())


@pytest.mark.parametrize("placed", LAYOUTS, ids=str)
def test_masks_do_not_know_the_mesh(placed: dict[str, Shard]) -> None:
    mesh = Mesh((("a", 2), ("b", 3)))
    layout = Layout.of(placed, mesh)
    assert not layout.problem(SHAPE, mesh)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    whole = ops.dropout(x, 0.4, Rng(seed=3), 5)
    parts = loopback(
        mesh,
        lambda m: ops.dropout(
            layout.local(x, mesh, mesh.coords(m.rank)), 0.4, Rng(seed=3), 5, m, SHAPE, digits(layout)
        ),
    )
    assert torch.equal(layout.join(lambda coords: parts[mesh.rank(coords)], mesh), whole)
    for rank, part in enumerate(parts):
        assert torch.equal(part, layout.local(whole, mesh, mesh.coords(rank)))


class Place:
    """Where a rank is: in the middle of every axis."""

    def size(self, axis: str) -> int:
        return {"a": 2, "b": 3, "wide": 40_000}[axis]

    def coordinate(self, axis: str) -> int:
        return self.size(axis) // 2


#: (global shape, digits, paddings)
PARTS: list[tuple[tuple[int, ...], Any, Any]] = [
    *((SHAPE, digits(Layout.of(placed, Mesh((("a", 2), ("b", 3))))), ()) for placed in LAYOUTS),
    ((5, 8), ((0, "a", 1, ()),), ((0, 1, 1),)),
    ((2, 14, 3), ((1, "a", 2, ()),), ((1, 1, 2),)),
    ((), (), ()),
    ((3, 5000), (), ()),
    ((0, 3), (), ()),
    ((13,), (), ()),
    ((40_000, 70_000), ((0, "wide", 1, ()), (1, "a", 350, ())), ()),  # 2.8e9 elements: indices of 64 bits
    ((40_000, 7, 70_000), ((0, "wide", 1, ()), (2, "a", 350, ())), ()),  # beyond 2^32: the upper word is hashed
]


@pytest.mark.parametrize(("shape", "placed", "paddings"), PARTS, ids=str)
def test_rows_and_columns_add_up_to_the_indices(shape: tuple[int, ...], placed: Any, paddings: Any) -> None:
    rows, columns = rng.row_and_column_offsets(shape, placed, Place(), CPU, paddings)
    want = rng.indices(shape, placed, Place(), CPU, paddings)
    assert torch.equal((rows[:, None] + columns).view(-1)[: want.numel()], want.view(-1))
    assert len(rows) + len(columns) <= max(want.numel(), 2) + 1 or not placed


def test_wide_indices_are_wide() -> None:
    rows, columns = rng.row_and_column_offsets(*PARTS[-1][:2], Place(), CPU)
    assert rows.dtype == columns.dtype == torch.int64
    assert int(rows.max() + columns.max()) > 2**33


@pytest.fixture(scope="module")
def kernel() -> Iterator[ModuleType]:
    with interpreted("shardc.runtime.ops.dropout.kernel") as module:
        yield module


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit; of two NaN any bits."""
    signs = torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())
    return a.dtype == b.dtype and a.shape == b.shape and signs and torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.mark.parametrize(("shape", "placed", "paddings"), PARTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_the_kernel_is_the_torch_form_bit_for_bit(
    kernel: ModuleType, dtype: torch.dtype, shape: tuple[int, ...], placed: Any, paddings: Any
) -> None:
    rows, columns = (
        x[-700:] if placed else x for x in rng.row_and_column_offsets(shape, placed, Place(), CPU, paddings)
    )
    count = len(rows) * len(columns) if placed else math.prod(shape)
    x = torch.randn(count, generator=torch.Generator().manual_seed(0)).to(dtype)
    special = torch.tensor([math.inf, -math.inf, math.nan, -0.0])[:count].to(dtype)
    x[: len(special)] = special
    for p, state in ((0.1, Rng(-3, 2**40, 1)), (0.5, Rng()), (1e-12, Rng(2**63 + 5)), (0.999, Rng(step=7))):
        arguments = (x, state.words(CPU), rows, columns, 5, p)
        assert same(kernel.launch(*arguments), by_blocks(*arguments)), p


def test_the_kernel_takes_what_is_not_contiguous(kernel: ModuleType) -> None:
    x = torch.randn(6, 5).t()
    arguments = (x, Rng().words(CPU), *rng.row_and_column_offsets(x.shape, (), None, CPU), 1, 0.3)
    assert same(kernel.launch(*arguments), by_blocks(*arguments))
    assert kernel.launch(*arguments).shape == x.shape


def test_a_captured_step_draws_new_numbers_in_every_replay(kernel: ModuleType) -> None:
    """What a CUDA graph does: the same kernels on the same addresses."""
    state, x = Rng(in_place=True), torch.ones(64)
    words = state.words(CPU)
    captured = (x, words, *state.row_and_column_offsets(x.shape, (), None, CPU, ()), 3, 0.5)
    for step in range(3):
        state.step = step
        assert state.words(CPU) is words
        assert torch.equal(kernel.launch(*captured), ops.dropout(x, 0.5, Rng(step=step), 3))


def test_a_backward_after_the_next_step_began_has_the_mask_of_its_forward() -> None:
    x, state = torch.ones(50, 20, requires_grad=True), Rng(seed=2)
    y = ops.dropout(x, 0.3, state, 1)
    state.step += 1
    assert not torch.equal(ops.dropout(x, 0.3, state, 1), y)
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert torch.equal(x.grad, y.detach())


def test_nothing_is_kept_for_backward() -> None:
    saved: list[Tensor] = []
    x = torch.ones(50, 20, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = ops.dropout(x, 0.3, Rng(seed=2), 1)
    assert y.requires_grad
    assert not saved


def test_keeps_the_mean_and_scales() -> None:
    x = torch.ones(1000, 1000)
    for p in (0.1, 0.5, 0.9):
        y = ops.dropout(x, p, Rng(seed=1), 0)
        kept = y != 0
        assert abs(float(kept.double().mean()) - (1 - p)) < 4 * math.sqrt(p * (1 - p) / x.numel())
        assert torch.all(y[kept] == torch.tensor(1.0) * (1 / (1 - p)))


def test_nothing_and_everything() -> None:
    x = torch.randn(5, requires_grad=True)
    assert ops.dropout(x, 0.0, Rng(), 0) is x
    assert ops.dropout(x, 0.5, Rng(training=False), 0) is x
    assert ops.dropout(x, 0.5, None, 0) is x
    assert not ops.dropout(x, 1.0, Rng(), 0).any()
    assert threshold(1e-12) == 2**31 - 1
    scalar = torch.tensor(2.0)
    assert float(ops.dropout(scalar, 0.5, Rng(), 0)) in (0.0, 4.0)


def test_every_op_step_microbatch_and_seed_has_its_own_mask() -> None:
    x = torch.ones(64)
    states = [(Rng(), 0), (Rng(), 1), (Rng(step=1), 0), (Rng(microbatch=1), 0), (Rng(seed=1), 0), (Rng(step=1), 1)]
    masks = {tuple(ops.dropout(x, 0.5, r, i).tolist()) for r, i in states}
    assert len(masks) == len(states)


def test_one_op_on_tensors_without_data() -> None:
    """The ledger and torch.compile see one op, forward and backward: nothing is written out."""
    with FakeTensorMode():
        x, state = torch.ones(8, 4, requires_grad=True), Rng()
        ops.dropout(x, 0.5, state, 0)  # words and factors, once
        with torch.profiler.profile() as profile:
            ops.dropout(x, 0.5, state, 0).backward(torch.ones(8, 4))
    calls = [e.name for e in profile.events() if e.name.startswith("shardc::")]
    assert calls == ["shardc::dropout"] * 2


def test_a_random_state_keeps_the_vectors_of_one_microbatch() -> None:
    mesh, state = Microbatches(), Rng()
    part = (6, 8), ((0, "microbatch", 1, ()),), mesh, CPU, ()
    for mesh.now in (*range(6), *range(6)):
        rows, columns = state.row_and_column_offsets(*part)
        assert (rows + columns).tolist() == list(range(mesh.now * 8, mesh.now * 8 + 8))
        assert state.row_and_column_offsets(*part)[0] is rows
    assert len(state.tensors()) == 2


class Microbatches:
    now = 0

    def size(self, axis: str) -> int:
        return 6

    def coordinate(self, axis: str) -> int:
        return self.now


def test_a_gpu_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "shardc.runtime.ops.dropout.kernel", raising=False)
    monkeypatch.delattr(sys.modules["shardc.runtime.ops.dropout"], "kernel", raising=False)
    x = torch.ones(4)
    with pytest.raises(ShardcError, match=r"dropout 3: .*Triton is not installed") as e:
        by_kernel(x, Rng().words(CPU), *Rng().row_and_column_offsets(x.shape, (), None, CPU, ()), 3, 0.5)
    assert "pip install triton" in str(e.value)


def test_torchs_own_check_of_the_op() -> None:
    x = torch.randn(6, 5)
    where = (Rng().words(CPU), *rng.row_and_column_offsets(x.shape, (), None, CPU), 1, 0.3)
    torch.library.opcheck(torch.ops.shardc.dropout.default, (x, *where), test_utils=("test_schema", "test_faketensor"))


def test_blocks_do_not_matter() -> None:
    x = torch.randn(70, 50)
    whole = ops.dropout(x, 0.3, Rng(), 0)
    module = by_blocks.__module__
    with mock.patch(f"{module}.BLOCK", 120):
        assert torch.equal(ops.dropout(x, 0.3, Rng(), 0), whole)
