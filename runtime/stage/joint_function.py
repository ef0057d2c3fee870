"""Make a differentiable function of a module's forward and backward graphs, as AOTAutograd does.

    loss = module(**part)      the forward graph has run; the loss's node keeps the inputs of the backward graph
    loss.backward()            the node runs the backward graph, which puts gradients into buckets

Parameters in buckets get their gradients when backward ends, as the sum over ranks. The node returns the other
gradients, so that autograd adds them to `.grad`, calls hooks, and supports torch.autograd.grad.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from shardc.errors import ShardcError
from shardc.runtime.ops.with_backward import with_backward
from shardc.torch_private import after_backward, engine_executes, keeps_graph

if TYPE_CHECKING:
    from shardc.runtime.stage.joint_stage import JointStage
    from shardc.runtime.step.module_running import Running

_AROUND = "a term that needs gradients itself (a gradient penalty) belongs in the loss function,"
_AROUND += " shardc.compile(model, batch, spec, loss=...)"


class JointCall:
    """One forward of a module that waits for its backward. values: the stage's inputs, by name."""

    def __init__(self, stage: JointStage, values: Mapping[str, Any], running: Running) -> None:
        self._stage, self._running, self._buckets = stage, running, running.buckets
        rng = copy.copy(values["rng"])  # backward uses the masks of this forward
        self._values = {**values, "rng": rng}
        self._version: int | None = None  # of the parameters, when forward read them
        self._kept: dict[str, Any] | None = None
        self._ended = False

    def forward(self) -> Any:
        """Run the forward graph; return (loss, new values)."""
        returned, self._kept = self._stage.forward(self._values["mesh"], *self._values.values())
        self._running.updates.finish_gather()  # a gather in the background writes to parameters
        if self._version is None:
            self._version = self._buckets.version()
        return returned[:2]

    def backward(self, g: Tensor) -> list[Tensor | None]:
        """Run the backward graph. g: the gradient of the loss. Returns gradients of `Buckets.unsummed`."""
        self._check()
        buckets = self._buckets
        if not buckets.active:  # if two losses share one backward, the first one starts it
            after_backward(self._running.finish_backward)
        alone = set(self._running.waiting) == {self}
        buckets.start(first=not buckets.active, last=alone)
        self._running.checks.loss_gradient(g)
        keeps = keeps_graph()
        if self._kept is None:  # an earlier backward with `retain_graph=True` used it up
            self.forward()
        assert self._kept is not None
        kept, self._kept, self._ended = self._kept, None, not keeps
        try:
            kept |= self._stage.named_grads({}, g)
            self._stage.backward(kept, self._values, buckets.launch if alone else _nothing)
            buckets.pause()
        finally:
            if not keeps:
                self._running.waiting.discard(self)
                self._values = {}
        return buckets.take_unsummed()

    def _check(self) -> None:
        """Raise ShardcError for a backward that cannot run, or would give wrong gradients."""
        if self._ended:
            fix = "call module(...) again, or loss.backward(retain_graph=True) before"
            raise ShardcError("the backward of this loss has run already", where="loss.backward()", fix=fix)
        if self._buckets.version() != self._version:
            fault = "parameters were written to between the forward of this loss and its backward"
            raise ShardcError(fault, where="loss.backward()", fix="call optimizer.step() after loss.backward()")
        if torch.is_grad_enabled():
            fault = "gradients of a program have no graph, by which they could be differentiated"
            raise ShardcError(fault, where="loss.backward(create_graph=True)", fix=f"call loss.backward(); {_AROUND}")
        self._check_whole()

    def _check_whole(self) -> None:
        """Refuse a backward that skips the sums over ranks: it would return no gradient, or a rank's part."""
        for p in (self._buckets.owned[name] for name in self._running.summed):
            if not p.requires_grad:
                continue
            runs = engine_executes(get_gradient_edge(p).node)
            if runs is None:
                fault = "gradients of parameters are summed over ranks when backward() ends, and are in .grad: "
                fault += "autograd.grad would find none, or only that of this rank's part"
                fix = f"call loss.backward() and read each p.grad; {_AROUND}"
                raise ShardcError(fault, where="torch.autograd.grad(loss, module.parameters())", fix=fix)
            if not runs:
                fault = "with inputs=, backward would skip the sums of gradients over ranks: no gradient would arrive"
                fix = "call loss.backward(), and set the .grad that you do not need to None"
                raise ShardcError(fault, where="loss.backward(inputs=...)", fix=fix)


def _nothing() -> None:
    pass


def differentiable(loss: Tensor, call: JointCall, *params: nn.Parameter) -> Tensor:
    """Return a call's loss as a differentiable function of all trained parameters, unbucketed ones first."""
    result: Tensor = with_backward(
        lambda loss, *params: (loss.clone(), ()),  # a view could not be written to: `loss += penalty`
        lambda needs, g: (None, *call.backward(g)),
        loss,
        *params,
        once=False,  # JointCall refuses a second backward, with a fix
    )
    return result
