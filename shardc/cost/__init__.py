"""Predict a program's memory, operations, communication and time before it runs anywhere.

measured      measurements of a device and of a run
recorded      the results of a dry run, as plain values
dry_run       one rank's step, run by the engine on tensors without data, on a fake_mesh with a host_memory; it finds
              which bytes are parameters, gradients, state, activations
graph_lines   runs a graph line by line for a dry run
ledger        counts storages and ops; known_ops: results of ops that it has seen before; growth: the part of them
              that grows with the rows of a batch
peak_memory   the peak memory of the whole schedule, from a dry run
step          combines all of it: `program.cost(device)`
kept_activations
              the tensors that a forward keeps for its backward, and the ops that need them
streams       when every collective runs on its communicator's stream, and the computation that hides it
waterfall     a step's seconds, cause by cause
caching_allocator
              the memory that torch's allocator reserves on a GPU
"""

from importlib import import_module
from typing import TYPE_CHECKING

from shardc.cost.measured.device_file import device, known_devices, names
from shardc.machine.device import Device

if TYPE_CHECKING:
    from shardc.cost.peak_memory import Memory
    from shardc.cost.step import Cost, RankCost

__all__ = ["Cost", "Device", "Memory", "RankCost", "device", "known_devices", "names"]

# Loaded later: a rank of a run reads its device's description, and does not need the passes for a dry run.
_LATER = {"Cost": "shardc.cost.step", "Memory": "shardc.cost.peak_memory", "RankCost": "shardc.cost.step"}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)
