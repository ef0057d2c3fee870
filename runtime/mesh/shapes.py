"""Simulate one rank on tensors without data: collectives return the right sizes and send nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from shardc.runtime.mesh.base import RankMesh, Work


class ShapeMesh(RankMesh):
    """A mesh of one rank that allocates as NCCL does: no buffers except arguments and results."""

    def _all_reduce(self, x: Tensor, axes: tuple[str, ...], op: str, tag: str) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def _sum_on_host(self, x: Tensor) -> Tensor:
        return x * self.layout.world

    def _start_all_reduce(self, flat: Tensor, axes: tuple[str, ...], tag: str) -> Work:
        return Work()

    def _start_all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str) -> Work:
        return Work(kept=part)

    def _start_reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str) -> Work:
        return Work()

    def _all_gather(self, x: Tensor, axis: str, tag: str) -> Tensor:
        return x.new_empty((self.size(axis), *x.shape))

    def _reduce_scatter(self, parts: Tensor, axis: str, tag: str) -> Tensor:
        return torch.empty_like(parts[0])

    def _all_to_all(self, parts: Tensor, axis: str, tag: str) -> Tensor:
        return torch.empty_like(parts)

    def _all_to_all_rows(
        self, x: Tensor, sent: list[int], received: list[int], axes: tuple[str, ...], tag: str
    ) -> Tensor:
        return x.new_empty((sum(received), *x.shape[1:]))

    def _start_all_to_all_rows(
        self, x: Tensor, into: Tensor, sent: list[int], received: list[int], axes: tuple[str, ...], tag: str
    ) -> Work:
        return Work()

    def _start_send(self, x: Tensor, axis: str, to: int, tag: str) -> Work:
        return Work(kept=x)

    def _start_receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work:
        return Work()

    def barrier(self) -> None:
        """Return at once: there are no other ranks."""
