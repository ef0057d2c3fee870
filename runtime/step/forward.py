"""Run a forward-only program on this rank's part of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.data.loader import Loader
from shardc.runtime.step.engine import Engine


class Forward:
    """Runs one rank's part of a forward-only program.

    Made by `program.forward(...)`, in each process of torchrun or thread of loopback. The arguments are those of an
    Engine (shardc.runtime.step.engine) that concern weights.

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
            fix = "shardc.compile(..., forward=True); or use program.engine(model).evaluate(batch)"
            raise ShardcError(fault, where="program.forward", fix=fix)
        self.engine = Engine(program, model, None, seed, weights=weights, check=check, broadcast=broadcast, mesh=mesh)
        self.program, self.mesh = program, self.engine.mesh

    def __call__(self, batch: Any, *, local: bool = False, gather: bool = False) -> dict[str, Tensor]:
        """Return {name: value} of a global batch (local=True: this rank's part of one).

        Values with rows have this rank's rows, split as the spec's `outputs` says; gather=True: all rows on every rank.
        Single numbers are the whole batch's. A batch of fewer rows or another length is compiled for when it comes.
        """
        values: dict[str, Tensor] = self.engine.evaluate(batch, local=local, gather=gather)
        return values

    def score(self, batch: Any, *, local: bool = False, gather: bool = False) -> Tensor:
        """Return log-probabilities of the targets of the loss: see Engine.score."""
        return self.engine.score(batch, local=local, gather=gather)

    def score_all(
        self, batches: Iterable[Any], *, local: bool = False, each: Callable[[Tensor], None] | None = None
    ) -> dict[str, float]:
        """Return the count, mean and perplexity of scores over batches: see Engine.score_all."""
        return self.engine.score_all(batches, local=local, each=each)

    def evaluate_all(self, batches: Iterable[Any], *, local: bool = False) -> dict[str, float]:
        """Return {name: mean or sum} of the single numbers over batches: see Engine.evaluate_all."""
        return self.engine.evaluate_all(batches, local=local)

    def generate(self, prompts: Any, max_new_tokens: int = 20, **options: Any) -> list[list[int]]:
        """Return the new tokens of each prompt: see Engine.generate."""
        return self.engine.generate(prompts, max_new_tokens, **options)

    def load(self, folder: str | Path) -> None:
        """Read parameters and buffers from a checkpoint that an engine saved, on any mesh. Collective."""
        self.engine.load(folder)

    @property
    def weights_holder(self) -> Any:
        """The object that holds the weights."""
        return self.engine.weights_holder

    def weights_to(self, other: Any) -> Any:
        """Copy the weights to an engine, or to the runner of another program: see Engine.weights_to."""
        return self.engine.weights_to(other)

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """Return this rank's parts of a dataset, for calls with local=True: see Engine.loader."""
        return self.engine.loader(dataset, batch_size, **{"name": None, "shuffle": False, **options})

    def __repr__(self) -> str:
        return f"<Forward of {self.program!r}>"
