"""Where to cut a rank's graph into pipeline stages: before modules, by counts of layers, or by cost.

A graph's *main* ops are those that depend on both parameters and the batch, in the order in which they run; a cut is a
position among them. What only depends on one of the two (masks, rotary tables; normed weights) is made wherever it is
used, and cannot be cut.

Cost is counted in seconds on the machine that passes assume (shardc.machine.assumed). Parameters count as what an
optimizer's step reads and writes of them, spread over the microbatches. What crosses a cut is sent while the stages
compute: it costs what takes longer than that, and of cuts that are nearly as even the one is taken over which least
crosses."""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import fx

from shardc.errors import Errors, ShardcError
from shardc.ir.graph import source_of, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.patterns import did_you_mean, enclosing, match
from shardc.layer_names import layer_of
from shardc.machine.assumed import STAGES, byte_seconds, work_seconds
from shardc.rules.core.registry import rank_seconds
from shardc.runtime import ops
from shardc.runtime.schedule import default_stages
from shardc.spec import Spec

#: Bytes that an optimizer's step moves for every byte of a parameter: weight, gradient, two moments, read and written.
UPDATE = 8
#: Stages may cost this much more than those of the best cut, if less crosses then or a cut is between modules.
SLACK = 1.1
#: Of such cuts, what it is worth that half as much crosses, and that a cut goes through one module less: parts of the
#: cost of an even stage.
CROSSING, INSIDE = 0.1, 0.02

#: Ops that have to be on the stage of the op before them: only their own rank knows how many rows they take.
JOINED = frozenset(
    {ops.experts_send, ops.experts_apply, ops.fp8_experts_apply, ops.experts_return, ops.experts_combine}
)


@dataclass(frozen=True)
class Ops:
    """The main ops of a graph: what the choice of cuts looks at.

    work: cost of each. weight: bytes of the parameters that each is the first to use. crossing: entry p: bytes of what
    ops before p make and ops from p on use.
    """

    nodes: tuple[fx.Node, ...]
    work: tuple[float, ...]
    crossing: tuple[int, ...]

    def sending(self, cut: int) -> float:
        """What it costs to send what crosses a cut there and its gradients back, each while the stages compute forward
        and backward: 3 times the work of forward.
        """
        return byte_seconds("send_recv", STAGES) * self.crossing[cut] / 3

    @staticmethod
    def of(main: Sequence[fx.Node], mesh: Mesh, microbatches: int) -> Ops:
        position = {n: i for i, n in enumerate(main)}
        change = [0] * (len(main) + 2)
        seen: set[fx.Node] = set()
        work = []
        for i, n in enumerate(main):
            fresh = [x for x in _weights(n, position) if x not in seen]
            seen |= set(fresh)
            update = UPDATE * sum(x.meta["value"].nbytes(mesh) for x in fresh) / microbatches
            work.append(rank_seconds(n, mesh) + work_seconds(0.0, update))
            last = max((position[u] for u in users(n) if u in position), default=i)
            nbytes = sum(v.nbytes(mesh) for v in values_of(n))
            change[i + 1] += nbytes
            change[last + 1] -= nbytes
        return Ops(tuple(main), tuple(work), tuple(accumulate(change[:-1])))

    def joined(self) -> tuple[Ops, list[int]]:
        """The same with what belongs together as one; and where each of them begins."""
        starts = [i for i, n in enumerate(self.nodes) if n.target not in JOINED]
        ends = [*starts[1:], len(self.nodes)]
        work = tuple(sum(self.work[a:b]) for a, b in zip(starts, ends, strict=True))
        return (
            Ops(tuple(self.nodes[i] for i in starts), work, (*(self.crossing[i] for i in starts), self.crossing[-1])),
            starts,
        )


def users(node: fx.Node) -> list[fx.Node]:
    """The ops that use a result, looking through `getitem`."""
    return [u for user in node.users for u in (users(user) if user.target is operator.getitem else [user])]


def _weights(node: fx.Node, main: dict[fx.Node, int]) -> list[fx.Node]:
    """The placeholders behind an op's operands that are no main ops themselves: its weights (and inputs)."""
    weights, todo, seen = [], [x for x in node.all_input_nodes if x not in main], set[fx.Node]()
    while todo:
        x = todo.pop()
        if x not in seen:
            seen.add(x)
            todo += x.all_input_nodes
            if x.op == "placeholder" and x.meta.get("value") is not None:
                weights.append(x)
    return weights


def homes(node: fx.Node, position: dict[fx.Node, int], running: Mapping[str, tuple[int, ...]]) -> set[int]:
    """The stages that have the weights of a main op, of weights that one stage alone has."""
    stages = (running.get(x.name, ()) for x in _weights(node, position))
    return {found[0] for found in stages if len(found) == 1}


def positions(
    main: Sequence[fx.Node], spec: Spec, mesh: Mesh, running: Mapping[str, tuple[int, ...]] | None = None
) -> list[int]:
    """Where the stages after the first begin, as positions in the main ops.

    mesh: of the ranks of one stage. running: the stages that have each parameter, in a program that this one is to run
    beside: what costs would say of other sizes is left aside. Raises ShardcError, at the spec's line, for modules that
    do not exist or are not in the order in which they run, counts that are not the model's, and more stages than there
    are ops.
    """
    p = spec.pipeline
    assert p is not None
    if p.cut is not None:
        return _before(main, p.cut, spec)
    if p.balance is not None:
        return _counted(main, p.balance, spec)
    n = p.stages or default_stages(p.schedule, spec.mesh.size(p.axis))
    most = sum(x.target not in JOINED for x in main)
    if n > most:
        fault = f"{n} stages, and the model has only {most} ops that depend on its input and its weights"
        raise ShardcError(fault, where=spec.where(("pipeline", "stages")), fix=f"at most {most} stages")
    whole, starts = Ops.of(main, mesh, spec.batch.microbatches).joined()
    if running is not None:
        position = {op: i for i, op in enumerate(main)}
        each = [homes(op, position, running) for op in main]
        joined = [set[int]().union(*each[a:b]) for a, b in pairwise([*starts, len(main)])]
        if (found := _beside(whole, n, joined)) is not None:
            return [starts[start] for start in found]
    return [starts[start] for start in even(whole, n)]


# --- before modules, by counts ----------------------------------------------------------------------------------------


def _before(main: Sequence[fx.Node], names: Sequence[str], spec: Spec) -> list[int]:
    errors = Errors()
    every = dict.fromkeys(m for n in main for m in enclosing(source_of(n).module))
    starts = []
    for i, name in enumerate(names):
        where = spec.where(("pipeline", "cut", i))
        inside = [
            position for position, n in enumerate(main) if any(match(name, m) for m in enclosing(source_of(n).module))
        ]
        if not inside:
            otherwise = "name a module as model.named_modules() does; one whose ops depend on its input"
            fix = did_you_mean(name, every, otherwise)
            errors.add(f"no op of the model runs in a module {name!r}", where=where, fix=fix)
        elif inside[0] == 0:
            errors.add(
                f"{name!r} runs first: nothing is left for the stage before it",
                where=where,
                fix="leave it out, or name a later module",
            )
        else:
            starts.append((inside[0], name, where))
    for (position, name, _), (then, other, where) in pairwise(starts):
        if then < position:
            errors.add(
                f"{other!r} begins before {name!r} does",
                where=where,
                fix="list the modules in the order in which they run",
            )
        elif then == position:
            fault = f"{other!r} begins where {name!r} does" if other != name else f"{other!r} is listed twice"
            errors.add(
                f"{fault}: nothing is left for the stage between",
                where=where,
                fix="leave it out, or name a later module",
            )
    errors.raise_any()
    return [position for position, _, _ in starts]


def layers(main: Sequence[fx.Node]) -> dict[str, list[tuple[str, int]]]:
    """The model's outermost lists of layers: {list: [(layer, position of its first op)]}, all in the order in which
    they run.
    """
    starts: dict[str, dict[str, int]] = {}
    for position, n in enumerate(main):
        if layer := layer_of(source_of(n).module):
            name, number = layer
            starts.setdefault(name, {}).setdefault(f"{name}.{number}" if name else number, position)
    return {name: sorted(each.items(), key=lambda item: item[1]) for name, each in starts.items()}


def _counted(main: Sequence[fx.Node], counts: Sequence[int], spec: Spec) -> list[int]:
    lists_of_layers = {name: each for name, each in layers(main).items() if len(each) > 1}
    lists = {
        ", ".join(lists_of_layers): sorted(
            (layer for each in lists_of_layers.values() for layer in each), key=lambda item: item[1]
        )
    } | lists_of_layers
    fitting = {name: each for name, each in lists.items() if len(each) == sum(counts)}
    if len(fitting) != 1:
        has = (
            ", ".join(f"{name or 'the model'} ({len(each)})" for name, each in lists_of_layers.items())
            or "no lists of layers"
        )
        fault = f"balance counts {sum(counts)} layers, and the model has {has}"
        many = len(lists[", ".join(lists_of_layers)])
        fix = f"make the counts add up to {many}" if many else "write stages: N, or cut: [modules]"
        raise ShardcError(fault, where=spec.where(("pipeline", "balance")), fix=fix)
    (each,) = fitting.values()
    starts = list(accumulate(counts))[:-1]
    return [each[i][1] for i in starts]


# --- by cost ----------------------------------------------------------------------------------------------------------


def _beside(ops: Ops, n: int, homes: Sequence[set[int]]) -> list[int] | None:
    """n - 1 cuts between ops whose weights the stages before and after have, where least crosses; None where the ops
    run in another order than their weights' stages.
    """
    cuts: list[int] = []
    for stage in range(1, n):
        low = max((i + 1 for i, h in enumerate(homes) if h and max(h) < stage), default=0)
        high = min((i for i, h in enumerate(homes) if h and min(h) >= stage), default=len(homes) - 1)
        low = max(low, cuts[-1] + 1 if cuts else 1)
        if high < low:
            return None
        cuts.append(min(range(low, high + 1), key=lambda c: ops.crossing[c]))
    return cuts


def even(ops: Ops, n: int) -> list[int]:
    """n - 1 cuts for which the costliest stage is as cheap as can be (up to SLACK), and little crosses. n <= the number
    of ops.
    """
    low, high = sum(ops.work) / n, max(sum(ops.work), *map(ops.sending, range(len(ops.work))))
    while high - low > 1e-3 * low:
        middle = (low + high) / 2
        low, high = (low, middle) if _Limit(ops, middle).allows(0, n) else (middle, high)
    limit = _Limit(ops, high * SLACK)
    cuts: list[int] = []
    a = 0
    for left in range(n - 1, 0, -1):  # stages after this one
        fits = [c for c in range(a + 1, limit.furthest(a) + 1) if limit.may(c) and limit.allows(c, left)]
        share = max((limit.begins[-1] - limit.begins[a]) / (left + 1), 1e-12)
        least = max(min(ops.crossing[c] for c in fits), 1)
        off = {c: abs(limit.begins[c] - limit.begins[a] - share) / share for c in fits}
        a = min(fits, key=lambda c: off[c] + CROSSING * ops.crossing[c] / least + INSIDE * _inside(ops, c))
        cuts.append(a)
    return cuts


class _Limit:
    """Stages that cost at most `limit`, and what is sent between them. begins: the work before every position."""

    def __init__(self, ops: Ops, limit: float) -> None:
        self.ops, self.limit = ops, limit
        self.begins = [0.0, *accumulate(ops.work)]
        end = len(ops.work)
        last = list(accumulate((c if self.may(c) else 0 for c in range(end)), max))  # the last cut up to every position
        self.fewest, self.most = (
            [0.0] * (end + 1),
            [0] * (end + 1),
        )  # how many stages the ops from every position on can be
        for a in reversed(range(end)):
            b = self.furthest(a)
            b = last[b] if b < end else end
            self.fewest[a] = 1 + self.fewest[b] if b > a else math.inf
            self.most[a] = self.most[a + 1] + (a + 1 == end or self.may(a + 1))

    def may(self, cut: int) -> bool:
        """May a cut be here?"""
        return self.ops.sending(cut) <= self.limit

    def furthest(self, a: int) -> int:
        """Where a stage from position a on ends at the latest."""
        return bisect_right(self.begins, self.begins[a] + self.limit) - 1

    def allows(self, a: int, n: int) -> bool:
        """Can the ops from a on be n stages?"""
        return self.fewest[a] <= n <= self.most[a]


def _inside(ops: Ops, cut: int) -> int:
    """How deep in the model a cut is: the number of modules that it cuts through."""
    one, other = enclosing(source_of(ops.nodes[cut - 1]).module), enclosing(source_of(ops.nodes[cut]).module)
    return len(set(one) & set(other))
