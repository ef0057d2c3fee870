"""Move parameters, buffers and optimizer state into an engine and out of it.

Keys are the model's own names and the place in the global tensor, never a program's sharding: any mesh can read it.

    boxes                 boxes of a global tensor; which a rank has; tensors of which a box can be read
    owners                what a rank holds, and where an optimizer steps it
    saving, loading       checkpoints: how all ranks together write one, and read it
    saving_optimizer      the optimizer's state in a checkpoint
    checkpoint_folder     the folder of checkpoints: which is the last one; slices, read and checked
    checkpoint_index      index.json: the contents of a checkpoint, checked as untrusted input
    tensor_file           the safetensors format, for files that are written by ranges of bytes
    torch_format          folders of torch.distributed.checkpoint, read as checkpoints; torch_conversion: out
    fitting               whether names and shapes of tensors fit a program
    parts                 this rank's part of each parameter and buffer; the plain state_dict, from all ranks' parts
    sources               sources of weights: a model, a builder, a state_dict, files
    init, init_tape       weights of a builder: its constructor is recorded, and replayed for one tensor
    weight_files          safetensors files, torch files and checkpoints, whose tensors are read by slice
    pretrained            weights of files under a model's names, also if a builder reads them (`from_pretrained`)
    quantized             weights that are tensors of tensors (torchao's)
    export                files that safetensors, transformers and peft load; no rank holds all of it
"""

#: How many checkpoints stay, the last ones.
KEEP = 2
