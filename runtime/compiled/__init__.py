"""Compile fused regions of step graphs (shardc.ir.fused_regions).

regions      replaces the regions of a graph by calls
inductor    compiles each distinct region once, by torch's Inductor
masks       dropout as arithmetic on two key words, which fuses with neighbouring ops
"""

from __future__ import annotations

from shardc.runtime.compiled.inductor import Compiler
from shardc.runtime.compiled.regions import with_compiled_regions

__all__ = ["Compiler", "with_compiled_regions"]
