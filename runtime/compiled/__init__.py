"""Regions of graphs of a step (shardc.ir.regions) as compiled code.

regions      a text whose regions are calls
inductor    compiles each distinct region once, by torch's Inductor
masks       dropout as arithmetic on two key words, which fuses with what is around it
"""

from __future__ import annotations

from shardc.runtime.compiled.inductor import Compiler
from shardc.runtime.compiled.regions import with_compiled_regions

__all__ = ["Compiler", "with_compiled_regions"]
