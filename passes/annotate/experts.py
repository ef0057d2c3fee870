"""Compute the layouts of experts' weights (`experts`): experts are spread over an axis's ranks.

    before   y = experts(x, index, weights, gate_up, down, ...)       gate_up: f32[8, 256, 64]        x: f32[128@dp, 64]
    after    the same, with the experts' dim of the weights split:    gate_up: f32[8@ep, 256, 64]

Placement does the rest by the rule of the op (shardc.rules.experts): tokens that are split over the axis are exchanged.
Weights of experts that no `experts` op uses (GShard's einsums) are also split, by the batch dim of their products.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import calls, placeholders, source_of
from shardc.ir.mesh import Mesh
from shardc.ir.patterns import enclosing, matches
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.similar_names import did_you_mean
from shardc.passes.annotate.indivisible import rank_counts
from shardc.passes.annotate.weight_roles import users_of_dim
from shardc.rules.core import registry
from shardc.rules.core.op_call import call_of
from shardc.rules.experts import UP
from shardc.runtime import ops
from shardc.spec import Spec

FORMS = (
    'transformers\' experts with experts_implementation="grouped_mm", shardc.nn.experts(x, index, weights, up, down),'
    " grouped products of rows sorted by expert (torch._grouped_mm), or products with weights [experts, in, out]"
    " (einsum, bmm)"
)


def _enclosing(node: fx.Node) -> list[str]:
    """Return the modules that an op is in, the model ("") first."""
    return ["", *enclosing(source_of(node).module)]


def _named(module: str) -> str:
    return module or "the model"


@dataclass(frozen=True)
class Experts:
    """The experts that the entries of `experts:` name, in a canonical graph."""

    spec: Spec
    program: Program

    def entry(self, node: fx.Node) -> int | None:
        """Return the first entry that matches the module of an op, or one around it."""
        aliases = self.program.module_aliases
        entries = enumerate(self.spec.experts)
        return next((i for i, e in entries if any(matches(e.match, m, aliases) for m in _enclosing(node))), None)

    def ops(self) -> Iterator[tuple[int, fx.Node]]:
        """Yield the experts' ops, each with its entry."""
        for node in self.program.graph.find_nodes(op="call_function", target=ops.experts):
            if (i := self.entry(node)) is not None:
                yield i, node

    def where(self, i: int, key: str = "match") -> str:
        return self.spec.where(("experts", i, key))

    def layouts(self, named: dict[str, Layout], mesh: Mesh) -> dict[str, Layout]:
        """Return the layouts of the experts' weights.

        named: layouts from `shard:`. Raises ShardcError for all entries that do not fit.
        """
        errors = Errors()
        params = {p.name: p for p in self.program.params}
        nodes = {name: node for name, node in placeholders(self.program.graph).items() if name in params}
        layouts: dict[str, Layout] = {}
        reported: set[tuple[int, int]] = set()
        used: set[int] = set()
        for name, node in nodes.items():
            if (spread := self._spread_use(node)) is None:
                continue
            i, dim, user = spread
            used.add(i)
            entry, p = self.spec.experts[i], params[name]
            layout = named.get(name, Layout())
            n, size = mesh.size(entry.axis), p.shape[dim]
            if n == 1:
                continue
            if any(layout[a] != Layout()[a] for a in mesh.digits(entry.axis)):
                fault = f"{p.fqn} is split over {entry.axis} by `shard:` too"
                fix = f"keep {entry.axis} for the experts: drop that entry of `shard:`"
                errors.add(fault, where=self.where(i, "axis"), fix=fix)
            elif size % n and self.spec.uneven != "pad":
                if (i, size) not in reported:
                    reported.add((i, size))
                    module = _named(source_of(user).module)
                    fault = f"the {size} experts of {module} are not divisible by {entry.axis}={n}"
                    fix = f"{rank_counts(entry.axis, size, n)}, or set `uneven: pad`"
                    errors.add(fault, where=self.where(i, "axis"), fix=fix)
            else:
                inner = math.prod(mesh.size(a) for a, _ in layout.shards(dim))
                layouts[name] = Layout.of({**dict(layout.items), entry.axis: Shard(dim, inner)}, mesh)
                cause = f"{self.where(i)} experts {entry.match!r}"
                node.meta.setdefault("cause", {}).update(dict.fromkeys(mesh.digits(entry.axis), cause))
        self._report_unused(used, errors)
        errors.raise_any()
        return layouts

    def _spread_use(self, param: fx.Node) -> tuple[int, int, fx.Node] | None:
        """Return the entry that spreads a parameter's experts, the dim that counts them, and the op; None if none."""
        shape = param.meta["value"].shape
        for dim in range(len(shape)):
            for user, operand, dim_of_operand in users_of_dim(param, dim):
                if user.target is ops.experts:
                    spread = dim_of_operand == 0 and operand >= UP
                else:
                    spread = len(shape) > 2 and _is_batch_dim(user, operand, dim_of_operand)
                if spread and (i := self.entry(user)) is not None:
                    return i, dim, user
        return None

    def _report_unused(self, used: set[int], errors: Errors) -> None:
        """Add an error, with a reason, for every entry that spreads no parameter."""
        aliases = self.program.module_aliases
        nodes = list(calls(self.program.graph))
        modules = list(dict.fromkeys(m for n in nodes for m in _enclosing(n)))
        holding = {source_of(n).module: _enclosing(n) for n in nodes if n.target is ops.experts}
        for i, e in enumerate(self.spec.experts):
            if i in used:
                continue
            matched = [m for m in modules if matches(e.match, m, aliases)]
            stacked = [n for j, n in self.ops() if j == i]
            if stacked:
                fault = (
                    f"the experts of {_named(source_of(stacked[0]).module)} are put together from several"
                    " parameters, which cannot be spread"
                )
                fix = "store them as one parameter [experts, m, hidden] and one [experts, hidden, i]"
            elif any(matches(e.match, m, aliases) for around in holding.values() for m in around):
                fault = f"pattern {e.match!r} never wins: earlier entries match all experts that it matches"
                fix = "delete it, or move it up"
            elif matched:
                fault = f"pattern {e.match!r} matches {_named(matched[0])}, which has no experts that shardc recognises"
                loop = "else rewrite a Python loop over experts as one of these"
                fix = f"delete the entry if it has none; {loop}: {FORMS}"
            else:
                fault = f"pattern {e.match!r} matches no module that holds experts"
                names = ", ".join(map(_named, holding))
                otherwise = (
                    f"experts are in {names}: match: '*'"
                    if holding
                    else f"the model has no experts that shardc recognises: {FORMS}"
                )
                fix = did_you_mean(e.match, [m for m in holding or modules if m], otherwise)
            errors.add(fault, where=self.where(i), fix=fix)


def _is_batch_dim(user: fx.Node, operand: int, dim: int) -> bool:
    """Return whether an op is a product, and a dim is a batch dim of it: all operands and the result have it."""
    rule = registry.find(user.target)
    if rule is None or rule.flops is None:
        return False
    signature = rule.signature(call_of(user))
    tensors = (*signature.inputs, *signature.outputs)
    factors = signature.inputs[operand][dim] if dim < len(signature.inputs[operand]) else ()
    return any(signature.sizes[f] > 1 and all(any(f in dim for dim in dims) for dims in tensors) for f in factors)
