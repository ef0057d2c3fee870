"""Compile a model: the whole compilation in one straight function. Read this file first.

The spec is read, the model is captured as a global graph, and the passes of `shardc.passes.PIPELINE` turn it into the
program of one rank. docs/explanation/architecture.md follows a linear layer through all of them.

capture ► precision ► canonical ► annotate ► place ► partition ► accumulate ► pipeline ► recompute ► buckets ► joint
global graph of one device                 one rank's program                            its forward and backward graph
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from shardc import recompile, torch_modes
from shardc.api import Program
from shardc.artifact import model_source
from shardc.call_arguments import checked
from shardc.capture import capture, check_forward
from shardc.capture.loss import Forward
from shardc.collector import uncollected
from shardc.cost.measured.device_file import of_spec
from shardc.errors import ShardcError
from shardc.ir import program as ir
from shardc.ir.outputs import OtherForward
from shardc.passes import CAPTURE, PIPELINE, Options, forward_only, runner, with_features
from shardc.passes.annotate import model_plan
from shardc.passes.annotate.batch_rows import with_microbatches
from shardc.runtime.data import inputs
from shardc.runtime.state import quantized
from shardc.spec import Spec
from shardc.spec.model_names import Names
from shardc.torch_private import quick_walks


@checked("shardc.compile")
@uncollected()
@quick_walks()
def compile(
    model: nn.Module,
    batch: Any,
    spec: str | Path | Mapping[str, Any] | Spec,
    *,
    mesh: Mapping[str, int] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    forward: bool | Literal["score"] | Callable[[Any, Any], Any] | OtherForward = False,
    overrides: tuple[str, ...] = (),
    world: int | None = None,
    prove: bool = True,
    captured: ir.Program | None = None,
    compatible_with: ir.Program | None = None,
    dump: str | Path | None = None,
    on_pass: Callable[[str], None] | None = None,
) -> Program:
    """Compile a model and a sharding spec into the program of one rank.

    model: in the mode (train) and dtype in which it will run; may be on the meta device: only shapes are needed.
    batch: one *global* batch, as a single device would get it: dict (keyword arguments), tuple or tensor, real or fake.
    spec: path, dict or Spec. mesh: sizes that override the spec's; overrides: dotted settings such as "data.zero=0".
    world: number of ranks, if known: it sets an axis of size -1, and must be the number that the mesh needs.
    loss: (model's output, batch) -> scalar, or (scalar, {name: tensor}) beside it (docs/how-to/batches.md);
        default: the output itself, its `.loss`, or its first element.
    forward: compile a program that runs only forward, in eval mode (docs/how-to/forward.md). It returns, for True:
        the tensors in the model's output, by name; a function (model's output, batch) -> {name: tensor}: its result;
        "score": the log-probability of each target of the loss's cross entropy.
    prove: run the captured graph once against the model on small real numbers. captured: the result of
        `capture.capture` for the same model and batch, to try several specs. compatible_with: a program of the same
        model and spec for another batch, whose parameters and buckets this one reuses (shardc.passes.match_recompiled).
    dump: folder for the text after every pass. on_pass: called with each pass's name as it begins.
    Raises ShardcError for everything that is wrong with the input, all independent mistakes at once.
    """
    torch_modes.check("compile", training=False)
    if isinstance(batch, (str, Path, Spec)):
        fault = f"the batch is a {type(batch).__name__}, which looks like the spec"
        raise ShardcError(
            fault, where="shardc.compile", fix="pass the batch before the spec: compile(model, batch, spec)"
        )
    start = time.perf_counter()
    model = quantized.plain(model)
    passes = runner.Runner(dump=Path(dump) if dump else None, on_pass=on_pass)

    names = Names.of(model) if isinstance(model, nn.Module) else None
    spec = Spec.load(spec, mesh=mesh, overrides=overrides, world=world, names=names)
    of_spec(spec)  # raises if the device is unknown, or has no room for the mesh
    if inputs.CHOICES in spec.sections:
        batch = inputs.without_choices(batch)
    if isinstance(forward, OtherForward):
        spec = forward.spec(spec)
    plan = model_plan.read(model) if spec.shard_use == "model" else {}
    check_forward(forward)
    values = _captured_values(forward)
    with recompile.in_eval_mode(model) if forward else nullcontext():
        program = passes.run(CAPTURE, lambda: captured or capture(model, batch, loss=loss, forward=values, prove=prove))
    spec = with_microbatches(model_plan.with_experts(spec, model, program), program)
    mode: Any = forward if isinstance(forward, OtherForward) or forward == "score" else bool(forward)
    options = Options(plan, compatible_with, mode)
    if compatible_with is not None:
        spec = recompile.spec_of(spec, program, compatible_with)
    if forward:
        spec, notes = forward_only.spec_of(spec)
        # no record of what a checkpoint trained: it was captured with the loss, in training mode
        program = replace(program, eval_mode=False, recorded=lambda: None, notes=(*program.notes, *notes))

    program = replace(program, spec=spec)
    for entry in with_features(PIPELINE):
        compiler_pass = entry.make(spec, options)
        if compiler_pass.applies(program):
            program = passes.run(entry.name, compiler_pass.run, program)

    meta = program.meta | {
        "model": type(model).__name__,
        "torch": str(torch.__version__),
        "compile_seconds": round(time.perf_counter() - start, 3),
        "pass_seconds": passes.seconds,
    }
    if spec.text:  # causes cite its lines; the spec.yaml of a saved program is a new text
        meta["spec"] = {"file": spec.file, "text": spec.text}
    program = replace(
        program,
        resize=recompile.Resizer.of(model, loss, compile, forward, batch),
        origins=model_source.origins(model, forward if callable(forward) else loss),
        meta=meta,
    )
    return Program.of(program)


def _captured_values(forward: Any) -> Forward | None:
    """Return what is captured in place of the loss: None for training and for a score (made of the loss)."""
    if forward is True:
        return True
    return None if isinstance(forward, (bool, str)) else forward
