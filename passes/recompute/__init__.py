"""Recomputation: choose which activations backward computes again, and which are kept.

The spec calls it `checkpoint:`, as torch does (activation checkpointing). Checkpoints that are files are saved by
shardc.runtime.state.

    before   h = layer_norm(x, w)            h.0.ln_1        backward keeps x, w
             q = linear(h, w2)               h.0.attn.qkv    ... h, w2
    after    the same ops, each with its region:
             h = layer_norm(x, w)            | region "h.0"
             q = linear(h, w2)               | region "h.0" kept "h.0"

A region is one call of a module that a pattern names. Its inputs are kept if something is computed from them. Results
of ops are kept, if backward needs them, in three cases: `save` names the op, `budget` pays for the result, or without
it an op would have to run again that `recompute` does not name. All other values are computed again when backward
reaches the region (shardc.passes.joint.kept). If a pattern matches nested modules the outermost count, as with
activations; regions of several entries may be nested.

The budget is a share of the bytes that backward would keep of the region without a checkpoint. It is spent as in a
knapsack: first on results that save most seconds per byte, on the machine that passes assume (shardc.machine.assumed).

region_choice   decides what one region keeps
kinds           defines the kinds of ops for `save` and `recompute`
fewest_bytes    decides what is kept if `recompute` names the ops that may run again
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import copy_graph, source_of
from shardc.ir.patterns import enclosing
from shardc.ir.program import Program
from shardc.ir.stage import Region
from shardc.ir.units import plural, size
from shardc.layer_names import fold
from shardc.passes.base import Pass
from shardc.passes.joint.derivatives import Rules
from shardc.passes.recompute.region_choice import Choice, StageGraph
from shardc.spec import Checkpoint as Entry
from shardc.spec.model_names import Selector, select_modules


@dataclass(frozen=True)
class Recompute(Pass):
    """Adds the regions of the spec's `checkpoint` to the stages' graphs."""

    def applies(self, program: Program) -> bool:
        return bool(self.spec.checkpoint)

    def run(self, program: Program) -> Program:
        entries = self._entries(program)
        regions: dict[str, Region] = {}
        entry: dict[str, Entry] = {}
        stages = tuple(replace(s, graph=copy_graph(s.graph)) for s in program.stages)
        for stage in stages:
            for node in stage.graph.nodes:
                if node.op == "call_function":
                    self._set_region(node, entries, regions, entry)
        order = sorted(
            regions.values(), key=lambda r: r.name.count(".")
        )  # outer ones first: their names are prefixes of inner ones
        rules, kept_positions = Rules(program), dict[Any, list[int]]()
        for stage in stages:
            graph = StageGraph(stage.graph, replace(program, regions=tuple(order)), rules)
            for region in order[::-1]:  # an outer region may recompute what an inner one holds
                if members := graph.members(region.name):
                    outcome = Choice(graph, region.name, entry[region.name], members, kept_positions).run()
                    old = regions[region.name]
                    kept, dropped, again = (
                        old.kept + outcome.kept,
                        old.dropped + outcome.dropped,
                        old.again + len(outcome.again),
                    )
                    regions[region.name] = replace(old, kept=kept, dropped=dropped, again=again)
        ordered = tuple(regions[r.name] for r in order)
        return replace(program, stages=stages, regions=ordered, notes=(*program.notes, *fold(_notes(ordered))))

    def _entries(self, program: Program) -> dict[str, tuple[int, Entry]]:
        """Return every module that is a region, with its entry of the spec and the entry's number."""
        nodes = (n for stage in program.stages for n in stage.graph.nodes)
        modules = dict.fromkeys(m for n in nodes for m in enclosing(source_of(n).module))  # in order of execution
        selectors = [
            Selector(entry.match, self.spec.where(("checkpoint", i, "match")), every=entry.every)
            for i, entry in enumerate(self.spec.checkpoint)
        ]
        errors = Errors()
        selected = select_modules(selectors, list(modules), program.module_aliases, errors)
        errors.raise_any()
        return {m: (i, self.spec.checkpoint[i]) for i, names in enumerate(selected) for m in names}

    def _set_region(
        self, node: fx.Node, entries: dict[str, tuple[int, Entry]], regions: dict[str, Region], entry: dict[str, Entry]
    ) -> None:
        """Set the region of a node; for a part of a result, that of the whole result."""
        if node.target is operator.getitem:
            result = node.args[0]
            if isinstance(result, fx.Node) and "region" in result.meta:
                node.meta["region"] = result.meta["region"]
            return
        source = source_of(node)
        parent = ""
        for m in enclosing(source.module):
            if m in entries:
                call = next((c for c in source.calls if c.rpartition("@")[0] == m), m)
                i, entry[call] = entries[m]
                cause = f"{self.spec.where(('checkpoint', i, 'match'))} checkpoint {entry[call].match!r}"
                regions.setdefault(call, Region(call, parent, entry[call].offload == "cpu", cause))
                parent = call
        if parent:
            node.meta["region"] = parent


def _notes(regions: Sequence[Region]) -> Iterable[str]:
    """Yield a note on what each region keeps and computes again."""
    for r in regions:
        repeats = f", repeats {plural(r.again, 'collective')}" if r.again else ""
        when = "while the backward of the region around it runs" if r.parent else "until backward"
        yield f"{r.name}: keeps {size(r.kept)} {when}, computes {size(r.dropped)} again{repeats} ({r.cause})"
