"""Define the mesh as a running rank sees it: its coordinates, and raw collectives by axis.

    base          RankMesh: the interface, and what its implementations share; CommRecord, Work
    torch_mesh    TorchMesh: over torch.distributed (NCCL on CUDA, gloo on the CPU)
    loopback      LoopbackMesh: all ranks of a mesh as threads of one process, sums in the order of ranks
    shapes        ShapeMesh: one rank without the others, on tensors without data
    step_context  the state of the running step that ops can read: the microbatch, sums over microbatches
    agreement     consistency checks of what all ranks must share; replicas: consistency checks of copies of weights
    local_device  which device of its machine a rank uses; own_cores: on a CPU, which of its cores
    presence      joins this process to its world early: where ranks meet, which are there
    activity      records what a rank is doing
    watch         names the rank that keeps the others waiting, and passes an error of one rank to all others
    link_check    sends some megabytes between ranks, and names slow and broken links
    wait_times    measures how long a rank waits for its collectives
    local_processes  which ranks of this machine have ended or are stopped
    allocator     what the C library does with freed memory on a CPU

A program does not depend on the kind of mesh. Collectives return new tensors and never change their argument.
"""

from shardc.ir.metadata import CommRecord
from shardc.runtime.mesh.base import RankMesh, Work
from shardc.runtime.mesh.torch_mesh import TorchMesh, rank_here

__all__ = ["CommRecord", "RankMesh", "TorchMesh", "Work", "rank_here"]
