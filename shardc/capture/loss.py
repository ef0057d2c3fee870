"""What is captured of a model: the loss alone, of its output or by a function of the user's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from shardc.capture.batch import Leaves
from shardc.capture.forward_arguments import arguments
from shardc.errors import ShardcError
from shardc.ir.source import of_function
from shardc.runtime.ops.torch_library import with_gradient_of
from shardc.torch_private import traced_node

Loss = Callable[[Any, Any], Tensor]


class LossOf(nn.Module):
    """Takes the batch's tensors, returns only the scalar loss: caches, output classes and logits die in the graph."""

    def __init__(self, model: nn.Module, leaves: Leaves, loss: Loss | None) -> None:
        super().__init__()
        self.model, self.leaves, self.loss = model, leaves, loss
        self.side: list[Tensor] = []  # terms of the loss of which only the gradient counts

    def forward(self, *tensors: Tensor) -> Tensor:
        self.leaves.nodes = list(map(traced_node, tensors))
        batch = self.leaves.batch(tensors)
        args, kwargs = arguments(self.model, batch, self.loss is not None)
        output = self.model(*args, **kwargs)
        scalar = (
            self.loss(output, batch)
            if self.loss is not None
            else default_loss(output, of_function(self.model.forward).line)
        )
        if not isinstance(scalar, Tensor) or scalar.numel() != 1 or not scalar.is_floating_point():
            what = f"the loss is {_described(scalar)}, not a scalar"
            where = of_function(self.loss or self.model.forward).line
            raise ShardcError(what, where=where, fix="return one floating-point number, e.g. loss.mean()")
        scalar = scalar.reshape(()) if scalar.dim() else scalar
        return with_gradient_of(scalar.detach(), sum(self.side, scalar)) if self.side else scalar


def default_loss(output: Any, where: str = "") -> Any:
    """The loss in a model's output: the output itself, its `.loss`, its "loss", its first element or the only number in
    it: `(logits, loss)`. where: the model's line, for the error if there is none.
    """
    candidate = output
    if not isinstance(output, Tensor):
        candidate = getattr(output, "loss", None)
        if candidate is None and isinstance(output, Mapping):
            candidate = output.get("loss")
        elif candidate is None and isinstance(output, (tuple, list)) and output:
            numbers = [x for x in output if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
            candidate = output[0] if len(numbers) != 1 else numbers[0]
    if not isinstance(candidate, Tensor) or candidate.numel() != 1:
        raise ShardcError(
            f"the model returns {_described(output)}: there is no scalar loss in it",
            where=where,
            fix=(
                "define loss(output, batch) in the model's file, in Python pass loss=lambda output, batch: ...; "
                "or give the model the labels with which it computes its loss itself"
            ),
        )
    return candidate


def _described(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)} and {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
