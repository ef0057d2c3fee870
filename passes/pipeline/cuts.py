"""Choose the cuts of a rank's graph into pipeline stages: before modules, by layer counts, or by cost.

A graph's *main* ops are those that depend on both parameters and the batch, in the order in which they run. A cut is a
position among them. Ops that depend on only one of the two (masks, rotary tables; normed weights) run wherever they are
used, and cannot be cut.

Cost is counted in seconds on the machine that passes assume (shardc.machine.assumed). Parameters count as the bytes
that an optimizer's step reads and writes for them, spread over the microbatches. Values that cross a cut are sent while
the stages compute: only the time beyond that counts. Among cuts that are nearly as even, the one that the fewest
bytes cross is taken.
"""

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
from shardc.ir.patterns import enclosing, match
from shardc.ir.similar_names import did_you_mean
from shardc.layer_names import layer_of
from shardc.machine.assumed import STAGES, byte_seconds, work_seconds
from shardc.rules.core.registry import rank_seconds
from shardc.runtime.schedule import default_stages
from shardc.spec import Spec

#: Bytes that an optimizer's step moves for every byte of a parameter: weight, gradient, two moments, read and written.
UPDATE = 8
#: Stages may cost this much more than those of the best cut, if fewer bytes cross or a cut is between modules.
SLACK = 1.1
#: The value, among such cuts, of half as many bytes crossing, and of one module less that a cut goes through: shares of
#: the cost of an even stage.
CROSSING, INSIDE = 0.1, 0.02


@dataclass(frozen=True)
class Ops:
    """The main ops of a graph: the data for the choice of cuts.

    work: cost of each. crossing: entry p: bytes that ops before p make and ops from p on use.
    """

    nodes: tuple[fx.Node, ...]
    work: tuple[float, ...]
    crossing: tuple[int, ...]

    def sending(self, cut: int) -> float:
        """Return the cost of sending what crosses a cut, and its gradients back.

        Both are sent while the stages compute forward and backward: 3 times the work of forward.
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
        """Return these ops with those that belong together as one, and where each of them begins."""
        starts = begins(self.nodes)
        ends = [*starts[1:], len(self.nodes)]
        work = tuple(sum(self.work[a:b]) for a, b in zip(starts, ends, strict=True))
        return (
            Ops(tuple(self.nodes[i] for i in starts), work, (*(self.crossing[i] for i in starts), self.crossing[-1])),
            starts,
        )


def begins(main: Sequence[fx.Node]) -> list[int]:
    """Return the positions where stages may begin: not among the lines of one op."""
    names = [n.meta.get("op") for n in main]
    return [i for i, name in enumerate(names) if name is None or i == 0 or name != names[i - 1]]


def users(node: fx.Node) -> list[fx.Node]:
    """Return the ops that use a result, looking through `getitem`."""
    return [u for user in node.users for u in (users(user) if user.target is operator.getitem else [user])]


def _weights(node: fx.Node, main: dict[fx.Node, int]) -> list[fx.Node]:
    """Return the placeholders that lead to an op's operands without main ops: its weights (and inputs)."""
    weights, todo, seen = [], [x for x in node.all_input_nodes if x not in main], set[fx.Node]()
    while todo:
        x = todo.pop()
        if x not in seen:
            seen.add(x)
            todo += x.all_input_nodes
            if x.op == "placeholder" and x.meta.get("value") is not None:
                weights.append(x)
    return weights


def stages_of_weights(node: fx.Node, position: dict[fx.Node, int], running: Mapping[str, tuple[int, ...]]) -> set[int]:
    """Return the stages that have a main op's weights, of the weights that only one stage has."""
    stages = (running.get(x.name, ()) for x in _weights(node, position))
    return {numbers[0] for numbers in stages if len(numbers) == 1}


def positions(
    main: Sequence[fx.Node], spec: Spec, mesh: Mesh, running: Mapping[str, tuple[int, ...]] | None = None
) -> list[int]:
    """Return where the stages after the first begin, as positions in the main ops.

    mesh: of one stage's ranks. running: the stages of each parameter in a program beside which this one runs; then
    costs, which depend on sizes, do not count. Raises ShardcError, at the spec's line, for modules that do not exist or
    are not in the order in which they run, counts that are not the model's, and more stages than there are ops.
    """
    p = spec.pipeline
    assert p is not None
    if p.cut is not None:
        return _before(main, p.cut, spec)
    if p.balance is not None:
        return _counted(main, p.balance, spec)
    n = p.stages or default_stages(p.schedule, spec.mesh.size(p.axis))
    most = len(begins(main))
    if n > most:
        fault = f"{n} stages, and the model has only {most} ops that depend on its input and its weights"
        raise ShardcError(fault, where=spec.where(("pipeline", "stages")), fix=f"at most {most} stages")
    whole, starts = Ops.of(main, mesh, spec.batch.microbatches).joined()
    if running is not None:
        position = {op: i for i, op in enumerate(main)}
        per_op = [stages_of_weights(op, position, running) for op in main]
        joined = [set[int]().union(*per_op[a:b]) for a, b in pairwise([*starts, len(main)])]
        if (at_weights := _cuts_at_weights(whole, n, joined)) is not None:
            return [starts[start] for start in at_weights]
    return [starts[start] for start in even(whole, n)]


# --- before modules, by counts ----------------------------------------------------------------------------------------


def _before(main: Sequence[fx.Node], names: Sequence[str], spec: Spec) -> list[int]:
    errors = Errors()
    modules = dict.fromkeys(m for n in main for m in enclosing(source_of(n).module))
    starts = []
    for i, name in enumerate(names):
        where = spec.where(("pipeline", "cut", i))
        inside = [
            position for position, n in enumerate(main) if any(match(name, m) for m in enclosing(source_of(n).module))
        ]
        if not inside:
            otherwise = "name a module as model.named_modules() does; one whose ops depend on its input"
            fix = did_you_mean(name, modules, otherwise)
            errors.add(f"no op of the model runs in a module {name!r}", where=where, fix=fix)
        elif inside[0] == 0:
            fault, fix = f"{name!r} runs first: the stage before it would be empty", "remove it, or name a later module"
            errors.add(fault, where=where, fix=fix)
        else:
            starts.append((inside[0], name, where))
    for (position, name, _), (then, other, where) in pairwise(starts):
        if then < position:
            fault, fix = f"{other!r} begins before {name!r} does", "list the modules in the order in which they run"
            errors.add(fault, where=where, fix=fix)
        elif then == position:
            fault = f"{other!r} begins where {name!r} does" if other != name else f"{other!r} is listed twice"
            errors.add(
                f"{fault}: the stage between would be empty", where=where, fix="remove it, or name a later module"
            )
    errors.raise_any()
    return [position for position, _, _ in starts]


def layers(main: Sequence[fx.Node]) -> dict[str, list[tuple[str, int]]]:
    """Return the model's outermost lists of layers, in order: {list: [(layer, position of its first op)]}."""
    starts: dict[str, dict[str, int]] = {}
    for position, n in enumerate(main):
        if layer := layer_of(source_of(n).module):
            name, number = layer
            starts.setdefault(name, {}).setdefault(f"{name}.{number}" if name else number, position)
    return {name: sorted(begins.items(), key=lambda item: item[1]) for name, begins in starts.items()}


def _counted(main: Sequence[fx.Node], counts: Sequence[int], spec: Spec) -> list[int]:
    lists_of_layers = {name: items for name, items in layers(main).items() if len(items) > 1}
    lists = {
        ", ".join(lists_of_layers): sorted(
            (layer for items in lists_of_layers.values() for layer in items), key=lambda item: item[1]
        )
    } | lists_of_layers
    fitting = {name: items for name, items in lists.items() if len(items) == sum(counts)}
    if len(fitting) != 1:
        has = (
            ", ".join(f"{name or 'the model'} ({len(items)})" for name, items in lists_of_layers.items())
            or "no lists of layers"
        )
        fault = f"balance counts {sum(counts)} layers, and the model has {has}"
        total = len(lists[", ".join(lists_of_layers)])
        fix = f"make the counts add up to {total}" if total else "write stages: N, or cut: [modules]"
        raise ShardcError(fault, where=spec.where(("pipeline", "balance")), fix=fix)
    (items,) = fitting.values()
    starts = list(accumulate(counts))[:-1]
    return [items[i][1] for i in starts]


# --- by cost ----------------------------------------------------------------------------------------------------------


def _cuts_at_weights(ops: Ops, n: int, homes: Sequence[set[int]]) -> list[int] | None:
    """Return n - 1 cuts that match the stages of the ops' weights, with the fewest bytes crossing.

    None if the ops run in another order than their weights' stages.
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
    """Return n - 1 cuts that minimise the costliest stage (up to SLACK), and that few bytes cross.

    n <= the number of ops.
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
    """Stages that cost at most `limit`, and the cuts between them. begins: the work before each position."""

    def __init__(self, ops: Ops, limit: float) -> None:
        self.ops, self.limit = ops, limit
        self.begins = [0.0, *accumulate(ops.work)]
        end = len(ops.work)
        last = list(accumulate((c if self.may(c) else 0 for c in range(end)), max))  # the last cut up to every position
        self.fewest, self.most = (
            [0.0] * (end + 1),
            [0] * (end + 1),
        )  # how many stages the ops from each position on can be
        for a in reversed(range(end)):
            b = self.furthest(a)
            b = last[b] if b < end else end
            self.fewest[a] = 1 + self.fewest[b] if b > a else math.inf
            self.most[a] = self.most[a + 1] + (a + 1 == end or self.may(a + 1))

    def may(self, cut: int) -> bool:
        """Return whether a cut may be here."""
        return self.ops.sending(cut) <= self.limit

    def furthest(self, a: int) -> int:
        """Return the last position where a stage from position a on can end."""
        return bisect_right(self.begins, self.begins[a] + self.limit) - 1

    def allows(self, a: int, n: int) -> bool:
        """Return whether the ops from a on can be n stages."""
        return self.fewest[a] <= n <= self.most[a]


def _inside(ops: Ops, cut: int) -> int:
    """Return how deep in the model a cut is: the number of modules that it cuts through."""
    one, other = enclosing(source_of(ops.nodes[cut - 1]).module), enclosing(source_of(ops.nodes[cut]).module)
    return len(set(one) & set(other))
