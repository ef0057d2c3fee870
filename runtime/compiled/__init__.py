"""Compile fused regions of step graphs (shardc.ir.fused_regions).

region_calls  replaces the regions of a graph by calls (passes/joint/fused_regions.py chooses regions)
compiler      compiles each distinct region once, by torch's Inductor
masks         dropout as arithmetic on two key words, which fuses with neighbouring ops
"""

from __future__ import annotations

from shardc.runtime.compiled.compiler import Compiler
from shardc.runtime.compiled.region_calls import with_compiled_regions

__all__ = ["Compiler", "with_compiled_regions"]
