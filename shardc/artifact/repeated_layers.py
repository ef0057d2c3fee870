"""Which lines of a program's text are left out, as they only repeat: equal layers, their parameters, buckets, stages.

    # h.0.fc (gpt.py:31): ...
    linear = aten.linear.default(x, h_0_fc_weight)
    # 78 more layers like this one: h.1 to h.78

Layers are equal if they run the same ops, at the same types, on values that stand in the same relation to them; the
numbers in names of modules may differ, all by the same step. What is saved is always whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, starmap
from typing import Any, TypeVar

from torch import fx

from shardc.ir.buckets import Bucket
from shardc.ir.graph import source_of
from shardc.ir.layers import layers_of
from shardc.ir.metadata import Collective
from shardc.ir.program import Program
from shardc.ir.stage import Edge, Region, Stage
from shardc.ir.stored import Param

_NUMBER = re.compile(r"(?<![\w])\d+(?![\w])")
_BUCKET = re.compile(r"bucket\d+$")
#: A pattern of layers has at most so many of them: local, local, local, global.
_PATTERN = 6
#: Lists of parameters, buckets and the like repeat after at most so many entries.
_ENTRIES = 64
Notes = dict[str, str]
T = TypeVar("T")


@dataclass(frozen=True)
class Folded:
    """What a text leaves out. Each maps what is left out (names of nodes and of parameters; indices) to the line that
    takes its place, which is "" for all but the first of a stretch.
    """

    params: Mapping[str, str]
    nodes: Mapping[str, Mapping[str, str]]  # by name of the stage; placeholders and ops
    buckets: Mapping[int, str]
    regions: Mapping[int, str]
    edges: Mapping[int, str]
    stages: Mapping[int, str]


NOTHING = Folded({}, {}, {}, {}, {}, {})


def fold(program: Program) -> Folded:
    stages = program.stages or (Stage(program.graph, "single"),)
    params = {p.name: p for p in program.params}
    nodes: dict[str, Notes] = {}
    for stage in stages:
        placeholders = [params[n.name] for n in stage.graph.find_nodes(op="placeholder") if n.name in params]
        nodes[stage.name] = {**_params(placeholders), **_ops(stage.graph)}
    return Folded(
        _params(program.params),
        nodes,
        _entries(program.buckets, _bucket_key(program), lambda i, b: f"bucket {i}"),
        _entries(program.regions, _region_key, lambda i, r: r.name),
        _entries(program.edges, _edge_key, lambda i, e: f"stage{e.source} -> stage{e.target}"),
        _stages(program.stages),
    )


# --- lists: parameters, buckets, regions, edges


def _params(params: Sequence[Param]) -> Notes:
    def key(p: Param) -> Hashable:
        return _blank(p.fqn), tuple(map(_blank, p.aliases)), str(p.value), p.reduce, p.bucket < 0, p.requires_grad

    left_out = _entries(params, key, lambda i, p: p.fqn)
    return {params[i].name: note for i, note in left_out.items()}


def _bucket_key(program: Program) -> Callable[[Bucket], Hashable]:
    def key(b: Bucket) -> Hashable:
        values = (program.param(n).value for n in b.params)
        return replace(b, params=(), stages=()), tuple(str(v) for v in values)

    return key


def _region_key(r: Region) -> Hashable:
    return replace(r, name=_blank(r.name), parent=_blank(r.parent))


def _edge_key(e: Edge) -> Hashable:
    return tuple((str(v), v.requires_grad) for v in e.values)


def _entries(entries: Sequence[T], key: Callable[[T], Hashable], name: Callable[[int, T], str]) -> dict[int, str]:
    """Indices that are left out of a list, as the entries before them repeat. At least two entries are left out."""
    left_out: dict[int, str] = {}
    for start, period, times in _repeats([key(x) for x in entries]):
        rest = range(start + period, start + period * times)
        if len(rest) < 2:
            continue
        which = "this one" if period == 1 else f"these {period}"
        groups = "" if period == 1 else " group" if times == 2 else " groups"
        first, last = name(rest[0], entries[rest[0]]), name(rest[-1], entries[rest[-1]])
        left_out |= dict.fromkeys(rest, "")
        left_out[rest[0]] = f"{times - 1} more{groups} like {which}: {first} to {last}"
    return left_out


def _repeats(keys: Sequence[Hashable]) -> Iterator[tuple[int, int, int]]:
    """(start, period, times) of stretches that repeat, from left to right, each the longest from its start."""
    i = 0
    while i < len(keys):
        best = (1, 1)
        for period in range(1, min(_ENTRIES, (len(keys) - i) // 2) + 1):
            end = i + period
            while end < len(keys) and keys[end] == keys[end - period]:
                end += 1
            times = (end - i) // period
            if times > 1 and period * times > best[0] * best[1]:
                best = (period, times)
        period, times = best
        if times > 1:
            yield i, period, times
        i += period * times


def _blank(name: str) -> str:
    return _NUMBER.sub("#", name)


# --- ops


def _ops(graph: fx.Graph) -> Notes:
    """Ops that are left out, as the layers that they are in run what an earlier layer runs."""
    ops = [n for n in graph.nodes if n.op == "call_function"]
    index = {n: i for i, n in enumerate(ops)}
    left_out: Notes = {}
    taken = [False] * len(ops)
    for starts in _lists(ops):
        i = 0
        while i + 1 < len(starts):
            count, times, begin, length = _longest(ops, index, starts, i)
            if times < 2 or any(taken[begin : begin + length * times]):
                i += 1
                continue
            rest = ops[begin + length : begin + length * times]
            taken[begin : begin + length * times] = [True] * (length * times)
            last = min(i + count * times, len(starts)) - 1
            first_name, last_name = starts[i + count][1], starts[last][1]
            which = "this one" if count == 1 else f"these {count} layers"
            more = count * (times - 1)
            left_out |= dict.fromkeys((n.name for n in rest), "")
            left_out[rest[0].name] = f"{more} more layer{'s' * (more > 1)} like {which}: {first_name}" + (
                f" to {last_name}" if last_name != first_name else ""
            )
            i += count * times
    return left_out


def _lists(ops: Sequence[fx.Node]) -> Iterator[list[tuple[int, str]]]:
    """Of every list of layers, outermost first: (index of the first op, name) of each layer, as they run."""
    begins: dict[tuple[int, str], list[tuple[int, str]]] = {}
    for i, n in enumerate(ops):
        for depth, (name, number) in enumerate(layers_of(source_of(n).module)):
            entries = begins.setdefault((depth, name), [])
            layer = f"{name}.{number}" if name else number
            if not any(layer == other for _, other in entries[-2:]):  # the next layer's first op may run early
                entries.append((i, layer))
    for _, entries in sorted(begins.items(), key=lambda x: x[0][0]):
        yield entries


def _longest(
    ops: Sequence[fx.Node], index: Mapping[fx.Node, int], starts: Sequence[tuple[int, str]], i: int
) -> tuple[int, int, int, int]:
    """The longest repetition from a layer on: (layers that repeat, times, first op, ops that repeat)."""
    best = (1, 1, 0, 0)
    for count in range(1, min(_PATTERN, len(starts) - i - 1) + 1):
        begin, length = starts[i][0], starts[i + count][0] - starts[i][0]
        if length <= 0:
            continue
        compare, end = _Repetition(index, begin, length), begin + length
        while end < len(ops) and compare.same(ops[end - length], ops[end]):
            end += 1
        times = (end - begin) // length
        if times > 1 and count * times > best[0] * best[1]:
            best = (count, times, begin, length)
    return best


@dataclass
class _Repetition:
    """Compares ops from `begin` on with those `length` ops later. steps: differences between numbers in names so far.
    entering: what the first layer takes from before it -> what the second one takes from the first in its place.
    """

    index: Mapping[fx.Node, int]
    begin: int
    length: int
    steps: set[int] = field(default_factory=set)
    entering: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def same(self, a: fx.Node, b: fx.Node) -> bool:
        return _like(a, b, self._value, self.steps)

    def _value(self, x: fx.Node, y: fx.Node) -> bool:
        if x is y:
            return True
        if x in self.index and y in self.index and self.index[y] - self.index[x] == self.length:
            return True
        if y in self.index and self.begin <= self.index[y] < self.begin + self.length and self._before(x):
            return str(x.meta["value"]) == str(y.meta["value"]) and self.entering.setdefault(x, y) is y
        named = x.op == y.op == "placeholder" and _type(x) == _type(y)
        return named and _names(x.name.replace("_", " "), y.name.replace("_", " "), self.steps)

    def _before(self, x: fx.Node) -> bool:
        return x not in self.index or self.index[x] < self.begin


def _like(a: fx.Node, b: fx.Node, value: Callable[[fx.Node, fx.Node], bool], steps: set[int]) -> bool:
    if a.target is not b.target or _type(a) != _type(b) or len(a.all_input_nodes) != len(b.all_input_nodes):
        return False
    source, other = source_of(a), source_of(b)
    silent = Collective("none", "none", (), 0)
    sent: Collective = a.meta.get("collective", silent)
    sent_other: Collective = b.meta.get("collective", silent)
    if source.code != other.code or replace(sent, cause="") != replace(sent_other, cause=""):
        return False
    names = [(source.module, other.module), (sent.cause, sent_other.cause)]
    names.append((a.meta.get("region", ""), b.meta.get("region", "")))
    names += zip(a.meta.get("kept", ()), b.meta.get("kept", ()), strict=False)
    return (
        all(_names(x, y, steps) for x, y in names)
        and len(a.meta.get("kept", ())) == len(b.meta.get("kept", ()))
        and a.meta.get("again", 0) == b.meta.get("again", 0)
        and _args((a.args, dict(a.kwargs)), (b.args, dict(b.kwargs)), value)
    )


def _args(a: Any, b: Any, value: Callable[[fx.Node, fx.Node], bool]) -> bool:
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return isinstance(a, fx.Node) and isinstance(b, fx.Node) and value(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_args(x, y, value) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_args(a[k], b[k], value) for k in a if k != "tag")  # a tag is a name
    if isinstance(a, str) and isinstance(b, str) and _BUCKET.match(a) and _BUCKET.match(b):
        return True
    return type(a) is type(b) and bool(a == b)


def _type(n: fx.Node) -> str:
    value = n.meta.get("value")
    each = value if isinstance(value, tuple) else (value,)
    return f"{isinstance(value, tuple)} {[(str(v), getattr(v, 'requires_grad', False)) for v in each]}"


def _names(a: str, b: str, steps: set[int]) -> bool:
    """Whether names differ in numbers only, and all that differ by one step."""
    if a == b:
        return True
    if _blank(a) != _blank(b):
        return False
    differences = {int(y) - int(x) for x, y in zip(_NUMBER.findall(a), _NUMBER.findall(b), strict=True) if x != y}
    steps |= differences
    return len(steps) <= 1


# --- stages of a pipeline


def _stages(stages: Sequence[Stage]) -> dict[int, str]:
    """Stages that are left out, as they run what the one before runs."""
    equal = [False, *starmap(_equal, pairwise(stages))]
    left_out: dict[int, str] = {}
    for i, same in enumerate(equal):
        if same and not equal[i - 1]:
            end = next((j for j in range(i, len(equal)) if not equal[j]), len(equal))
            first, last = stages[i].name, stages[end - 1].name
            names = first if first == last else f"{first} to {last}"
            left_out[i] = f"{names}: as {stages[i - 1].name}, on {'its' if first == last else 'their'} own layers"
        elif same:
            left_out[i] = ""
    return left_out


def _equal(a: Stage, b: Stage) -> bool:
    mine, other = list(a.graph.nodes), list(b.graph.nodes)
    if len(mine) != len(other):
        return False
    at = {n: i for i, n in enumerate(mine)} | {n: i for i, n in enumerate(other)}
    steps: set[int] = set()
    for x, y in zip(mine, other, strict=True):
        if x.op != y.op or _type(x) != _type(y):
            return False
        if x.op == "call_function" and not _like(x, y, lambda u, v: at[u] == at[v], steps):
            return False
    return True
