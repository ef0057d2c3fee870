"""Move parameters, buffers and optimizer state into an engine and out of it.

Keys are the model's own names and the place in the global tensor, never a program's sharding: any mesh can read it.

    local_parts           this rank's parts of weights, from a model, a builder or files
    save, load            checkpoints that any mesh can load
    full_state_dict       the plain state_dict of the unsharded model, gathered parameter by parameter
    export_safetensors    the same, in files that safetensors, transformers and peft load; no rank holds all of it

    saving, loading       checkpoints: how all ranks together write one, and read it
    boxes                 which boxes of a global tensor a rank writes and reads
    checkpoint_folder     the folder of checkpoints: which is the last one; slices, read and checked
    checkpoint_index      index.json: the contents of a checkpoint, checked as untrusted input
    saving_optimizer      the optimizer's state in a checkpoint
    owners                where an optimizer steps parameters: on the ranks that store them, or on owners
    tensor_file           .safetensors files by ranges of bytes
    disk_calls            every call that reaches a disk
    torch_format          torch.distributed.checkpoint's format, in and out
    parts                 this rank's part of each parameter and buffer, and global tensors from all ranks' parts
    sources               sources of weights: a model, a builder, a state_dict, files
    init, init_tape       weights of a builder: its constructor is recorded, and replayed for one tensor
    weight_files          safetensors files, torch files and checkpoints, whose tensors are read by slice
    sliced_tensors        tensors that can be read by slice: ranges of their dims
    pretrained            weights of files under a model's names, also if a builder reads them (`from_pretrained`)
    quantized             weights that are tensors of tensors (torchao's)
    export                folders and files for other programs
"""

from typing import TYPE_CHECKING

from shardc.names_loaded_later import names_loaded_later

if TYPE_CHECKING:
    from shardc.runtime.state.checkpoint_folder import DamagedError, SavingError
    from shardc.runtime.state.export import export_safetensors, skeleton
    from shardc.runtime.state.loading import load
    from shardc.runtime.state.parts import blank, constants, full_state_dict, gather, local_parts
    from shardc.runtime.state.quantized import plain
    from shardc.runtime.state.saving import Saves, save
    from shardc.runtime.state.sources import Weights, weights, weights_for, weights_of

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
    "local_parts",
    "plain",
    "save",
    "skeleton",
    "weights",
    "weights_for",
    "weights_of",
]

_NAMES = {
    "checkpoint_folder": ["DamagedError", "SavingError"],
    "export": ["export_safetensors", "skeleton"],
    "loading": ["load"],
    "parts": ["blank", "constants", "full_state_dict", "gather", "local_parts"],
    "quantized": ["plain"],
    "saving": ["Saves", "save"],
    "sources": ["Weights", "weights", "weights_for", "weights_of"],
}
__getattr__ = names_loaded_later(__name__, {n: f"{__name__}.{file}" for file, names in _NAMES.items() for n in names})
