"""Global tensors, from every rank's parts of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.shard_chunks import trim, unchunk
from shardc.ir.stored import Buffer, Param


def _all(program: Program) -> list[Param | Buffer]:
    return [*program.params, *program.buffers]


def gather(x: Tensor, layout: Layout, mesh: Any, tag: str = "") -> Tensor:
    """The global tensor of this rank's part `x`, on every rank. Collective over the axes that shard it."""
    x = x.detach()
    for axis, shard in sorted(layout.shards(), key=lambda item: item[1].split):  # outer digits first, as Layout.join
        x = unchunk(mesh.all_gather(x.contiguous(), axis, direction="state", tag=tag), shard)
    for shard in layout.paddings():
        x = trim(x, shard)
    return x


def _entries(
    program: Program, mesh: Any, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[tuple[Param | Buffer, Tensor]]:
    """Every parameter and persistent buffer with its global value on the CPU, one at a time."""
    for x in _all(program):
        if not x.fqn or (isinstance(x, Buffer) and not x.persistent):
            continue
        yield x, gathered_entry(program, mesh, x, params if isinstance(x, Param) else buffers)


def gathered_entry(program: Program, mesh: Any, x: Param | Buffer, held: Mapping[str, Tensor]) -> Tensor:
    """The global value of a parameter or buffer on the CPU, on every rank. Collective."""
    local = _everywhere(program, mesh, x, held)
    return gather(local, x.layout, mesh, x.fqn).to(device="cpu", copy=True, memory_format=torch.contiguous_format)


def _everywhere(program: Program, mesh: Any, x: Param | Buffer, held: Mapping[str, Tensor]) -> Tensor:
    """This rank's part; where its pipeline stage has none, that of the first stage that has. Collective over the
    pipeline's axis.
    """
    if not program.axis:
        return held[x.name]
    first, *_ = holders = program.holders(x)
    at, others = mesh.coordinate(program.axis), [c for c in range(mesh.size(program.axis)) if c not in holders]
    if at in others:
        found = torch.empty(x.layout.local_shape(x.shape, program.mesh), dtype=x.dtype, device=mesh.device)
        mesh.start_receive(found, program.axis, first, tag=x.fqn).wait()
        return found
    local = held[x.name]
    if at == first:
        for work in [mesh.start_send(local, program.axis, c, direction="state", tag=x.fqn) for c in others]:
            work.wait()
    return local


def full_state_dict(
    program: Program,
    mesh: Any,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    rank0_only: bool = False,
) -> dict[str, Tensor]:
    """{fqn: global tensor on the CPU}, as the unsharded `model.state_dict()` gives it: all names of tied tensors (one
    tensor under several names), persistent buffers. rank0_only: the other ranks take part but keep nothing and return
    {}. Collective."""
    found: dict[str, Tensor] = {}
    for x, whole in _entries(program, mesh, params, buffers):
        if mesh.rank == 0 or not rank0_only:
            found |= x.by_name(whole)
    return found
