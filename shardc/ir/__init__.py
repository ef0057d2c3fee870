"""Define what a program is: data that needs no weights, devices or process group, and functions on it.

program         Program: holds all of the following; it can be printed, saved and loaded
stage           the graphs that ranks run, pairs of them, and what stages send; metadata: keys of node.meta, collectives
stored          parameters, buffers, inputs, and buckets of parameters
mesh            names and sizes of axes, ranks and coordinates
placement       how a value is placed on a mesh; conversions: the table of all changes from one placement to another
shard_chunks    cuts a tensor by a shard, and joins the parts again
types           shapes and dtypes of nodes; type_text: types as programs print them, f32[8, 512@tp] +dp
graph           small functions on fx graphs; source: the line of the user's code behind a node or an error
fused_regions   lines of a step's graph that are compiled together
forward_record  a record of what forward and loss compute, for runs that resume
outputs         values that a step returns beside its loss, or another forward of the model
repeats         which layers are equal; patterns: globs over a model's names; similar_names: did you mean ...?
units           formats bytes, rates and counts for people
"""
