"""What a program takes before it runs anywhere: memory, operations, communication, time.

measured      what is measured of a device and of a run
recorded      what a dry run found out, as plain values
dry_run       one rank's step, run by the engine on tensors without data, on a fake_mesh with a host_memory; which bytes
              are parameters, gradients, optimizer state, activations; first_step: what it makes the state with
ledger        counts the storages and ops of a dry run; known_ops: what it has seen of them already;
              growth: what of them grows with the rows of a batch
peak_memory   of the whole schedule, from a dry run
step          all of it: `program.cost(device)`; premises: what the step computes that it prices, in words
kept_activations
              what a forward keeps for its backward, tensor by tensor, and which ops want it
streams       when every collective runs, on the stream of its communicator, and what hides it
waterfall     a step's seconds, cause by cause
caching_allocator
              what torch's allocator takes of a GPU for it
fewer_layers  leaves out repeated layers of a model
"""

from typing import TYPE_CHECKING

from shardc.cost.measured.device_file import device, known_devices, names
from shardc.machine.device import Device
from shardc.names_loaded_later import names_loaded_later

if TYPE_CHECKING:
    from shardc.cost.peak_memory import Memory
    from shardc.cost.step import Cost, RankCost

__all__ = ["Cost", "Device", "Memory", "RankCost", "device", "known_devices", "names"]

# A rank of a run reads its device's description, and needs no passes for a dry run.
__getattr__ = names_loaded_later(
    __name__, {"Cost": "shardc.cost.step", "Memory": "shardc.cost.peak_memory", "RankCost": "shardc.cost.step"}
)
