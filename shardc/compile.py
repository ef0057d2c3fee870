"""Read this first: the whole flow in one straight function. DESIGN section 1 has the picture.

capture ► precision ► canonical ► experts ► annotate ► place ► partition ► accumulate ► pipeline ► checkpoint ► data
global graph of one device                  one rank's program
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardc import torch_modes
from shardc.capture import capture
from shardc.ir.program import OffloadPlaces, Program
from shardc.passes import runner, unused_axes
from shardc.passes.accumulate import Accumulate, widened
from shardc.passes.annotate import Annotate, model_plan
from shardc.passes.canonical import Canonical
from shardc.passes.canonical.grouped_mm import Unsort
from shardc.passes.capacity import Capacity
from shardc.passes.checkpoint import Checkpoint
from shardc.passes.data import Data
from shardc.passes.match_layouts import Alike
from shardc.passes.partition import Partition
from shardc.passes.pipeline import Pipeline
from shardc.passes.place import place
from shardc.passes.place.refuse import check_rules
from shardc.passes.precision import Precision
from shardc.resize import Resizer
from shardc.spec import Spec


@runner.uncollected()
def compile(
    model: nn.Module,
    batch: Any,
    spec: str | Path | Mapping[str, Any] | Spec,
    *,
    mesh: Mapping[str, int] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    overrides: tuple[str, ...] = (),
    world: int | None = None,
    prove: bool = True,
    captured: Program | None = None,
    like: Program | None = None,
    dump: str | Path | None = None,
    on_pass: Callable[[str], None] | None = None,
) -> Program:
    """Compile a model and a sharding spec into the program of one rank.

    model: in the mode (train) and dtype in which it is to run; may be on the meta device: only shapes are needed.
    batch: one *global* batch, as a single device would get it: dict (keyword arguments), tuple or tensor, real or fake.
    spec: path, dict or Spec. mesh: sizes that override the spec's; overrides: dotted settings such as "data.zero=0".
    world: number of ranks, where known: it fills in an axis of size -1, and has to be what the mesh needs.
    loss: (model's output, batch) -> scalar; default: the output itself, its `.loss`, or its first element.
    prove: run the captured graph once against the model on small real numbers. captured: what `shardc.capture.capture`
        made of the same model and batch, for trying several specs. like: a program of the same model and spec for
        another batch, whose parameters and buckets this one is to run on (shardc.passes.match_layouts). dump: folder
        for the text after every pass.
    on_pass: called with each stage's name as it begins.
    Raises ShardcError for everything that is wrong with the input, all independent mistakes at once.
    """
    torch_modes.check("compile", training=False)
    steps = runner.Runner(dump=Path(dump) if dump else None, on_pass=on_pass)
    asked = Spec.load(spec, mesh=dict(mesh) if mesh else None, overrides=overrides, world=world)
    carried = model_plan.read(model) if asked.shard_use == "model" else {}
    start = time.perf_counter()

    program = steps.run("capture", lambda: captured or capture(model, batch, loss=loss, prove=prove))
    asked = model_plan.with_experts(asked, model, program)
    dtypes = Precision.of(asked.precision)
    if dtypes.compute or dtypes.params:
        program = steps.run("precision", lambda: dtypes.run(program))
    program = steps.run("canonical", lambda: Unsort().run(Canonical.of(asked).run(program)))
    notes = check_rules(program, replicate=asked.unknown_ops == "replicate")
    if asked.experts:
        program = steps.run("experts", lambda: Capacity(asked).run(program))
    wide = widened(Pipeline.inner(asked))
    program = steps.run("annotate", lambda: Annotate(wide, carried).run(program, wide.mesh))
    program = steps.run("place", lambda: place(program, program.mesh))
    program = steps.run("partition", lambda: Partition(strict=asked.strict).run(program, program.mesh))
    if asked.batch.microbatches > 1:
        accumulate = Accumulate(asked.where(("batch", "microbatches")))
        program = steps.run("accumulate", lambda: accumulate.run(program, program.mesh))
    if asked.pipeline is not None:
        program = steps.run("pipeline", lambda: Pipeline(asked).run(program, program.mesh))
    if asked.checkpoint:
        program = steps.run("checkpoint", lambda: Checkpoint(asked).run(program, program.mesh))
    if like is not None:
        program = steps.run("alike", lambda: Alike(like).run(program, program.mesh))
    data = Data.of(asked, dtypes.reduce)
    program = steps.run("data", lambda: data.run(program, program.mesh))

    program.spec, program.resize = asked, Resizer.of(model, loss)
    program.notes = (*notes, *program.notes, *unused_axes.notes(program, asked))
    program.meta = program.meta | {
        "model": type(model).__name__,
        "torch": str(torch.__version__),
        "compile_seconds": round(time.perf_counter() - start, 3),
        "pass_seconds": steps.seconds,
    }
    program.loss_scale = asked.precision.loss_scale
    program.offload = OffloadPlaces(**asked.data.offload.model_dump(), page_mb=asked.data.bucket_mb)
    return program
