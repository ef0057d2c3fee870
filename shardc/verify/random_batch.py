"""Make random weights and a random batch that a program accepts: no checkpoint or data is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.graph import placeholders, values_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Choice, Param
from shardc.ir.types import op_name
from shardc.verify.to_float64 import wide


def random_state(program: Program, seed: int, *, integers: int = 0) -> dict[str, Tensor]:
    """Return random parameters (scaled as an initialization does) and buffers, by each of their FQNs.

    integers: the value that fills buffers of integers and truth values. As a causal mask, one of 0 and 1 hides nothing,
    the other everything.
    """
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    stored: list[Param | Buffer] = [*program.params, *(b for b in program.buffers if b.constant is None)]
    for x in stored:
        if not x.dtype.is_floating_point and not x.dtype.is_complex:
            value = torch.full(x.shape, integers, dtype=x.dtype)
        else:
            noise = torch.randn(x.shape, generator=generator, dtype=wide(x.dtype))
            center = 1 if isinstance(x, Param) else 0.5  # gains; variances, and rates r where sqrt(1 - r) is taken
            value = (noise * x.shape[-1] ** -0.5 if len(x.shape) > 1 else center + 0.1 * noise).to(x.dtype)
        state |= x.by_name(value)
    return state


def random_inputs(program: Program, seed: int, *, fractions: bool = False) -> Any:
    """Return a random batch in the user's structure.

    Integers stay in the range of their lookups and of their dtype; complex numbers have both parts.
    fractions: numbers between 0 and 1, as probabilities are, instead of normal ones.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    nodes = placeholders(program.graph)
    leaves: dict[tuple[str | int, ...], Tensor] = {}
    for x in program.inputs:
        if x.choice is not None and x.choice.below:
            leaves[x.path] = _choices(x.choice, x.shape, generator).to(x.dtype)
        elif x.dtype.is_floating_point or x.dtype.is_complex:
            draw = torch.rand if fractions else torch.randn
            leaves[x.path] = draw(x.shape, generator=generator, dtype=wide(x.dtype)).to(x.dtype)
        else:
            limit = 2 if x.dtype == torch.bool else torch.iinfo(x.dtype).max
            bound = min(limit, min(_bounds(nodes[x.name]), default=2))
            leaves[x.path] = torch.randint(0, max(bound, 1), x.shape, generator=generator).to(x.dtype)
    return _nest(leaves)


def _choices(c: Choice, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return random choices that the op could make."""
    if c.distinct is None:
        return torch.randint(c.below, shape, generator=generator)
    d = c.distinct
    scores = torch.rand(*shape[:d], c.below, *shape[d + 1 :], generator=generator)
    return scores.argsort(d).narrow(d, 0, shape[d])


def _bounds(node: fx.Node, seen: set[fx.Node] | None = None) -> Iterator[int]:
    """Yield the sizes of what an integer value indexes: rows of an embedding, classes of a loss."""
    seen = seen if seen is not None else set()
    for user in (u for u in node.users if u.op == "call_function" and u not in seen):
        seen.add(user)
        name, first = op_name(user.target), user.args[0] if user.args else None
        shapes = [v.shape for v in values_of(first)] if isinstance(first, fx.Node) else []
        if name.startswith("embedding") and node is not first:
            yield shapes[0][0]
        elif name == "nll" and node is not first:
            yield shapes[0][1 if len(shapes[0]) > 1 else 0]
        elif name.startswith("one_hot"):
            yield user.meta["value"].shape[-1]
        elif isinstance(user.meta.get("value"), Value) and not user.meta["value"].dtype.is_floating_point:
            yield from _bounds(user, seen)


def _nest(leaves: dict[tuple[str | int, ...], Tensor]) -> Any:
    if set(leaves) == {()}:
        return leaves[()]
    if () in leaves:  # a tensor with choices beside it
        return {None: leaves[()], **_nest({path: leaf for path, leaf in leaves.items() if path})}
    heads = dict.fromkeys(path[0] for path in leaves)
    parts = {h: _nest({path[1:]: leaf for path, leaf in leaves.items() if path[0] == h}) for h in heads}
    return tuple(parts[k] for k in sorted(parts, key=int)) if all(isinstance(k, int) for k in parts) else parts
