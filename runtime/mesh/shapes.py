"""Simulate one rank on tensors without data: collectives return the right sizes and send nothing."""

from __future__ import annotations

from torch import Tensor

from shardc.runtime.mesh.base import Axes, RankMesh, Rows, Work


class ShapeMesh(RankMesh):
    """A mesh of one rank that allocates as NCCL does: no buffers except arguments and results."""

    def _sum_on_host(self, x: Tensor) -> Tensor:
        return x * self.layout.world

    def _all_reduce(self, flat: Tensor, axes: Axes, op: str, tag: str, background: bool) -> Work:
        return Work()

    def _all_gather(self, part: Tensor, whole: Tensor, axis: str, tag: str, background: bool) -> Work:
        return Work(kept=part)

    def _reduce_scatter(self, flat: Tensor, part: Tensor, axis: str, tag: str, background: bool) -> Work:
        return Work()

    def _all_to_all(self, x: Tensor, into: Tensor, rows: Rows, axes: Axes, tag: str, background: bool) -> Work:
        return Work()

    def _send(self, x: Tensor, axis: str, to: int, tag: str) -> Work:
        return Work(kept=x)

    def _receive(self, into: Tensor, axis: str, source: int, tag: str) -> Work:
        return Work()

    def barrier(self) -> None:
        """Return at once: there are no other ranks."""
