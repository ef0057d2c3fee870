"""Step whole matrices in a custom loop: gradients go to the owners, and the new values come back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardc.runtime.state.owners import Owners, OwnersOptimizer
from shardc.runtime.zero.several_optimizers import class_of


class MatricesOptimizer(OwnersOptimizer):
    """An optimizer for a custom loop and its schedulers, with the groups of its members.

    made: the result of the user's function as one optimizer, with its final parameters; owners: of its matrices.
    .param_groups and .state are those of `made`. stored: the module's parameters, whose gradients it takes and
    frees. agree: compares the optimizer, and whether parameters were written to, between ranks before a step.
    """

    def __init__(
        self,
        made: Optimizer,
        owners: Owners,
        stored: Iterable[nn.Parameter],
        agree: Callable[[Optimizer, bool], None],
    ) -> None:
        # without Optimizer.__init__, which would make new groups
        self.made, self.owners = made, owners
        self._stored, self._agree = list(stored), agree
        self._take_over()

    def _take_over(self) -> None:
        self.param_groups, self.defaults, self.state = self.made.param_groups, self.made.defaults, self.made.state

    def step(self, closure: Any = None) -> Any:
        """Step everything, unless backward reached no parameter; return the closure's loss. Collective."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if all(p.grad is None for p in self._stored):
            return loss
        written = self.owners.written
        self._agree(self.made, written)
        if written:  # weights were loaded, or averaged
            self.owners.gather()
        with self.owners.stepping():
            self.made.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all of the module's parameters, on any owner."""
        for p in self._stored:
            if set_to_none or p.grad is None:
                p.grad = None
            else:
                p.grad.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of what this rank steps."""
        return self.made.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load this rank's own `state_dict()`; `module.load` reads checkpoints of any mesh."""
        self.made.load_state_dict(state_dict)
        self._take_over()

    def __repr__(self) -> str:
        return f"<{class_of(self.made)} of whole matrices, of which this rank owns {len(self.owners.owned)}>"
