"""Find values of traced tensors that are known during tracing: those made only of constants."""

from __future__ import annotations

import operator
from collections.abc import Mapping

import torch
from torch import Tensor, fx

from shardc.ir.types import op_name
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, OpOverload, traced_constant, traced_node, transforming

#: The first op on a constant that forward makes, as by `torch.tensor(...)`: nobody else holds it.
FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


def contents(x: Tensor) -> bytes:
    """Return bytes that are equal for tensors with bitwise equal contents."""
    data = x.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{x.dtype} {tuple(x.shape)} {x.device} ".encode() + data


def constant(x: Tensor) -> Tensor | None:
    """Return the value of a traced tensor that depends on no input, parameter or buffer; else None."""
    return constant_value(x, {})[0]


def constant_value(x: Tensor, stored: Mapping[fx.Node, Tensor]) -> tuple[Tensor | None, set[fx.Node]]:
    """Return a traced tensor's value, if made of constants and `stored` only, and the `stored` nodes used.

    Random numbers have no value, unless it is the same at both ends of their range: `torch.rand([]) < 0.0`.
    """
    ends, used = constant_ends(x, stored)
    return (ends[0], used) if ends is not None and torch.equal(*ends) else (None, set())


def constant_ends(x: Tensor, stored: Mapping[fx.Node, Tensor]) -> tuple[tuple[Tensor, Tensor] | None, set[fx.Node]]:
    """Return the value with the least and the greatest uniform random numbers; else as `constant_value`."""
    if not isinstance(x, FakeTensor):  # in vmap it is one of many
        return None if transforming() else (x, x), set()
    node = traced_node(x)
    if node is None:
        return None, set()
    family = _family(node)
    known = {n: c for n in family if n.op == "get_attr" and (c := traced_constant(str(n.target))) is not None}
    known |= {n: c for n, c in stored.items() if n in family}
    drawn = {n for n in family if is_random(n) and op_name(n.target) not in UNIFORM}
    if any(n not in known and (n.op != "call_function" or n in drawn) for n in family):
        return None, set()
    low, high = (untraced(_evaluate, node, family, known, end) for end in ENDS)
    return (low, high), family & stored.keys()


def given_numbers(x: Tensor) -> set[fx.Node]:
    """Return the placeholders that a traced tensor is made of, if all of them are integers; else nothing."""
    node = traced_node(x)
    inputs = {n for n in _family(node) if n.op == "placeholder"} if node is not None else set()
    dtypes = [getattr(n.meta.get("val"), "dtype", torch.float32) for n in inputs]
    return set() if any(d.is_floating_point or d.is_complex for d in dtypes) else inputs


def _evaluate(node: fx.Node, family: set[fx.Node], constants: Mapping[fx.Node, Tensor], drawn: float) -> Tensor:
    """Compute the value of a node. family: see `_family`. drawn: replaces uniform random numbers."""
    known = {n: c.clone() for n, c in constants.items()}
    for n in node.graph.nodes:
        if n in family and n not in known:
            args, kwargs = fx.map_arg((n.args, n.kwargs), lambda m: known[m])
            with torch.random.fork_rng(devices=[]):
                result: Tensor = n.target(*args, **kwargs)
            known[n] = result.fill_(drawn) if is_random(n) else result
    return known[node]


def _family(node: fx.Node) -> set[fx.Node]:
    """Return what a node's value depends on: its inputs, and writes into those, also through views."""
    family: set[fx.Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n not in family:
            family.add(n)
            todo += n.all_input_nodes
            todo += [user for user in n.users if _shares(user, n)]
    return family


def _shares(user: fx.Node, node: fx.Node) -> bool:
    """Return whether a call's result is a view of one of its operands, or it writes to that."""
    if not isinstance(user.target, OpOverload):
        return user.target is operator.getitem
    schema = user.target._schema.arguments
    return any(a.alias_info is not None and x is node for a, x in zip(schema, user.args, strict=False))


#: Range of uniform random numbers. (0 itself is drawn once in 16 million times.)
ENDS = (2.0**-25, 1.0 - 2.0**-24)
#: Random ops that draw from (0, 1).
UNIFORM = ("rand", "rand_like")


def is_random(node: fx.Node) -> bool:
    """Return whether an op draws random numbers."""
    return isinstance(node.target, OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
