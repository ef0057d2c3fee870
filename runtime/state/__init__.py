"""Parameters, buffers and the optimizer's state, into an engine and out of it: keyed by the model's own names and the
place in the global tensor, never by how a program shards, so that any mesh reads what any other wrote.

    local_parameters      this rank's part of real weights, of a builder's (nothing is broadcast), of a file's
    save, load            checkpoints that any mesh can load
    full_state_dict       the plain state_dict of the unsharded model, gathered parameter by parameter
    export_safetensors    the same, in files that safetensors, transformers and peft load; no rank holds all of it

    saving, loading       checkpoints: how one is written, and read, by all ranks together
    save_plan, one_save   what one rank writes; its part of one save, and rank 0's, from the lock to the rename
    checked_slices        slices of a checkpoint's files, read and checked against their digests
    checkpoint_folder     the folder of checkpoints: which is the last one, and which are whole
    checkpoint_index      index.json: what is in a checkpoint, checked as what anybody may have written
    boxes                 which boxes of a global tensor a rank writes and reads
    saving_optimizer      the optimizer's state in a checkpoint
    nested_state          lists and dicts of tensors in it
    tensor_file           .safetensors files by stretches of bytes
    inspecting            whether checkpoints are whole, and in what two differ
    torch_format          torch.distributed.checkpoint's format, in and out
    digest                of a slice, by which damage is found
    disk_calls            every call that reaches a disk
    parts                 this rank's part of each parameter and buffer
    export                folders and files for others
    sources               where weights come from: a model, a builder, a state_dict, files
    weight_files          safetensors files, torch files and checkpoints, whose tensors are read by slice
    sliced_tensors        what can be read by slice: ranges of a tensor's dims
    reading_calls         `from_pretrained` and `torch.load` inside a builder, answered without reading
    pretrained            weights of files under a model's names: prefixes, renames, conversions
    init                  weights of a builder, each computed by itself from what its constructor did:
    init_recorder         records that; init_tape: the tape, and the replay of any tensor
    adapter_files         what is exported of them: peft's folders, or merged weights
    adapters              weights of adapters that the spec adds: how they begin, and peft's files
    quantized             weights that are tensors of tensors (torchao's), taken apart
    tape_slices           a slice of a recorded tensor, traced back to the tensors of files that it is made of
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.shard_chunks import trim, unchunk
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.adapters import weights_of
from shardc.runtime.state.checkpoint_folder import DamagedError, SavingError
from shardc.runtime.state.export import export_safetensors, skeleton
from shardc.runtime.state.loading import load
from shardc.runtime.state.parts import blank, constants, local_parameters, local_parts
from shardc.runtime.state.quantized import plain
from shardc.runtime.state.saving import Saves, save
from shardc.runtime.state.sources import Weights, weights, weights_for

__all__ = [
    "DamagedError",
    "Saves",
    "SavingError",
    "Weights",
    "blank",
    "constants",
    "export_safetensors",
    "full_state_dict",
    "gather",
    "load",
    "local_parameters",
    "local_parts",
    "plain",
    "save",
    "skeleton",
    "weights",
    "weights_for",
    "weights_of",
]


def _all(program: Program) -> list[Param | Buffer]:
    return [*program.params, *program.buffers]


def gather(x: Tensor, layout: Layout, mesh: Any, tag: str = "") -> Tensor:
    """The global tensor of this rank's part `x`, on every rank. Collective over the axes that shard it."""
    x = x.detach()
    for axis, shard in sorted(layout.shards(), key=lambda item: item[1].split):  # outer digits first, as Layout.join
        x = unchunk(mesh.all_gather(x.contiguous(), axis, direction="state", tag=tag), shard)
    for shard in layout.paddings():
        x = trim(x, shard)
    return x


def _entries(
    program: Program, mesh: Any, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[tuple[Param | Buffer, Tensor]]:
    """Every parameter and persistent buffer with its global value on the CPU, one at a time."""
    for x in _all(program):
        if not x.fqn or (isinstance(x, Buffer) and not x.persistent):
            continue
        yield x, gathered_entry(program, mesh, x, params if isinstance(x, Param) else buffers)


def gathered_entry(program: Program, mesh: Any, x: Param | Buffer, held: Mapping[str, Tensor]) -> Tensor:
    """The global value of a parameter or buffer on the CPU, on every rank. Collective."""
    local = _everywhere(program, mesh, x, held)
    return gather(local, x.layout, mesh, x.fqn).to(device="cpu", copy=True, memory_format=torch.contiguous_format)


def _everywhere(program: Program, mesh: Any, x: Param | Buffer, held: Mapping[str, Tensor]) -> Tensor:
    """This rank's part; where its pipeline stage has none, that of the first stage that has. Collective over the
    pipeline's axis.
    """
    if not program.axis:
        return held[x.name]
    first, *_ = holders = program.holders(x)
    at, others = mesh.coordinate(program.axis), [c for c in range(mesh.size(program.axis)) if c not in holders]
    if at in others:
        found = torch.empty(x.layout.local_shape(x.shape, program.mesh), dtype=x.dtype, device=mesh.device)
        mesh.start_receive(found, program.axis, first, tag=x.fqn).wait()
        return found
    local = held[x.name]
    if at == first:
        for work in [mesh.start_send(local, program.axis, c, direction="state", tag=x.fqn) for c in others]:
            work.wait()
    return local


def full_state_dict(
    program: Program,
    mesh: Any,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    rank0_only: bool = False,
) -> dict[str, Tensor]:
    """{fqn: global tensor on the CPU}, as the unsharded `model.state_dict()` gives it: all names of tied tensors (one
    tensor under several names), persistent buffers. rank0_only: the other ranks take part but keep nothing and return
    {}. Collective."""
    found: dict[str, Tensor] = {}
    for x, whole in _entries(program, mesh, params, buffers):
        if mesh.rank == 0 or not rank0_only:
            found |= x.by_name(whole)
    return found
