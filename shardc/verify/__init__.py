"""Two checks that a program equals one device. By numbers: the compiled program on all ranks of the loopback mesh
against the single-device graph, in float64. By proof, without running: shardc.verify.static.

simulate        all ranks in this process; reference: one device
equality        the comparison, value by value; not_finite: the op that makes the first nan or inf
to_float64      a program in float64; random_batch: weights and a batch that it accepts
static          every text type-checked against the model's graph, for any number of ranks
rules           proof of the rules of ops
"""

from shardc.verify.equality import TOLERANCE, Finding, Report, difference, verify
from shardc.verify.simulate import simulate
from shardc.verify.static import Gap, Proof, prove

__all__ = ["TOLERANCE", "Finding", "Gap", "Proof", "Report", "difference", "prove", "simulate", "verify"]
