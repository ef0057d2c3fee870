"""Define `batch`: how inputs of a step are split by rows. (shardc.features.sequence: along the sequence.)

An input [8, 1024] on dp=2 × cp=2, with batch: {microbatches: 2} and sequence: {axis: cp}:

               cp 0   cp 1
    rows 0-1 |      |      |  dp 0, microbatch 0
    rows 2-3 |      |      |  dp 0, microbatch 1
    rows 4-5 |      |      |  dp 1, microbatch 0
    rows 6-7 |      |      |  dp 1, microbatch 1

With balance: zigzag a rank of cp has two stretches, an early and a late one.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from shardc.spec.fields import Axes, BatchDims, Count, Pattern, Section, as_tuple


class Batch(Section):
    """How the global batch is split. dims: glob over input names -> batch dim, None = not split; the first that matches
    counts.
    """

    dims: BatchDims = Field(
        default={"*": 0}, description="each input's batch dim; null = not split", examples=[{"*": 0}]
    )
    axes: Axes | None = Field(
        default=None, description="axes that split the batch (default: every data axis)", examples=[["dp"]]
    )
    microbatches: Count = Field(default=1, description="microbatches per step", examples=[8])
    rows: Count | None = Field(
        default=None,
        description="rows of one rank in a microbatch; the number of microbatches follows from it",
        examples=[4],
    )
    lengths: Annotated[tuple[Count, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="lengths to which batches are padded; needs pad", examples=[[128, 256, 512]]
    )
    pad: dict[Pattern, float] = Field(
        default={},
        description="number that pads an input to the batch's length (dim 1, or dim 0 if dim 1 is the batch's)",
        examples=[{"input_ids": 0, "labels": -100}],
    )
