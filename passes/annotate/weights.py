"""Compute the layouts of weights that `shard` names by patterns, with a style word or with dims.

The op that uses a weight decides what `column`, `row` and `vocab` mean for it, not its module's class: out-features are
the factor that only the weight and the result have, in-features the one that is summed (weight_roles.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import placeholders
from shardc.ir.mesh import Mesh
from shardc.ir.patterns import match, names_weight
from shardc.ir.placement import REPLICATE, Layout
from shardc.ir.program import Program
from shardc.ir.stored import Param, whole_name
from shardc.ir.types import full_op_name
from shardc.passes.annotate import indivisible, kv_heads
from shardc.passes.annotate.mesh_parts import Digits
from shardc.passes.annotate.model_plan import Plan
from shardc.passes.annotate.spec_layouts import check_fits, dims_text, layout_of, quote
from shardc.passes.annotate.weight_roles import dim_for_style, fused_parts, unsplit_by
from shardc.spec import DimShard, Spec
from shardc.spec.model_names import Names


@dataclass
class Weights:
    """The layouts that `shard` sets for a program's weights.

    digits: of the mesh, and of its axes in parts of the model. named: the parameters that the spec's own entries name,
    known after `named_layouts`.
    """

    spec: Spec
    program: Program
    digits: Digits
    shared: dict[fx.Node, kv_heads.Shared]
    named: set[str] = field(default_factory=set)
    _unsplittable: set[int] = field(default_factory=set)  # entries whose style word has no meaning for some weight
    _indivisible: list[tuple[Param, Layout, str]] = field(default_factory=list)  # with the places in the spec
    _unmatched_alternatives: list[str] = field(default_factory=list)  # notes on `{a,b}` in patterns: b matches nothing
    _whole_parts: list[str] = field(default_factory=list)  # parts of quantised weights that no style word splits
    # (kv heads, digit) -> weights whose queries all ranks of the digit compute
    _repeated: dict[tuple[int, str], list[str]] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.digits.mesh

    @property
    def notes(self) -> Iterator[str]:
        """Notes for the user, known after `named_layouts` and `planned_layouts`."""
        yield from self._unmatched_alternatives
        if self._whole_parts:
            first, *others = self._whole_parts
            more = f" and {len(others)} more" if others else ""
            yield f"{first}{more}: whole on every rank: no rule splits this part of a quantised weight"
        for (kv, digit), (first, *others) in self._repeated.items():
            more = f" and {len(others)} more" if others else ""
            yield (
                f"{first}{more}: one weight makes {kv} key-value head{'s' if kv > 1 else ''} (of a scan: groups) and"
                f" the queries (heads) that use them; the {self.mesh.size(digit)} ranks of {digit} that share one all"
                " compute its queries too"
            )

    def named_layouts(self) -> dict[str, Layout]:
        """Return the layouts from the entries of `shard`. Raises ShardcError for all invalid entries."""
        errors, rules = Errors(), self.spec.shard
        nodes = placeholders(self.program.graph)
        used = self._unmatched_entries(errors)
        layouts: dict[str, Layout] = {}
        for p in self.program.params:
            entries = self._entries_of(p, used, errors)
            if entries:
                self.named.add(p.name)
            self._check_stack(p, entries, errors)
            chosen: dict[Layout, tuple[int, str]] = {}  # more than one if names of a tied weight are split differently
            for i, name in entries.items():
                layout = self._layout_by_entry(p, nodes[p.name], i, name, errors)
                if layout is not None:
                    chosen.setdefault(layout, (i, name))
            if len(chosen) > 1:
                (a, (i, n)), (b, (j, m)) = list(chosen.items())[:2]
                ways = f"{replace(p.value, layout=a)} and {replace(p.value, layout=b)}"
                fault = f"{n} and {m} are one shared weight, which the spec splits in two ways: {ways}"
                fix = "split it once; each name of a tied weight means the same weight"
                errors.add(fault, where=self._where(max(i, j)), fix=fix)
            elif chosen:
                layout, (i, _) = next(iter(chosen.items()))
                layouts[p.name] = layout
                cause = quote(self.spec, "shard", rules[i].pattern, rules[i].style or dims_text(rules[i].dims or {}))
                nodes[p.name].meta["cause"] = {axis: cause for axis, _ in layout.shards()}
        for i in sorted(set(range(len(rules))) - used):
            fault = f"pattern {rules[i].pattern!r} never wins: earlier patterns match all that it matches"
            errors.add(fault, where=self._where(i), fix="delete it, or move it up")
        indivisible.report(self.program, self.mesh, self._indivisible, errors)
        errors.raise_any()
        return layouts

    def _where(self, i: int) -> str:
        return self.spec.where(("shard", self.spec.shard[i].pattern))

    def _unmatched_entries(self, errors: Errors) -> set[int]:
        """Return the entries that match no weight, with an error for each; note the idle alternatives of the others."""
        rules = self.spec.shard
        known = Names.of_weights({n: p.shape for p in self.program.params for n in (p.fqn, *p.names)})
        wrong = known.check_weights(((("shard", r.pattern), r.pattern, False) for r in rules), self.spec.where, errors)
        unmatched = {i for i, rule in enumerate(rules) if ("shard", rule.pattern) in wrong}
        for i in sorted(set(range(len(rules))) - unmatched):
            texts = known.idle_alternatives(rules[i].pattern)
            self._unmatched_alternatives += [f"{self._where(i)} {text}" for text in texts]
        return unmatched

    def _entries_of(self, p: Param, used: set[int], errors: Errors) -> dict[int, str]:
        """Return the entries that win a parameter, each with the name by which it does, and add them to `used`.

        For each name the first entry that matches wins; a tied weight has several names.
        """
        entries: dict[int, str] = {}
        for name in (p.fqn, *p.names):
            for i, rule in enumerate(self.spec.shard):
                if not names_weight(rule.pattern, name):
                    continue
                used.add(i)
                if rule.dims is None or match(rule.pattern, name):
                    entries.setdefault(i, name)
                else:
                    fault = f"{rule.pattern!r} names a module, but dims belong to one parameter"
                    fix = f"name the parameter: {rule.pattern + '.' + name.rpartition('.')[2]!r}"
                    errors.add(fault, where=self._where(i), fix=fix)
                break
        return entries

    def _check_stack(self, p: Param, entries: Iterable[int], errors: Errors) -> None:
        """Add an error for an entry that names only some of a stack of experts: all have the same split."""
        for i in entries if p.members else ():
            pattern = self.spec.shard[i].pattern
            named = [m for m in p.members if names_weight(pattern, m)]
            if 0 < len(named) < len(p.members):
                fault = f"{pattern!r} names {named[0]}, one of {len(p.members)} experts that are one weight, {p.fqn}"
                errors.add(fault, where=self._where(i), fix=f"name all of them: {p.fqn!r}")

    def _layout_by_entry(self, p: Param, node: fx.Node, i: int, name: str, errors: Errors) -> Layout | None:
        """Return a parameter's layout by entry i; None if the style has no meaning for it, or it does not fit."""
        rule, where = self.spec.shard[i], self._where(i)
        if rule.dims is not None:
            layout = self._split(rule.dims, node)
            return layout if self._fits(p, layout, name, where, errors) else None
        assert rule.style is not None
        dim = dim_for_style(node, rule.style, name.rpartition(".")[0])
        if dim is not None:
            shard = DimShard(axis=rule.axis, split=fused_parts(node, dim))
            layout = self._split({dim: (shard,)} if dim >= 0 else {}, node)
            return layout if self._fits(p, layout, name, where, errors) else None
        if whole_name(p.fqn) != p.fqn:  # a part of a quantised weight, whose blocks are not along such a dim
            if math.prod(p.shape) > 1:
                self._whole_parts.append(p.fqn)
            return self._split({}, node)
        if i in self._unsplittable:  # one error for the pattern, not one for every weight it matches
            return None
        self._unsplittable.add(i)
        uses = ", ".join(sorted({full_op_name(u.target) for u in node.users}))
        unsplit, dims = bool(unsplit_by(node)), f"name dims instead, e.g. {{0: {rule.axis}}}"
        uses += ", whose weights no rule splits" if unsplit else ""
        fault = f"{name} is not a weight that {rule.style!r} can split: it is used by {uses}"
        errors.add(fault, where=where, fix=f"{'delete it' if unsplit else dims}, or narrow the pattern")
        return None

    def _fits(self, p: Param, layout: Layout, name: str, where: str, errors: Errors) -> bool:
        """Check as `check_fits` does, but report sizes that ranks do not divide together, by shared split."""
        if self.spec.uneven != "pad" and indivisible.indivisible_dim(layout, p.shape, self.mesh):
            self._indivisible.append((p, layout, where))
            return False
        return check_fits(layout, p.shape, self.mesh, name, where, errors, pad=self.spec.uneven == "pad")

    def planned_layouts(self, plan: Plan) -> dict[str, Layout]:
        """Return the layouts of the parameters that a plan names."""
        errors = Errors()
        layouts: dict[str, Layout] = {}
        for name, node in placeholders(self.program.graph).items():
            if name not in plan.splits:
                continue
            p, (s, cause) = self.program.param(name), plan.splits[name]
            layout = self._split({s.dim: (DimShard(axis=plan.axis, split=s.split, sections=s.sections),)}, node)
            if self._fits(p, layout, p.fqn, cause, errors):
                layouts[p.name] = layout
                node.meta["cause"] = {axis: cause for axis, _ in layout.shards()}
        indivisible.report(self.program, self.mesh, self._indivisible, errors)
        errors.raise_any()
        return layouts

    def _split(self, dims: dict[int, tuple[DimShard, ...]], node: fx.Node) -> Layout:
        """Return a layout by dims; ranks that share a key-value head all hold it."""
        layout = layout_of(dims, self.mesh, partial(self.digits.of, node))
        if node in self.shared:
            for axis in {s.axis for shards in dims.values() for s in shards}:
                for digit in kv_heads.shares(self.mesh, self.digits.of(node, axis), self.shared[node]):
                    layout = layout.replace(digit, REPLICATE, self.mesh)
                    if self.shared[node].fused:
                        key = (self.shared[node].heads, digit)
                        self._repeated.setdefault(key, []).append(self.program.param(node.name).fqn)
                    node.meta.setdefault("shared", set()).add(digit)
        return layout
