"""Generate tokens, one after the other, by the programs of shardc.ir.generation.

prompts     the options, checked; prompts of several lengths as one batch
sampling    the next token of logits that may be split over ranks: greedy, or by counters, the same on every mesh
loop        the programs of an engine, and the loop over tokens
"""

from __future__ import annotations

from shardc.runtime.generate.loop import Generator
from shardc.runtime.generate.prompts import Options, Prompts

__all__ = ["Generator", "Options", "Prompts"]
