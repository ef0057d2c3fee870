"""Define the matrices that an optimizer over whole matrices updates (`optimizer: {matrices: ...}`).

parameter [12, 4]            whole      one matrix [12, 4]
the same, {0: 3}             three      [4, 4] each: a fused q|k|v weight
experts   [8, 16, 4]         experts    eight [16, 4]
several of the model's parameters in a stack: each is a matrix, as on one device
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from shardc.ir.program import Program
from shardc.ir.stored import Param

Numbers = tuple[int, ...]


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter that is cut. sizes: of its parts, in order.

    alone: each part has one row, and the matrices do not have that dim.
    """

    dim: int
    sizes: tuple[Annotated[int, Field(ge=1, lt=1 << 62)], ...]
    alone: bool = False


#: How a program's parameters are cut, by placeholder name; others are not cut.
Cuts = Mapping[str, tuple[Cut, ...]]
#: What `Program.features` may hold of this feature.
STORED = {"matrices": Cuts}


@dataclass(frozen=True)
class Matrix:
    """A box of a parameter that an optimizer steps as one tensor.

    name: the key of its state in checkpoints: the name of the parameter (or of a stack's member) and the index of each
    part ("qkv.weight[2]"). param: the placeholder's name. offset, size: of the box in the global parameter.
    shape: as the optimizer sees it, without dims that are cut `alone`.
    """

    name: str
    param: str
    offset: Numbers
    size: Numbers
    shape: Numbers

    @property
    def numel(self) -> int:
        return math.prod(self.size)


def matrices_of(p: Param, cuts: Sequence[Cut] = ()) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter, in order. cuts: their dims are those of a stack's members."""
    ahead = 1 if p.members else 0
    at = {c.dim + ahead: c for c in cuts}
    if p.members:
        at[0] = Cut(0, (1,) * p.shape[0], alone=True)
    parts = [_stretches(at[d].sizes) if d in at else [(0, n)] for d, n in enumerate(p.shape)]
    kept = [d for d in range(len(p.shape)) if d not in at or not at[d].alone]
    matrices = []
    for numbers in itertools.product(*(range(len(stretches)) for stretches in parts)):
        box = [stretches[i] for stretches, i in zip(parts, numbers, strict=True)]
        size = tuple(n for _, n in box)
        behind = [numbers[d] for d in sorted(at) if d >= ahead]
        name = p.members[numbers[0]] if p.members else p.fqn
        name += f"[{','.join(map(str, behind))}]" if behind else ""
        matrices.append(Matrix(name, p.name, tuple(a for a, _ in box), size, tuple(size[d] for d in kept)))
    return tuple(matrices)


def cuts(program: Program) -> Cuts:
    """Return the cuts of a program's parameters."""
    stored: Cuts = program.features.get("matrices", {})
    return stored


def with_cuts(program: Program, new: Cuts) -> Program:
    """Return the program with these cuts."""
    return replace(program, features={**program.features, "matrices": new})


def of_param(program: Program, p: Param) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter of a program, in order."""
    return matrices_of(p, cuts(program).get(p.name, ()))


def added(program: Program, beside: Mapping[str, str]) -> Program:
    """Cut new parameters, {name: the one beside which it is}: those of experts have a matrix for each expert.

    Drops the cuts of parameters that are no longer trained.
    """
    old = cuts(program)
    new = {n: old[base] for n, base in beside.items() if any(c.alone for c in old.get(base, ()))}
    trained = {p.name for p in program.params if p.requires_grad}
    return with_cuts(program, {n: c for n, c in {**old, **new}.items() if n in trained})


def axes(program: Program) -> tuple[str, ...]:
    """Return the axes over which ranks share parameters: all but the pipeline's."""
    return tuple(a for a in program.mesh.names if a != program.axis)


def faults(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the cuts of parameters that the program does not have, and those that do not fit."""
    params = {p.name: p for p in program.params}
    for name, parts in cuts(program).items():
        if name not in params:
            yield "matrices", f"there is no {name!r:.60}"
        elif why := fault(params[name].shape[1:] if params[name].members else params[name].shape, parts):
            yield f"matrices[{name}]", why


def fault(shape: Sequence[int], cuts: Sequence[Cut]) -> str:
    """Return why a parameter (or a stack's member) of this shape cannot be cut so; "" if it can."""
    if len({c.dim for c in cuts}) < len(cuts):
        return "a dim is cut twice"
    for c in cuts:
        if c.alone and max(c.sizes, default=1) > 1:
            return "parts of several rows cannot be separate"
        if not 0 <= c.dim < len(shape):
            return f"a parameter has no dim {c.dim}: its shape is {list(shape)}"
        if not c.sizes or min(c.sizes) < 1 or sum(c.sizes) != shape[c.dim]:
            sizes = list(c.sizes) if len(c.sizes) < 9 else f"{len(c.sizes)} parts"
            return f"{sizes} do not sum to the {shape[c.dim]} of dim {c.dim}"
    return ""


def _stretches(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(itertools.accumulate(sizes, initial=0), sizes, strict=False))
