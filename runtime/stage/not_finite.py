"""Handle a loss or a gradient that is nan or inf: leave out the step, or stop the run.

Stopping names the op of forward that first made one, or the parameters whose gradients have one, on any rank.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate, chain
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph, source_of
from shardc.ir.program import Program
from shardc.ir.types import continuous, requires_grad
from shardc.runtime.mesh.step_context import changed
from shardc.runtime.stage.interpreter import Interpreter
from shardc.runtime.stage.runnable import on_device

#: How to handle a step whose loss or gradient is nan or inf.
Action = Literal["ignore", "stop", "skip"]


_FIX = (
    "nothing was updated: try a lower learning rate, clip (clip_norm=, --clip), or skip such updates"
    " (nonfinite='skip', --nonfinite skip)"
)
_FLOAT16 = (
    "; parameters are float16, in which the eps of Adam (1e-8) is 0, and small gradients too: keep them float32, and"
    " write `precision: {compute: float16, loss_scale: dynamic}`"
)
_NAMED = 3  # parameters that an error names
#: Why a mean is nan whose divisor, computed from the batch, is 0.
NOTHING = "it is a mean over nothing, as all labels of the batch are ignored, or have weight 0"
FIX_NOTHING = "leave such batches out of the data, divide by at least 1 in the loss, or skip them (--nonfinite skip)"


class NotFiniteError(ShardcError):
    """A loss or a gradient is nan or inf, and the engine has nonfinite="stop". Nothing was updated."""


def skips_loss(
    action: Action, loss: Tensor, interpreter: Interpreter, values: Sequence[Mapping[str, Any]], *, step: int
) -> bool:
    """Return whether a step with this global loss, 0-dim, updates nothing.

    Reads the loss on the host, unless action is "ignore". values: per microbatch {placeholder: value}. Raises
    NotFiniteError for "stop", on all ranks.
    """
    if action == "ignore" or math.isfinite(float(loss)):
        return False
    if action == "skip":
        return True
    where = first_not_finite(interpreter, values)
    fault = f"the loss of step {step} is {float(loss)}"
    fault += f"; {where} is the first result that is not finite" if where else ""
    raise NotFiniteError(fault, where=f"step {step}", fix=_fix(interpreter.program))


def _fix(program: Program) -> str:
    return _FIX + (_FLOAT16 if any(p.dtype == torch.float16 and p.requires_grad for p in program.params) else "")


def skips_gradient(action: Action, norm: Tensor, model: Any) -> bool:
    """Return whether a step updates nothing, by the global 2-norm of its gradient, 0-dim. Collective.

    Backward can make a nan of a finite loss (square root of 0). A norm that overflows counts as finite if all gradients
    are. model: of this rank (shardc.runtime.step.local_model).
    """
    if action == "ignore" or math.isfinite(float(norm)):
        return False
    program, params, step = model.program, model.owned, model.rng.step + 1
    grads = ((params[p.name].grad if p.name in params else None) for p in program.params)
    flags = [int(g is not None and not bool(g.isfinite().all())) for g in grads]
    names = [p.fqn for p, ranks in zip(program.params, model.mesh.sum_on_host(flags), strict=True) if ranks]
    if action == "stop" and names:
        more = f" and {len(names) - _NAMED} more parameters" if len(names) > _NAMED else ""
        fault = f"the loss of step {step} is finite, but not the gradient of {', '.join(names[:_NAMED])}{more}"
        raise NotFiniteError(fault, where=f"step {step}", fix=_fix(program))
    return bool(names)


def first_not_finite(interpreter: Interpreter, values: Sequence[Mapping[str, Any]]) -> str:
    """Rerun forward op by op, on all ranks and stages, and name the first op whose result is not finite.

    values: per microbatch {placeholder: value}. Returns the op with its module and line; "" if all results of forward
    are finite on every rank.
    """
    program, mesh = interpreter.program, interpreter.mesh
    bad: dict[fx.Node, bool] = {}
    graphs = {s: on_device(program.stages[s].graph, mesh.device) for s in interpreter.stages}
    with ExitStack() as stack:
        for s, g in graphs.items():
            run = fx.GraphModule(nn.Module(), watched(g, bad))
            stack.enter_context(changed(interpreter.stages[s], _run=run))
        interpreter.evaluate(values)
    # nodes are numbered through all stages: the first in forward has the lowest number
    starts = list(accumulate((len(stage.graph.nodes) for stage in program.stages), initial=0))
    every = [0] * mesh.layout.world
    every[mesh.rank] = min((starts[s] + i for s, g in graphs.items() if (i := _first(g, bad)) >= 0), default=starts[-1])
    first = min(mesh.sum_on_host(every))
    if first == starts[-1]:
        return ""
    stage = bisect_right(starts, first) - 1
    return named(list(program.stages[stage].graph.nodes)[first - starts[stage]])


def named(node: fx.Node) -> str:
    """Return the name of an op, with its module and line in the model."""
    return f"{node.name} of {source}" if str(source := source_of(node)) else node.name


def watched(graph: fx.Graph, bad: dict[fx.Node, bool]) -> fx.Graph:
    """Return a copy of a graph that adds to `bad`, as it runs, each node with a nan (True) or only an inf (False)."""
    env: dict[fx.Node, fx.Node] = {}
    copy = copy_graph(graph, env)
    first = next(n for n in copy.nodes if n.op != "placeholder")
    for n, copied in env.items():

        def look(result: Any, node: fx.Node = n) -> None:
            for x in result if isinstance(result, tuple) else (result,):
                if isinstance(x, Tensor) and continuous(x) and x.itemsize > 1:
                    if bool(x.isnan().any()):
                        bad[node] = True
                    elif bool(x.isinf().any()):
                        bad.setdefault(node, False)

        with copy.inserting_before(first if n.op == "placeholder" else copied.next):
            copy.call_function(look, (copied,))
    return copy


def _first(graph: fx.Graph, bad: Mapping[fx.Node, bool]) -> int:
    """Return the number of the first op that makes a nan, or else an inf; -1 if all results are finite.

    An inf counts if a gradient flows through it and no operand has one: masks are made of -inf on purpose.
    """
    ops = [(i, n) for i, n in enumerate(graph.nodes) if n.op == "call_function" and n in bad]
    nans = (i for i, n in ops if bad[n])
    infs = (i for i, n in ops if requires_grad(n) and bad.keys().isdisjoint(n.all_input_nodes))
    return next(chain(nans, infs), -1)
