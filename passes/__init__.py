"""List the stages of compilation in order, each with the reason for its place.

`shardc.compile` runs them. A stage is a file or a folder with one `Pass` (shardc.passes.base). To add one, write it
and add a line here. runner.py runs the passes; outputs.py decides how ranks hold a step's outputs; dump.py writes the
program's text after each pass.
"""

from __future__ import annotations

from typing import NamedTuple

from shardc.passes.accumulate import Accumulate
from shardc.passes.adapt import Adapt
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
from shardc.passes.matrix_cuts import Matrices
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

__all__ = ["CAPTURE", "PIPELINE", "Options", "Pass", "Stage"]

#: The name of what comes before the first stage: the model becomes a program.
CAPTURE = "capture"


class Stage(NamedTuple):
    """A stage of compilation.

    name: in dumps, timings and `shardc inspect --diff`. make: its pass. why: the reason for its place.
    """

    name: str
    make: type[Pass]
    why: str


PIPELINE = (
    # the global graph, of one device
    Stage("precision", Precision, "torch's autocast lists name the ops of a captured graph, which canonical rewrites"),
    Stage("canonical", Canonical, "one spelling per operation, so that all that follows has few ops to know"),
    Stage("grouped_mm", GroupedMM, "its pattern is of canonical ops; the rules know `experts` in its place"),
    Stage(
        "unknown_ops", UnknownOps, "canonical has decomposed what it can; place needs a rule for every op that is left"
    ),
    Stage("stack_experts", StackExperts, "annotate gives layouts to parameters, and stacks of them are what is split"),
    Stage("matrices", Matrices, "members of a stack are matrices of their own; attention shows the heads of weights"),
    Stage("expert_capacity", ExpertCapacity, "adds an op to every `experts`, which has to be placed like the others"),
    Stage("annotate", Annotate, "placement starts from the layouts of weights, inputs and activations in the spec"),
    Stage("adapt", Adapt, "plans and structures are the model's; adapters are split as the weights beside them"),
    Stage("forward_only", ForwardOnly, "annotate tells activations by their gradients; nothing after it needs them"),
    Stage("products", Products, "all before it knows linear layers by their shape; scales are placed with all else"),
    Stage("place", Place, "every op runs by one strategy per mesh axis before collectives can be known"),
    # the local graph, of one rank
    Stage("partition", Partition, "conversions between placements become collectives, and sizes those of one rank"),
    Stage("accumulate", Accumulate, "microbatches are an axis up to here; what follows sees one microbatch"),
    Stage("pipeline", Pipeline, "cuts where few bytes cross, and these are known once sizes are local"),
    Stage("loss_chunks", LossChunks, "a product and its loss become one op, which cannot be cut into stages"),
    Stage("packed_inputs", PackedInputs, "recompute counts what is kept for backward, and how inputs lie is known"),
    Stage("recompute", Recompute, "a region is part of one stage, and its budget counts bytes of one rank"),
    Stage("match_recompiled", MatchRecompiled, "gives the buckets that the next pass would otherwise make"),
    Stage("gradient_buckets", GradientBuckets, "they follow the order of the final graphs, and gathers stand in them"),
    Stage("weight_casts", WeightCasts, "sharded buckets that hold the dtype of products have taken their casts out"),
    Stage("joint", JointGraphs, "the backward graph is of all that forward and its buckets have become"),
    Stage("unused_axes", UnusedAxes, "only now is every axis seen that something uses"),
)
