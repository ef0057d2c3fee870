"""Split long sequences over ranks (`sequence`): context parallel.

section         `sequence`: axes, the dim of each input, the method of attention
passes          splits inputs and marks attention, as a part of annotate; causal_convs: convolutions that may stay split
methods         how attention may run: gather, ring, ulysses
scans           splits by another dim those ops that need all tokens
"""
