"""Annotate: turn the spec's sections into placements on parameters, inputs and activations.

    before   down.weight: f32[64, 256]        spec: shard: {down: row}
    after    down.weight: f32[64, 256@tp]     (a linear layer stores [out, in]: `row` splits the in-features)

Placement decides everything that is not annotated.

weights.py       `shard`: patterns and style words        batch_rows.py    `batch`: the rows of a batch over data axes
model_plan.py    `use: model`: the plan of the model      activations.py   `activations`: pins
structure.py     `use: structure`: pairs in the graph     experts.py       `experts`: the experts' dim of weights
padding.py       `uneven: pad`                            outputs.py       `outputs`: the layouts of outputs
attention_bands.py   which keys each row of attention sees
mesh_parts.py        parts that see the ranks as another mesh

Optional features add their splits (`passes.annotate`): `sequence`, along the tokens.

weight_roles.py   the meaning of `column`, `row`, `vocab`   kv_heads.py        key-value heads that ranks share
propagate_split.py   what else is split with a value        indivisible.py     errors for sizes that ranks do not divide
spec_layouts.py   the spec's text as a layout               to_spec.py         splits as entries of a spec
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardc.errors import Errors
from shardc.ir.graph import copy_graph, placeholders
from shardc.ir.outputs import OtherForward
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.optional import registered
from shardc.passes.annotate import kv_heads, model_plan, padding, structure, to_spec
from shardc.passes.annotate.activations import pin_activations
from shardc.passes.annotate.attention_bands import use_bands
from shardc.passes.annotate.batch_rows import disagreements, input_layouts, row_axes, with_microbatch_axis
from shardc.passes.annotate.experts import Experts
from shardc.passes.annotate.mesh_parts import Digits, find_digits, pin_parts
from shardc.passes.annotate.model_plan import Plan
from shardc.passes.annotate.outputs import wanted_outputs
from shardc.passes.annotate.weights import Weights
from shardc.passes.base import Pass
from shardc.passes.pipeline import stage_spec
from shardc.spec import ShardRule, Spec


@dataclass(frozen=True)
class Annotate(Pass):
    """Adds layouts to parameters and inputs, and `pin` nodes after annotated activations.

    From here to `accumulate` and `pipeline` the program's mesh is that of one stage's ranks, and its last axis is that
    of microbatches (shardc.ir.mesh.MICROBATCH), if a step has several. compatible_with, here `running`, is a program
    for another batch that runs already: its parameters, and the digits of its axes, stay as they are.
    """

    def run(self, program: Program) -> Program:
        spec = with_microbatch_axis(stage_spec(self.spec))
        program = replace(program, graph=copy_graph(program.graph))
        shared, running = kv_heads.shared(program.graph), self.options.compatible_with
        errors, notes = Errors(), list[str]()
        parts = [part for of in registered("passes", "mesh_parts") for part in of(self.spec, program, errors)]
        errors.raise_any()
        digits = find_digits(spec, program, parts, weight_axes(spec), running, errors)
        mesh = digits.mesh
        use_bands(spec, program)
        weights = Weights(spec, program, digits, shared)
        program, layouts = self._split_weights(spec, program, weights, errors, notes)
        with errors.collect():
            axes, unsplit = row_axes(spec, program, mesh)
            notes += unsplit
            layouts |= input_layouts(spec, program, mesh, axes, digits.row_ranks)
            notes += [f"{d.where}: {d.what}: {d.fix}" for d in disagreements(spec, program).values()]
        with errors.collect():
            pin_activations(spec, program, mesh, digits.of)
        pin_parts(spec, program, digits, errors if running is None else Errors())  # of fewer rows: they stay whole
        outputs = wanted_outputs(spec, program.outputs, mesh, errors, notes, all_named=self.options.forward is True)
        if isinstance(self.options.forward, OtherForward):
            outputs = self.options.forward.outputs(outputs)
        if running is not None:  # how it splits parameters and buffers
            fixed = {x.name: Layout.of(dict(x.layout.shards()), mesh) for x in running.params_and_buffers if x.fqn}
            layouts = {name: x for name, x in (layouts | fixed).items() if name not in fixed or x.items}
        program = replace(program.with_layouts(layouts), mesh=mesh)
        for of_feature in registered("passes", "annotate"):
            program = of_feature(spec, program, errors)
        errors.raise_any()
        return replace(program, outputs=outputs, notes=(*program.notes, *notes))

    def _split_weights(
        self, spec: Spec, program: Program, weights: Weights, errors: Errors, notes: list[str]
    ) -> tuple[Program, dict[str, Layout]]:
        """Return the layouts of weights, and the program with what `use` chose in its `meta`. Adds errors and notes."""
        mesh, running, layouts = weights.mesh, self.options.compatible_with, dict[str, Layout]()
        with errors.collect():
            layouts |= weights.named_layouts()
            if spec.shard_use and any(size > 1 for size in weights.digits.sizes(spec.shard_axis)):
                if running is not None and spec.shard_use == "structure":
                    plan = _plan_of(running, spec, weights.digits, weights.named)
                    entries = running.meta.get("shard", [])
                else:
                    plan = _plan(spec, self.options.model_plan, program, weights.digits, weights.named, layouts)
                    entries = _as_entries(spec, program, plan, weights.named)
                layouts |= weights.planned_layouts(plan)
                notes += plan.notes
                program = replace(program, meta={**program.meta, "shard": entries})
        notes += weights.notes
        with errors.collect():
            if spec.experts:
                layouts |= Experts(spec, program).layouts(layouts, mesh)
        return program, padding.pad_weights(program, layouts, mesh) if spec.uneven == "pad" else layouts


def weight_axes(spec: Spec) -> set[str]:
    """Return the axes that `shard` splits weights over."""

    def axes(rule: ShardRule) -> set[str]:
        return {s.axis for shards in rule.dims.values() for s in shards} if rule.dims is not None else {rule.axis}

    of_rules = set[str]().union(*map(axes, spec.shard))
    return (of_rules | ({spec.shard_axis} if spec.shard_use else set())) & set(spec.mesh.names)


def _plan(
    spec: Spec, words: Mapping[str, str], program: Program, digits: Digits, named: set[str], layouts: dict[str, Layout]
) -> Plan:
    """Return how the model's plan or the graph's structure splits the weights that no spec entry names.

    words: the plan of the model. named: the parameters that entries name. layouts: the entries' layouts for them.
    """
    axis, where, nodes = spec.shard_axis, spec.where(("shard", "use")), placeholders(program.graph)
    if spec.shard_use == "model":
        return model_plan.resolve(words, program, axis, named, where)
    fixed: dict[str, Shard | None] = {}
    for name in named:
        of_axis = digits.of(nodes[name], axis)
        shards = [s for part, s in layouts.get(name, Layout()).shards() if part in of_axis]
        fixed[name] = min(shards, key=lambda s: s.split) if shards else None
    ranks = {n: math.prod(map(digits.mesh.size, digits.of(nodes[n], axis))) for n in (p.name for p in program.params)}
    splits: dict[str, tuple[Shard, str]] = {}
    notes: dict[str, None] = {}
    for n in sorted({*ranks.values()} - {1}):  # parts whose meshes have an axis of this size
        others = {name: None for name, size in ranks.items() if size != n}
        plan = structure.choose(program, others | fixed, axis, n, where, pad=spec.uneven == "pad")
        splits |= plan.splits
        notes |= dict.fromkeys(plan.notes)
    return Plan(axis, splits, tuple(notes))


def _plan_of(running: Program, spec: Spec, digits: Digits, named: set[str]) -> Plan:
    """Return the plan that `use` made for the program that already runs. named: see `_plan`.

    The current graph, with one token or fewer rows, might suggest another plan.
    """
    axis, nodes, own = spec.shard_axis, placeholders(running.graph), {n.name: n for n in digits.of_node}
    splits: dict[str, tuple[Shard, str]] = {}
    for p in running.params:
        parts = digits.of(own.get(p.name, nodes[p.name]), axis)
        causes = nodes[p.name].meta.get("cause", {})
        shards = [(s, causes[part]) for part, s in p.layout.shards() if part in parts and part in causes]
        if shards and p.name not in named:
            splits[p.name] = min(shards, key=lambda one: one[0].split)
    return Plan(axis, splits, ())


def _as_entries(spec: Spec, program: Program, plan: Plan, named: set[str]) -> list[str]:
    """Return the entries that `use` made, as a user would write them: lines of YAML."""
    rules = to_spec.entries(program, {name: s for name, (s, _) in plan.splits.items()}, plan.axis, named)
    text = str(replace(spec, shard=(*spec.shard, *rules), shard_use=None))
    section = text.partition("\nshard:\n")[2].partition("\n\n")[0]
    return [line for line in section.splitlines() if line.startswith("  ")]
