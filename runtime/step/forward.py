"""Run a forward-only program on this rank's part of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.data.loader import Loader
from shardc.runtime.step.engine import Engine


class Forward(Engine):
    """Runs one rank's part of a forward-only program: an engine without an optimizer, which can be called.

    Made by `program.forward(...)`, in each process of torchrun or thread of loopback. Its arguments are those of an
    Engine (shardc.runtime.step.engine) that concern weights, and it has an engine's `evaluate_all`, `score`,
    `score_all`, `generate`, `load`, `full_state_dict` and `weights_to`.

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
        super().__init__(program, model, None, seed, weights=weights, check=check, broadcast=broadcast, mesh=mesh)

    def __call__(
        self, batch: Any, *, choices: Mapping[str, Any] | None = None, local: bool = False, gather: bool = False
    ) -> dict[str, Tensor]:
        """Return {name: value} of a global batch (local=True: this rank's part of one).

        Values with rows have this rank's rows, split as the spec's `outputs` says; gather=True: all rows on every rank.
        choices: as for `Engine.step`.
        Single numbers are the whole batch's. A batch of fewer rows or another length is compiled for when it comes.
        """
        values: dict[str, Tensor] = self.evaluate(batch, choices=choices, local=local, gather=gather)
        return values

    def loader(self, dataset: Any, batch_size: int | None = None, **options: Any) -> Loader:
        """Return this rank's parts of a dataset, in order, for calls with local=True: see Engine.loader."""
        return super().loader(dataset, batch_size, **{"name": None, "shuffle": False, **options})

    @property
    def engine(self) -> Engine:
        """The engine behind it: itself."""
        return self

    def __repr__(self) -> str:
        return f"<Forward of {self.program!r}>"
