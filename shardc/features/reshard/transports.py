"""Define how bytes go between the processes of a move: over a mesh, or between two worlds that meet at an address.

An object with these names may take their place, over NIXL or torchstore: `engines.through(make, layout)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.errors import ShardcError

#: Seconds that a process waits for the others to come, and in a collective.
WAIT = 600


class Transport(Protocol):
    """The processes between which weights move. Every method is collective.

    world: their number; rank: of this one; device: of the tensors that are exchanged.
    """

    world: int
    rank: int
    device: torch.device

    def totals(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of numbers over all processes, on the host."""
        ...

    def exchange(self, x: Tensor, into: Tensor, counts: tuple[list[int], list[int]]) -> None:
        """Send counts[0][i] bytes of x to process i, in order; fill `into` with counts[1][i] bytes from each."""
        ...

    def spread(self, text: str) -> str:
        """Return the text of process 0."""
        ...


class OverMesh:
    """The ranks of a mesh."""

    def __init__(self, mesh: Any) -> None:
        self._mesh = mesh
        self.world, self.rank, self.device = mesh.layout.world, mesh.rank, mesh.device

    def totals(self, numbers: Sequence[int]) -> list[int]:
        sums: list[int] = self._mesh.sum_on_host(numbers)
        return sums

    def exchange(self, x: Tensor, into: Tensor, counts: tuple[list[int], list[int]]) -> None:
        names = self._mesh.layout.names
        self._mesh.start_all_to_all_rows(x, into, counts, names, direction="state", tag="reshard").wait()

    def spread(self, text: str) -> str:
        return text  # every rank has it


class OverAddress:
    """Processes of two worlds, which meet at an address, "host:port": those that train first, then the engine's.

    They need no common group of torch.distributed. Process 0 listens at the address.
    """

    def __init__(self, address: str, rank: int, world: int, device: torch.device | str = "cpu") -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            fix = 'such as "10.0.0.1:29600": the host of the first rank that trains, and a free port'
            raise ShardcError(f"{address!r} is no address", where="shardc.engines", fix=fix)
        self.world, self.rank, self.device = world, rank, torch.device(device)
        self._address, self._texts, wait = address, 0, timedelta(seconds=WAIT)
        with self._others():
            self._store = dist.TCPStore(host, int(port), world, rank == 0, wait)  # type: ignore[attr-defined]
            make: Any = dist.ProcessGroupNCCL if self.device.type == "cuda" else dist.ProcessGroupGloo
            group = dist.PrefixStore("weights", self._store)  # type: ignore[attr-defined]
            self._group = make(group, rank, world, wait)

    @contextmanager
    def _others(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as e:  # torch's network errors
            fault = f"other processes of these {self.world} ended, or never came: {str(e).splitlines()[0]}"
            fix = "look at their errors; then start both worlds again, as a connection is made once"
            raise ShardcError(fault, where=self._address, fix=fix) from e

    def totals(self, numbers: Sequence[int]) -> list[int]:
        x = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        with self._others():
            self._group.allreduce([x]).wait()
        sums: list[int] = x.tolist()
        return sums

    def exchange(self, x: Tensor, into: Tensor, counts: tuple[list[int], list[int]]) -> None:
        with self._others():
            self._group.alltoall_base(into, x, counts[1], counts[0]).wait()

    def spread(self, text: str) -> str:
        self._texts += 1
        with self._others():
            if self.rank == 0:
                self._store.set(f"text {self._texts}", text)
            return str(self._store.get(f"text {self._texts}").decode())
