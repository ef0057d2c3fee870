"""On a GPU: the dropout kernel against the torch form, without a host sync, and in a captured CUDA graph."""

from __future__ import annotations

import pytest
import torch

from shardc.runtime import ops, rng
from shardc.runtime.ops.dropout import by_blocks
from shardc.runtime.rng import Rng
from tests.gpu.devices import needs_gpu

pytestmark = needs_gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(), (13,), (7, 33), (3, 5000), (8, 512, 768)], ids=str)
def test_the_kernel_is_the_torch_form_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    want = ops.dropout(x, 0.1, Rng(seed=3, step=2), 5)
    assert torch.equal(ops.dropout(x.cuda(), 0.1, Rng(seed=3, step=2), 5).cpu(), want)


def test_indices_of_64_bits() -> None:
    rows = torch.arange(2**33, 2**33 + 40_000, 1000)
    columns = torch.arange(1000)
    x, words = torch.randn(40_000), Rng(seed=3).words(torch.device("cpu"))
    where = [t.cuda() for t in (words, rows, columns)]
    got = torch.ops.shardc.dropout(x.cuda(), *where, 5, 0.3)
    assert torch.equal(got.cpu(), by_blocks(x, words, rows, columns, 5, 0.3))


@pytest.mark.parametrize("shape", [(64, 64), (2**16, 2**16)], ids=str)
def test_nothing_waits_for_the_device(shape: tuple[int, ...]) -> None:
    """Indices of the second shape take 64 bits; only a part of it is there."""
    device, state = torch.device("cuda"), Rng()
    x = torch.ones(64, 64, device=device, requires_grad=True)
    rows, columns = (v[:64].contiguous() for v in rng.row_and_column_offsets(shape, (), None, device, last=True))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(3):
            state.step = step
            y = torch.ops.shardc.dropout(x.detach(), state.words(device), rows, columns, 0, 0.5)
            (ops.dropout(x, 0.5, state, 1) * y).sum().backward()
            q = x.view(1, 1, 64, 64)
            ops.attention(q, q, q, None, 0.1, True, None, False, state, 2).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_graph_draws_new_numbers_in_every_replay() -> None:
    device, state = torch.device("cuda"), Rng(in_place=True)
    x = torch.ones(4096, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles the kernel, and makes what stays from step to step
        ops.dropout(x, 0.5, state, 3)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.dropout(x, 0.5, state, 3)
    for step in range(3):
        state.step = step
        state.renew()
        graph.replay()
        assert torch.equal(y.cpu(), ops.dropout(torch.ones(4096), 0.5, Rng(step=step), 3))


def test_attention_is_that_of_the_cpu() -> None:
    q, k, v = (torch.randn(2, 4, 300, 16, dtype=torch.float64, requires_grad=True) for _ in range(3))
    theirs = [x.detach().cuda().requires_grad_() for x in (q, k, v)]
    options = (None, 0.3, True, None, False, Rng(seed=1), 7)
    results = [ops.attention(*xs, *options) for xs in ((q, k, v), theirs)]
    grads = [torch.autograd.grad(y.sum(), xs) for y, xs in zip(results, ((q, k, v), theirs), strict=True)]
    for a, b in zip((results[0], *grads[0]), (results[1], *grads[1]), strict=True):
        torch.testing.assert_close(b.cpu(), a, rtol=1e-12, atol=1e-12)
