"""Find the tensors that a forward keeps for its backward, and the ops that need each of them.

    2.00 MiB   o_proj linear      bf16[1, 512, 4096]   wanted by gate_proj linear, up_proj linear: after to, mul, gather
    3.50 MiB   gate_proj linear   bf16[4096, 1792]     wanted by act_fn silu; down_proj linear: after silu, mul

The tensors are those that a dry run kept (shardc.cost.dry_run). The reasons come from the program: an op needs what
its backward keeps of it (shardc.passes.joint.saved). If a region recomputes that, the path from a kept tensor to the op
goes through the recomputed ops.
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
    """An op whose backward needs a kept tensor, or a tensor recomputed from it. op: the program's node.

    name: the op's name; source: its module and line; after: the recomputed ops in between, in order, by name.
    """

    op: str
    name: str
    source: Source
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Kept:
    """One storage that lives from a microbatch's forward until its backward. op, name: as in Want.

    own: it is not a result of the op, but made for the op's own backward (statistics).
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
    """Return the storages that the first microbatch's forwards make and do not free, on a rank's stages."""
    live: dict[int, Storage] = {}
    for _, part in forwards(r):
        for sign, storage in part.changes:
            if sign > 0:
                live[id(storage)] = storage
            else:
                live.pop(id(storage), None)
    return [x for x in live.values() if x.kind in ("activations", "communication")]


def forwards(r: DryRun) -> Iterator[tuple[int, Part]]:
    """Yield (stage, part) of the first microbatch's forwards."""
    for action, part in r.actions:
        yield from ((a.stage, part) for a in action.parts if a.kind == "F" and a.microbatch == 0)


def kept(program: Program, r: DryRun) -> list[Kept]:
    """Return the tensors that one microbatch keeps on the dry run's rank, in the order of creation."""
    types, rules = LocalTypes(program), Rules(program)
    stored = storages(r)
    graphs = [_Graph(saved_of(program, stage.graph, rules), {x.op for x in stored}) for stage in program.stages]
    nodes = {n.name: (n, graph) for graph in graphs for n in graph.saved}
    # what an op with several results makes may carry the name of one of them
    nodes |= {x.name: (n, g) for n, g in nodes.values() for x in n.users if x.target is operator.getitem}
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
    """A stage. saved: what backward keeps of each op; again: recomputed ops; held: ops with kept results."""

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
            for x in taken:  # values of a region that are not kept are recomputed
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
        """Return the ops that need a node's result, directly or through views and recomputed ops."""
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
