"""Define where an optimizer steps parameters: on the ranks that store them, unless an optional feature says more."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from shardc.errors import Errors
from shardc.runtime.state.boxes import Part
from shardc.runtime.state.checkpoint_index import Index


class Owners:
    """Every rank steps what it stores, so that nothing moves. A feature's owners step whole parameters.

    moves: whether gradients go to owners. nbytes: that this rank sends in each message of a step. owned: what it steps
    as their owner, {name in checkpoints: parameter}.
    """

    moves = False
    nbytes: Sequence[int] = ()
    owned: Mapping[str, nn.Parameter] = MappingProxyType({})

    @property
    def written(self) -> bool:
        """Whether user code wrote to stored parts of which owners have copies."""
        return False

    def note(self) -> None:
        """Note that the owners have the current values of the stored parts."""

    def gather(self) -> None:
        """Send the stored parts to the owners. Collective."""

    def forget(self) -> None:
        """Drop gradients of an earlier step, before a step."""

    def begin(self, names: Iterable[str]) -> None:
        """Start to send the final gradients of these parameters, while backward goes on. Collective."""

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context for the optimizer's step: gradients go to the owners, new values come back. Collective."""
        return nullcontext()

    def in_own_loop(
        self, optimizer: Optimizer, stored: Iterable[nn.Parameter], agree: Callable[[Optimizer, bool], None]
    ) -> Optimizer:
        """Return the optimizer for a custom loop.

        stored: the module's parameters. agree: compares the optimizer, and whether user code wrote to parameters,
        between ranks before a step.
        """
        return optimizer

    # --- in a checkpoint

    def groups(self, optimizer: Optimizer) -> list[dict[str, str] | None]:
        """Return {name in checkpoints: parameter's placeholder} of each group; None: it steps stored parts."""
        return [None] * len(optimizer.param_groups)

    def state_parts(self, optimizer: Optimizer, mesh: Any) -> tuple[dict[str, Part], dict[str, dict[str, Any]]]:
        """Return the state of what this rank owns: tensors as parts, the rest as JSON values by name."""
        return {}, {}

    def room_for(
        self, optimizer: Optimizer, index: Index, parts: dict[str, Part], errors: Errors, folder: str
    ) -> dict[str, dict[str, Any]]:
        """Make new state, to be filled, of what this rank owns. Adds its tensors to parts, faults to errors."""
        return {}


class OwnersOptimizer(Optimizer):
    """An optimizer for a custom loop whose step moves values to owners and back. made: as the user made it."""

    made: Optimizer
    owners: Owners
