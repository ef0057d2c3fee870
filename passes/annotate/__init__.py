"""Annotate: the spec's sections become placements on the parameters, inputs and activations they name.

    before   w: f32[256, 64]                                    spec: shard: {"*.c_proj": row}
    after    w: f32[256@tp, 64]                                  (Conv1D stores [in, out]: its in-features are dim 0)

What `column`, `row` and `vocab` mean for a weight is read off the op that uses it, not off its module's class:
out-features are the factor that only the weight and the result have, in-features the one that is summed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import copy_graph, operands_of, producer_of, values_of
from shardc.ir.mesh import MICROBATCH, Mesh
from shardc.ir.placement import REPLICATE, Layout, Placement, Shard
from shardc.ir.program import Input, Param, Program, Source
from shardc.passes import divisibility
from shardc.passes.accumulate import widened
from shardc.passes.annotate import indivisible, kv_heads, model_plan, padding, structure, to_spec
from shardc.passes.annotate.experts import Experts
from shardc.passes.annotate.plan import Plan
from shardc.passes.annotate.weight_roles import fused, styled
from shardc.passes.base import Pass
from shardc.passes.pipeline import stage_spec
from shardc.spec import DimShard, ShardRule, Spec
from shardc.spec.patterns import first_match, match, nearest

aten = torch.ops.aten


@dataclass(frozen=True)
class Annotate(Pass):
    """Puts layouts on parameters and inputs, and `pin` nodes behind annotated activations.

    From here to `accumulate` and `pipeline` the program's mesh is that of one stage's ranks, and has microbatches as an
    axis.
    """

    def run(self, program: Program) -> Program:
        spec = widened(stage_spec(self.spec))
        program = replace(program, graph=copy_graph(program.graph))
        return _Annotator(spec, self.options.model_plan).run(program, spec.mesh)


@dataclass(frozen=True)
class _Annotator:
    spec: Spec
    carried: Mapping[str, str]

    def run(self, program: Program, mesh: Mesh) -> Program:
        errors = Errors()
        layouts: dict[str, Layout] = {}
        shared = kv_heads.shared(program.graph)
        split_by = {a for r in self.spec.shard for a in _axes(r)} | (
            {self.spec.shard_axis} if self.spec.shard_use else set()
        )
        for axis in sorted(split_by & set(mesh.names)):
            mesh = kv_heads.refine(mesh, axis, shared.values())
        weights = _Weights(self.spec, program, mesh, shared)
        with errors.collect():
            layouts |= weights.run()
            if (
                self.spec.shard_use
                and self.spec.shard_axis in self.spec.mesh.names
                and mesh.size(self.spec.shard_axis) > 1
            ):
                plan = self._plan(program, mesh, weights.named, layouts)
                layouts |= weights.planned(plan)
                program = replace(
                    program,
                    notes=(*program.notes, *plan.notes),
                    meta={**program.meta, **self._written(program, plan, weights.named)},
                )
        program = replace(program, notes=(*program.notes, *weights.notes))
        with errors.collect():
            if self.spec.experts:
                layouts |= Experts(self.spec, program).layouts(layouts, mesh)
        if self.spec.uneven == "pad":
            layouts = padding.pad_weights(program, layouts, mesh)
        with errors.collect():
            axes, notes = _batch_axes(self.spec, program, mesh)
            program = replace(program, notes=(*program.notes, *notes))
            layouts |= _inputs(self.spec, program, mesh, axes)
        with errors.collect():
            _activations(self.spec, program, mesh)
        errors.raise_any()
        return replace(program.with_layouts(layouts), mesh=mesh)

    def _plan(self, program: Program, mesh: Mesh, named: set[str], layouts: dict[str, Layout]) -> Plan:
        """How the model's plan, or the structure of its graph, splits the weights that
        the spec's entries leave open.
        """
        axis, where = self.spec.shard_axis, self.spec.where(("shard", "use"))
        if self.spec.shard_use == "model":
            return model_plan.resolve(self.carried, program, axis, named, where)
        given: dict[str, Shard | None] = {}
        for name in named:
            on = [s for part, s in layouts.get(name, Layout()).shards() if part in mesh.parts(axis)]
            given[name] = min(on, key=lambda s: s.split) if on else None
        return structure.choose(program, given, axis, mesh.size(axis), where, pad=self.spec.uneven == "pad")

    def _written(self, program: Program, plan: Plan, named: set[str]) -> dict[str, Any]:
        """The entries that `use` came to, as a user would write them: {"shard": lines of YAML}."""
        rules = to_spec.entries(program, {name: s for name, (s, _) in plan.splits.items()}, plan.axis, named)
        text = str(replace(self.spec, shard=(*self.spec.shard, *rules), shard_use=None))
        return {
            "shard": [
                line
                for line in text.partition("\nshard:\n")[2].partition("\n\n")[0].splitlines()
                if line.startswith("  ")
            ]
        }


def _axes(rule: ShardRule) -> set[str]:
    return {s.axis for shards in rule.dims.values() for s in shards} if rule.dims is not None else {rule.axis}


def _quote(spec: Spec, section: str, key: str, text: object) -> str:
    return f"{spec.where((section, key))} {key!r}: {text}"


def _fits(
    layout: Layout, shape: tuple[int, ...], mesh: Mesh, name: str, where: str, errors: Errors, *, pad: bool = False
) -> bool:
    """Report a layout that a shape cannot have, with the nearest sizes that fit. pad: what is only a matter of padding
    is right.
    """
    layout = padding.padded(layout, shape, mesh) if pad else layout
    wrong = layout.fits(shape, mesh)
    if not wrong:
        return True
    if odd := divisibility.odd(layout, shape, mesh):
        errors.add(f"{name} of shape {list(shape)}: {odd.what(mesh)}", where=where, fix=odd.fix(mesh))
        return False
    sections = next((s.sections for _, s in layout.shards() if s.dim < len(shape) and s.sections), ())
    fix = f"its dims are 0 to {len(shape) - 1}" if shape else "it is one number: leave it whole"
    errors.add(
        f"{name} of shape {list(shape)}: {wrong}", where=where, fix="list the sizes of the parts" if sections else fix
    )
    return False


def _layout(dims: dict[int, tuple[DimShard, ...]], mesh: Mesh) -> Layout:
    """Several axes on one dim: the first takes the outermost digit, the next the digit inside it."""
    placements: dict[str, Placement] = {}
    for dim, shards in dims.items():
        digit = 1
        for s in shards:
            placements[s.axis] = Shard(dim, s.split * digit, s.sections)
            digit *= mesh.size(s.axis)
    return Layout.of({a: p for a, p in placements.items() if mesh.size(a) > 1}, mesh)


# --- weights ----------------------------------------------------------------------------------------------------------


@dataclass
class _Weights:
    spec: Spec
    program: Program
    mesh: Mesh
    shared: dict[fx.Node, kv_heads.Shared]
    told: set[int] = field(default_factory=set)
    named: set[str] = field(default_factory=set)  # parameters that the spec's own entries name
    odd: list[tuple[Param, Layout, str]] = field(default_factory=list)  # parameters that ranks do not divide
    repeated: dict[tuple[int, str], list[str]] = field(
        default_factory=dict
    )  # (kv heads, digit) -> weights whose queries its ranks all compute

    @property
    def notes(self) -> Iterator[str]:
        for (kv, digit), (first, *others) in self.repeated.items():
            more = f" and {len(others)} more" if others else ""
            yield (
                f"{first}{more}: one weight makes {kv} key-value head{'s' if kv > 1 else ''} and the queries that use"
                f" them; the {self.mesh.size(digit)} ranks of {digit} that share a head all compute its queries too"
            )

    def run(self) -> dict[str, Layout]:
        errors = Errors()
        rules = self.spec.shard
        nodes = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        names = {n: p for p in self.program.params for n in (p.fqn, *p.aliases)}
        modules = {n.rpartition(".")[0] for n in names}
        _, unmatched, _ = first_match([r.pattern for r in rules], [*names, *modules])
        for i in unmatched:
            rule = rules[i]
            close = nearest(rule.pattern, sorted({*names, *modules}))
            errors.add(
                f"pattern {rule.pattern!r} matches no parameter and no module of the model",
                where=self.spec.where(("shard", rule.pattern)),
                fix=(
                    f"did you mean {close!r}?"
                    if close
                    else "see the model's names with `shardc inspect model.py --before`"
                ),
            )
        won: set[int] = set(unmatched)
        layouts: dict[str, Layout] = {}
        for p in self.program.params:
            found: dict[int, str] = {}
            for name in (p.fqn, *p.aliases):
                for i, rule in enumerate(rules):
                    if match(rule.pattern, name) or (
                        rule.dims is None and match(rule.pattern, name.rpartition(".")[0])
                    ):
                        found.setdefault(i, name)
                        won.add(i)
                        break
                    if rule.dims is not None and match(rule.pattern, name.rpartition(".")[0]):
                        won.add(i)
                        errors.add(
                            f"{rule.pattern!r} names a module, but dims belong to one parameter",
                            where=self.spec.where(("shard", rule.pattern)),
                            fix=f"name the parameter: {rule.pattern + '.' + name.rpartition('.')[2]!r}",
                        )
                        break
            if found:
                self.named.add(p.name)
            made: dict[Layout, tuple[int, str]] = {}
            for i, name in found.items():
                layout = self._one(p, nodes[p.name], i, name, errors)
                if layout is not None:
                    made.setdefault(layout, (i, name))
            if len(made) > 1:
                (a, (i, n)), (b, (j, m)) = list(made.items())[:2]
                ways = f"{replace(p.value, layout=a)} and {replace(p.value, layout=b)}"
                errors.add(
                    f"{n} and {m} are one shared weight, which the spec splits two ways: {ways}",
                    where=self.spec.where(("shard", rules[max(i, j)].pattern)),
                    fix="split it once; a tied weight answers to all of its names",
                )
            elif made:
                layout, (i, _) = next(iter(made.items()))
                layouts[p.name] = layout
                cause = _quote(self.spec, "shard", rules[i].pattern, rules[i].style or _dims_text(rules[i].dims or {}))
                nodes[p.name].meta["cause"] = {axis: cause for axis, _ in layout.shards()}
        for i in sorted(set(range(len(rules))) - won):
            errors.add(
                f"pattern {rules[i].pattern!r} never wins: earlier patterns match all that it matches",
                where=self.spec.where(("shard", rules[i].pattern)),
                fix="delete it, or move it up",
            )
        indivisible.tell(self.program, self.mesh, self.odd, errors)
        errors.raise_any()
        return layouts

    def _one(self, p: Param, node: fx.Node, i: int, name: str, errors: Errors) -> Layout | None:
        """The layout that rule i gives a parameter; None where the style has no meaning for it or it does not fit."""
        rule = self.spec.shard[i]
        where = self.spec.where(("shard", rule.pattern))
        if rule.dims is not None:
            layout = self._split(rule.dims, node)
            return layout if self._fits(p, layout, name, where, errors) else None
        assert rule.style is not None
        dim = styled(node, rule.style, name.rpartition(".")[0])
        if dim is not None:
            layout = self._split({dim: (DimShard(axis=rule.axis, split=fused(node, dim)),)} if dim >= 0 else {}, node)
            return layout if self._fits(p, layout, name, where, errors) else None
        if i in self.told:  # one error for the pattern, not one for every weight it matches
            return None
        self.told.add(i)
        uses = sorted({str(u.target) for u in node.users})
        errors.add(
            f"{name} is not a weight that {rule.style!r} can split: it is used by {', '.join(uses)}",
            where=where,
            fix="name dims instead, e.g. {0: " + rule.axis + "}, or narrow the pattern",
        )
        return None

    def _fits(self, p: Param, layout: Layout, name: str, where: str, errors: Errors) -> bool:
        """As `_fits`; sizes that do not divide are told later, together."""
        if self.spec.uneven != "pad" and divisibility.odd(layout, p.shape, self.mesh):
            self.odd.append((p, layout, where))
            return False
        return _fits(layout, p.shape, self.mesh, name, where, errors, pad=self.spec.uneven == "pad")

    def planned(self, plan: Plan) -> dict[str, Layout]:
        """The layouts that a plan gives to the parameters it names."""
        errors = Errors()
        layouts: dict[str, Layout] = {}
        for node in self.program.graph.nodes:
            if node.op != "placeholder" or node.name not in plan.splits:
                continue
            p, (s, cause) = self.program.param(node.name), plan.splits[node.name]
            layout = self._split({s.dim: (DimShard(axis=plan.axis, split=s.split, sections=s.sections),)}, node)
            if self._fits(p, layout, p.fqn, cause, errors):
                layouts[p.name] = layout
                node.meta["cause"] = {axis: cause for axis, _ in layout.shards()}
        indivisible.tell(self.program, self.mesh, self.odd, errors)
        errors.raise_any()
        return layouts

    def _split(self, dims: dict[int, tuple[DimShard, ...]], node: fx.Node) -> Layout:
        """A layout by dims; ranks that share a key-value head all hold it."""
        layout = _layout(dims, self.mesh)
        if node in self.shared:
            for axis in {s.axis for shards in dims.values() for s in shards}:
                for digit in kv_heads.shares(self.mesh, axis, self.shared[node]):
                    layout = layout.replace(digit, REPLICATE, self.mesh)
                    if self.shared[node].fused:
                        self.repeated.setdefault((self.shared[node].heads, digit), []).append(
                            self.program.param(node.name).fqn
                        )
                    node.meta.setdefault("shared", set()).add(digit)
        return layout


def _dims_text(dims: dict[int, tuple[DimShard, ...]]) -> str:
    def one(s: DimShard) -> str:
        return s.axis + (f"/{s.split}" if s.split > 1 else "") + (f"{list(s.sections)}" if s.sections else "")

    return "{" + ", ".join(f"{d}: {'+'.join(map(one, s))}" for d, s in dims.items()) + "}"


# --- inputs -----------------------------------------------------------------------------------------------------------


def _batch_axes(spec: Spec, program: Program, mesh: Mesh) -> tuple[list[str], list[str]]:
    """The axes that split the batch, with notes. Those that only experts have do so if the batch divides."""
    axes = [a for a in spec.data_axes if mesh.size(a) > 1]
    own = [a for a in axes if a in spec.expert_axes] if spec.batch.axes is None and spec.uneven != "pad" else []
    ranks = math.prod(mesh.size(a) for a in axes)
    dims = [(x.shape, _batch_dim(spec, program, x)) for x in program.inputs]
    odd = [shape[d] for shape, d in dims if d is not None and d < len(shape) and shape[d] % ranks]
    if not own or not odd:
        return axes, []
    same = f"outside of experts the ranks of {', '.join(own)} do the same"
    return [a for a in axes if a not in own], [
        f"{spec.where(('experts',))}: the batch of {odd[0]} does not divide by {ranks} ranks: {same}"
    ]


def _batch_dim(spec: Spec, program: Program, x: Input) -> int | None:
    """The dim of an input that the batch's axes split. Of one row where others have more, all rows share it (positions
    i64[1, s]): none.
    """

    def named(x: Input) -> int | None:
        return next((d for pattern, d in spec.batch.dims.items() if match(pattern, _input_name(x))), 0)

    def rows(x: Input) -> int:
        return x.shape[d] if (d := named(x)) is not None and d < len(x.shape) else 0

    return None if rows(x) == 1 < max(map(rows, program.inputs)) else named(x)


def _inputs(spec: Spec, program: Program, mesh: Mesh, axes: list[str]) -> dict[str, Layout]:
    errors = Errors()
    layouts: dict[str, Layout] = {}
    names = [_input_name(i) for i in program.inputs]
    given = spec.batch.dims
    for pattern in given:
        if pattern != "*" and not any(match(pattern, n) for n in names):
            close = nearest(pattern, names)
            errors.add(
                f"pattern {pattern!r} matches no input",
                where=spec.where(("batch", "dims", pattern)),
                fix=f"did you mean {close!r}?" if close else f"the inputs are {', '.join(names)}",
            )
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    wrong: dict[tuple[str, str, str], list[str]] = {}  # one error for all inputs that are alike
    for x, name in zip(program.inputs, names, strict=True):
        dim = _batch_dim(spec, program, x)
        if dim is None or not axes or not x.shape:
            continue
        layout = _layout({dim: tuple(DimShard(axis=a) for a in axes)}, mesh)
        if spec.uneven == "pad":
            layout = padding.padded(layout, x.shape, mesh)
        if odd := divisibility.odd(layout, x.shape, mesh):
            at = spec.where(("batch", "microbatches") if odd.axes[-1] == MICROBATCH else ("mesh", odd.axes[-1]))
            wrong.setdefault(
                (odd.what(mesh, f"the batch of {odd.size} (dim {dim})"), at, odd.fix(mesh, size="it")), []
            ).append(name)
        elif _fits(layout, x.shape, mesh, f"input {name!r} (batch dim {dim})", spec.where(("batch", "dims")), errors):
            layouts[x.name] = layout
            nodes[x.name].meta["cause"] = dict.fromkeys(axes, f"{spec.where(('batch',))} batch dim {dim} of {name!r}")
    for (what, at, fix), alike in wrong.items():
        errors.add(f"input {', '.join(map(repr, alike))}: {what}", where=at, fix=fix)
    errors.raise_any()
    return layouts


def _input_name(x: Input) -> str:
    return ".".join(map(str, x.path)) or x.name


# --- activations ------------------------------------------------------------------------------------------------------


def _activations(spec: Spec, program: Program, mesh: Mesh) -> None:
    errors = Errors()
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    own = {m for n in nodes for m in _parents(n.meta.get("source", Source()).module)}
    modules = sorted(own.union(*(n.meta.get("through", ()) for n in nodes)))
    also = {m: names for names in program.shared_modules for m in modules if m in names}
    pinned: dict[fx.Node, tuple[Layout, str]] = {}
    todo: list[tuple[fx.Node, set[fx.Node] | None, Layout, str, str]] = []
    claimed: set[tuple[str, str]] = set()
    for rule in spec.activations:
        key = rule.pattern + (":in" if rule.at == "input" else "")
        where = spec.where(("activations", key))
        found = {m for m in modules if any(match(rule.pattern, name) for name in also.get(m, [m]))}
        # `model.layers.*` names the layers, not everything in them: `*` matches dots too, but what is inside a match is
        # not meant
        hits = [m for m in modules if m in found and not any(parent in found for parent in _parents(m)[:-1])]
        if not hits:
            close = nearest(rule.pattern, modules)
            errors.add(
                f"pattern {key!r} matches no module that computes anything",
                where=where,
                fix=(
                    f"did you mean {close!r}?"
                    if close
                    else "see the model's modules with `shardc inspect model.py --before`"
                ),
            )
        mine = [m for m in hits if (m, rule.at) not in claimed]
        if hits and not mine:
            errors.add(
                f"pattern {key!r} never wins: earlier patterns match all that it matches",
                where=where,
                fix="delete it, or move it up",
            )
        claimed |= {(m, rule.at) for m in mine}
        for module in mine:
            for value, inside in _boundary(nodes, module, rule.at):
                v = values_of(producer_of(value)[0])[producer_of(value)[1]]
                layout = _layout(rule.dims, mesh)
                if spec.uneven == "pad":
                    layout = padding.padded(layout, v.shape, mesh)
                cause = _quote(spec, "activations", key, _dims_text(rule.dims))
                if not _fits(layout, v.shape, mesh, f"{rule.at} of {module}", where, errors):
                    continue
                if value in pinned and pinned[value][0] != layout:
                    errors.add(
                        f"{rule.at} of {module} is the same value as one that {pinned[value][1]} lays out differently",
                        where=where,
                        fix="let both annotations say the same, or drop one",
                    )
                elif value not in pinned:
                    pinned[value] = (layout, cause)
                    todo.append((value, inside if rule.at == "input" else None, layout, cause, key))
    errors.raise_any()
    for value, within, layout, cause, _ in todo:
        with program.graph.inserting_after(value):
            pin = program.graph.call_function(aten.alias.default, (value,))
        users = [u for u in value.users if u is not pin and (within is None or u in within)]
        for user in users:
            user.replace_input_with(value, pin)
        pin.meta = {
            "value": values_of(producer_of(value)[0])[producer_of(value)[1]],
            "source": value.meta.get("source", Source()),
            "pin": layout,
        }
        pin.meta["cause"] = dict.fromkeys(mesh.names, cause)


def _parents(module: str) -> list[str]:
    parts = module.split(".") if module else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]


def _boundary(nodes: list[fx.Node], module: str, at: str) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """For every call of a module: the value it returns (or takes) through which a gradient flows, and the nodes inside.

    A module that comes to nothing, as Dropout(0.0), returns what it takes.
    """
    run: list[fx.Node] = []
    through: dict[fx.Node, set[fx.Node]] | None = {}
    for node in [*nodes, None]:
        name = node.meta.get("source", Source()).module if node is not None else ""
        if node is not None and (name == module or name.startswith(module + ".")):
            run.append(node)
            through = None
            continue
        if node is not None and through is not None and module in node.meta.get("through", ()) and _flows(node):
            through[node] = set(node.users)
        if run:
            inside = set(run)
            run = []
            if at == "output":
                found = [n for n in inside if _flows(n) and any(u not in inside for u in n.users)]
                order = {n: i for i, n in enumerate(nodes)}
                if found:
                    yield max(found, key=order.__getitem__), inside
            else:
                order = {n: i for i, n in enumerate(nodes)}
                ordered = sorted(inside, key=order.__getitem__)
                taken = [
                    t
                    for n in ordered
                    for t in operands_of(n)
                    if t not in inside and t.op != "placeholder" and _flows(t)
                ]
                if taken:
                    yield taken[0], inside
    yield from (through or {}).items()


def _flows(node: fx.Node) -> bool:
    v = node.meta.get("value")
    return v is not None and not isinstance(v, tuple) and v.requires_grad
