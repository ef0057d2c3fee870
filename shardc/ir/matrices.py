"""Define the matrices that an optimizer over whole matrices updates (`optimizer: {matrices: ...}`).

parameter [12, 4]            whole      one matrix [12, 4]
the same, {0: 3}             three      [4, 4] each: a fused q|k|v weight
experts   [8, 16, 4]         experts    eight [16, 4]
several of the model's parameters in a stack: each is a matrix, as on one device
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardc.ir.program import Program
from shardc.ir.stored import Param

Numbers = tuple[int, ...]
_LOOKUPS = (torch.ops.aten.embedding.default, torch.ops.aten.index_select.default)


@dataclass(frozen=True)
class Cut:
    """One dim of a parameter that is cut. sizes: of its parts, in order.

    alone: each part has one row, and the matrices do not have that dim.
    """

    dim: int
    sizes: tuple[int, ...]
    alone: bool = False


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


def inner(program: Program) -> frozenset[str]:
    """Return the placeholder names of parameters for optimizers over matrices.

    They have two dims or more and are neither a lookup table nor the head (Jordan et al. 2024, "Muon"). A parameter
    counts as the head if no other such parameter is used after it.
    """
    wide = {p.name for p in program.params if len(p.shape) - bool(p.members) > 1}
    bits = {name: 1 << i for i, name in enumerate(sorted(wide))}
    bit_of: dict[fx.Node, int] = {}  # the bit of each parameter, and of values computed from it alone
    taken: dict[str, list[fx.Node]] = {name: [] for name in wide}
    for node in program.graph.nodes:
        if node.op == "placeholder":
            bit_of[node] = bits.get(node.name, 0)
        elif len(node.all_input_nodes) == 1:  # a cast, a view
            bit_of[node] = bit_of.get(node.all_input_nodes[0], 0)
    # for each op: the bits that it or any later op takes (proofs leave users that are not in the graph)
    behind: dict[fx.Node, int] = {}
    for node in reversed(program.graph.nodes):
        taken_bits = [bit_of.get(x, 0) for x in node.all_input_nodes] if not bit_of.get(node) else []
        behind[node] = functools.reduce(operator.or_, [*taken_bits, *(behind.get(user, 0) for user in node.users)], 0)
        for name in (n for n, bit in bits.items() if bit in taken_bits):
            taken[name].append(node)
    names = set()
    for name, users in taken.items():
        others = functools.reduce(operator.or_, (behind[user] for user in users), 0) & ~bits[name]
        if others and not any(user.target in _LOOKUPS for user in users):
            names.add(name)
    return frozenset(names)


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
