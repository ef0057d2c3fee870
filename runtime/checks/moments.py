"""The moments of an engine at which checks look at what the user's code did, and at what other ranks have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.runtime.mesh.agreement import Fact

if TYPE_CHECKING:
    from shardc.runtime.data.loader import Loader
    from shardc.runtime.rng import Rng
    from shardc.runtime.state.sources import Weights
    from shardc.runtime.zero.buckets import Buckets


class Model(Protocol):
    """What checks see of a rank's part of the model (shardc.runtime.step.local_model)."""

    rng: Rng
    buckets: Buckets

    @property
    def owned(self) -> Mapping[str, nn.Parameter]: ...

    @property
    def buffers(self) -> Mapping[str, Tensor]: ...

    @property
    def written(self) -> bool: ...


class Moments:
    """Does nothing at any moment: an engine with check=False has this one. EngineChecks does all that is checked.

    `compares`: are calls compared over ranks?
    """

    compares = False

    def making(self, seed: int, **options: Any) -> None:
        """Before weights are read."""

    def weights(self, model: Any, given: Weights) -> None:
        """Weights are found, and none is read yet. model: as the user gave it."""

    def whole(self, x: Any, whole: Tensor) -> None:
        """A whole weight or buffer, before it is cut."""

    def parts(self, parts: Iterator[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        """This rank's parts of parameters, as they are made."""
        return parts

    def made(self, model: Model) -> None:
        """Parameters and buffers are there."""

    def optimizer(self, optimizer: Optimizer | None) -> None:
        """The optimizer is made, and no scheduler of it is."""

    def schedule(self, schedulers: Any) -> None:
        """Schedulers are made, stepped or loaded."""

    def options(self, **settable: Any) -> None:
        """Options of `engine.set`, also those that the engine is made with."""

    def loader(self, loader: Loader) -> None:
        """A loader is made."""

    def call(self, name: str, *facts: Fact, steps: bool = False) -> None:
        """All ranks begin a call. facts: its arguments; steps: it depends on the steps done."""

    def forward(self, call: str, *, training: bool) -> None:
        """Before a step or an evaluation."""

    def batch(self, batch: Any, *, local: bool) -> None:
        """A batch is given, in the compiled dtypes and lengths."""

    def read_params(self) -> None:
        """The user reads `engine.params`."""

    def gradients(self, *, handed_out: bool = False) -> None:
        """Gradients are summed. handed_out: the user reads them before an update."""

    def loss(self, loss: Any) -> Any:
        """The loss, as the user gets it."""
        return loss

    def stepping(self) -> AbstractContextManager[None]:
        """The engine steps its optimizer within."""
        return nullcontext()

    def updated(self) -> None:
        """A step has ended."""

    def saving(self, optimizer: Optimizer | None) -> None:
        """A checkpoint with this optimizer's state is about to be written."""

    def handed_out(self) -> None:
        """The user got whole weights."""

    def follow(self, other: Moments) -> None:
        """Go on for an engine whose weights this one's engine takes over."""

    # --- of a module alone

    def held(self, model: Any, parts: Any, held: Any, updates: Any) -> None:
        """Its parameters and buffers are registered under the model's names."""

    def mode(self, *, training: bool) -> None:
        """The user calls `train()`."""

    def loss_gradient(self, gradient: Tensor) -> None:
        """A backward begins with this gradient of the loss."""

    def returned(self, result: Any) -> Any:
        """What a forward returns: the loss, or (the loss, {name: value})."""
        return result

    def owners_step(self, optimizer: Optimizer, *, written: bool) -> None:
        """Owners of whole matrices are about to step. written: has anybody written to parameters?"""

    def last(self, call: str, fact: Fact) -> None:
        """A call after which no forward may come."""

    def loaded_unmarked(self) -> None:
        """Weights were loaded that do not say of which rank they are."""

    def copy(self, model: Any) -> Moments:
        """The checks of a copy of the module, such as an average of weights. model: what the weights came from."""
        return self
