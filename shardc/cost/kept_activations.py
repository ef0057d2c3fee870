"""What a forward keeps for its backward, tensor by tensor, and which ops want it.

    2.00 MiB   o_proj linear      bf16[1, 512, 4096]   wanted by gate_proj linear, up_proj linear: after to, mul, gather
    3.50 MiB   gate_proj linear   bf16[4096, 1792]     wanted by act_fn silu; down_proj linear: after silu, mul

Which tensors there are is what a dry run kept (shardc.cost.dry_run). Why is read from the program: an op wants what
autograd would keep of it (shardc.passes.recompute.autograd_saves); where a region computes that again, its op is
reached from what is kept, through the ops that run again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from shardc.cost.recorded import DryRun
from shardc.ir.graph import operands_of, source_of
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.types import op_name
from shardc.machine.work import Part, Storage
from shardc.passes.recompute.autograd_saves import SavedOf


@dataclass(frozen=True)
class Want:
    """An op whose backward takes a kept tensor, or one that is computed from it again. op: the program's node; name:
    what the op is called; source: its module and line; after: the ops that run again, in order, by name.
    """

    op: str
    name: str
    source: Source
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """One storage that lives from a microbatch's forward until its backward. op: the program's node that made it;
    name: what the op is called; own: it is no result of the op, but made by it for its own backward (statistics).
    """

    op: str
    name: str
    source: Source
    nbytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    own: bool
    wants: tuple[Want, ...]


def storages(r: DryRun) -> list[Storage]:
    """What the forwards of the first microbatch make and do not free, on all stages of a rank."""
    live: dict[int, Storage] = {}
    for _, part in forwards(r):
        for sign, storage in part.changes:
            if sign > 0:
                live[id(storage)] = storage
            else:
                live.pop(id(storage), None)
    return [x for x in live.values() if x.kind in ("activations", "communication")]


def forwards(r: DryRun) -> Iterator[tuple[int, Part]]:
    """(stage, part) of the first microbatch's forwards."""
    for action, part in r.actions:
        yield from ((a.stage, part) for a in action.parts if a.kind == "F" and a.microbatch == 0)


def kept(program: Program, r: DryRun) -> list[Kept]:
    """Of one microbatch on the dry run's rank, in the order in which it is made."""
    saved = SavedOf(program)
    made = storages(r)
    graphs = [_Graph(stage.graph, saved, {x.op for x in made}) for stage in program.stages]
    nodes = {n.name: (n, graph) for graph in graphs for n in graph.saved}
    found = []
    for x in made:
        if x.op not in nodes or x.dtype is None:
            continue
        node, graph = nodes[x.op]
        result = any(v.nbytes() == x.nbytes for v in saved.types(node))
        wants = tuple(graph.wants(node)) if result else ()
        found.append(Kept(x.op, op_name(node.target), source_of(node), x.nbytes, x.shape, x.dtype, not result, wants))
    return found


class _Graph:
    """A stage. saved: what autograd keeps of each op; again: the ops that run again; held: names of ops that made what
    is kept.
    """

    def __init__(self, graph: fx.Graph, saved: SavedOf, held: set[str]) -> None:
        self.saved = {n: saved(n) for n in graph.nodes if n.op == "call_function"}
        self.again: set[fx.Node] = set()
        for n in reversed(list(self.saved)):
            of = self.saved[n]
            if "region" in n.meta and (n in self.again or ((of.own or of.results) and n.name not in held)):
                self.again.add(n)
                taken = n.all_input_nodes
            else:
                taken = [operands_of(n)[i] for i in of.operands]
            for x in taken:  # what is not kept, and was made in a region, is made again
                while self._views(x):
                    x = (
                        operands_of(x)[self.saved[x].views[0]]
                        if x.target is not operator.getitem
                        else x.all_input_nodes[0]
                    )
                if x in self.saved and x.name not in held and "region" in x.meta:
                    self.again.add(x)

    def _views(self, x: fx.Node) -> bool:
        of = self.saved.get(x)
        return of is not None and (x.target is operator.getitem or (len(of.views) == 1 and of.views[0] >= 0))

    def wants(self, node: fx.Node) -> list[Want]:
        """Ops that want a node's result, or what follows from it through views and ops that run again."""
        wants: dict[str, Want] = {}
        if self.saved[node].results:
            wants[node.name] = Want(node.name, op_name(node.target), source_of(node))
        seen: set[fx.Node] = {node}
        waiting: list[tuple[fx.Node, tuple[str, ...]]] = [(node, ())]
        while waiting:
            x, after = waiting.pop(0)
            for user in (u for u in x.users if u in self.saved):
                if any(operands_of(user)[i] is x for i in self.saved[user].operands):
                    wants.setdefault(user.name, Want(user.name, op_name(user.target), source_of(user), after))
                if user not in seen and (self._views(user) or user in self.again):
                    seen.add(user)
                    waiting.append((user, after if self._views(user) else (*after, op_name(user.target))))
        return list(wants.values())
