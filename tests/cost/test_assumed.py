"""Passes ask the formulas of the cost model, with one device: the H100 that it describes."""

from __future__ import annotations

import pytest

from shardc.cost.measured.device_file import device
from shardc.machine.assumed import ASSUMED, LARGE, byte_seconds, work_seconds
from shardc.machine.collectives import collective_seconds
from shardc.machine.work import Op

H100 = device("h100-80g")
NODE, NODES = tuple(range(8)), tuple(range(0, 64, 8))


def test_a_line_of_a_graph_takes_what_a_step_is_priced_at() -> None:
    for op in (Op(0, 2**30, "float32"), Op(2**40, 2**24, "bfloat16", matrices=(1, 4096, 4096)), Op(0, 1, "float32")):
        assert ASSUMED.op_seconds(op) == H100.op_seconds(op) > 0
    for kind in ("all_gather", "all_reduce", "all_to_all", "reduce_scatter"):
        for ranks in (NODE, NODES):
            assert collective_seconds(ASSUMED, kind, 1e7, ranks) == collective_seconds(H100, kind, 1e7, ranks) > 0
    assert ASSUMED.copy_seconds(10**6) == H100.copy_seconds(10**6) > 0


@pytest.mark.parametrize("kind", ["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "send_recv"])
@pytest.mark.parametrize("ranks", [NODE, NODES, (0, 1), tuple(range(64))])
def test_of_large_messages_and_ops_only_bytes_and_flops_count(kind: str, ranks: tuple[int, ...]) -> None:
    assert collective_seconds(LARGE, kind, 3e9, ranks) == pytest.approx(3e9 * byte_seconds(kind, ranks))
    if kind != "all_reduce" or max(ranks) >= H100.node:  # a node's switches add
        assert collective_seconds(H100, kind, 1e14, ranks) == pytest.approx(1e14 * byte_seconds(kind, ranks), rel=0.01)
    assert byte_seconds("all_reduce", ranks) == pytest.approx(2 * byte_seconds("reduce_scatter", ranks))
    assert work_seconds(2e9, 0) == pytest.approx(2 * work_seconds(1e9, 0))
    assert work_seconds(0, 2e6) == pytest.approx(2 * work_seconds(0, 1e6))
