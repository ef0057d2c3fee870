"""Split long sequences over ranks (`sequence`): context parallel.

section         `sequence`: axes, the dim of each input, the method of attention
passes          the pass that splits inputs and marks attention; causal_convs: convolutions that may stay split
methods         how attention may run: gather, ring, ulysses
scans           splits by another dim those ops that need all tokens
"""
