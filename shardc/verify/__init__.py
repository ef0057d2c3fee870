"""The numeric check: the compiled program on all ranks of the loopback mesh against the single-device graph, in
float64.
"""

from shardc.verify.equality import TOLERANCE, Finding, Report, difference, verify
from shardc.verify.simulate import simulate

__all__ = ["TOLERANCE", "Finding", "Report", "difference", "simulate", "verify"]
