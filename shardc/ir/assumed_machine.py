"""The machine that the compiler has in mind when it weighs work against communication: one NVIDIA H100 SXM of a DGX.

A compiled program must not depend on the device that it will run on, so passes know one machine. What to split, to keep
and to compute again follows from ratios of it: what else could be done in the time in which one byte is moved. What
runs beside what (shardc.passes.joint.overlap) follows from seconds. Ratios are rounded. Choices between splits differ
by factors, and a figure that follows a data sheet to three digits would change programs without making them faster.
What a step takes on a given device, in seconds, is another question: shardc.cost answers it, from devices/*.yaml.

Source: NVIDIA H100 Tensor Core GPU datasheet (dense bfloat16); DGX H100, one 400 Gbit/s NIC a GPU, PCIe 5 x16 to the
host. The same figures are in shardc/cost/devices/h100-80g.yaml; tests/ir/test_assumed_machine.py compares them, and
holds each ratio to them.
"""

from __future__ import annotations

#: Floating-point operations a second: at best, and what large products of a training step reach (40 %).
PEAK_FLOPS, USUAL_FLOPS = 989e12, 400e12
#: Bytes a second: of its memory; to a device of the same node; to a device of another node; to the host's memory.
MEMORY, NVLINK, NETWORK, HOST_LINK = 3.35e12, 450e9, 50e9, 63e9
#: Seconds that the smallest op takes; and a message, inside a node and between nodes. Devices of a node.
LAUNCH, NVLINK_LATENCY, NETWORK_LATENCY = 4e-6, 3e-6, 8e-6
NODE = 8
#: The share of a memory's or a link's rate that large ops reach.
REACHED = 0.8

#: Placement and recomputation ask what to do again and what to send: USUAL_FLOPS / NVLINK = 889 at the full rate of the
#: link, 1111 at the 80 % of it that a large collective reaches.
FLOPS_PER_LINK_BYTE = 1000.0
#: Recomputation asks what to keep: USUAL_FLOPS / MEMORY = 119.
FLOPS_PER_MEMORY_BYTE = 120.0
#: The cuts of a pipeline compare an op's products with the traffic of the same op: PEAK_FLOPS / MEMORY = 295. At the
#: peak, and not at what is usual: both sides of this comparison are limits of the hardware.
PEAK_FLOPS_PER_MEMORY_BYTE = 300
#: Stages are sent to other nodes: MEMORY / NETWORK = 67.
MEMORY_BYTES_PER_NETWORK_BYTE = 64
