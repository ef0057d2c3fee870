"""Check that a loss does not depend on what fills up rows, before the first step of rows of several lengths.

Any order of rows is the same step only if padding takes no part in it. So the first step's rows run forward three
times, without dropout: as they are; padded to longer rows; and so with another id in place of the number to pad with.
The last two are one program, where masked places are multiplied by exact zeros: their losses are equal to the bit, also
in 16 bits and where a new model hardly looks at any token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import calls, placeholders, value_of, values_of
from shardc.ir.patterns import match
from shardc.ir.program import Program
from shardc.runtime import ops
from shardc.runtime.data.inputs import name_of
from shardc.runtime.data.ragged import Ragged, Size

#: Makes the inputs of a step, of (size of each microbatch, numbers to pad with by input): (interpreter, values).
Take = Callable[[Sequence[Size], Mapping[str, float]], tuple[Any, Any]]
_WHERE = "batch.balance"
_FIX = "ignore these places in the loss (labels of -100), and mask them in attention; or leave out balance"
_SAME = (torch.ops.aten._to_copy.default, torch.ops.aten.alias.default, torch.ops.aten.view.default)
#: Relative differences of losses by rounding, in units of the coarsest dtype, and at most: of one program with other
#: padding, if values choose what is computed together; of programs for other lengths, which add in another order.
_ONE_PROGRAM, _TWO_PROGRAMS = (100, 1e-4), (1e4, 2e-2)
#: Ops by which values choose: a router's experts get other groups of tokens with other padding.
_CHOOSE = {torch.ops.aten.topk.default, torch.ops.aten.sort.default, torch.ops.aten.argmax.default}


def check(model: Any, batch: Ragged, take: Take) -> bool:
    """Compare the losses; return whether the step has rows that can be longer. Collective.

    Raises ShardcError, on all ranks, if they differ.
    """
    longer = {s: next((n for n in batch.every if n.times == s.times and n > s), s) for s in batch.every}
    if all(long == size for size, long in longer.items()):
        return False
    program, sizes, eps = model.program, [longer[s] for s in batch.sizes], _rounding(model.program)
    # one scale of numbers of 8 bits is for padding too
    ids = _other_ids(program) if eps < torch.finfo(torch.float8_e4m3fn).eps else {}

    def loss(sizes: Sequence[Size], numbers: Mapping[str, float]) -> float:
        model.buckets.reset(forward=True)
        interpreter, values = take(sizes, numbers)
        with torch.no_grad():
            interpreter.compute_totals(values)
            return float(interpreter.evaluate(values)[0])

    training, model.rng.training = model.rng.training, False
    try:
        short, long = loss(batch.sizes, {}), loss(sizes, {})
        filled = loss(sizes, ids) if ids else long
        rounds = _calls(program, _CHOOSE) or (filled != long and loss(sizes, {}) != long)  # some kernels' sums vary
    finally:
        model.rng.training = training
    model.buckets.reset(forward=True)
    if not _calls(program, {ops.random}) and _differ(
        short, long, eps, *_TWO_PROGRAMS
    ):  # of other sizes, other numbers are drawn
        fault = f"rows that are padded more have another loss, {long:.6g} and not {short:.6g}: padding takes part in it"
        raise ShardcError(fault, where=_WHERE, fix=_FIX)
    if _differ(long, filled, eps, *(_ONE_PROGRAM if rounds else (0, 0))):
        fault = (
            f"the loss depends on the number that fills up {', '.join(ids)}: {long:.9g}, and with another {filled:.9g}"
        )
        raise ShardcError(fault, where=_WHERE, fix=_FIX)
    return True


def _calls(program: Program, targets: set[Any]) -> bool:
    return any(n.target in targets for s in program.stages for n in calls(s.graph))


def _differ(a: float, b: float, eps: float, units: float, most: float) -> bool:
    share = min(units * eps, most)
    return math.isfinite(a) and math.isfinite(b) and abs(a - b) > share * max(abs(a), abs(b))


def _rounding(program: Program) -> float:
    """Return the relative rounding of the coarsest dtype that the program computes in."""
    dtypes = {v.dtype for s in program.stages for n in s.graph.nodes for v in values_of(n)}
    return max(torch.finfo(t).eps for t in dtypes if t.is_floating_point)


def _other_ids(program: Program) -> dict[str, float]:
    """Return another number to pad with for each input that only embeddings read, by its name."""
    nodes, other = placeholders(program.graph), dict[str, float]()
    for x in program.inputs:
        name = name_of(x.path)
        number = next((n for pattern, n in program.spec.batch.pad.items() if match(pattern, name)), None)
        if number is not None and (rows := _embedded(nodes[x.name])) > 1:
            other[name] = (number + 1) % rows
    return other


def _embedded(node: fx.Node) -> int:
    """Return the rows of the smallest table that ids look up; 0 if anything else reads them."""
    least = 0
    for user in node.users:
        if user.target in _SAME:
            rows = _embedded(user)
        elif user.target is torch.ops.aten.embedding.default and user.args[1] is node and user.args[0] is not node:
            rows = value_of(user.args[0]).shape[0]  # type: ignore[arg-type]
        else:
            return 0
        if not rows:
            return 0
        least = min(least or rows, rows)
    return least
