"""Distinct layers: of many equal layers the passes up to partition see a few; the others are written after that, as
copies.

    captured     embed  h.0  h.1  h.2  h.3  h.4 ... h.30  h.31  head       h.2 to h.30 have the ops of h.1
    cut          embed  h.0  h.1  h.2                           head       what the passes run on
    restored     embed  h.0  h.1  h.2  h.3  h.4 ... h.30  h.31  head       h.3 to h.31: h.2 of the result, renamed

A pass decides by what is around an op. h.1 stands between two layers, h.2 behind one and before the head; where the
passes made the same of both, what is in front of a layer and what is behind it are the same in the result for both, and
would be for a layer between them. A copy is a program that runs, whatever was decided: it takes what the layer before
gives, in the same layout. Where the two differ in more than names and ordinals, passes run once more, on h.0 to h.3 and
h.31: the last layer may differ from h.1, h.2 and h.3, which are compared. What the passes hand back from the end of a
graph gets less far than that (`SWEEPS` of shardc.passes.place). Where these differ too, where something depends on all
layers, or where anything is refused, all passes run on the whole program, as they do for a model without equal layers.

cut.py         which layers repeat, and the program without most of them
numbering.py   the numbers in names of nodes, which go on from layer to layer
twins.py       whether one op is another one, some layers later; and its copy, more layers later
restore.py     the whole program again
"""

from __future__ import annotations

from collections.abc import Callable

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.passes.distinct_layers.cut import cuts
from shardc.passes.distinct_layers.restore import restored
from shardc.passes.distinct_layers.twins import UnlikeError
from shardc.spec import Spec

__all__ = ["run_on_distinct"]


def run_on_distinct(program: Program, spec: Spec, run: Callable[[Program], Program]) -> Program:
    """`run(program)`, by way of a program with fewer layers where that gives the same. run: passes up to partition."""
    for cut in cuts(program, spec):
        try:
            return restored(program, cut, run(cut.program), run)
        except UnlikeError:
            continue
        except ShardcError:
            break  # the whole program says what is wrong, of all its layers
    return run(program)
