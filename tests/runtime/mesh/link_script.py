"""Check the links of a world whose link 1 -> 2 is healthy, slow or broken: link_script.py slow, under torchrun."""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import Any

import torch.distributed as dist

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh import TorchMesh, link_check

late: list[Any] = []  # sends in the background, which end with the process


class Nothing:
    def wait(self, _: Any) -> None:
        pass


def main(how: str) -> None:
    mesh = TorchMesh(Mesh.of({"dp": 3}), device="cpu")
    link_check.NBYTES, link_check.LINK = 1 << 20, 1.5
    real = dist.batch_isend_irecv

    def exchange(ops: list[Any]) -> Any:
        receive, send = ops
        if mesh.rank != 1 or send.peer != 2 or how == "healthy":
            return real(ops)
        if how == "slow":
            threading.Timer(0.4, lambda: late.extend(real([send]))).start()
        return [*real([receive]), Nothing()]

    dist.batch_isend_irecv = exchange
    start = time.perf_counter()
    try:
        lines = link_check.check_links(mesh)
    except ShardcError as e:
        lines = [str(e)]
    if mesh.rank == 0:
        print("\n".join(lines), f"\n{time.perf_counter() - start:.1f} s")
    mesh.watch.stop()
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
    os._exit(0)  # the connection of a broken link is gone
