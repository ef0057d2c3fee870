"""The optimizer of a loop of the user's own around a module, where owners step whole matrices: its step takes the
gradients to the owners first, and the new values back to all that store some of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardc.runtime.matrices.whole import WholeMatrices
from shardc.runtime.zero.optimizer_list import class_of


class OwnersOptimizer(Optimizer):
    """To the user's loop and its schedulers it is an optimizer with the groups of those that it consists of.

    made: what the user's function returned, as one, after it got what it works on; matrices: those that this rank owns.
    stored: the module's parameters, whose gradients it takes and lets go. agree: called before a step with the
    optimizer and whether somebody wrote to parameters; compares them between ranks.

    .made, .matrices; .param_groups and .state are those of `made`.
    """

    def __init__(
        self,
        made: Optimizer,
        matrices: WholeMatrices,
        stored: Iterable[nn.Parameter],
        agree: Callable[[Optimizer, bool], None],
    ) -> None:
        # without Optimizer.__init__: that would make groups of its own
        self.made, self.matrices = made, matrices
        self._stored, self._agree = list(stored), agree
        self._take_over()

    def _take_over(self) -> None:
        self.param_groups, self.defaults, self.state = self.made.param_groups, self.made.defaults, self.made.state

    def step(self, closure: Any = None) -> Any:
        """One step of all matrices, and of what else it has. closure: computes the loss, which is returned. Collective.

        Where backward reached none of the parameters, nothing is done."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(p.grad is None for p in self._stored):
            return loss
        written = self.matrices.written
        self._agree(self.made, written)
        if written:  # weights were loaded, or averaged
            self.matrices.gather()
        self.matrices.take_gradients()
        self.made.step()
        self.matrices.publish()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all of the module's parameters, whoever steps them."""
        for p in self._stored:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Of what this rank steps."""
        return self.made.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """state_dict: of this rank's own `state_dict()`; checkpoints of any mesh are read by `module.load`."""
        self.made.load_state_dict(state_dict)
        self._take_over()

    def __repr__(self) -> str:
        return f"<{class_of(self.made)} of whole matrices, of which this rank owns {len(self.matrices.owned)}>"
