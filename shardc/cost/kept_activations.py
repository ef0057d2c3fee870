"""What a forward keeps for its backward, tensor by tensor, and which ops want it.

    2.00 MiB   o_proj linear      bf16[1, 512, 4096]   wanted by gate_proj linear, up_proj linear: after to, mul, gather
    3.50 MiB   gate_proj linear   bf16[4096, 1792]     wanted by act_fn silu; down_proj linear: after silu, mul

Which tensors there are is what a dry run kept (shardc.cost.dry_run). Why is read from the program: an op wants what
its backward keeps of it (shardc.passes.joint.saved); where a region computes that again, its op is
reached from what is kept, through the ops that run again.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from shardc.cost.recorded import DryRun
from shardc.ir.graph import source_of
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.types import op_name
from shardc.machine.work import Part, Storage
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.saved import LocalTypes, Saved, saved_of


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
    types, rules = LocalTypes(program), Rules(program)
    stored = storages(r)
    graphs = [_Graph(saved_of(program, stage.graph, rules), {x.op for x in stored}) for stage in program.stages]
    nodes = {n.name: (n, graph) for graph in graphs for n in graph.saved}
    items = []
    for x in stored:
        if x.op not in nodes or x.dtype is None:
            continue
        node, graph = nodes[x.op]
        result = any(v.nbytes() == x.nbytes for v in types.of(node))
        wants = tuple(graph.wants(node)) if result else ()
        items.append(Kept(x.op, op_name(node.target), source_of(node), x.nbytes, x.shape, x.dtype, not result, wants))
    return items


class _Graph:
    """A stage. saved: what backward keeps of each op; again: the ops that run again; held: names of ops that made what
    is kept.
    """

    def __init__(self, saved: dict[fx.Node, Saved], held: set[str]) -> None:
        self.saved = saved
        self.again: set[fx.Node] = set()
        for n in reversed(list(self.saved)):
            record = self.saved[n]
            if "region" in n.meta and (n in self.again or ((record.own or record.results) and n.name not in held)):
                self.again.add(n)
                taken = n.all_input_nodes
            else:
                taken = list(record.operands)
            for x in taken:  # what is not kept, and was made in a region, is made again
                while (viewed := self._viewed(x)) is not None:
                    x = viewed
                if x in self.saved and x.name not in held and "region" in x.meta:
                    self.again.add(x)

    def _viewed(self, x: fx.Node) -> fx.Node | None:
        """Return the operand that a result is a part, or a view, of."""
        if x.target is operator.getitem:
            return x.all_input_nodes[0]
        record = self.saved.get(x)
        return record.views[0] if record is not None and len(record.views) == 1 else None

    def wants(self, node: fx.Node) -> list[Want]:
        """Ops that want a node's result, or what follows from it through views and ops that run again."""
        wants: dict[str, Want] = {}
        if self.saved[node].results:
            wants[node.name] = Want(node.name, op_name(node.target), source_of(node))
        seen: set[fx.Node] = {node}
        waiting: list[tuple[fx.Node, tuple[str, ...]]] = [(node, ())]
        while waiting:
            x, after = waiting.pop(0)
            for user in x.users:
                if user.target is operator.getitem and user not in seen:
                    seen.add(user)
                    waiting.append((user, after))
                if user not in self.saved:
                    continue
                if x in self.saved[user].operands:
                    wants.setdefault(user.name, Want(user.name, op_name(user.target), source_of(user), after))
                views = self._viewed(user) is not None
                if user not in seen and (views or user in self.again):
                    seen.add(user)
                    waiting.append((user, after if views else (*after, op_name(user.target))))
        return list(wants.values())
