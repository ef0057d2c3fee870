"""Check that a program equals one device: by numbers, and by proof.

By numbers: the compiled program on all ranks of the loopback mesh against the single-device graph, in float64.

simulate        runs all ranks in this process; reference: runs one device
equality        compares value by value; not_finite: finds the op that makes the first nan or inf
to_float64      a program in float64; random_batch: weights and a batch that it accepts
static          the proof without running, for any number of ranks
rules           proof of the rules of ops
"""

from shardc.verify.simulate import simulate as simulate
