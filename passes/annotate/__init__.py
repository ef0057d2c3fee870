"""Annotate: turn the spec's sections into placements on parameters, inputs and activations.

    before   w: f32[256, 64]                                    spec: shard: {"*.c_proj": row}
    after    w: f32[256@tp, 64]                                 (Conv1D stores [in, out]: its in-features are dim 0)

weights.py       `shard`: patterns and style words        inputs.py        `batch`: the rows of a batch over data axes
model_plan.py    `use: model`: the plan of the model      activations.py   `activations`: pins
structure.py     `use: structure`: pairs in the graph     experts.py       `experts`: the experts' dim of weights
padding.py       `uneven: pad`                            indivisible.py   errors for sizes that an axis does not divide
outputs.py       `outputs`: the layouts of outputs
sequence.py      `sequence`: the dim of inputs, and the method of attention; attention_bands.py: which keys rows see;
                  causal_convs.py: convolutions that may stay split

Placement decides everything that is not annotated.

weight_roles.py   the meaning of `column`, `row`, `vocab`   kv_heads.py        key-value heads that ranks share
propagate_split.py   what else is split with a value        fused_weights.py   suggests splits of a fused weight's parts
spec_layouts.py   the spec's text as a layout               to_spec.py         a plan, as entries of a spec
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardc.errors import Errors
from shardc.ir.generation import Step
from shardc.ir.graph import copy_graph, placeholders
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.passes.annotate import kv_heads, model_plan, padding, structure, to_spec
from shardc.passes.annotate.activations import pin_activations
from shardc.passes.annotate.attention_bands import use_bands
from shardc.passes.annotate.causal_convs import use_conv1d
from shardc.passes.annotate.experts import Experts
from shardc.passes.annotate.inputs import batch_axes, disagreements, input_layouts, widened
from shardc.passes.annotate.model_plan import Plan
from shardc.passes.annotate.outputs import generated, wanted_outputs
from shardc.passes.annotate.sequence import mark_methods, split_ids
from shardc.passes.annotate.weights import Weights
from shardc.passes.base import Pass
from shardc.passes.pipeline import stage_spec
from shardc.spec import ShardRule, Spec


@dataclass(frozen=True)
class Annotate(Pass):
    """Adds layouts to parameters and inputs, and `pin` nodes after annotated activations.

    From here to `accumulate` and `pipeline` the program's mesh is that of one stage's ranks, and has microbatches as an
    axis.
    """

    def run(self, program: Program) -> Program:
        spec = widened(stage_spec(self.spec))
        program = replace(program, graph=copy_graph(program.graph))
        shared = kv_heads.shared(program.graph)
        mesh, running = spec.mesh, self.options.compatible_with
        for axis in sorted(_weight_axes(spec)):
            if running is not None and len(digits := running.mesh.parts(axis)) > 1:  # its parameters' digits
                mesh = mesh.refine(axis, *map(running.mesh.size, digits[:-1]))
            else:
                mesh = kv_heads.refine(mesh, axis, shared.values())
        use_bands(spec, program)
        use_conv1d(spec, program)
        errors, layouts, notes = Errors(), dict[str, Layout](), list[str]()
        weights = Weights(spec, program, mesh, shared)
        with errors.collect():
            layouts |= weights.named_layouts()
            if spec.shard_use and spec.shard_axis in spec.mesh.names and mesh.size(spec.shard_axis) > 1:
                if running is not None and spec.shard_use == "structure":
                    plan, written = _plan_of(running, spec, mesh, weights.named), running.meta.get("shard", [])
                else:
                    plan = _plan(spec, self.options.model_plan, program, mesh, weights.named, layouts)
                    written = _written(spec, program, plan, weights.named)
                layouts |= weights.planned_layouts(plan)
                notes += plan.notes
                program = replace(program, meta={**program.meta, "shard": written})
        notes += weights.notes
        with errors.collect():
            if spec.experts:
                layouts |= Experts(spec, program).layouts(layouts, mesh)
        if spec.uneven == "pad":
            layouts = padding.pad_weights(program, layouts, mesh)
        with errors.collect():
            axes, unsplit = batch_axes(spec, program, mesh)
            notes += unsplit
            layouts |= input_layouts(spec, program, mesh, axes)
            notes += [f"{d.where}: {d.what}: {d.fix}" for d in disagreements(spec, program).values()]
        with errors.collect():
            pin_activations(spec, program, mesh)
        values = self.options.forward is True
        outputs = wanted_outputs(spec, program.outputs, mesh, errors, all_named=values)
        if isinstance(self.options.forward, Step):
            outputs = generated(self.options.forward, outputs)
        mark_methods(spec, program, mesh, _weight_axes(spec), errors)
        split_ids(spec, program, mesh, layouts)
        errors.raise_any()
        if running is not None:
            fixed = _running(running, mesh)
            layouts = {name: x for name, x in layouts.items() if name not in fixed} | {
                name: x for name, x in fixed.items() if x.items
            }
        program = program.with_layouts(layouts)
        return replace(program, mesh=mesh, outputs=outputs, notes=(*program.notes, *notes))


def _running(other: Program, mesh: Mesh) -> dict[str, Layout]:
    """Return how the program that already runs splits parameters and buffers."""
    return {x.name: Layout.of(dict(x.layout.shards()), mesh) for x in other.params_and_buffers if x.fqn}


def _weight_axes(spec: Spec) -> set[str]:
    """Return the axes that `shard` splits weights over."""

    def axes(rule: ShardRule) -> set[str]:
        return {s.axis for shards in rule.dims.values() for s in shards} if rule.dims is not None else {rule.axis}

    of_rules = set[str]().union(*map(axes, spec.shard))
    return (of_rules | ({spec.shard_axis} if spec.shard_use else set())) & set(spec.mesh.names)


def _plan(
    spec: Spec, carried: Mapping[str, str], program: Program, mesh: Mesh, named: set[str], layouts: dict[str, Layout]
) -> Plan:
    """Return how the model's plan or the graph's structure splits the weights that no spec entry names.

    carried: the plan of the model. named: the parameters that entries name. layouts: the entries' layouts for them.
    """
    axis, where = spec.shard_axis, spec.where(("shard", "use"))
    if spec.shard_use == "model":
        return model_plan.resolve(carried, program, axis, named, where)
    fixed: dict[str, Shard | None] = {}
    for name in named:
        shards = [s for part, s in layouts.get(name, Layout()).shards() if part in mesh.parts(axis)]
        fixed[name] = min(shards, key=lambda s: s.split) if shards else None
    return structure.choose(program, fixed, axis, mesh.size(axis), where, pad=spec.uneven == "pad")


def _plan_of(running: Program, spec: Spec, mesh: Mesh, named: set[str]) -> Plan:
    """Return the plan that `use` made for the program that already runs. named: see `_plan`.

    The current graph, with one token or fewer rows, might suggest another plan.
    """
    axis = spec.shard_axis
    parts, nodes = mesh.parts(axis), placeholders(running.graph)
    splits: dict[str, tuple[Shard, str]] = {}
    for p in running.params:
        causes = nodes[p.name].meta.get("cause", {})
        shards = [(s, causes[part]) for part, s in p.layout.shards() if part in parts and part in causes]
        if shards and p.name not in named:
            splits[p.name] = min(shards, key=lambda one: one[0].split)
    return Plan(axis, splits, ())


def _written(spec: Spec, program: Program, plan: Plan, named: set[str]) -> list[str]:
    """Return the entries that `use` made, as a user would write them: lines of YAML."""
    rules = to_spec.entries(program, {name: s for name, (s, _) in plan.splits.items()}, plan.axis, named)
    text = str(replace(spec, shard=(*spec.shard, *rules), shard_use=None))
    section = text.partition("\nshard:\n")[2].partition("\n\n")[0]
    return [line for line in section.splitlines() if line.startswith("  ")]
