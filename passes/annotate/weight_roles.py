"""Find the role of a weight's dim from the op that uses it: what `column`, `row` and `vocab` mean.

Module classes do not matter: the out-features of a linear layer are the dim that only the weight and the result have.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import operands_of, producer_of, source_of, stored_alone
from shardc.ir.placement import Shard
from shardc.ir.types import full_op_name
from shardc.passes.annotate.propagate_split import uses
from shardc.rules.core import registry
from shardc.rules.core.choices import Choices, choices_of
from shardc.rules.core.op_call import call_of
from shardc.rules.experts import DOWN
from shardc.runtime import ops
from shardc.spec import Style

aten = torch.ops.aten
#: The roles of a dim that a style splits: the first one that the weight has.
ROLES: dict[Style, tuple[str, ...]] = {
    "column": ("out", "bias"),
    "row": ("in", "rows"),
    "vocab": ("rows", "out", "bias"),
    "replicate": (),
}


def role_of(node: fx.Node, dim: int, module: str = "", known: dict[Any, Choices] | None = None) -> str:
    """Return the role of a parameter's dim in the first op that uses it together with an activation.

    "in" (summed), "out" (only the weight and the result have it), "bias" (a dim of an added operand), "rows" (looked
    up), or "". module: for a tied weight, the module whose op counts if there is one. known: calls so far (see
    `choices_of`), if many roles are requested.
    """
    known = {} if known is None else known
    for user, i in sorted(uses((node, 0)), key=lambda use: not module or source_of(use[0]).module != module):
        rule = registry.find(user.target) if user.op == "call_function" else None
        if rule is None:
            continue
        if user.target is aten.embedding.default and i == 0:
            return ("rows", "out")[dim]
        choices = choices_of(user, known)
        call, signature = choices.call, choices.signature
        if user.target is ops.experts:  # for each expert a column-parallel and a row-parallel product, with inner dim i
            factors = signature.inputs[i][dim]
            if len(signature.inputs[i]) == 2:  # a bias, of i inner or o outer features for each expert
                return "bias" if "i" in factors or "o" in factors else ""
            return "" if "i" not in factors else "in" if i == DOWN else "out"
        s = choices.from_operand(i, Shard(dim), 1)
        if s is None:
            continue
        other_operands = [x for j, x in enumerate(operands_of(user)) if j != i]
        if len(call.results) == 1 and isinstance(out := s.outputs[0], Shard):
            if rule.flops is None and all(map(stored_alone, other_operands)):  # the weight is computed from it
                role = role_of(user, out.dim, module, known)
                if role:
                    return role
                continue
            one_by_one = rule.flops is None and node.meta["value"].shape[dim] > 1
            if one_by_one and any(_is_from_product(x, user) for x in other_operands):
                return "bias"
        factor = s.factor.partition("/")[0]
        if i in rule.added:
            return "bias"
        if factor in signature.summed:
            return "in"
        others = [o for j, o in enumerate(signature.inputs) if j != i and j not in rule.added]
        if rule.flops is not None and not any(factor in d for o in others for d in o):
            return "out"
    return ""


def _is_from_product(node: fx.Node, user: fx.Node) -> bool:
    """Return whether a value is a product's result after only elementwise ops of the user's module.

    Then the user's other operand is a gain or a bias of that product.
    """
    while (op := producer_of(node)[0]).op == "call_function" and source_of(op).module == source_of(user).module:
        rule = registry.find(op.target)
        if rule is None or rule.flops is not None:
            return rule is not None
        activations = [x for x in operands_of(op) if not stored_alone(x)]
        if len(activations) != 1:
            return False
        node = activations[0]
    return False


def unsplit_by(node: fx.Node) -> str:
    """Return the ops that use a parameter if no rule of theirs splits it, such as aten.lstm; else ""."""
    used = [(u, i) for u, i in uses((node, 0)) if u.op == "call_function" and registry.find(u.target) is not None]
    dims = range(len(node.meta["value"].shape))
    split = any(choices_of(u, {}).from_operand(i, Shard(d), 1) is not None for u, i in used for d in dims)
    return "" if split else ", ".join(sorted({full_op_name(u.target) for u, _ in used}))


def users_of_dim(node: fx.Node, dim: int) -> Iterator[tuple[fx.Node, int, int]]:
    """Yield (op, operand, the operand's dim) for each use of a dim of a value, through views and casts."""
    for user, i in uses((node, 0)):
        if user.op != "call_function" or (rule := registry.find(user.target)) is None:
            continue
        call = call_of(user)
        moves = len(call.operands) == 1 or user.target is aten.cat.default
        if moves and len(call.results) == 1 and rule.flops is None:
            s = choices_of(user, {}).from_operand(i, Shard(dim), 1)
            if s is not None and isinstance(out := s.outputs[0], Shard) and out.split == 1:
                yield from users_of_dim(user, out.dim)
        else:
            yield user, i, dim


def fused_parts(node: fx.Node, dim: int) -> int:
    """Return how many fused parts of a parameter's dim are split separately: 2 for experts' gate and up."""
    for user, i, at in users_of_dim(node, dim):
        if user.target is ops.experts:
            signature = choices_of(user, {}).signature
            place = signature.places(signature.inputs[i], "i")
            if place is not None and place[0] == at:
                return place[1]
    return 1


def dim_for_style(node: fx.Node, style: Style, module: str = "") -> int | None:
    """Return the dim that a style word splits; -1: the parameter is whole; None: the word has no meaning.

    module: for a tied weight, the module by which the spec names it.
    """
    return -1 if style == "replicate" else dim_by_roles(node, style, roles_of(node, module))


def roles_of(node: fx.Node, module: str = "", known: dict[Any, Choices] | None = None) -> list[str]:
    """Return the role (`role_of`) of every dim of a parameter."""
    known = {} if known is None else known
    return [role_of(node, d, module, known) for d in range(len(node.meta["value"].shape))]


def dim_by_roles(node: fx.Node, style: Style, roles: list[str]) -> int | None:
    """Return the dim that a style word splits (see `dim_for_style`), for dims with these roles."""
    sizes = node.meta["value"].shape
    for role in ROLES[style]:
        if role in roles:
            return roles.index(role)
    alone = node.meta["value"].shape == (1,)  # the bias of one output
    # a row-parallel layer's bias is added once, whole; scales of rows are whole if columns are split
    kept = "bias" in roles or (any(roles) and all(n == 1 for n, r in zip(sizes, roles, strict=True) if not r))
    return -1 if kept or alone or not node.users else None
