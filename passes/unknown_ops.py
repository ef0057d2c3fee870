"""Refuse ops without a rule, or run them whole on every rank (`unknown_ops: replicate`) with a note."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import calls
from shardc.ir.program import Program
from shardc.passes.base import Pass
from shardc.rules.core import registry

#: What to write instead of an op, by a part of the op's name.
ALTERNATIVES = {
    "grouped_mm": ("write the layer with one op: shardc.nn.experts(x, index, weights, up, down) in your own model")
}


@dataclass(frozen=True)
class UnknownOps(Pass):
    """Reports every op that has no rule, once, at the first line of the model that calls it."""

    def run(self, program: Program) -> Program:
        unknown: dict[str, list[fx.Node]] = {}
        for node in calls(program.graph):
            if registry.find(node.target) is None:
                unknown.setdefault(str(node.target), []).append(node)
        if self.spec.unknown_ops == "replicate":
            places = ((_where(name, nodes), name) for name, nodes in unknown.items())
            notes = (f"{where}: {name} has no rule; every rank runs it whole" for where, name in places)
            return replace(program, notes=(*program.notes, *notes))
        errors = Errors()
        for name, nodes in unknown.items():
            fault = f"op {name} ({len(nodes)}×) has no rule: shardc does not know along which dims it can be split"
            errors.add(fault, where=_where(name, nodes), fix=_fix(name))
        errors.raise_any()
        return program


def _where(name: str, nodes: list[fx.Node]) -> str:
    return str(nodes[0].meta.get("source", "")) or name


def _fix(name: str) -> str:
    register = f'register one, shardc.rule({name}, "... -> ..."), or set `unknown_ops: replicate`'
    alternative = next((fix for part, fix in ALTERNATIVES.items() if part in name), "")
    return f"{alternative}; or {register}" if alternative else register
