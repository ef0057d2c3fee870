"""Find the tensors that a forward keeps for its backward, and the ops that need each of them.

    2.00 MiB   o_proj linear      bf16[1, 512, 4096]   wanted by gate_proj linear, up_proj linear: after to, mul, gather
    3.50 MiB   gate_proj linear   bf16[4096, 1792]     wanted by act_fn silu; down_proj linear: after silu, mul

The tensors are those that a dry run kept (shardc.cost.dry_run). The reasons come from the stages' backward graphs: a
line of an op's backward reads a kept tensor, or it reads lines that run ops of forward again, from a kept tensor on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from shardc.cost.recorded import DryRun
from shardc.ir.graph import placeholders, producer_of, values_of
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.type_text import show
from shardc.machine.work import Part, Storage
from shardc.passes.joint.memory import shares_operand
from shardc.passes.joint.saved import LocalTypes

#: The ops of the program whose backward needs a value, each with the ops that run again in between, in order.
_Readers = dict[fx.Node, tuple[fx.Node, ...]]


@dataclass(frozen=True)
class Kept:
    """A storage that lives from a microbatch's forward until its backward. node: the op that made it; type: in words.

    own: it is not a result of the op, but made for the op's own backward (statistics). wants: the ops whose backward
    needs it, each with the recomputed ops in between, in order.
    """

    node: fx.Node
    storage: Storage
    type: str
    own: bool
    wants: _Readers


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
    graphs = [s.graph for s in program.stages]
    # what an op with several results makes may carry the name of one of them
    ops = {n.name: producer_of(n)[0] for graph in graphs for n in graph.nodes if n.op == "call_function"}
    order = {n: i for i, n in enumerate(ops.values())}
    types, readers, items = LocalTypes(program), _all_readers(program, ops), []
    for x in storages(r):
        if x.op not in ops or x.dtype is None:
            continue
        node = ops[x.op]
        result = any(v.nbytes() == x.nbytes for v in types.of(node))
        wants = dict(sorted(readers[node].items(), key=lambda item: order[item[0]])) if result else {}
        items.append(Kept(node, x, show(x.shape, x.dtype, Layout()), not result, wants))
    return items


def _all_readers(program: Program, ops: Mapping[str, fx.Node]) -> Mapping[fx.Node, _Readers]:
    """Return what needs the kept results of each op. ops: of the program, by the names of their results."""
    readers: defaultdict[fx.Node, _Readers] = defaultdict(dict)
    for joint in (s.joint for s in program.stages if s.joint is not None):
        returned: Any = joint.forward.output_node().args[0]
        inputs = [placeholders(graph) for name, graph in joint.graphs.items() if name != "forward"]
        for n in returned[-1]:
            those = _readers([by_name[n.name] for by_name in inputs if n.name in by_name], ops)
            while n.op == "call_function":
                if n.name in ops:
                    readers[ops[n.name]] = those | readers[ops[n.name]]
                if not shares_operand(n.target):
                    break
                n = n.all_input_nodes[0]  # whose memory it shares
    return readers


def _readers(values: Iterable[fx.Node], ops: Mapping[str, fx.Node]) -> _Readers:
    """Return the ops whose backward reads values of a backward graph, directly or through lines that run ops again."""
    readers: _Readers = {}
    waiting: list[tuple[fx.Node, tuple[fx.Node, ...]]] = [(x, ()) for x in values]
    seen = {x for x, _ in waiting}
    for x, after in waiting:
        for user in x.users:
            op = ops.get(user.meta.get("of", ""))
            if op is not None and not user.meta.get("repeats"):
                readers.setdefault(op, after)
            elif op is not None and user not in seen:
                seen.add(user)
                shown = after[-1:] != (op,) and not (shares_operand(op.target) and len(values_of(op)) == 1)
                waiting.append((user, (*after, op) if shown else after))
    return readers
