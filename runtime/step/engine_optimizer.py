"""Make the user's optimizer on this rank's shards, and check it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.units import plural
from shardc.optional import registered
from shardc.runtime.offload import Offload
from shardc.runtime.state.owners import Owners
from shardc.runtime.step import param_groups
from shardc.runtime.step.param_groups import groups_of_whole, regroup
from shardc.runtime.zero.buckets import Buckets
from shardc.runtime.zero.named_parameters import NamedParameters, replace_stand_ins, stand_in
from shardc.runtime.zero.optimizer_check import check_matrices, check_sharded, stand_ins_of
from shardc.runtime.zero.several_optimizers import as_one

#: Of every default optimizer.
LEARNING_RATE = 3e-4
#: Returns a torch.optim.Optimizer, or a list of them.
OptimizerOf = Callable[[NamedParameters], Any]


def adamw(params: NamedParameters) -> torch.optim.Optimizer:
    """Return the default optimizer: AdamW(3e-4)."""
    return torch.optim.AdamW(params, lr=LEARNING_RATE)


def assumed(program: Program) -> OptimizerOf:
    """Return the optimizer that the cost model assumes if the user names none."""
    return next(registered("runtime", "assumed_optimizer", program.features), adamw)


def create_optimizer(
    make: OptimizerOf, program: Program, buckets: Buckets, mesh: Any, offload: Offload, *, try_it: bool = True
) -> tuple[torch.optim.Optimizer | None, Owners]:
    """Make the optimizer of this rank's parameters, and say where these are stepped.

    `make` gets parameters with the shapes of this rank's layers. The optimizer is None if this rank has nothing to
    train. offload: where parameters are kept outside of the device. try_it: try it on small copies. Raises ShardcError
    for an optimizer that trains nothing, or needs more than this rank's shards or the matrices that it owns.
    """
    params, shards = buckets.owned, buckets.shards
    shown = {n: stand_in(shards[n].shape, p) if n in shards else p for n, p in params.items()}
    make_stand_ins = stand_ins_of(program)
    stand_ins = make_stand_ins(program, params) if make_stand_ins is not None else None
    trained = NamedParameters.of(program, shown) if stand_ins is None else stand_ins.pairs
    if not trained:
        return None, Owners()
    of_whole = groups_of_whole(make, trained, program) if stand_ins is None else None
    optimizer = _called(make, trained, by_shape=of_whole is not None)
    if of_whole is not None:
        regroup(optimizer, of_whole, trained)
    param_groups.check_optimizer(optimizer)
    _check_parameters(optimizer, trained, mesh)
    whole = stand_ins.place(optimizer, shown, mesh.layout.coords(mesh.rank)) if stand_ins is not None else []
    if try_it:
        check_sharded(program, optimizer, shown, shards)
        for each in whole:
            check_matrices(each)
    if shards:
        replace_stand_ins(optimizer, shown, params, shards)
    if stand_ins is None or not whole:
        return optimizer, Owners()
    return optimizer, stand_ins.owners(mesh, params, whole, offload)


def _called(make: OptimizerOf, trained: NamedParameters, *, by_shape: bool) -> torch.optim.Optimizer:
    """Call the user's function. by_shape: it would group whole parameters differently."""
    try:
        return as_one(make(trained))
    except ValueError as e:
        if "only supports 2D parameters" in str(e):
            fault = f"an optimizer takes only matrices, but got a parameter of other dims ({e})"
            fix = "pass it the matrices, the rest to another: matrices, rest = shardc.matrices(params); return"
            fix += " [torch.optim.Muon(matrices, lr=...), torch.optim.AdamW(rest, lr=...)]"
            raise ShardcError(fault, where="optimizer", fix=fix) from e
        if "empty parameter list" not in str(e):
            raise
        fault = "an optimizer got no parameter on this rank: with a pipeline, ranks have only those of their stages"
        fix = "leave an optimizer out of the list if it would have no parameter"
        if by_shape:
            fault = "an optimizer got no parameter on this rank, but would get some of the whole shapes"
            fix = "choose an optimizer's parameters by name, not by p.shape, which is the shape of a rank's part"
        raise ShardcError(fault, where="optimizer", fix=fix) from e


def _check_parameters(optimizer: torch.optim.Optimizer, trained: NamedParameters, mesh: Any) -> None:
    """Check that the optimizer trains all parameters that it received, and nothing else."""
    held, given = {id(p): p for group in optimizer.param_groups for p in group["params"]}, {id(p) for _, p in trained}
    left = [name for name, p in trained if id(p) not in held]
    if len(left) == len(trained):
        fault = "the optimizer has none of the passed parameters: nothing would train"
        fix = "make it from the function's argument: lambda params: torch.optim.AdamW(params, lr=3e-4)"
        raise ShardcError(fault, where="optimizer", fix=fix)
    if left:
        more = f" and {len(left) - 5} more parameters" if len(left) > 5 else ""
        mesh.note(f"the optimizer has none of {', '.join(left[:5])}{more}: nothing updates them")
    if others := [str(list(p.shape)) for i, p in held.items() if i not in given]:
        shapes = f"{plural(len(others), 'parameter')} of shape {', '.join(others[:5])}"
        mesh.note(f"the optimizer has {shapes} not passed to it: no step computes a gradient for that")
