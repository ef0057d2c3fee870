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
    Stage("canonical", Canonical, "later passes need to know only a few ops: each operation has one form"),
    Stage("grouped_mm", GroupedMM, "it matches canonical ops; the rules know the op `experts`"),
    Stage("unknown_ops", UnknownOps, "canonical has decomposed what it can; place needs a rule for every remaining op"),
    Stage("stack_experts", StackExperts, "annotate sets the layouts of parameters, and splits stacks of them"),
    Stage("matrices", Matrices, "members of a stack are separate matrices; attention shows the heads of weights"),
    Stage("expert_capacity", ExpertCapacity, "adds an op to every `experts`, which must be placed like the others"),
    Stage("annotate", Annotate, "placement starts from the layouts of weights, inputs and activations in the spec"),
    Stage("adapt", Adapt, "plans and structures belong to the model; adapters are split like their weights"),
    Stage("forward_only", ForwardOnly, "annotate finds activations by their gradients; no later pass needs gradients"),
    Stage("products", Products, "earlier passes find linear layers by their shape; place also places the scales"),
    Stage("place", Place, "every op runs by one strategy per mesh axis before collectives can be known"),
    # the local graph, of one rank
    Stage("partition", Partition, "conversions between placements become collectives, and sizes those of one rank"),
    Stage("accumulate", Accumulate, "microbatches are an axis up to here; later passes see one microbatch"),
    Stage("pipeline", Pipeline, "it cuts where few bytes cross, which is known once sizes are local"),
    Stage("loss_chunks", LossChunks, "a product and its loss become one op, which cannot be cut into stages"),
    Stage("packed_inputs", PackedInputs, "recompute counts the bytes kept for backward; layouts of inputs are known"),
    Stage("recompute", Recompute, "a region is part of one stage, and its budget counts bytes of one rank"),
    Stage("match_recompiled", MatchRecompiled, "it supplies the buckets that the next pass would make"),
    Stage(
        "gradient_buckets", GradientBuckets, "buckets follow the order of the final graphs, which contain the gathers"
    ),
    Stage("weight_casts", WeightCasts, "sharded buckets in the dtype of products no longer need casts"),
    Stage("joint", JointGraphs, "the backward graph is derived from the final forward graph and buckets"),
    Stage("unused_axes", UnusedAxes, "only now all uses of the mesh axes are known"),
)
