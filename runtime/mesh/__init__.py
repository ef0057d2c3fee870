"""The mesh as a running rank sees it: its coordinates, and raw collectives by axis.

    base          RankMesh: the interface, and what its implementations share; CommRecord, Work
    torch_mesh    TorchMesh: over torch.distributed (NCCL on CUDA, gloo on the CPU)
    loopback      LoopbackMesh: all ranks of a mesh as threads of one process, sums in the order of ranks
    shapes        ShapeMesh: one rank alone, on tensors without data
    step_context  what ops may know of the step: the microbatch, sums over microbatches
    agreement     what all ranks have to share, compared; replicas: copies of weights, compared
    local_device  which device of its machine a rank uses; own_cores: on a CPU, which of its cores
    presence      this process as one of a world, from its start on: where ranks meet, who is there
    activity      what a rank is doing, noted; watch: who keeps the others waiting; failed_rank: an error reaches all
    waits         how long a rank waits for its collectives
    processes     which ranks of this machine have ended or are stopped, where; inherited: what forks must not keep
    allocator     what the C library does with freed memory on a CPU

A program cannot tell which mesh it runs on. Collectives return new tensors and never change their argument.
"""

from shardc.ir.comm_record import CommRecord
from shardc.runtime.mesh.base import RankMesh, Work
from shardc.runtime.mesh.torch_mesh import TorchMesh, rank_here

__all__ = ["CommRecord", "RankMesh", "TorchMesh", "Work", "rank_here"]
