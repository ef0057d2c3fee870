"""Hold the matrices that a rank owns, for the optimizers that need them whole.

    stored parts, with gradients        owners
    rank 0  w[0:2]  v[0:2]   ──────►   w whole, its gradient and its state
    rank 1  w[2:4]  v[2:4]   ──────►   v whole, its gradient and its state
                             ◄──────   the new values

An owner keeps its matrices between steps, beside the stored parts. So parameters move only back, and to owners again
only after a checkpoint, or the user, wrote to the stored parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.features.matrices.exchange import Exchange, Sending
from shardc.features.matrices.own_loop import MatricesOptimizer
from shardc.features.matrices.owners import owners, work
from shardc.features.matrices.program import Matrix
from shardc.features.matrices.routes import Routes
from shardc.ir.program import Program
from shardc.runtime.offload import Offload
from shardc.runtime.state.owners import Owners
from shardc.runtime.zero.optimizer_check import multiplies
from shardc.runtime.zero.several_optimizers import members_of
from shardc.runtime.zero.trained_params import trained_params

if TYPE_CHECKING:
    from shardc.features.matrices.stand_ins import MatrixStandIns


class WholeMatrices(Owners):
    """The matrices that one rank owns. Making it is collective.

    stored: its part of each parameter, by placeholder name. members: the optimizers that need whole matrices; their
    `stand_in`s (`shown`) are replaced by `.owned`: {matrix: parameter}. offload: stored parts may be outside of the
    device.
    """

    moves = True

    def __init__(
        self,
        program: Program,
        mesh: Any,
        stored: Mapping[str, nn.Parameter],
        shown: MatrixStandIns,
        members: Sequence[Optimizer],
        offload: Offload,
    ) -> None:
        self._program, trained = program, trained_params(program)
        costs: dict[Matrix, float] = {}
        #: For each group of each of the optimizers: its matrices, of any owner.
        self._members: dict[Optimizer, list[list[Matrix]]] = {}
        for member in members:
            products = multiplies(member)
            self._members[member] = shown.groups(member)
            stepped = (m for group in self._members[member] for m in group if m.param in trained)
            costs |= {m: work(m.shape, products=products) for m in stepped}
        routes = routes_of(program, mesh.rank, costs)
        matrices = routes.matrices
        self.matrices = {m.name: m for m in matrices if routes.owners[m.name] == routes.here}
        self._stored = {m.param: stored[m.param] for m in matrices}
        self.exchange = Exchange(routes, mesh, {n: p.dtype for n, p in self._stored.items()})
        self.owned = {
            n: nn.Parameter(torch.empty(m.shape, dtype=stored[m.param].dtype, device=stored[m.param].device))
            for n, m in self.matrices.items()
        }
        self._sent = {p.matrix.param for p in self.exchange.read}
        self._sending = Sending(self.exchange, "update")
        self._offload, self._versions = offload, 0
        self.gather()
        for member in members:
            shown.set_wholes(member, self.owned)

    def gather(self) -> None:
        """Send the stored parts to the owners. Collective."""
        with self._offload.params_on_host():
            self.exchange.to_owners(_detached(self._stored), _detached(self.owned), "state")
        self.note()

    def forget(self) -> None:
        """Drop gradients of an earlier step, before a step."""
        self._sending.drop()

    def begin(self, names: Iterable[str]) -> None:
        """Start to send the final gradients of these parameters, while backward goes on. Collective."""
        grads = {n: self._stored[n].grad for n in names if n in self._stored}
        of_others = {n: self._stored[n] for n in grads if n not in self._sent}  # this rank sends no part of these
        self._sending.begin({n: g.as_subclass(Tensor) for n, g in grads.items() if g is not None} | of_others)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        grads: dict[str, Tensor] = _detached({n: p for n, p in self._stored.items() if n not in self._sent})
        for name in self._sent:
            grad = self._stored[name].grad
            if grad is None:
                raise ShardcError(
                    "backward computed no gradient for it, but the graph of the model has one",
                    where=name,
                    fix="remove it from the optimizer over whole matrices",
                )
            grads[name] = grad.as_subclass(Tensor)
        for p in self.owned.values():
            p.grad = torch.empty_like(p)
        self._sending.finish(grads, {n: p.grad for n, p in self.owned.items() if p.grad is not None})
        yield
        for p in self.owned.values():
            p.grad = None
        with self._offload.params_on_host():
            self.exchange.from_owners(_detached(self.owned), _detached(self._stored), "update")
        self.note()

    def in_own_loop(
        self, optimizer: Optimizer, stored: Iterable[nn.Parameter], agree: Callable[[Optimizer, bool], None]
    ) -> Optimizer:
        return MatricesOptimizer(optimizer, self, stored, agree)

    @property
    def written(self) -> bool:
        """Whether stored parts were written to, since values last came from the owners, or went there."""
        return self._version() != self._versions

    def note(self) -> None:
        """Note that the owners have the current values of the stored parts."""
        self._versions = self._version()

    def _version(self) -> int:
        return sum(p._version for p in self._stored.values())

    # --- in a checkpoint

    def groups(self, optimizer: Optimizer) -> list[dict[str, str] | None]:
        groups: list[dict[str, str] | None] = []
        for m in members_of(optimizer):
            whole = self._members.get(m)
            groups += [None] * len(m.param_groups) if whole is None else [{x.name: x.param for x in g} for g in whole]
        return groups


def routes_of(program: Program, rank: int, costs: Mapping[Matrix, float]) -> Routes:
    """Return the routes of one rank. costs: {matrix of its parameters: the work of its step}."""
    order = {p.name: p.order for p in program.params}
    matrices = sorted(costs, key=lambda m: order[m.param])  # in the order of backward; sorted() is stable
    routes = Routes(program, rank, matrices, {})
    places = owners([costs[m] for m in matrices], len(routes.ranks))
    routes.owners |= {m.name: place for m, place in zip(matrices, places, strict=True)}
    return routes


def _detached(params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: p.detach() for n, p in params.items()}
