"""The machine that passes assume is the H100 that the cost model describes, and its ratios follow from it."""

from __future__ import annotations

import pytest

from shardc.cost.device import device
from shardc.ir import machine


def test_it_is_the_h100_of_the_cost_model() -> None:
    h100 = device("h100-80g")
    assert h100.flops["bfloat16"] == machine.PEAK_FLOPS
    assert h100.bandwidth == machine.MEMORY
    assert (h100.within.bandwidth, h100.between.bandwidth) == (machine.NVLINK, machine.NETWORK)


@pytest.mark.parametrize(
    ("rounded", "exact"),
    [
        (machine.FLOPS_PER_LINK_BYTE, machine.USUAL_FLOPS / machine.NVLINK),
        (machine.FLOPS_PER_MEMORY_BYTE, machine.USUAL_FLOPS / machine.MEMORY),
        (machine.PEAK_FLOPS_PER_MEMORY_BYTE, machine.PEAK_FLOPS / machine.MEMORY),
        (machine.MEMORY_BYTES_PER_NETWORK_BYTE, machine.MEMORY / machine.NETWORK),
    ],
)
def test_ratios_are_rounded_and_no_more(rounded: float, exact: float) -> None:
    assert rounded == pytest.approx(exact, rel=0.13)
