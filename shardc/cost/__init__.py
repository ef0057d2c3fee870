"""What a program takes: memory, operations, communication, time; before it runs anywhere.

ledger     counts what tensors hold, and what ops do
ghost      a mesh's rank that is alone
rehearse   one rank's step, run by the engine on tensors without data
replay     the whole schedule's memory and time from that
device     what a device does in a second
price      all of it: `program.cost(device)`
symbolic   closed forms in batch, sequence, hidden, layers and the mesh's sizes
"""

from shardc.cost.device import Device, device, known_devices, names
from shardc.cost.replay import Memory
from shardc.cost.step import Cost, RankCost

__all__ = ["Cost", "Device", "Memory", "RankCost", "device", "known_devices", "names"]
