"""ForwardOnly: compile a program without a backward (`shardc.compile(..., forward=...)`).

    before   logits = linear(h, w)                  f32[8, 16, 512] grad
             nll = nll(logits_rows, labels_rows)    f32[128] grad
             loss = div(sum(nll), count)
    after    logits = linear(h, w)                  f32[8, 16, 512]           no value has a gradient
             nll = nll(logits_rows, labels_rows)    f32[128]
             score = reshape(neg(nll), [8, 16])     f32[8, 16]                `forward="score"`: the log-probability of
             return (None, (score,))                                          each target of the loss, and no loss

So partition inserts no collectives for gradients, and nothing is kept for a backward. The pass runs after annotate,
which distinguishes activations from masks by their gradients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import calls, copy_graph, map_value, operands_of, source_of, value_of
from shardc.ir.metadata import Value
from shardc.ir.outputs import MEAN_SCORE, SCORE, SCORED, Output
from shardc.ir.program import Program
from shardc.ir.types import behind
from shardc.passes.base import Pass
from shardc.runtime import ops
from shardc.spec import Precision, Spec
from shardc.spec.step_sections import Execution

aten = torch.ops.aten
_VIEWS = {aten.reshape.default, aten.view.default, aten.flatten.using_ints, aten._unsafe_view.default}


def spec_of(spec: Spec) -> tuple[Spec, tuple[str, ...]]:
    """Return the part of a spec that a forward-only program uses, and a note on the rest."""
    data = spec.data
    zero = data.zero if data.zero == 3 else 0
    left: dict[str, bool] = {
        "checkpoint": bool(spec.checkpoint),
        "execution": spec.execution != Execution(),
        f"data: {{zero: {data.zero}}}": data.zero in (1, 2),
        "data: {offload: {optimizer: ...}}": data.offload.optimizer != "none",
        "precision: {loss_scale: ...}": spec.precision.loss_scale is not None,
    }
    names = [name for name, present in left.items() if present]
    offload = data.offload.model_copy(update={"optimizer": "none"})
    used = replace(
        spec,
        checkpoint=(),
        execution=Execution(),
        data=data.model_copy(update={"zero": zero, "offload": offload}),
        precision=spec.precision.model_copy(update={"loss_scale": Precision().loss_scale}),
    )
    if not names:
        return spec, ()
    return used, (f"forward only: {', '.join(names)} of the spec is only for training, and is ignored",)


@dataclass(frozen=True)
class ForwardOnly(Pass):
    """Removes gradients from the global graph; with `forward="score"`, the loss too."""

    def applies(self, program: Program) -> bool:
        return bool(self.options.forward)

    def run(self, program: Program) -> Program:
        graph = copy_graph(program.graph)
        outputs = program.outputs
        if self.options.forward == "score":
            returned: Any = graph.output_node().args[0]
            beside = zip(outputs, returned[1][len(returned[1]) - len(outputs) :], strict=True)
            choices = {o: n for o, n in beside if o.name in program.features.get("choices", ())}
            scores = _score(graph)
            outputs = tuple(
                Output(name, value_of(n).shape, value_of(n).dtype, divisor=SCORED if name == MEAN_SCORE else "")
                for name, n in scores.items()
            )
            outputs = (*outputs, *choices)
            graph.output_node().args = ((None, (*scores.values(), *choices.values())),)
        for node in list(graph.nodes):
            if node.target is aten.detach.default:
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
            elif node.meta.get("value") is not None:
                node.meta["value"] = map_value(lambda v: replace(v, requires_grad=False), node.meta["value"])
        graph.eliminate_dead_code()
        graph.lint()
        return replace(
            program,
            graph=graph,
            params=tuple(replace(p, requires_grad=False) for p in program.params),
            buffers=tuple(replace(b, updated=b.updated and b.cache) for b in program.buffers),
            outputs=outputs,
        )


def _score(graph: fx.Graph) -> dict[str, fx.Node]:
    """Write and return the log-probabilities of the targets of the loss's cross entropy.

    They have the targets' shape in the batch. Also returns their sum, and how many targets count.
    """
    returned: Any = graph.output_node().args[0]
    of_loss = behind([returned[0]])
    losses = [n for n in calls(graph) if n.target is ops.nll and n in of_loss]
    if len(losses) != 1:
        where = ", ".join(dict.fromkeys(str(source_of(n)) for n in losses))
        raise ShardcError(
            f"the loss has {len(losses)} cross entropies of class indices ({where})"
            if losses
            else "there is no cross entropy of class indices in the loss: it does not say what to score",
            where="score",
            fix="say which log-probabilities to return: forward=lambda output, batch:"
            " -F.cross_entropy(output.logits.flatten(0, -2), batch['labels'].flatten(), reduction='none')",
        )
    (nll,) = losses
    _, target, *ignore = nll.args
    assert isinstance(target, fx.Node)
    per_target, shape = value_of(nll), _unflattened(target)
    with graph.inserting_before(graph.output_node()):
        score = _node(graph, aten.neg.default, (nll,), SCORE, per_target, nll)
        wide = replace(per_target, dtype=torch.float64)
        summed = _node(graph, aten._to_copy.default, (score,), "score_wide", wide, nll, dtype=wide.dtype)
        summed = _node(graph, aten.sum.default, (summed,), "score_sum", replace(wide, shape=()), nll)
        counted = Value(value_of(target).shape, torch.bool)
        count = _node(graph, aten.ne.Scalar, (target, *(ignore or (-100,))), "scored", counted, nll)
        count = _node(graph, aten.sum.default, (count,), "score_count", Value((), torch.int64), nll)
        if shape != per_target.shape:
            rows = replace(per_target, shape=shape)
            score = _node(graph, aten.reshape.default, (score, list(shape)), "score_rows", rows, nll)
    return {SCORE: score, MEAN_SCORE: summed, SCORED: count}


def _unflattened(target: fx.Node) -> tuple[int, ...]:
    """Return the shape of the targets before they were flattened to rows."""
    while target.target in _VIEWS:
        (before,) = operands_of(target)
        if len(value_of(before).shape) < len(value_of(target).shape):
            break
        target = before
    return value_of(target).shape


def _node(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], name: str, value: Value, like: fx.Node, **kwargs: Any
) -> fx.Node:
    new = graph.create_node("call_function", target, args, kwargs, name=name)
    new.meta = {"value": value, "source": source_of(like)}
    return new
