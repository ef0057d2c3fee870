"""Other calls made from a sample: transposed in memory, dims of size one, dims counted from the end, switches turned,
other dtypes.

A variant is a sample too. Whether it is a call of the op at all, the op says: it is run whole first, and left out where
it raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from shardc.rules.core.sample_calls import Arguments, Sample, Tensors
from shardc.torch_private import OpOverload
from shardc.verify.rules.case import MISFIT, TRUSTING, Case, name_of

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
#: Floating dtypes that rules are proven in, the widest first.
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
#: They read memory as if it were contiguous, whole or not; their callers make it so.
CONTIGUOUS = {"aten._weight_norm_interface.default"}


def changed(sample: Sample, change: Callable[[int, Tensor], Tensor]) -> Sample:
    """The sample with every tensor replaced; change(i, the i-th tensor)."""

    def made(t: Tensors) -> Arguments:
        seen = 0

        def one(x: Any) -> Any:
            nonlocal seen
            if not isinstance(x, Tensor):
                return x
            y = change(seen, x)
            seen += 1
            if any(x is c for c in t.constants):
                t.constants.append(y)
            return y

        return fx.node.map_aggregate(sample(t), one)

    return made


def strided(_: int, x: Tensor) -> Tensor:
    """The same numbers, dims in memory in the other order."""
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order)


def narrowed(which: dict[int, list[int]], *, index: bool) -> Callable[[int, Tensor], Tensor]:
    """The tensors with some dims of some of them cut to size one. index: numbers of places all become 0, a place that
    is left.
    """

    def change(i: int, x: Tensor) -> Tensor:
        for d in which.get(i, ()):
            x = x.narrow(d, 0, 1)
        return torch.zeros_like(x) if index and x.dtype == torch.int64 else x.contiguous()

    return change


def cast(old: torch.dtype, new: torch.dtype) -> Callable[[int, Tensor], Tensor]:
    return lambda _, x: x.to(new) if x.dtype == old else x


def exact(op: Any, sample: Sample) -> Sample:
    """A sample in float32 in float64 instead, if the op takes that: then what is wrong is not rounding."""
    wide = changed(sample, cast(torch.float32, torch.float64))
    dtypes = {x.dtype for x in tensors_of(sample)}
    return wide if torch.float32 in dtypes and torch.float64 not in dtypes and runs(op, wide) else sample


def tensors_of(sample: Sample) -> list[Tensor]:
    tensors: list[Tensor] = []
    changed(sample, lambda _, x: tensors.append(x) or x)(Tensors(0))  # type: ignore[func-returns-value]
    return tensors


def rewritten(sample: Sample, position: int, name: str, value: Any) -> Sample:
    """The sample with another argument, given by position if it reaches so far, else by name."""

    def made(t: Tensors) -> Arguments:
        args, kwargs = sample(t)
        if position < len(args):
            return (*args[:position], value, *args[position + 1 :]), kwargs
        return args, {**kwargs, name: value}

    return made


def shapes(op: Any, case: Case, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Each factor of size one, and each dim of each operand alone: broadcasting, where the op allows it.

    Of ops that are not torch's only factors that may be split: a part may have size one. What else they check, nobody
    knows."""
    sig = case.choices.signature
    known = name_of(op).startswith("aten.")
    cuts: dict[tuple[tuple[int, int], ...], str] = {}
    for f, size in sig.sizes.items():
        if size > 1 and (known or f in sig.splittable()):
            cuts.setdefault(
                tuple((i, d) for i, dims in enumerate(sig.inputs) for d, dim in enumerate(dims) if f in dim),
                f"{f} of size 1",
            )
    for i, x in enumerate(case.tensors if known else ()):
        for d, size in enumerate(x.shape):
            if size > 1:
                cuts.setdefault(((i, d),), f"dim {d} of operand {i} of size 1")
    for places, label in cuts.items():
        which: dict[int, list[int]] = {}
        for i, d in places:
            which.setdefault(i, []).append(d)
        if which:
            narrower = changed(sample, narrowed(which, index=False))
            indexed = any(x.dtype == torch.int64 for x in case.tensors)
            yield (
                label,
                changed(sample, narrowed(which, index=True)) if indexed and not runs(op, narrower) else narrower,
            )


def runs(op: Any, sample: Sample) -> bool:
    """Whether the whole op takes the sample."""
    args, kwargs = sample(Tensors(0))
    try:
        op(*args, **kwargs)
    except MISFIT:
        return False
    return True


def spelled(op: Any, case: Case, sample: Sample) -> Iterator[tuple[str, Sample]]:
    """Arguments of ATen ops in their other spellings: dims from the end, switches turned."""
    if not isinstance(op, OpOverload):
        return
    call = case.choices.call
    ranks = {len(v.shape) for v in (*call.operands[:1], *call.results[:1])}
    for position, a in enumerate(op._schema.arguments):
        now = call.arg(position, a.name, a.default_value if a.has_default_value() else None)
        if a.name in DIMS and isinstance(now, int) and not isinstance(now, bool):
            for other in {now - n if now >= 0 else now + n for n in ranks}:
                yield f"{a.name}={other}", rewritten(sample, position, a.name, other)
        elif a.name in DIMS and isinstance(now, tuple | list) and now and all(isinstance(d, int) for d in now):
            n = len(call.operands[0].shape) if call.operands else 0
            moved = [d - n if d >= 0 else d + n for d in now]
            yield f"{a.name}={moved}", rewritten(sample, position, a.name, moved)
        elif a.name in SWITCHES and isinstance(now, bool):
            yield f"{a.name}={not now}", rewritten(sample, position, a.name, not now)


def variants(op: Any, sample: Sample, case: Case) -> Iterator[tuple[str, Sample]]:
    """(what is other, the call) for every variant, whether or not the op takes it. case: the sample, run whole."""
    if any(x.ndim > 1 for x in case.tensors) and name_of(op) not in CONTIGUOUS:
        yield "transposed in memory", changed(sample, strided)
    if name_of(op) not in TRUSTING:
        yield from spelled(op, case, sample)
        yield from shapes(op, case, sample)
    if floating := [DTYPES.index(x.dtype) for x in case.tensors if x.dtype in DTYPES]:
        widest = min(floating)
        for new in DTYPES[widest + 1 :]:
            yield str(new).removeprefix("torch."), changed(sample, cast(DTYPES[widest], new))
