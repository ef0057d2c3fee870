"""A bucket's parameters and parts begin at multiples of 16 bytes, and nothing of them is lost between."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.zero.flat_partition import ALIGNMENT, Flat

SHAPES = ((), (1,), (5, 3), (0, 4), (16,), (7,))


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("aligned", [1, 4, 8])
def test_every_element_is_in_one_part(ranks: int, aligned: int) -> None:
    flat = Flat(tuple("abcdef"), SHAPES, ranks, aligned)
    assert all(start % aligned == 0 for start in flat.starts)
    assert flat.part % aligned == 0
    taken = torch.zeros(flat.padded, dtype=torch.int64)
    for start, size in zip(flat.starts, flat.sizes, strict=True):
        taken[start : start + size] += 1
    for start, stop in flat.gaps:
        taken[start:stop] += 1
    assert (taken == 1).all()
    for name, size in zip(flat.names, flat.sizes, strict=True):
        shards = [flat.shards(rank)[name] for rank in range(ranks)]
        kept = [i for shard in shards for i in range(shard.start, shard.stop)]
        assert kept == list(range(size))


class Narrow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 1), nn.Linear(1, 3), nn.Linear(3, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_ops_get_aligned_parameters(zero: int, compute: str) -> None:
    """Behind a bias of one element, too."""
    model, x = Narrow(), torch.randn(4, 6)
    spec = {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": zero}, "precision": {"compute": compute}}
    program = shardc.compile(model, x, spec)
    for bucket in program.buckets:
        flat = Flat.of(program, bucket)
        itemsize = min(d.itemsize for d in (bucket.dtype, bucket.compute or torch.float32))
        assert all(start * itemsize % ALIGNMENT == 0 for start in (*flat.starts, flat.part))

    def work(mesh: LoopbackMesh) -> None:
        engine = program.engine(model, mesh=mesh)
        engine.step(x)
        for p in engine.params.values():
            assert p.storage_offset() * p.element_size() % ALIGNMENT == 0 or not p.numel()

    loopback(program.mesh, work)
