"""What runs a forward-only program: this rank's part of the weights, and nothing of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.data.loader import Loader
from shardc.runtime.reshard.between import End, Reshard
from shardc.runtime.step.engine import Engine


class Forward:
    """Runs one rank's part of a forward-only program. Made by `program.forward(...)`, in each process of torchrun or
    thread of loopback.

    The arguments are those of an Engine (shardc.runtime.step.engine) that have to do with weights.

    >>> run = program.forward(model)             # doctest: +SKIP
    >>> logits = run(batch)["logits"]            # doctest: +SKIP
    """

    def __init__(
        self,
        program: Program,
        model: Any = None,
        seed: int = 0,
        *,
        weights: Any = None,
        check: bool = True,
        broadcast: bool = False,
        mesh: Any = None,
    ) -> None:
        if not program.forward_only:
            fault = "the program trains: it has a loss, and gradients"
            fix = "shardc.compile(..., forward=True); or program.engine(model).evaluate(batch), of this one"
            raise ShardcError(fault, where="program.forward", fix=fix)
        self.engine = Engine(program, model, None, seed, weights=weights, check=check, broadcast=broadcast, mesh=mesh)
        self.program, self.mesh = program, self.engine.mesh

    def __call__(self, batch: Any, *, local: bool = False, gather: bool = False) -> dict[str, Tensor]:
        """{name: value} of a global batch (local=True: this rank's own part of one). Of values with rows, this rank's
        rows, split as the spec's `outputs` says; gather=True: all of them, whole, on every rank. Single numbers are the
        whole batch's. A batch of fewer rows or another length is compiled for when it comes.
        """
        values: dict[str, Tensor] = self.engine.evaluate(batch, local=local, gather=gather)
        return values

    def score(self, batch: Any, *, local: bool = False, gather: bool = False) -> Tensor:
        """Log-probabilities of the targets of the loss: see Engine.score."""
        return self.engine.score(batch, local=local, gather=gather)

    def score_all(
        self, batches: Iterable[Any], *, local: bool = False, each: Callable[[Tensor], None] | None = None
    ) -> dict[str, float]:
        """Their number, mean and perplexity over batches: see Engine.score_all."""
        return self.engine.score_all(batches, local=local, each=each)

    def evaluate_all(self, batches: Iterable[Any], *, local: bool = False) -> dict[str, float]:
        """{name: mean or sum} of the single numbers over batches: see Engine.evaluate_all."""
        return self.engine.evaluate_all(batches, local=local)

    def generate(self, prompts: Any, max_new_tokens: int = 20, **options: Any) -> list[list[int]]:
        """The new tokens of each prompt: see Engine.generate."""
        return self.engine.generate(prompts, max_new_tokens, **options)

    def load(self, folder: str | Path) -> None:
        """Take parameters and buffers of a checkpoint that an engine saved, on any mesh. Collective."""
        self.engine.load(folder)

    @property
    def weights_end(self) -> End:
        """What has the weights."""
        return self.engine.weights_end

    def weights_to(self, other: Any) -> Reshard:
        """Copy the weights into an engine, or into what runs another program: see Engine.weights_to."""
        return self.engine.weights_to(other)

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """This rank's parts of a dataset, for calls with local=True: see Engine.loader."""
        return self.engine.loader(dataset, batch_size, **{"name": None, "shuffle": False, **options})

    def __repr__(self) -> str:
        return f"<Forward of {self.program!r}>"
