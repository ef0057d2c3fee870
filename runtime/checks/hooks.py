"""Define the moments of an engine at which checks inspect the user's code and other ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.runtime.mesh.agreement import Fact

if TYPE_CHECKING:
    from shardc.ir.program import Program
    from shardc.runtime.data.loader import Loader
    from shardc.runtime.rng import Rng
    from shardc.runtime.state.sources import Weights
    from shardc.runtime.zero.buckets import Buckets


class Model(Protocol):
    """A rank's part of the model as checks see it (shardc.runtime.step.local_model)."""

    program: Program
    mesh: Any
    rng: Rng
    buckets: Buckets

    @property
    def owned(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def written(self) -> bool: ...


class CheckHooks:
    """Checks nothing at any moment: for an engine with check=False. EngineChecks has the checks.

    `compares`: whether calls are compared over ranks.
    """

    compares = False

    def making(self, seed: int, **options: Any) -> None:
        """Check seed and options, before weights are read."""

    def weights(self, model: Any, given: Weights) -> None:
        """Check the source of the weights, before any is read. model: as the user passed it."""

    def whole_weight(self, x: Any, whole: Tensor) -> None:
        """Record a whole weight or buffer, before it is cut."""

    def parts(self, parts: Iterator[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        """Record this rank's parts of parameters, as they are made."""
        return parts

    def new_model(self, model: Any, module: nn.Module | None = None) -> None:
        """Check new parameters and buffers, a `Model`; watch a module's submodules and parameters from now on."""

    def optimizer(self, optimizer: Optimizer | None) -> None:
        """Check the new optimizer, before its schedulers are made."""

    def schedule(self, schedulers: Any) -> None:
        """Record schedulers that were made, stepped or loaded."""

    def compare_every(self, steps: int) -> None:
        """Set after how many steps replicas are compared; 0: never."""

    def loader(self, loader: Loader) -> None:
        """Check a new loader."""

    def call(self, name: str, *facts: Fact, steps: bool = False) -> None:
        """Compare facts as all ranks begin a call. facts: its arguments; steps: also of the steps so far."""

    def forward(self, call: str, *, training: bool) -> None:
        """Check user code before a step or an evaluation."""

    def batch(self, batch: Any, *, local: bool) -> bool:
        """Check a batch, in the compiled dtypes and lengths. Return whether parts have other numbers of rows."""
        return False

    def ragged(self, batch: Any, take: Any) -> None:
        """Check rows of several lengths (shardc.runtime.checks.padding). take: makes the inputs of a step."""

    def read_params(self) -> None:
        """Start checks of parameters when the user reads `engine.params`."""

    def gradients(self, *, user_reads: bool = False) -> None:
        """Mark summed gradients that are parts. user_reads: the user reads them before an update."""

    def loss(self, loss: Any) -> Any:
        """Return the loss as the user gets it."""
        return loss

    def stepping(self) -> AbstractContextManager[None]:
        """Return a context in which the engine may step its optimizer."""
        return nullcontext()

    def updated(self) -> None:
        """Compare replicas after a step, if that is due."""

    def saving(self, optimizer: Optimizer | None) -> None:
        """Compare replicas before a checkpoint with this optimizer's state is written."""

    def note_weights_read(self) -> None:
        """Record that the user got whole weights."""

    def follow(self, other: CheckHooks) -> None:
        """Take over the checks of an engine whose weights this one's engine takes over."""

    # --- of a module alone

    def mode(self, *, training: bool) -> None:
        """Check the user's call of `train()`."""

    def loss_gradient(self, gradient: Tensor) -> None:
        """Record the gradient of the loss that a backward begins with."""

    def returned(self, result: Any) -> Any:
        """Return a forward's result as the user gets it: the loss, or (the loss, {name: value})."""
        return result

    def owners_step(self, optimizer: Optimizer, *, written: bool) -> None:
        """Compare facts before owners of whole matrices step. written: user code wrote to parameters."""

    def loaded_unmarked(self) -> None:
        """Record that loaded weights do not say which rank saved them."""

    def copy(self, model: Any) -> CheckHooks:
        """Return the checks for a copy of the module, such as an average of weights. model: source of weights."""
        return self
