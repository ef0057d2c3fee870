"""Pieces of graphs of a step (shardc.ir.pieces) as compiled code.

pieces      a text whose pieces are calls
inductor    compiles each distinct piece once, by torch's Inductor
masks       dropout as arithmetic on two key words, which fuses with what is around it
"""

from __future__ import annotations

from shardc.runtime.compiled.inductor import Compiler
from shardc.runtime.compiled.pieces import with_pieces

__all__ = ["Compiler", "with_pieces"]
