"""Define the argument of a user's `optimizer(params)`: (name, parameter) pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from shardc.ir.matrices import inner as matrices_between
from shardc.ir.program import Program


class _Pair(tuple[str, nn.Parameter]):
    """One pair. Attributes of a parameter, such as .ndim, raise an error that explains it."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"optimizer(params) gets (name, parameter) pairs, and a pair has no .{name}: write"
            " `for name, p in params`, and p is the parameter"
        )


class NamedParameters(list[tuple[str, nn.Parameter]]):
    """The (name, parameter) pairs for `optimizer=`: this rank's parts of the trained parameters.

    torch's optimizers, and all subclasses of torch.optim.Optimizer, accept such pairs in place of plain parameters.
    known: {name: all names of that parameter} of the whole model, also of those on other ranks: a tied weight has
    several. inner: the names of the matrices between tables and head (shardc.ir.matrices.inner).
    """

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
        """Build it from this rank's parameters, by placeholder name."""
        trained = [p for p in program.params if p.requires_grad]
        known = {p.fqn: (p.fqn, *p.names) for p in trained}
        matrices = matrices_between(program)
        inner = [p.fqn for p in trained if p.name in matrices]
        return cls([(p.fqn, params[p.name]) for p in trained if p.name in params], known, inner)
