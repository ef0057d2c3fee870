"""Make the optimizer of the user, or of the spec, on this rank's shards, and check it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from shardc.errors import ShardcError
from shardc.ir import similar_names
from shardc.ir.program import Program
from shardc.ir.units import plural
from shardc.optional import registered
from shardc.runtime.offload import Offload
from shardc.runtime.state.owners import Owners
from shardc.runtime.step import param_groups
from shardc.runtime.step.param_groups import groups, groups_of_whole, regroup
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
    of_features = registered("runtime", "ASSUMED_OPTIMIZER", program.features)
    return of_spec(program, name=None if program.spec.optimizer.chosen else next(of_features, None))


@functools.cache
def classes() -> dict[str, type[torch.optim.Optimizer]]:
    """Return the classes of torch.optim, by their names in lower case."""
    optim = torch.optim
    kinds = {n: c for n, c in vars(optim).items() if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    return {n.lower(): c for n, c in sorted(kinds.items()) if c is not optim.Optimizer}


def fault(
    name: str, arguments: Mapping[str, Any], of_groups: Mapping[str, Mapping[str, Any]], keys: Iterable[str]
) -> tuple[str, str] | None:
    """Return what is wrong with the arguments of a class of torch.optim, and the fix; None if it takes them.

    keys: the other words that a user may have meant.
    """
    made = classes()[name]
    known = list(inspect.signature(made).parameters)[1:]
    for key in (*arguments, *(k for settings in of_groups.values() for k in settings)):
        if key not in known:
            fix = similar_names.did_you_mean(key, [*known, *keys], f"its arguments: {', '.join(known)}")
            return f"{made.__name__} has no argument {key!r}", fix
    try:
        for settings in ({}, *of_groups.values()):
            made([{"params": [torch.nn.Parameter(torch.zeros(2, 2))], **settings}], **arguments)
    except (TypeError, ValueError) as e:
        return f"{made.__name__} refuses its arguments: {e}", "write what torch.optim documents"
    return None


def of_spec(program: Program, lr: float | None = None, name: str | None = None) -> OptimizerOf:
    """Return the optimizer of the spec's section `optimizer`, or AdamW(3e-4). lr, name: instead of the section's."""
    section = program.spec.optimizer
    name, rate = name or section.name, {"lr": lr} if lr is not None else {}
    given = {**({"lr": LEARNING_RATE} if name in ("adamw", "muon") else {}), **section.arguments, **rate}
    undecayed: dict[Any, Any] = {section.no_decay: {"weight_decay": 0.0}} if section.no_decay else {}
    settings = {**undecayed, **section.groups}

    def make(params: NamedParameters) -> Any:
        grouped = groups(params, settings) if settings else [{"params": list(params)}]
        if name != "muon":
            return classes()[name](grouped, **given)
        matrix = {name for name, p in params if name in params.inner and p.ndim == 2}
        rest = {k: x for k, x in given.items() if k in ("lr", "weight_decay")}
        parts = {True: (torch.optim.Muon, given), False: (torch.optim.AdamW, rest)}
        made = []
        for wanted, (kind, arguments) in parts.items():
            chosen = [{**g, "params": [x for x in g["params"] if (x[0] in matrix) == wanted]} for g in grouped]
            if any(g["params"] for g in chosen):
                # an empty group must say that it has names: torch sees that from the members
                named = [g if g["params"] else {**g, "param_names": []} for g in chosen]
                made.append(kind(named, **arguments))
        return made

    return make


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
