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
    gathering             global tensors from every rank's parts
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

from typing import TYPE_CHECKING

from shardc.names_loaded_later import names_loaded_later

if TYPE_CHECKING:
    from shardc.runtime.state.adapters import weights_of
    from shardc.runtime.state.checkpoint_folder import DamagedError, SavingError
    from shardc.runtime.state.export import export_safetensors, skeleton
    from shardc.runtime.state.gathering import full_state_dict, gather
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

__getattr__ = names_loaded_later(
    __name__,
    {
        "weights_of": "shardc.runtime.state.adapters",
        "DamagedError": "shardc.runtime.state.checkpoint_folder",
        "SavingError": "shardc.runtime.state.checkpoint_folder",
        "export_safetensors": "shardc.runtime.state.export",
        "skeleton": "shardc.runtime.state.export",
        "full_state_dict": "shardc.runtime.state.gathering",
        "gather": "shardc.runtime.state.gathering",
        "load": "shardc.runtime.state.loading",
        "blank": "shardc.runtime.state.parts",
        "constants": "shardc.runtime.state.parts",
        "local_parameters": "shardc.runtime.state.parts",
        "local_parts": "shardc.runtime.state.parts",
        "plain": "shardc.runtime.state.quantized",
        "Saves": "shardc.runtime.state.saving",
        "save": "shardc.runtime.state.saving",
        "Weights": "shardc.runtime.state.sources",
        "weights": "shardc.runtime.state.sources",
        "weights_for": "shardc.runtime.state.sources",
    },
)
