"""List the passes in order, each with the reason for its place.

`shardc.compile` runs them. Each is a file or a folder with one `Pass` (shardc.passes.base). To add one, write it and
add a line here. (`Stage` is an entry of this list; in shardc.ir.stage it is a part of a pipeline.) runner.py runs the
passes; outputs.py decides how ranks hold a step's outputs; dump.py writes the program's text after each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardc.optional import registered
from shardc.passes.accumulate import Accumulate
from shardc.passes.annotate import Annotate
from shardc.passes.base import Options, Pass
from shardc.passes.canonical import Canonical
from shardc.passes.canonical.grouped_mm import GroupedMM
from shardc.passes.expert_capacity import ExpertCapacity
from shardc.passes.forward_only import ForwardOnly
from shardc.passes.gradient_buckets import GradientBuckets
from shardc.passes.joint import JointGraphs
from shardc.passes.loss_chunks import LossChunks
from shardc.passes.match_recompiled import MatchRecompiled
from shardc.passes.packed_inputs import PackedInputs
from shardc.passes.partition import Partition
from shardc.passes.pipeline import Pipeline
from shardc.passes.place import Place
from shardc.passes.precision import Precision
from shardc.passes.products import Products
from shardc.passes.recompute import Recompute
from shardc.passes.stack_experts import StackExperts
from shardc.passes.unknown_ops import UnknownOps
from shardc.passes.unused_axes import UnusedAxes
from shardc.passes.weight_casts import WeightCasts

__all__ = ["CAPTURE", "PIPELINE", "Options", "Pass", "Stage", "with_features"]

#: The name of what comes before the first pass: the model becomes a program.
CAPTURE = "capture"


class Stage(NamedTuple):
    """An entry of the list of passes.

    name: in dumps, timings and `shardc inspect --diff`. make: its pass. why: the reason for its place.
    """

    name: str
    make: type[Pass]
    why: str


PIPELINE = (
    # the global graph, of one device
    Stage("precision", Precision, "before canonical, which rewrites ops that torch's autocast lists name"),
    Stage("canonical", Canonical, "before all passes that look at ops: afterwards there are few kinds of them"),
    Stage("grouped_mm", GroupedMM, "after canonical, whose ops it matches; before place: only its result has a rule"),
    Stage("unknown_ops", UnknownOps, "after canonical, which decomposes ops; before place: every op needs a rule"),
    Stage("stack_experts", StackExperts, "before annotate, as the stacked parameter is what gets a layout"),
    Stage("expert_capacity", ExpertCapacity, "after grouped_mm makes `experts`; before place, which places its op too"),
    Stage("annotate", Annotate, "before place, which starts from the layouts that the spec names"),
    Stage("forward_only", ForwardOnly, "after annotate, which recognises activations by `requires_grad`; before place"),
    Stage("products", Products, "after all that finds linear layers by their shape; before place, as scales are split"),
    Stage("place", Place, "after annotate; before partition: collectives follow from the strategies of all ops"),
    # the local graph, of one rank
    Stage("partition", Partition, "after place, for the conversions it implies; before all that counts local bytes"),
    Stage("accumulate", Accumulate, "after partition: microbatches are an axis before; later passes see one of them"),
    Stage("pipeline", Pipeline, "after partition, as it cuts where few local bytes cross"),
    Stage("loss_chunks", LossChunks, "after pipeline: one op for a product and its loss could not be cut"),
    Stage("packed_inputs", PackedInputs, "after partition, for layouts of inputs; before recompute counts bytes"),
    Stage("recompute", Recompute, "after pipeline, as a region is part of one stage; its budget is in local bytes"),
    Stage("match_recompiled", MatchRecompiled, "before gradient_buckets, which would otherwise make other buckets"),
    Stage("gradient_buckets", GradientBuckets, "after recompute: final graphs define the order, and get the gathers"),
    Stage("weight_casts", WeightCasts, "after gradient_buckets: buckets that gather in 16 bits need no casts to share"),
    Stage("joint", JointGraphs, "after all that changes forward or buckets: backward is derived from both"),
    Stage("unused_axes", UnusedAxes, "last: only now every use of an axis is known"),
)


def with_features(stages: Iterable[Stage]) -> Iterator[Stage]:
    """Yield these stages, and after each those that optional features put there."""
    added = [row for rows in registered("passes", "PASSES") for row in rows]
    for stage in stages:
        yield stage
        yield from (s for after, s in added if after == stage.name)
