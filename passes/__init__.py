"""List the passes in order, each with the reason for its place.

`shardc.compile` runs them. Each is a file or a folder with a `Pass` (base.py). To add one, write it and add a line
here. runner.py runs the passes; outputs.py decides how ranks hold a step's outputs; dump.py writes the program's text
after each pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from shardc.optional import registered
from shardc.passes.accumulate import Accumulate
from shardc.passes.annotate import Annotate
from shardc.passes.base import CAPTURE, Options, Pass
from shardc.passes.canonical import Canonical
from shardc.passes.canonical.grouped_mm import GroupedMM
from shardc.passes.class_rows import ClassRows
from shardc.passes.expert_capacity import ExpertCapacity
from shardc.passes.forward_only import ForwardOnly
from shardc.passes.gradient_buckets import GradientBuckets
from shardc.passes.joint import JointGraphs
from shardc.passes.loss_chunks import LossChunks
from shardc.passes.match_recompiled import MatchRecompiled
from shardc.passes.partition import Partition
from shardc.passes.pipeline import Pipeline
from shardc.passes.place import Place
from shardc.passes.precision import Precision
from shardc.passes.recompute import Recompute
from shardc.passes.stack_experts import StackExperts
from shardc.passes.unknown_ops import UnknownOps
from shardc.passes.unused_axes import UnusedAxes
from shardc.passes.weight_casts import WeightCasts

__all__ = ["CAPTURE", "PIPELINE", "Entry", "Options", "Pass", "with_features"]


class Entry(NamedTuple):
    """An entry of the list of passes.

    name: in dumps, timings and `shardc inspect --diff`. make: the class of the pass. why: the reason for its place.
    """

    name: str
    make: type[Pass]
    why: str


PIPELINE = (
    # the global graph, of one device
    Entry("precision", Precision, "before canonical, which rewrites ops that torch's autocast lists name"),
    Entry("canonical", Canonical, "before all passes that look at ops: afterwards there are few kinds of them"),
    Entry("grouped_mm", GroupedMM, "after canonical, whose ops it matches; before place: only its result has a rule"),
    Entry("unknown_ops", UnknownOps, "after canonical, which decomposes ops; before place: every op needs a rule"),
    Entry("stack_experts", StackExperts, "before annotate, as the stacked parameter is what gets a layout"),
    Entry("expert_capacity", ExpertCapacity, "after grouped_mm makes `experts`; before place: its op is placed too"),
    Entry("annotate", Annotate, "before place, which starts from the layouts that the spec names"),
    Entry("forward_only", ForwardOnly, "after annotate: gradients show activations; before place, which prices them"),
    Entry("class_rows", ClassRows, "after annotate, whose patterns are of the model's own shapes; before place"),
    Entry("place", Place, "after annotate; before partition: collectives follow from the strategies of all ops"),
    # the local graph, of one rank
    Entry("partition", Partition, "after place, for the conversions it implies; before all that counts local bytes"),
    Entry("accumulate", Accumulate, "after partition, where microbatches are an axis; later passes see one of them"),
    Entry("pipeline", Pipeline, "after partition, as it cuts where few local bytes cross"),
    Entry("loss_chunks", LossChunks, "after pipeline: one op for a product and its loss could not be cut"),
    Entry("recompute", Recompute, "after pipeline, as a region is part of one stage; its budget is in local bytes"),
    Entry("match_recompiled", MatchRecompiled, "before gradient_buckets, which would otherwise make other buckets"),
    Entry("gradient_buckets", GradientBuckets, "after recompute: final graphs define the order, and get the gathers"),
    Entry("weight_casts", WeightCasts, "after gradient_buckets: buckets that gather in 16 bits need no casts to share"),
    Entry("joint", JointGraphs, "after all that changes forward or buckets: backward is derived from both"),
    Entry("unused_axes", UnusedAxes, "last: only now every use of an axis is known"),
)


def with_features(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Yield these entries, and after each those that optional features put there."""
    added = [pair for pairs in registered("passes", "PASSES") for pair in pairs]
    for entry in entries:
        yield entry
        yield from (new for after, new in added if after == entry.name)
