"""Collect all that the page shows, as JSON: plain values, no HTML. The page's scripts draw it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from shardc.artifact import emit
from shardc.cost import Cost
from shardc.ir.graph import source_of
from shardc.ir.patterns import enclosing
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.repeats import Repeats, repeats
from shardc.ir.type_text import show
from shardc.ir.units import size
from shardc.layer_names import note_lines, ranges
from shardc.report import attention_scores
from shardc.report.page import step
from shardc.report.page.graphs import graphs
from shardc.report.page.messages import Messages
from shardc.report.page.spec_lines import SpecLines
from shardc.verify.static import Proof


def data(program: Program, cost: Cost | None, proof: Proof | None, *, full: bool = False) -> dict[str, Any]:
    """Return the data of the page. cost: None: no times, no memory. proof: None: no verdict.

    full: also show layers that equal a shown one.
    """
    layers, spec = Repeats() if full else repeats(program), SpecLines(program)
    modules = _modules(program, layers)
    at = {m["path"]: i for i, m in enumerate(modules)}
    weights, numbers = _weights(program, layers, spec, at)
    messages = Messages(program, layers, spec, numbers, cost)
    before, after = graphs(program, layers, numbers, messages.of_node)
    regions = {
        f"{r.name}: keeps {size(r.kept)} of a microbatch, computes {size(r.dropped)} again": r.cause
        for r in program.regions
        if layers.shown(r.name) == r.name
    }
    inputs = [
        {
            "name": ".".join(map(str, x.path)) or x.name,
            "type": str(x.value),
            "lines": spec.of_axes(axis.partition("[")[0] for axis, _ in x.layout.shards()),
        }
        for x in program.inputs
    ]
    shown: dict[str, Any] = {
        "facts": _facts(program, cost),
        "proof": proof and {"ok": proof.ok, "gaps": [*map(asdict, proof.gaps)], "said": str(proof).splitlines()[0]},
        "notes": [{"text": note, "lines": spec.of(note)} for note in note_lines(program.notes)],
        "regions": [{"text": text, "lines": spec.of(cause)} for text, cause in regions.items()],
        "modules": _small(modules),
        "weights": _small(weights),
        "before": _small(before),
        "after": _small(after),
        "messages": _small(messages.all),
        "rows": messages.rows,
        "inputs": inputs,
        "activations": spec.activations(at),
        "stage_lines": spec.at("pipeline") if program.axis else [],
        "timeline": step.timeline(cost, messages.number) if cost is not None else None,
        "memory": step.memory(cost) if cost is not None else None,
        "scores": attention_scores.to_json(program) if program.stages else [],
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
        "mine": program.parameter_bytes() if program.stages else 0,
    }
    if cost is not None:
        facts |= {
            "device": cost.device.name,
            "seconds": cost.step_seconds,
            "bubble": cost.bubble,
            "peak": cost.memory.peak,
            "limit": cost.device.memory,
            "fits": cost.fits,
            "exposed": dict(cost.exposed),
        }
    return facts


def _modules(program: Program, layers: Repeats) -> list[dict[str, Any]]:
    """Return the modules of the tree in the model's order, outer ones first, equal layers once.

    path: name in the model; parent: number of the module around it, -1 for the root. layers, count: the numbers of the
    equal layers that it represents, and how many. stages: of a pipeline, which of these layers are on each stage.
    """
    names = [source_of(n).module for n in program.graph.nodes if n.op == "call_function"]
    names += [p.fqn.rpartition(".")[0] for p in program.params]
    stages: defaultdict[str, defaultdict[int, dict[str, None]]] = defaultdict(lambda: defaultdict(dict))
    for i, stage in enumerate(program.stages if program.axis else ()):
        for name in (source_of(n).module for n in stage.graph.nodes if n.op == "call_function"):
            names.append(name)
            for whole in ("", *enclosing(name)):
                stages[layers.shown(whole)][i].setdefault(whole.rpartition(".")[2])
    at: dict[str, int] = {}
    modules: list[dict[str, Any]] = []
    for path in dict.fromkeys(["", *(path for name in map(layers.shown, names) for path in enclosing(name))]):
        at[path] = len(modules)
        outer, _, label = path.rpartition(".")
        same = layers.same_layers.get(path, ())
        equal = {"layers": ranges(same), "count": len(same)} if len(same) > 1 else {"count": 1}
        here = {i: ranges(numbers) if len(same) > 1 else "" for i, numbers in sorted(stages[path].items())}
        label = label or str(program.meta.get("model", "program"))
        modules.append({"path": path, "parent": at[outer] if path else -1, "label": label, **equal, "stages": here})
    return modules


def _weights(
    program: Program, layers: Repeats, spec: SpecLines, modules: dict[str, int]
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return the parameters of the shown layers, and by placeholder the number of the one shown for it.

    type: with its split, plain: without; bytes: on one rank, whole: on one device; lines: of the spec that split it;
    module, bucket: numbers; bucket -1: in none; count: number of equal ones.
    """
    weights: list[dict[str, Any]] = []
    at: dict[str, int] = {}
    for p in program.params:
        name = layers.shown(p.fqn)
        if at.setdefault(name, len(weights)) == len(weights):
            weights.append(
                {
                    "name": name,
                    "module": modules.get(name.rpartition(".")[0], 0),
                    "type": str(p.value),
                    "plain": show(p.shape, p.dtype, Layout()),
                    "split": [(axis, shard.dim) for axis, shard in p.layout.shards()],
                    "bytes": p.value.nbytes(program.mesh),
                    "whole": p.value.nbytes(),
                    "reduce": p.reduce,
                    "bucket": p.bucket,
                    "lines": spec.of_param(p),
                    "aliases": p.aliases,
                    "frozen": not p.requires_grad,
                    "count": 0,
                }
            )
        weights[at[name]]["count"] += 1
    return weights, {p.name: at[layers.shown(p.fqn)] for p in program.params}


def _small(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return records without their empty values: the page's scripts restore these."""
    empty: tuple[Any, ...] = ("", None, [], {}, ())
    return [{k: v for k, v in x.items() if v not in empty and v is not False} for x in records]
