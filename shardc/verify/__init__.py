"""The numeric check: the compiled program on all ranks of the loopback mesh against the single-device graph, in
float64.

simulate        all ranks in this process; reference: one device
equality        the comparison, value by value, and what is said of a difference
to_float64      a program in float64; random_batch: weights and a batch that it accepts
rules           proof of the rules of ops
"""

from shardc.verify.equality import TOLERANCE, Finding, Report, difference, verify
from shardc.verify.simulate import simulate

__all__ = ["TOLERANCE", "Finding", "Report", "difference", "simulate", "verify"]
