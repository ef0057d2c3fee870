"""Build the user's `optimizer(params)` from placeholders without memory, one for each whole matrix.

A `stand_in` has the shape of one device. Later every optimizer gets its final parameters: those that update each
element separately this rank's parts; all others the matrices that this rank owns (`optimizer: {matrices: ...}`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.features.matrices.program import Matrix, of_param
from shardc.features.matrices.whole import WholeMatrices
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.runtime.offload import Offload
from shardc.runtime.zero.named_parameters import NamedParameters, inner_matrices, stand_in
from shardc.runtime.zero.optimizer_check import has_param_shape, needs_whole
from shardc.runtime.zero.several_optimizers import members_of


class MatrixStandIns:
    """The `stand_in`s of one rank, for params: {parameter: its part}. .matrices: {id: the matrix}."""

    def __init__(self, program: Program, params: Mapping[str, Tensor]) -> None:
        self._program = program
        self._here = [p for p in program.params if p.name in params and p.requires_grad]
        pairs = [(m, stand_in(m.shape, params[m.param])) for p in self._here for m in of_param(program, p)]
        self._held = [x for _, x in pairs]  # ids are unique only while their objects live
        self.matrices = {id(x): m for m, x in pairs}

    @property
    def pairs(self) -> NamedParameters:
        """(name, `stand_in`) of every matrix of this rank's parameters."""
        trained = [p for p in self._program.params if p.requires_grad]
        known = {m.name: (m.name, p.fqn, *p.names) for p in trained for m in of_param(self._program, p)}
        inner_names = inner_matrices(self._program)
        names = [m.name for p in trained if p.name in inner_names for m in of_param(self._program, p)]
        return NamedParameters(((self.matrices[id(x)].name, x) for x in self._held), known, names)

    def place(
        self, optimizer: Optimizer, parts: Mapping[str, nn.Parameter], coords: Mapping[str, int]
    ) -> list[Optimizer]:
        """Set this rank's parts in optimizers that update each element separately; return the others."""
        wholes = [m for m in members_of(optimizer) if needs_whole(m)]
        for member in members_of(optimizer):
            if member not in wholes:
                self.set_parts(member, parts, coords)
        return wholes

    def owners(
        self, mesh: Any, stored: Mapping[str, nn.Parameter], members: Sequence[Optimizer], offload: Offload
    ) -> WholeMatrices:
        """Return the owners of the matrices of the optimizers that need them whole. Collective; see WholeMatrices."""
        return WholeMatrices(self._program, mesh, stored, self, members, offload)

    def groups(self, optimizer: Optimizer) -> list[list[Matrix]]:
        """Return the matrices of each group. Raises ShardcError where it holds anything else."""
        for group in optimizer.param_groups:
            for x in group["params"]:
                if id(x) not in self.matrices:
                    raise ShardcError(
                        f"the optimizer holds a tensor of shape {list(x.shape)} that is not one of its parameters",
                        where="optimizer",
                        fix="make the optimizer from the parameters that shardc passes to it",
                    )
        return [[self.matrices[id(x)] for x in group["params"]] for group in optimizer.param_groups]

    def set_parts(self, optimizer: Optimizer, parts: Mapping[str, nn.Parameter], coords: Mapping[str, int]) -> None:
        """Replace `stand_in`s of an elementwise optimizer by parts {parameter: local part}, also in its state."""
        every = {p.name: p for p in self._here}
        groups = self.groups(optimizer)
        places: dict[str, set[int]] = {}
        for i, matrices in enumerate(groups):
            for m in matrices:
                places.setdefault(m.param, set()).add(i)
        for name, indices in places.items():
            count = sum(m.param == name for matrices in groups for m in matrices)
            if len(indices) > 1 or count != len(of_param(self._program, every[name])):
                raise ShardcError(
                    f"{type(optimizer).__name__} has some matrices of {every[name].fqn} in other groups than the rest,"
                    " and updates the parameter as one",
                    where=every[name].fqn,
                    fix="put all matrices of a parameter into one group, or write `matrices: whole` for it",
                )
        stand_ins = {id(x): x for x in self._held}
        for x in [x for x in optimizer.state if id(x) in stand_ins]:
            m = self.matrices[id(x)]
            state, p = optimizer.state.pop(x), every[m.param]
            if m.size != p.shape and any(has_param_shape(k, s, x) for k, s in state.items()):
                raise _early_state_error(optimizer, p)
            local = {
                k: p.layout.local(s.reshape(p.shape), self._program.mesh, coords).contiguous()
                for k, s in state.items()
                if has_param_shape(k, s, x)
            }
            optimizer.state[parts[m.param]] = {**state, **local}
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            names = list(dict.fromkeys(m.param for m in members))
            _fill(group, {every[n].fqn: parts[n] for n in names})

    def set_wholes(self, optimizer: Optimizer, owned: Mapping[str, nn.Parameter]) -> None:
        """Replace the `stand_in`s of an optimizer over whole matrices by those that this rank owns."""
        groups = self.groups(optimizer)
        for x in [x for x in optimizer.state if id(x) in self.matrices]:
            m, state = self.matrices[id(x)], optimizer.state.pop(x)
            if m.name in owned:
                values = {k: s.contiguous().clone() if isinstance(s, Tensor) else s for k, s in state.items()}
                optimizer.state[owned[m.name]] = values
        for group, members in zip(optimizer.param_groups, groups, strict=True):
            _fill(group, {m.name: owned[m.name] for m in members if m.name in owned})


def _fill(group: dict[str, Any], params: Mapping[str, nn.Parameter]) -> None:
    group["params"][:] = params.values()  # in place: others may hold the list
    if "param_names" in group:
        group["param_names"] = list(params)


def _early_state_error(optimizer: Optimizer, p: Param) -> ShardcError:
    return ShardcError(
        f"{type(optimizer).__name__} makes state in its constructor, for parts of {p.fqn} that it then updates as one",
        where=p.fqn,
        fix="write `matrices: whole` for it",
    )
