"""The machine that passes assume is the H100 that the cost model describes, and its ratios follow from it."""

from __future__ import annotations

import pytest

from shardc.cost.device_file import device
from shardc.ir import assumed_machine


def test_it_is_the_h100_of_the_cost_model() -> None:
    h100 = device("h100-80g")
    assert h100.flops["bfloat16"] == assumed_machine.PEAK_FLOPS
    assert h100.bandwidth == assumed_machine.MEMORY
    assert (h100.within.bandwidth, h100.between.bandwidth) == (assumed_machine.NVLINK, assumed_machine.NETWORK)
    assert h100.host_link == assumed_machine.HOST_LINK
    latencies = assumed_machine.NVLINK_LATENCY, assumed_machine.NETWORK_LATENCY
    assert (h100.within.latency, h100.between.latency) == latencies
    assert (h100.launch, h100.node) == (assumed_machine.LAUNCH, assumed_machine.NODE)


@pytest.mark.parametrize(
    ("rounded", "exact"),
    [
        (assumed_machine.FLOPS_PER_LINK_BYTE, assumed_machine.USUAL_FLOPS / assumed_machine.NVLINK),
        (assumed_machine.FLOPS_PER_MEMORY_BYTE, assumed_machine.USUAL_FLOPS / assumed_machine.MEMORY),
        (assumed_machine.PEAK_FLOPS_PER_MEMORY_BYTE, assumed_machine.PEAK_FLOPS / assumed_machine.MEMORY),
        (assumed_machine.MEMORY_BYTES_PER_NETWORK_BYTE, assumed_machine.MEMORY / assumed_machine.NETWORK),
    ],
)
def test_ratios_are_rounded_and_no_more(rounded: float, exact: float) -> None:
    assert rounded == pytest.approx(exact, rel=0.13)
