"""Define `data`: which ranks sum gradients, what ZeRO shards between them, and what is offloaded."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardc.spec.fields import Axes, Place, Positive, Section

#: Sizes of a gradient bucket in MiB, if the spec names none.
LEAST, MOST = 25, 256


class Offload(Section):
    """Where optimizer state and parameters are kept: none = on the device, cpu, or a directory on disk."""

    optimizer: Place = Field(default="none", examples=["cpu"])
    parameters: Place = Field(default="none", examples=["cpu"])

    @property
    def used(self) -> dict[str, str]:
        """{kind of state: place} of the state that is kept off the device."""
        places = {"optimizer": self.optimizer, "parameters": self.parameters}
        return {kind: place for kind, place in places.items() if place != "none"}


class Data(Section):
    """Data parallel and ZeRO. axis: () = the mesh's axes dp and dp_*, or without these the axes of `sequence`;
    [outer, inner] = sharded in inner, replicated over outer; what is split over inner already, as experts are over ep,
    is sharded in outer.
    """

    axis: Axes = Field(default=(), description="data axis; [dp_outer, dp] = HSDP", examples=["dp"])
    zero: Annotated[int, Field(ge=0, le=3)] = Field(
        default=0,
        description="0 all-reduced gradients, 1 +optimizer state split, 2 +gradients, 3 +parameters",
        examples=[2],
    )
    bucket_mb: Positive | None = Field(
        default=None,
        description=f"size of a bucket in MiB (default: 1 for each rank that sums it, {LEAST} to {MOST})",
        examples=[25],
    )
    prefetch: Annotated[int, Field(ge=0)] = Field(
        default=1, description="at zero 3: buckets gathered ahead of their use", examples=[2]
    )
    keep: bool = Field(
        default=False, description="at zero 3: parameters stay whole from a step's first forward to its last backward"
    )
    offload: Offload = Field(default=Offload(), examples=[{"optimizer": "cpu"}])

    def bucket_bytes(self, ranks: int = 1) -> float:
        """Return the bytes of a bucket that so many ranks reduce: by default 1 MiB per rank, from LEAST to MOST.

        In a ring each rank sends one part at a time, which should take longer than the latency: between machines 1 MiB
        takes 20 us at 50 GB/s, and the latency is 8 us. With ZeRO 3 larger buckets cost memory.
        """
        return (self.bucket_mb or min(max(LEAST, ranks), MOST)) * 2**20
