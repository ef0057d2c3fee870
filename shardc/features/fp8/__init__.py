"""Multiply numbers of 8 bits in linear layers and experts (`precision: {products: ...}`).

section         `products`, a key of `precision`
passes          the passes that round what layers multiply, and their derivatives; packed_inputs: backward keeps 8 bits
rules           how their ops may be split; proof: which lines of a rank's program are them
ops             the ops: rounding; products, as recipe defines, and kernel: torch's for them; experts
casts           rounding as one op, cast_kernel: the same on a GPU; format: the two formats
gathers         values that are sent in 8 bits; runtime: ZeRO 3's parameters
"""
