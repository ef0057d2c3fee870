"""Experts over the ranks of an axis: the layouts of their weights that `experts:` asks for.

    before   y = experts(x, index, weights, gate_up, down, ...)       gate_up: f32[8, 256, 64]        x: f32[128@dp, 64]
    after    the same, with the experts' dim of the weights split:    gate_up: f32[8@ep, 256, 64]

The rest is placement's (shardc.rules.experts): tokens that are split over the axis too are exchanged.
Weights of experts that no `experts` op uses (GShard's einsums) are split likewise, by the dim that is a batch of their
products."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.errors import Errors
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program, Source
from shardc.passes import divisibility
from shardc.passes.annotate.propagate_split import uses
from shardc.rules import registry
from shardc.rules.calls import call_of, choices_of
from shardc.rules.experts import UP
from shardc.runtime import ops
from shardc.spec import Spec
from shardc.spec.patterns import match, nearest

FORMS = (
    'experts that are one op: transformers\' with experts_implementation="grouped_mm", shardc.nn.experts(x, index,'
    " weights, up, down), grouped products of rows sorted by expert (torch._grouped_mm), or products with weights"
    " [experts, in, out] (einsum, bmm)"
)


def _parents(module: str) -> list[str]:
    """ "a.b" -> ["", "a", "a.b"]: a module and those around it, the model first."""
    parts = module.split(".") if module else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def _module(node: fx.Node) -> str:
    found: Source = node.meta.get("source", Source())
    return found.module


def _named(module: str) -> str:
    return module or "the model"


@dataclass(frozen=True)
class Experts:
    """What the entries of `experts:` name, in a canonical graph."""

    spec: Spec
    program: Program
    names: dict[str, tuple[str, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shared = {name: names for names in self.program.shared_modules for name in names}
        object.__setattr__(self, "names", shared)

    def entry(self, module: str) -> int | None:
        """The first entry that matches a module, or one around it."""
        for i, e in enumerate(self.spec.experts):
            if any(match(e.match, name) for m in _parents(module) for name in self.names.get(m, (m,))):
                return i
        return None

    def ops(self) -> Iterator[tuple[int, fx.Node]]:
        """The experts' ops, each with its entry."""
        for node in self.program.graph.find_nodes(op="call_function", target=ops.experts):
            if (i := self.entry(_module(node))) is not None:
                yield i, node

    def where(self, i: int, key: str = "match") -> str:
        return self.spec.where(("experts", i, key))

    # --- placement

    def layouts(self, given: dict[str, Layout], mesh: Mesh) -> dict[str, Layout]:
        """The layouts of the experts' weights. given: what `shard:` says of them. Raises ShardcError for all entries
        that do not fit.
        """
        errors = Errors()
        params = {p.name: p for p in self.program.params}
        nodes = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder" and n.name in params}
        found: dict[str, Layout] = {}
        told: set[tuple[int, str]] = set()
        hit: set[int] = set()
        for name, node in nodes.items():
            for i, dim, user in self._held(node):
                hit.add(i)
                entry, p = self.spec.experts[i], params[name]
                cause = f"{self.where(i)} experts {entry.match!r}"
                layout = given.get(name, Layout())
                n, size = mesh.size(entry.axis), p.shape[dim]
                if n == 1 or name in found:
                    continue
                if any(layout[a] != Layout()[a] for a in mesh.parts(entry.axis)):
                    what = f"{p.fqn} is split over {entry.axis} by `shard:` too"
                    errors.add(
                        what,
                        where=self.where(i, "axis"),
                        fix=f"leave {entry.axis} to the experts: drop that entry of `shard:`",
                    )
                elif size % n and self.spec.uneven != "pad":
                    if (i, str(size)) not in told:
                        told.add((i, str(size)))
                        errors.add(
                            f"the {size} experts of {_named(_module(user))} do not divide by {entry.axis}={n}",
                            where=self.where(i, "axis"),
                            fix=f"{divisibility.ranks(entry.axis, size, n)}, or set `uneven: pad`",
                        )
                else:
                    inner = math.prod(mesh.size(a) for a, _ in layout.shards(dim))
                    found[name] = Layout.of({**dict(layout.items), entry.axis: Shard(dim, inner)}, mesh)
                    node.meta.setdefault("cause", {}).update(dict.fromkeys(mesh.parts(entry.axis), cause))
        self._unmatched(hit, set(nodes), errors)
        errors.raise_any()
        return found

    def _held(self, param: fx.Node) -> Iterator[tuple[int, int, fx.Node]]:
        """The entries that spread a parameter's experts, the dim of it that counts them, and the op that uses it so."""
        shape = param.meta["value"].shape
        for dim in range(len(shape)):
            for user, operand, at in _users(param, dim):
                if user.target is ops.experts:
                    i = self.entry(_module(user)) if at == 0 and operand >= UP else None
                elif (
                    len(shape) > 2
                    and (rule := registry.find(user.target)) is not None
                    and rule.flops is not None
                    and _batch(user, operand, at)
                ):
                    i = self.entry(_module(user))
                else:
                    continue
                if i is not None:
                    yield i, dim, user
                    return

    def _unmatched(self, hit: set[int], params: set[str], errors: Errors) -> None:
        modules = list(
            dict.fromkeys(m for n in self.program.graph.nodes if n.op == "call_function" for m in _parents(_module(n)))
        )
        having = list(
            dict.fromkeys(_module(n) for n in self.program.graph.find_nodes(op="call_function", target=ops.experts))
        )
        for i, e in enumerate(self.spec.experts):
            if i in hit:
                continue
            matched = [m for m in modules if any(match(e.match, name) for name in self.names.get(m, (m,)))]
            stacked = [n for j, n in self.ops() if j == i]
            there = [m for m in having if any(match(e.match, x) for x in _parents(m))]
            if stacked:
                what = (
                    f"the experts of {_named(_module(stacked[0]))} are put together from several parameters, which"
                    " cannot be spread"
                )
                errors.add(
                    what,
                    where=self.where(i),
                    fix="store them as one parameter [experts, m, hidden] and one [experts, hidden, i]",
                )
            elif there:
                errors.add(
                    f"pattern {e.match!r} never wins: earlier entries match all experts that it matches",
                    where=self.where(i),
                    fix="delete it, or move it up",
                )
            elif matched:
                what = (
                    f"pattern {e.match!r} matches {_named(matched[0])}, in which there are no experts of a form that"
                    " shardc knows"
                )
                errors.add(what, where=self.where(i), fix=f"a Python loop over experts is not one; {FORMS}")
            else:
                close = nearest(e.match, [m for m in having or modules if m])
                there_are = (
                    f"experts are in {', '.join(map(_named, having))}" if having else f"the model has none; {FORMS}"
                )
                fix = f"did you mean {close!r}?" if close else there_are
                errors.add(f"pattern {e.match!r} matches no module that holds experts", where=self.where(i), fix=fix)


def _users(node: fx.Node, dim: int) -> Iterator[tuple[fx.Node, int, int]]:
    """(op, operand, the operand's dim) of every op that uses a dim of a value, looking through views and casts."""
    for user, i in uses((node, 0)):
        if user.op != "call_function" or (rule := registry.find(user.target)) is None:
            continue
        call = call_of(user)
        if (
            (len(call.operands) == 1 or user.target is torch.ops.aten.cat.default)
            and len(call.results) == 1
            and rule.flops is None
        ):
            s = choices_of(user, {}).from_operand(i, Shard(dim), 1)
            if s is not None and isinstance(out := s.outputs[0], Shard) and out.split == 1:
                yield from _users(user, out.dim)
        else:
            yield user, i, dim


def _batch(user: fx.Node, operand: int, dim: int) -> bool:
    """Is a dim of an operand one that all operands and the result of a product have: a batch of products?"""
    call = call_of(user)
    rule = registry.find(user.target)
    assert rule is not None
    sig = rule.signature(call)
    factors = sig.inputs[operand][dim] if dim < len(sig.inputs[operand]) else ()
    return any(all(any(f in d for d in o) for o in (*sig.inputs, *sig.outputs)) and sig.sizes[f] > 1 for f in factors)
