"""Capture an unmodified model and one global batch as the global graph, a `Program` on no mesh.

    batch.py, loss.py   a module that takes the batch's tensors and returns the loss and named values
    export.py           torch.export of it, non-strict, on fake tensors; regions and in-place writes removed
    lift.py             a Program: placeholders mesh, rng, params, buffers, inputs; typed nodes with module and line
    compare_eager.py    proof that loss, gradients and buffers are those of eager mode

patches.py, transformers.py, data_dependent_sizes.py, value_reads.py (Python that reads values) and
rewrite/inner_autograd surround the export: they refuse what it would drop silently, and let it trace what it could
not. refusals.py explains in the user's terms why a capture failed.

The model is captured in the mode it is in: put it in train mode first. It may be on the meta device; it is not changed.

constants               values that are known while a model is traced
packed_rows             notes on packed rows whose sequences reach one another
attribute_reads         what forward reads of modules and of a loss object: `self.training`, plain values, counters
masked_rows             rows selected by values, in a fixed size; loops over experts as one op
equal_layers            equal layers are traced once; the others are copied in the graph
rewrite                 rewrites of the exported graph
side_effects            what forward depends on and must not change
"""

from __future__ import annotations

import inspect
import time
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardc.capture import attribute_reads, compare_eager, packed_rows, patches, refusals, side_effects, transformers
from shardc.capture.batch import Leaves, keys_of_loss, with_plain_dicts
from shardc.capture.equal_layers import UnlikeError
from shardc.capture.export import export
from shardc.capture.lift import lift
from shardc.capture.loss import Forward, Loss, check_loss, values_of_batch
from shardc.capture.loss import default_loss as default_loss
from shardc.capture.masked_rows import experts
from shardc.capture.masked_rows.all_rows import DrawnError, add_reason
from shardc.capture.rewrite import flex_attention
from shardc.collector import uncollected
from shardc.errors import ShardcError
from shardc.ir.forward_record import ForwardRecord
from shardc.ir.graph import placeholders, source_of
from shardc.ir.outputs import OtherForward
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.runtime.checks.user_changes import EVAL_MODE, Attributes
from shardc.torch_private import quick_walks


@uncollected()
@quick_walks()
@refusals.torch_errors()
def capture(
    model: nn.Module, batch: Any, *, loss: Loss | None = None, forward: Forward | None = None, prove: bool = True
) -> Program:
    """Capture the global graph of `loss(model(batch))`, at the shapes of one global batch.

    model: on any device, also meta; in train mode for training. Not changed.
    batch: dict (keyword arguments), tuple (positional) or tensor; nested; real, fake or meta. Other leaves are
    constants.
    loss:  `(output, batch) -> scalar` or `(scalar, {name: tensor})`, which also gets keys that forward does not name;
           default: the output itself, its `.loss`, its "loss" or its first element. Named tensors beside the loss are
           kept, detached (shardc.ir.outputs).
    forward: of a forward-only program, instead of a loss: `(output, batch) -> {name: tensor}`, or True: the tensors in
           the output; or another forward. The model's buffers are then not updated.
    prove: compare loss, gradients and buffers with eager once, if the model is small enough (compare_eager).

    Returns a Program with mesh = Mesh(()), whose graph has functional aten ops only, as the model writes them.
    Raises ShardcError, with the model's line, if something cannot be captured or would compute other values, and for
    all errors of torch on the way.
    """
    started = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise _no_module(model)
    patches.check_wrapped(model)
    patches.check_hooks(model)
    if loss is not None:
        check_loss(loss)
    generates = isinstance(forward, OtherForward)
    if callable(forward):
        check_loss(forward, "forward")
    batch = with_plain_dicts(batch)
    leaves = Leaves(batch)
    refused: ShardcError | None = None
    function = forward if callable(forward) else loss
    # fold: equal layers are traced once. If that fails, the whole model is traced, for the error message. Then a size
    # may depend on values: few models have that, and the search costs a tenth of the time. rows: rows may be selected
    # by values, as in loops over experts.
    for fold, rows in [(True, False)] * (not generates) + [(False, False), (False, True)]:
        try:
            with side_effects.unchanged(model) as changes, attribute_reads.recorded(model, changes, function) as reads:
                so_far = (reads, changes) if fold else None
                exported = export(model, leaves, loss, forward, rows=rows, fold=so_far)
            break
        except UnlikeError:
            pass
        except ShardcError as e:
            if rows or not (fold or refusals.of_values(e)):
                raise (add_reason(refused, e) if rows and refused and not isinstance(e, DrawnError) else e) from None
            refused = None if fold else e
    changes.refuse_created()
    if forward is not None:
        kept = {n: x for n, x in exported.updated.items() if n in exported.caches}
        exported = exported._replace(updated=kept)
    program = lift(model, leaves, exported, with_loss=forward is None)
    counts = tuple(_counts(*item) for item in reads.set_too(changes).items())
    of_loss = attribute_reads.loss_object(function), reads.of_loss
    eval_mode = forward is None and not model.training and reads.acts_otherwise(model)
    branches = bool(reads.training) and any(m.training for m in model.modules())
    program = replace(
        program,
        notes=(*exported.notes, *counts, *compare_eager.narrow_values(program), *((EVAL_MODE,) if eval_mode else ())),
        baked=tuple(leaves.constants),
        check_attributes=Attributes(model, reads.values, of_loss, _constants(program)).check,
        eval_mode=eval_mode,
        still=reads.still(model) if forward is None else (),
        evaluates="untried" if branches else "alike",
    )
    if rows:
        program = experts.with_experts(program)
    notes = packed_rows.notes(program, batch) if not generates else ()
    if loss is not None:
        unread = {name for name, n in placeholders(program.graph).items() if not n.users}
        keys = {i.path[0] for i in program.inputs if i.name in unread} & keys_of_loss(model, batch)
        notes += tuple(
            f"{key}: neither forward nor the loss reads this key of the batch" for key in sorted(map(str, keys))
        )
    seconds, evaluates = round(time.perf_counter() - started, 3), program.evaluates
    if prove and not generates:
        sinks, uncached = transformers.as_one_more_key(written_out=False), transformers.without_cache(model)
        with side_effects.unchanged(model), flex_attention.in_eager(), sinks, uncached:
            proof = compare_eager.prove(
                program, model, batch, lambda b: _eager(model, Leaves(b), loss, forward), changes.set, branches=branches
            )
        notes += proof.notes
        evaluates = proof.evaluates if branches or proof.evaluates == "otherwise" else "alike"
    if evaluates == "otherwise":
        notes += (_evaluates(list(reads.training.values())),)
    return replace(
        program,
        recorded=ForwardRecord.later(program),
        notes=(*program.notes, *notes),
        evaluates=evaluates,
        meta=program.meta | {"capture_seconds": seconds},
    )


def _constants(program: Program) -> list[tuple[str, Tensor]]:
    """Return the tensors, other than the model's and the batch's, that forward and the loss read, and the lines."""
    nodes = placeholders(program.graph)
    return [
        (source_of(user).line, b.constant)
        for b in program.buffers
        if b.constant is not None and (user := next(iter(nodes[b.name].users), None)) is not None
    ]


def _eager(model: nn.Module, leaves: Leaves, loss: Loss | None, forward: Forward | None) -> tuple[Any, ...]:
    """Run the user's model; return the loss (None for a forward-only program) and the named values."""
    values = values_of_batch(model, leaves, loss, forward)(*leaves.tensors)
    return tuple(values) if forward is None else (None, *values)


def check_forward(forward: object) -> None:
    """Raise ShardcError for a `forward` that `shardc.compile` does not take."""
    if not isinstance(forward, bool | OtherForward) and forward != "score":
        check_loss(forward, "forward")


def _evaluates(places: list[Source]) -> str:
    """Write the note that eval mode differs. places: the lines of forward that read `self.training`."""
    if not places:
        return (
            "the model behaves differently in eval mode, because of a hook or its train() method: `evaluate` compiles"
            " the model in that mode when it is first called"
        )
    lines = ", ".join(p.line for p in places[:3]) + f" and {len(places) - 3} more" * (len(places) > 3)
    code = f" ({places[0].shown})" if len(places) == 1 else ""
    return (
        f"{lines}: forward reads self.training{code}, and behaves differently in eval mode: `evaluate` compiles the"
        " model in that mode when it is first called"
    )


def _counts(name: str, place: Source) -> str:
    """Write the note on a number that forward reads and sets."""
    where, code = (f"{place.line}: ", f" ({place.shown})") if place.line else ("", "")
    return (
        f"{where}forward sets {name!r}, which it reads{code}: a program uses its first value, and "
        "results that depend on later values stay as in the first call"
    )


def _no_module(model: object) -> ShardcError:
    if isinstance(model, Program) or hasattr(model, "program"):
        fault, fix = f"this is already compiled: {model!r}", "pass the plain model, which it was compiled from"
        return ShardcError(fault, where="shardc.compile", fix=fix)
    kind = "function" if inspect.isroutine(model) else "class" if inspect.isclass(model) else type(model).__name__
    fix = "pass what it returns: model()" if callable(model) else "pass an instance of the model"
    return ShardcError(f"the model is a {kind}, not a torch.nn.Module", fix=fix)
