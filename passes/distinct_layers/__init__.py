"""Distinct layers: of many equal layers the passes up to partition see a few; the others are written after that, as
copies.

    captured     embed  h.0  h.1  h.2  h.3  h.4 ... h.30  h.31  head       h.2 to h.30 have the ops of h.1
    cut          embed  h.0  h.1  h.2  h.3                h.31  head       what the passes run on
    restored     embed  h.0  h.1  h.2  h.3  h.4 ... h.30  h.31  head       h.4 to h.30: h.3 of the result, renamed

A pass decides by what is around an op. h.1, h.2 and h.3 have the same before them and behind them; where the passes
made the same of all three, they would of h.4 as well: they go through a graph from its front, and what they hand back
from its end gets less far than three layers and the last one (`SWEEPS` of shardc.passes.place). A copy is a program
that runs, whatever was decided: it takes what the layer before gives, in the same layout. Where the three differ in
more than names and ordinals, where something depends on all layers, or where anything is refused, all passes run on the
whole program, as they do for a model without equal layers.

cut.py         which layers repeat, and the program without most of them
numbering.py   the numbers in names of nodes, which go on from layer to layer
twins.py       whether one op is another one, some layers later; and its copy, more layers later
restore.py     the whole program again
"""

from __future__ import annotations

from collections.abc import Callable

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.passes.distinct_layers.cut import shortened
from shardc.passes.distinct_layers.restore import restored
from shardc.passes.distinct_layers.twins import UnlikeError
from shardc.spec import Spec

__all__ = ["run_on_distinct"]


def run_on_distinct(program: Program, spec: Spec, run: Callable[[Program], Program]) -> Program:
    """`run(program)`, by way of a program with fewer layers where that gives the same. run: passes up to partition."""
    if (cut := shortened(program, spec)) is not None:
        try:
            return restored(program, cut, run(cut.program), run)
        except (UnlikeError, ShardcError):
            pass  # the whole program says what is wrong, of all its layers
    return run(program)
