"""Prove shardc's rules on more calls than a user's: torch's arguments spelled otherwise, and broadcasting."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shardc.ir.types import full_op_name
from shardc.rules.core.user_ops import Arguments, Sample
from shardc.torch_private import OpOverload
from shardc.verify.rules import variants
from shardc.verify.rules.case import UNDEFINED, Case, Finding
from shardc.verify.rules.check import OpReport, check_op
from shardc.verify.rules.prove import too_strict

#: They do not check that their operands fit together: run on what does not, they read and write beside them.
TRUSTING = {
    "aten.lstm.input",
    "aten.gru.input",
    "aten.rnn_tanh.input",
    "aten.rnn_relu.input",
    "aten.put.default",
    "aten._weight_norm.default",
    "aten._weight_norm_interface.default",
    "shardc.ctc_loss.default",
    "experts",
    "aten.avg_pool2d_backward.default",
    "aten.avg_pool3d_backward.default",
    "aten._adaptive_avg_pool2d_backward.default",
    "aten._adaptive_avg_pool3d_backward.default",
}
#: They read memory as if it were contiguous, whole or not; their callers make it so.
CONTIGUOUS = {"aten._weight_norm_interface.default"}
#: Arguments that count dims of the first operand, for which -1 is the last.
DIMS = {"dim", "dims", "dim0", "dim1", "dim2", "start_dim", "end_dim", "axis"}
#: Switches whose either side is an op of numbers (not of memory, of random state, or with clashing writes).
SWITCHES = {
    "keepdim",
    "descending",
    "largest",
    "sorted",
    "unbiased",
    "upper",
    "reverse",
    "align_corners",
    "ceil_mode",
    "count_include_pad",
    "right",
    "stable",
    "is_causal",
    "approximate",
    "log_target",
    "full",
    "include_self",
    "left",
    "unitriangular",
    "scale_grad_by_freq",
}
_HEADS = "fused kernels want q, k and v of one head size"
_CONSTANT = "a constant: its operand gives only shape or dtype"
_WEIGHTS = "a norm's weights that are still to be summed over ranks do not occur"
_FEW = "boundaries are few: counting below a part of them and adding up saves nothing"
_EMPTY = "only because the other operands are empty"
#: (op, what) that a rule forbids though it would be right, and why it stays so.
KNOWN = {
    ("aten.scaled_dot_product_attention.default", "split e"): _HEADS,
    ("attention", "split e"): _HEADS,
    ("aten.layer_norm.default", "linear in 1 2"): _WEIGHTS,
    ("aten.layer_norm.default", "linear in 1"): _WEIGHTS,
    ("aten.rms_norm.default", "linear in 1"): _WEIGHTS,
    ("aten.group_norm.default", "linear in 1 2"): _WEIGHTS,
    ("aten.group_norm.default", "linear in 1"): _WEIGHTS,
    ("aten.type_as.default", "linear in 0 1"): "of the second operand only the dtype counts",
    ("aten.zeros_like.default", "linear in 0"): _CONSTANT,
    ("aten.new_zeros.default", "linear in 0"): _CONSTANT,
    ("aten.new_zeros.default", "split x0_0, sum"): _CONSTANT,
    ("aten.bucketize.Tensor", "split x1_0, sum"): _FEW,
    ("aten.cat.default", "linear in 0"): _EMPTY,
    ("aten.cat.default", "linear in 0 2"): _EMPTY,
    ("aten.index.Tensor", "split i0_0 = o0_0"): "a mask makes sizes that depend on data: such graphs are not captured",
    ("aten.index_put.default", "split i0, sum"): "one value for all entries would be added for padding too",
    ("aten.searchsorted.Tensor", "split n, sum"): "padding would stand among the sorted numbers",
    ("fp8_experts", "split k, sum"): "a token's choices are few, and its row would be sent to all ranks",
    ("fp8_linear", "linear in 0"): "what is rounded is no sum that is still to be done",
    ("batch_stat", "linear in 0"): "true in training only; outside it is the running statistic, counted once a rank",
    ("batch_stat", "linear in 0 1"): "the statistic is used more than once: it is summed before",
}


def checked(op: Any, samples: list[Sample]) -> tuple[OpReport, list[Finding]]:
    """The check of an op of torch or of shardc, and what its rule forbids though it is right."""
    strict = [] if op in UNDEFINED or full_op_name(op) in TRUSTING else too_strict(op, samples)
    return check_op(op, samples, variants=_variants), strict


def _variants(op: Any, sample: Sample, case: Case) -> Iterator[tuple[str, Sample]]:
    if full_op_name(op) in TRUSTING or full_op_name(op) in CONTIGUOUS:
        if full_op_name(op) not in CONTIGUOUS:
            yield "transposed in memory", variants.changed(sample, variants.strided)
        yield from variants.other_dtypes(sample, case)
        return
    yield from variants.variants(op, sample, case)
    yield from spelled(op, case, sample)
    if full_op_name(op).startswith("aten."):
        yield from broadcast(op, case, sample)


def rewritten(sample: Sample, position: int, name: str, value: Any) -> Sample:
    """The sample with another argument, given by position if it reaches so far, else by name."""

    def made(constants: list[Tensor]) -> Arguments:
        args, kwargs = sample(constants)
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    return made


def spelled(op: Any, case: Case, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Arguments of ATen ops in their other spellings: dims from the end, switches turned."""
    if not isinstance(op, OpOverload):
        return
    call = case.choices.call
    ranks = {len(v.shape) for v in (*call.operands[:1], *call.results[:1])}
    for position, a in enumerate(op._schema.arguments):
        now = call.arg(a.name)
        if a.name in DIMS and isinstance(now, int) and not isinstance(now, bool):
            for other in {now - n if now >= 0 else now + n for n in ranks}:
                yield f"{a.name}={other}", rewritten(sample, position, a.name, other)
        elif a.name in DIMS and isinstance(now, tuple | list) and now and all(isinstance(d, int) for d in now):
            n = len(call.operands[0].shape) if call.operands else 0
            moved = [d - n if d >= 0 else d + n for d in now]
            yield f"{a.name}={moved}", rewritten(sample, position, a.name, moved)
        elif a.name in SWITCHES and isinstance(now, bool):
            yield f"{a.name}={not now}", rewritten(sample, position, a.name, not now)


def broadcast(op: Any, case: Case, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Each factor that is whole of size one, and each dim of each operand alone, where the op allows it."""
    sig = case.choices.signature
    cuts = {
        variants.places_of(case, f): f"{f} of size 1"
        for f, size in sig.sizes.items()
        if size > 1 and f not in sig.splittable()
    }
    for i, x in enumerate(case.tensors):
        cuts |= {((i, d),): f"dim {d} of operand {i} of size 1" for d, size in enumerate(x.shape) if size > 1}
    for places, label in cuts.items():
        if places:
            yield label, variants.of_size_one(op, case, sample, places)
