"""What a user's `optimizer(params)` is given: (name, parameter) pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardc.ir.matrices import inner as matrices_between
from shardc.ir.program import Program


class _Pair(tuple[str, nn.Parameter]):
    """One of them. What is asked of it as of a parameter, such as .ndim, is told that it is a pair."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"optimizer(params) gets (name, parameter) pairs, and this is one, without .{name}: write"
            " `for name, p in params`, and p is the parameter"
        )


class NamedParameters(list[tuple[str, nn.Parameter]]):
    """The (name, parameter) pairs that `optimizer=` receives: this rank's parts of the parameters that are trained.

    torch.optim's optimizers, and all that derive from torch.optim.Optimizer, take such pairs as they take plain
    parameters.
    known: {name: all names of that parameter} of the whole model, also of those that other ranks hold: a tied weight
    answers to each. inner: the names of those that are matrices between tables and head (shardc.ir.matrices.inner)."""

    def __init__(
        self,
        pairs: Iterable[tuple[str, nn.Parameter]],
        known: Mapping[str, tuple[str, ...]],
        inner: Iterable[str] = (),
    ) -> None:
        super().__init__(map(_Pair, pairs))
        self.known, self.inner = dict(known), frozenset(inner)

    def __getattr__(self, name: str) -> Any:
        if name in ("parameters", "named_parameters", "modules", "named_modules", "children"):
            raise AttributeError(
                f"optimizer(params) gets (name, parameter) pairs, not the model, so there is no .{name}(): torch's"
                " optimizers take them as they are, AdamW(params, lr=...); the parameters alone are"
                " [p for name, p in params]"
            )
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @classmethod
    def of(cls, program: Program, params: Mapping[str, nn.Parameter]) -> NamedParameters:
        """params: this rank's, by placeholder name."""
        trained = [p for p in program.params if p.requires_grad]
        known = {p.fqn: (p.fqn, *p.names) for p in trained}
        found = matrices_between(program)
        inner = [p.fqn for p in trained if p.name in found]
        return cls([(p.fqn, params[p.name]) for p in trained if p.name in params], known, inner)
