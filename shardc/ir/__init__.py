"""What a program is: values that need no weights, no devices and no process group, and small tools on them.

program         Program: it holds all of the following, prints, saves and loads
stage           the graphs that ranks run, and what stages make for each other; metadata: what nodes carry
stored          parameters, buffers and inputs; buckets: flat buffers of parameters; offload: what leaves the device
mesh            names and sizes of axes, ranks and coordinates
placement       how a value lies on a mesh; conversions: every way in which that becomes another one, in one table
shard_chunks    cuts a tensor by a shard, and joins it again
types           shapes and dtypes of nodes; type_text: as programs print them, f32[8, 512@tp] +dp
graph           small functions on fx graphs; source: the user's line that something came from
fused_regions   lines of a graph of a step that are compiled as one; pairs: the graph of a forward beside a backward
forward_record  what forward and loss were, for a run that goes on
outputs         values that a step gives beside its loss; generation: the two steps of a model that generates
adapters        matrices of low rank beside weights, and which weights are frozen
repeats         which layers are equal; patterns: globs over a model's names
comm_record     one collective of a run
units           bytes, rates and counts for people
matrices        what an optimizer over whole matrices sees, and who steps which
"""
