"""What of a tensor a rank writes into a checkpoint, and reads from one: boxes of the global tensor.

A rank's part is one or more boxes (`Layout.boxes`: several for fused weights); ZeRO keeps a stretch of the flattened
part, which is some boxes again. The first of its replicas writes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout
from shardc.ir.program import Buffer, Param, Program
from shardc.runtime.zero.rank_parts import Run, elements

Runs = Mapping[str, Run]


@dataclass(frozen=True)
class Part:
    """This rank's part of a global tensor, as torch.distributed.checkpoint sees it.

    run: local is 1-d, this stretch of the flattened local part; None: it is the local part. replicas: the axes whose
    ranks have the same.
    copy: a rank of another pipeline stage has the same, and writes it.
    """

    local: Tensor
    shape: tuple[int, ...]
    layout: Layout = field(default_factory=Layout)
    run: Run | None = None
    replicas: tuple[str, ...] = ()
    copy: bool = False

    def boxes(self, mesh: Mesh, coords: Mapping[str, int]) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        """(place in the global tensor, what is there: a view of the local tensor)."""
        local = self.local.detach()
        if self.run is None and 0 in self.shape:  # nothing to write, but its name must be known
            yield ChunkStorageMetadata(torch.Size([0] * len(self.shape)), torch.Size(local.shape)), local
            return
        if self.run is None:
            for box in self.layout.boxes(self.shape, mesh, coords):
                yield _place(box), local[tuple(slice(a, a + n) for a, _, n in box)]
            return
        for stretch in self.run.boxes():
            first, count = elements(stretch, self.run.shape)
            held = local[first - self.run.start :][:count].view([n for _, n in stretch])
            for box in self.layout.boxes(self.shape, mesh, coords):
                common = [_common(mine, has) for mine, has in zip(stretch, box, strict=True)]
                if all(n > 0 for _, _, n in common):
                    yield _place(common), held[tuple(slice(a, a + n) for a, _, n in common)]

    def items(self, key: str, mesh: Mesh, coords: Mapping[str, int]) -> list[WriteItem]:
        """What this rank, at `coords`, writes of it: nothing if another replica does."""
        if self.copy or any(coords[a] for a in self.replicas):
            return []
        properties, size = TensorProperties(dtype=self.local.dtype), torch.Size(self.shape)
        return [
            WriteItem(
                MetadataIndex(key, box.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(box, properties, size)
            )
            for box, _ in self.boxes(mesh, coords)
        ]


@dataclass(frozen=True)
class Member(Part):
    """One entry of a stack of several of the model's parameters. stack: the part of all; index: which of them."""

    stack: Part | None = None
    index: int = 0

    def boxes(self, mesh: Mesh, coords: Mapping[str, int]) -> Iterator[tuple[ChunkStorageMetadata, Tensor]]:
        assert self.stack is not None
        for box, held in self.stack.boxes(mesh, coords):
            at = self.index - box.offsets[0]
            if 0 <= at < box.sizes[0]:
                yield ChunkStorageMetadata(box.offsets[1:], box.sizes[1:]), held[at]


def by_name(p: Param, part: Part) -> dict[str, Part]:
    """A parameter's part under the names that checkpoints have for it: the first, of a stack those of all members."""
    if not p.members:
        return {p.fqn: part}
    shape = p.shape[1:]
    return {
        n: Member(part.local, shape, replicas=part.replicas, copy=part.copy, stack=part, index=i)
        for i, n in enumerate(p.members)
    }


def _place(box: Iterable[tuple[int, int, int]]) -> ChunkStorageMetadata:
    found = list(box)
    return ChunkStorageMetadata(torch.Size([g for _, g, _ in found]), torch.Size([n for _, _, n in found]))


def _common(stretch: tuple[int, int], box: tuple[int, int, int]) -> tuple[int, int, int]:
    """(start in the stretch, global start, length) of what a stretch (start, length) and a box (local start, global
    start, length) share.
    """
    (a, n), (b, g, m) = stretch, box
    start, stop = max(a, b), min(a + n, b + m)
    return start - a, g + start - b, stop - start


def replicas(program: Program, layout: Layout, cut: Iterable[str] = ()) -> tuple[str, ...]:
    """The axes whose ranks hold the same."""
    split = {a for a, _ in layout.shards()} | set(cut) | {program.axis}
    return tuple(a for a in program.mesh.names if a not in split)


def cut_axes(program: Program, p: Param) -> tuple[str, ...]:
    """The axes over which ZeRO keeps it in stretches."""
    bucket = program.bucket(p)
    return program.mesh.parts(bucket.shard) if bucket is not None and bucket.zero else ()


def part_of(program: Program, p: Param, x: Tensor, run: Run | None, mesh: Any) -> Part:
    cut = cut_axes(program, p) if run is not None else ()
    return Part(x, p.shape, p.layout, run, replicas(program, p.layout, cut), copied(program, p, mesh))


def copied(program: Program, x: Param | Buffer, mesh: Any) -> bool:
    """Is a rank of another pipeline stage the first that has it?"""
    return bool(program.axis) and mesh.coordinate(program.axis) != program.holders(x)[0]


def model_parts(
    program: Program, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], runs: Runs, mesh: Any
) -> dict[str, Part]:
    parts = {
        f"model.{name}": part
        for p in program.params
        if p.name in params
        for name, part in by_name(p, part_of(program, p, params[p.name], runs.get(p.name), mesh)).items()
    }
    return parts | {
        f"model.{b.fqn}": Part(
            buffers[b.name], b.shape, b.layout, None, replicas(program, b.layout), copied(program, b, mesh)
        )
        for b in kept(program)
        if b.name in buffers
    }


def kept(program: Program) -> list[Buffer]:
    return [b for b in program.buffers if b.fqn and (b.persistent or b.updated)]


def coordinates(mesh: Any) -> dict[str, int]:
    return {a: mesh.coordinate(a) for a in mesh.layout.names}
