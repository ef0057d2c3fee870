"""Collect all that the page shows, as JSON: plain values, no HTML. The page's scripts draw it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from shardc.artifact import emit
from shardc.cost import Cost
from shardc.ir.graph import source_of
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.repeats import Repeats, repeats
from shardc.ir.type_text import show
from shardc.ir.units import size
from shardc.layer_names import note_lines, ranges
from shardc.report import scores
from shardc.report.page import step
from shardc.report.page.graphs import graphs
from shardc.report.page.messages import Messages
from shardc.report.page.spec_lines import SpecLines
from shardc.verify.static import Proof


@dataclass
class Module:
    """A row of the tree. path: name in the model; parent: number of the module around it, -1 for the root.

    layers, count: the numbers of the equal layers that it represents, and how many. stages: of a pipeline, which of
    these layers are on each stage.
    """

    path: str
    parent: int
    label: str
    layers: str = ""
    count: int = 1
    stages: dict[int, str] = field(default_factory=dict)


@dataclass
class Weight:
    """A parameter, including those of equal layers. module, bucket: numbers; bucket -1: in none.

    type: with its split, plain: without; bytes: on one rank, whole: on one device; lines: of the spec that split it.
    """

    name: str
    module: int
    type: str
    plain: str
    split: list[tuple[str, int]]
    bytes: int
    whole: int
    reduce: tuple[str, ...]
    bucket: int
    lines: list[int]
    count: int = 1
    aliases: tuple[str, ...] = ()
    frozen: bool = False


def data(program: Program, cost: Cost | None, proof: Proof | None, *, full: bool = False) -> dict[str, Any]:
    """Return the data of the page. cost: None: no times, no memory. proof: None: no verdict.

    full: also show layers that equal a shown one.
    """
    layers, spec = Repeats() if full else repeats(program), SpecLines(program)
    modules = _modules(program, layers)
    at = {m.path: i for i, m in enumerate(modules)}
    weights, numbers = _weights(program, layers, spec, at)
    messages = Messages(program, layers, spec, numbers, cost)
    before, after = graphs(program, layers, numbers, messages.of_node)
    regions = [
        {
            "text": f"{r.name}: keeps {size(r.kept)} of a microbatch, computes {size(r.dropped)} again",
            "lines": spec.of(r.cause),
        }
        for r in program.regions
        if layers.shown(r.name) == r.name
    ]
    inputs = [
        {"name": ".".join(map(str, x.path)) or x.name, "type": str(x.value), "lines": spec.of_axes(_axes(x.layout))}
        for x in program.inputs
    ]
    shown: dict[str, Any] = {
        "facts": _facts(program, cost),
        "proof": _proof(proof),
        "notes": [{"text": note, "lines": spec.of(note)} for note in note_lines(program.notes)],
        "modules": [_small(m) for m in modules],
        "weights": [_small(w) for w in weights],
        "before": [_small(op) for op in before],
        "after": [_small(op) for op in after],
        "messages": [_small(m) for m in messages.all],
        "rows": messages.rows,
        "regions": regions,
        "inputs": inputs,
        "activations": spec.activations([m.path for m in modules]),
        "stage_lines": spec.at("pipeline") if program.axis else [],
        "timeline": step.timeline(cost, messages.number) if cost is not None else None,
        "memory": step.memory(cost) if cost is not None else None,
        "scores": scores.to_json(program) if program.stages else [],
        "text": emit.text(program, full=full).splitlines(),
    }
    # last, because causes add settings of the command line to its lines
    shown["spec"] = {"file": spec.file, "lines": spec.lines, "use": list(program.meta.get("shard", ()))}
    return shown


def _facts(program: Program, cost: Cost | None) -> dict[str, Any]:
    mesh = program.mesh
    facts: dict[str, Any] = {
        "model": str(program.meta.get("model", "program")),
        "mesh": [[axis, n] for axis, n in mesh.axes],
        "ranks": mesh.world,
        "stages": len(program.stages),
        "axis": program.axis,
        "schedule": program.schedule.name if program.schedule is not None else "",
        "microbatches": program.microbatches,
        "numbers": sum(math.prod(p.shape) for p in program.params),
        "parameters": sum(p.value.nbytes() for p in program.params),
        "mine": program.parameter_bytes() if program.stages else 0,
        "torch": str(program.meta.get("torch", "")),
    }
    if cost is not None:
        facts |= {
            "device": cost.device.name,
            "seconds": cost.step_seconds,
            "bubble": cost.bubble,
            "peak": cost.memory.peak,
            "limit": cost.device.memory,
            "fits": cost.fits,
            "flops": cost.flops,
            "exposed": dict(cost.exposed),
        }
    return facts


def _proof(proof: Proof | None) -> dict[str, Any] | None:
    if proof is None:
        return None
    gaps = [asdict(gap) for gap in proof.gaps]
    return {"ok": proof.ok, "gaps": gaps, "said": str(proof).partition("\n")[0]}


def _modules(program: Program, layers: Repeats) -> list[Module]:
    """Return the modules of the tree in the model's order, outer ones first, equal layers once."""
    names = [source_of(n).module for n in program.graph.nodes if n.op == "call_function"]
    names += [p.fqn.rpartition(".")[0] for p in program.params]
    stages: defaultdict[str, defaultdict[int, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for i, stage in enumerate(program.stages if program.axis else ()):
        for n in stage.graph.nodes:
            if n.op == "call_function":
                name = source_of(n).module
                names.append(name)
                parts = name.split(".") if name else []
                for depth in range(len(parts) + 1):
                    whole = ".".join(parts[:depth])
                    stages[layers.shown(whole)][i].setdefault(parts[depth - 1] if depth else "")
    known: dict[str, int] = {"": 0}
    modules = [Module("", -1, str(program.meta.get("model", "program")))]
    for name in dict.fromkeys(layers.shown(n) for n in names):
        parts = name.split(".") if name else []
        for depth in range(1, len(parts) + 1):
            path = ".".join(parts[:depth])
            if path in known:
                continue
            known[path] = len(modules)
            numbers = layers.alike.get(path, ())
            label = parts[depth - 1]
            modules.append(Module(path, known[".".join(parts[: depth - 1])], label))
            if len(numbers) > 1:
                modules[-1].layers, modules[-1].count = ranges(numbers), len(numbers)
    for module in modules:
        for i, numbers_here in sorted(stages[module.path].items()):
            module.stages[i] = ranges(numbers_here) if module.count > 1 else ""
    return modules


def _weights(
    program: Program, layers: Repeats, spec: SpecLines, modules: dict[str, int]
) -> tuple[list[Weight], dict[str, int]]:
    """Return the parameters of the shown layers, and by placeholder the number of the one shown for it."""
    weights: list[Weight] = []
    at: dict[str, int] = {}
    numbers: dict[str, int] = {}
    for p in program.params:
        name = layers.shown(p.fqn)
        if name in at:
            weights[at[name]].count += 1
        else:
            at[name] = len(weights)
            split = [(axis, shard.dim) for axis, shard in p.layout.shards()]
            weights.append(
                Weight(
                    name,
                    modules.get(name.rpartition(".")[0], 0),
                    str(p.value),
                    show(p.shape, p.dtype, Layout()),
                    split,
                    p.value.nbytes(program.mesh),
                    p.value.nbytes(),
                    p.reduce,
                    p.bucket,
                    spec.of_param(p),
                    aliases=p.aliases,
                    frozen=not p.requires_grad,
                )
            )
        numbers[p.name] = at[name]
    return weights, numbers


def _axes(layout: Layout) -> tuple[str, ...]:
    return tuple(dict.fromkeys(re.sub(r"\[.*", "", axis) for axis, _ in layout.shards()))


def _small(record: Any) -> dict[str, Any]:
    """Return a record as JSON without empty values: the page's scripts know the defaults."""
    return {k: v for k, v in asdict(record).items() if v not in ("", None, [], {}, ()) and v is not False}
