"""Multiply numbers of 8 bits in linear layers and experts (`precision: {products: ...}`).

section         `products`, a key of `precision`
passes          the pass that rounds what layers multiply; packed_inputs: the one by which backward keeps 8 bits
rules           how their ops may be split; proof: which lines of a rank's program are them
ops             a list: rounding; products, as recipe defines, and kernel: torch's for them; experts
casts           rounding as one op, cast_kernel: the same on a GPU
runtime         gathers of values, and of ZeRO 3's parameters, in 8 bits
"""
