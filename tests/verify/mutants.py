"""Programs broken on purpose, and who notices: the proof without running, or a step on the loopback mesh.

    python -m tests.verify.mutants [--models 'gpt llama'] [--each 3] [--run] [--write] [--kept FILE [--minutes 5]]

Each kind of `KINDS` breaks a program in one place; of each kind, model and mesh a few places are tried. A mutant that
nothing notices is run (with --run: all are): if its step equals one device, it is no mutant at all, and not counted.
`make mutants` prints the table of docs/measured/proof.md. --kept: each program's result is added to this file, and
not tried again; after --minutes it ends behind a program, with exit status 3 while there are more.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import operator
import random
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import fx

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.api import Program  # noqa: E402
from shardc.ir.graph import copy_graph, operands_of, values_of  # noqa: E402
from shardc.ir.placement import Shard  # noqa: E402
from shardc.ir.stage import Stage  # noqa: E402
from shardc.ir.stored import Bucket, Param  # noqa: E402
from shardc.passes.joint import with_joint_graphs  # noqa: E402
from shardc.runtime import ops  # noqa: E402
from shardc.spec.step_sections import Execution  # noqa: E402
from shardc.verify.static import prove  # noqa: E402
from shardc.verify.static.conversion_types import ROWS  # noqa: E402
from tests.verify.mutants_joint import OF_GRAPHS  # noqa: E402

aten = torch.ops.aten
#: (a program, with copies of its graphs that may be changed) -> broken programs, lazily: a thunk each.
Kind = Callable[[Program], Iterator[Callable[[], Program]]]
KINDS: dict[str, Kind] = {}


def kind(name: str) -> Callable[[Kind], Kind]:
    def register(function: Kind) -> Kind:
        KINDS[name] = function
        return function

    return register


def on_nodes(change: Callable[[fx.Node, Program], bool | None], wanted: Callable[[fx.Node], bool]) -> Kind:
    """Mutants that change one node of one stage's text. change: in place, on a copy; False: there is nothing to do."""

    def mutants(program: Program) -> Iterator[Callable[[], Program]]:
        for i, stage in enumerate(program.stages):
            for node in stage.graph.nodes:
                if wanted(node):
                    yield lambda i=i, name=node.name: _changed(program, i, name, change)  # type: ignore[misc]

    return mutants


class NothingError(Exception):
    """A change that changes nothing here."""


def _changed(program: Program, i: int, name: str, change: Callable[[fx.Node, Program], bool | None]) -> Program:
    graph = copy_graph(program.stages[i].graph)
    node = next(n for n in graph.nodes if n.name == name)
    if change(node, program) is False:
        raise NothingError
    graph.lint()
    stages = list(program.stages)
    stages[i] = replace(stages[i], graph=graph, joint=None)
    return _with_graphs(program, stages)


def _with_graphs(program: Program, stages: Sequence[Stage]) -> Program:
    """The program with these stages, whose forward and backward graphs are written anew."""
    return with_joint_graphs(replace(program, stages=tuple(stages)), Execution())


def is_conversion(node: fx.Node) -> bool:
    return node.target in ROWS


def communicates(node: fx.Node) -> bool:
    c = node.meta.get("collective")
    return node.target in ROWS and c is not None


def is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is not operator.getitem and not is_conversion(node)


def bypass(node: fx.Node, program: Program) -> None:
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
    node.graph.erase_node(node)


KINDS["collective dropped"] = on_nodes(bypass, communicates)
KINDS["conversion without communication dropped"] = on_nodes(bypass, lambda n: is_conversion(n) and not communicates(n))


@kind("collective doubled")
def doubled(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, _: Program) -> None:
        with node.graph.inserting_after(node):
            again = node.graph.create_node(
                "call_function", node.target, (node, *node.args[1:]), {**node.kwargs}, name=f"{node.name}_again"
            )
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again, delete_user_cb=lambda u: u is not again)

    return on_nodes(change, lambda n: communicates(n) and n.target in (ops.all_reduce, ops.sum_grad))(program)


@kind("collective replaced by another")
def retargeted(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, _: Program) -> bool | None:
        groups = (
            (ops.all_reduce, ops.sum_grad),
            (ops.all_gather, ops.all_gather_partial_grad, ops.unshard_partial),
            (ops.shard, ops.reduce_scatter, ops.shard_partial_grad),
            (ops.to_partial, ops.partial_grad_to_partial, ops.first_grad),
        )
        group = next((g for g in groups if node.target in g), None)
        if group is None:
            return False
        node.target = group[(group.index(node.target) + 1) % len(group)]
        if node.target not in (ops.sum_grad, ops.all_gather_partial_grad):
            node.kwargs = {k: v for k, v in node.kwargs.items() if k != "overlap"}
        return None

    return on_nodes(change, is_conversion)(program)


def other_axis(axis: Any, program: Program) -> Any:
    names = [a for a in program.mesh.names if a != program.axis]
    if isinstance(axis, tuple):
        return tuple(other_axis(a, program) for a in axis)
    others = [a for a in names if a.partition(".")[0] != axis.partition(".")[0]]
    if not others:
        raise NothingError
    return others[0]


@kind("collective over another group")
def regrouped(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, program: Program) -> None:
        node.args = (*node.args[:2], other_axis(node.args[2], program), *node.args[3:])

    return on_nodes(change, is_conversion)(program)


@kind("collective along another dim")
def redimmed(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, program: Program) -> bool | None:
        dim: Any = node.args[3]
        shape = values_of(node)[0].shape
        others = [d for d in range(len(shape)) if d != dim and shape[d] == shape[dim]] or [
            d for d in range(len(shape)) if d != dim
        ]
        if not others:
            return False
        node.args = (*node.args[:3], others[0], *node.args[4:])
        return None

    return on_nodes(change, lambda n: is_conversion(n) and len(n.args) > 3)(program)


@kind("split at another digit")
def resplit(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, program: Program) -> None:
        split: Any = node.args[4]
        node.args = (*node.args[:4], 2 * split if split == 1 else 1, *node.args[5:])

    return on_nodes(change, lambda n: is_conversion(n) and len(n.args) > 4)(program)


def shape_of(node: fx.Node) -> Any:
    v = node.meta.get("value")
    return (v.shape, v.dtype, v.layout) if v is not None and not isinstance(v, tuple) else None


@kind("op takes another value")
def swapped(program: Program) -> Iterator[Callable[[], Program]]:
    """Another value of the same type, made before it."""

    def change(node: fx.Node, _: Program) -> bool | None:
        for x in operands_of(node):
            for other in node.graph.nodes:
                if other is node:
                    break
                if other is not x and shape_of(other) == shape_of(x) and shape_of(x) is not None:
                    node.replace_input_with(x, other)
                    return None
        return False

    return on_nodes(change, is_op)(program)


@kind("op takes another form of its value")
def reformed(program: Program) -> Iterator[Callable[[], Program]]:
    """As it is before or after a conversion: of the same local shape."""

    def change(node: fx.Node, program: Program) -> bool | None:
        for x in operands_of(node):
            others = [u for u in x.users if is_conversion(u) and u < node]
            others += [x.args[0]] if is_conversion(x) else []  # type: ignore[list-item]
            if others and values_of(others[0])[0].local_shape(program.mesh) == values_of(x)[0].local_shape(
                program.mesh
            ):
                node.replace_input_with(x, others[0])
                return None
        return False

    return on_nodes(change, is_op)(program)


@kind("operands exchanged")
def exchanged(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, _: Program) -> None:
        node.args = (node.args[1], node.args[0], *node.args[2:])

    def wanted(node: fx.Node) -> bool:
        first = node.args[:2]
        return (
            node.target in (aten.sub.Tensor, aten.div.Tensor, aten.mm.default, aten.bmm.default, aten.matmul.default)
            and all(isinstance(x, fx.Node) for x in first)
            and first[0] is not first[1]
        )

    return on_nodes(change, wanted)(program)


def numbers(args: Any) -> list[int]:
    return [i for i, x in enumerate(args) if isinstance(x, int | float) and not isinstance(x, bool)]


@kind("constant changed")
def constants(program: Program) -> Iterator[Callable[[], Program]]:
    """A count, a factor, an epsilon, a dim, the number of a random stream."""

    def change(node: fx.Node, _: Program) -> None:
        args = list(node.args)
        i = numbers(args)[-1]
        args[i] = args[i] * 2 if isinstance(args[i], float) else args[i] + 1
        node.args = tuple(args)

    return on_nodes(change, lambda n: is_op(n) and bool(numbers(n.args)) and n.target is not ops.total)(program)


@kind("count of one rank")
def rescaled(program: Program) -> Iterator[Callable[[], Program]]:
    """A mean over this rank's rows alone."""

    def change(node: fx.Node, program: Program) -> None:
        args = list(node.args)
        i = numbers(args)[-1]
        args[i] = max(args[i] // 2, 1) if isinstance(args[i], int) else args[i] / 2
        node.args = tuple(args)

    return on_nodes(change, lambda n: n.target is ops.partial_mean)(program)


@kind("size of one rank changed")
def resized(program: Program) -> Iterator[Callable[[], Program]]:
    """A whole size where a rank's belongs."""

    def change(node: fx.Node, program: Program) -> bool | None:
        (value,) = values_of(node)
        sizes: Any = node.args[1]
        if value.layout.shards() and tuple(sizes) != value.shape:
            node.args = (node.args[0], list(value.shape), *node.args[2:])
            return None
        return False

    targets = (aten.reshape.default, aten.expand.default, aten.view.default)
    return on_nodes(change, lambda n: n.target in targets)(program)


@kind("cast changed")
def recast(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, _: Program) -> None:
        to = torch.float16 if node.kwargs["dtype"] != torch.float16 else torch.bfloat16
        node.kwargs = {**node.kwargs, "dtype": to}

    return on_nodes(
        change, lambda n: n.target is aten._to_copy.default and isinstance(n.kwargs.get("dtype"), torch.dtype)
    )(program)


@kind("random numbers by a local index")
def local_random(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, _: Program) -> bool | None:
        at = {ops.dropout: 6, ops.random: 7}[node.target]
        if len(node.args) <= at or not node.args[at]:
            return False
        node.args = (*node.args[:at], (), *node.args[at + 1 :])
        return None

    return on_nodes(change, lambda n: n.target in (ops.dropout, ops.random))(program)


@kind("random numbers of another axis")
def random_axis(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, program: Program) -> bool | None:
        at = {ops.dropout: 6, ops.random: 7}[node.target]
        digits: Any = node.args[at] if len(node.args) > at else ()
        if not digits:
            return False
        dim, axis, *rest = digits[0]
        changed = ((dim, other_axis(axis, program), *rest), *digits[1:])
        node.args = (*node.args[:at], changed, *node.args[at + 1 :])
        return None

    return on_nodes(change, lambda n: n.target in (ops.dropout, ops.random))(program)


@kind("padding left as it is")
def unfilled(program: Program) -> Iterator[Callable[[], Program]]:
    return on_nodes(bypass, lambda n: n.target is ops.fill_padding)(program)


@kind("padding filled with another number")
def misfilled(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, _: Program) -> None:
        # zeros where an op is not finite at them; else what is counted
        node.args = (*node.args[:7], 0.0 if len(node.args) > 7 and node.args[7] else 3.0)

    return on_nodes(change, lambda n: n.target is ops.fill_padding)(program)


@kind("offset into split classes")
def offset(program: Program) -> Iterator[Callable[[], Program]]:
    """A look-up or a loss on split classes that takes another rank's rows."""

    def change(node: fx.Node, _: Program) -> bool | None:
        args = list(node.args)
        for i, a in enumerate(args):
            if isinstance(a, tuple | list) and a and isinstance(a[0], tuple | list):
                axis, split = a[0][:2]
                if isinstance(axis, str) and isinstance(split, int):
                    args[i] = ((axis, split * 2), *a[1:])
                    node.args = tuple(args)
                    return None
        return False

    def wanted(n: fx.Node) -> bool:
        name = getattr(n.target, "__name__", "")
        return n.op == "call_function" and any(w in name for w in ("embedding", "nll", "select", "experts"))

    return on_nodes(change, wanted)(program)


@kind("op left out")
def left_out(program: Program) -> Iterator[Callable[[], Program]]:
    def same(n: fx.Node) -> bool:
        return bool(is_op(n) and n.args and isinstance(n.args[0], fx.Node) and shape_of(n) == shape_of(n.args[0]))

    return on_nodes(bypass, lambda n: same(n) and n.target not in (aten.alias.default, aten.clone.default))(program)


# --- what is not in a text


def with_param(program: Program, name: str, **changes: Any) -> Program:
    return replace(program, params=tuple(replace(p, **changes) if p.name == name else p for p in program.params))


def with_sum(program: Program, p: Param, axes: tuple[str, ...]) -> Program:
    """A parameter's gradient summed over other axes, by a bucket of its own."""
    buckets, at = list(program.buckets), p.bucket
    if at < 0 or buckets[at].params != (p.name,):
        one = Bucket(axes, p.dtype, (p.name,))
        if at >= 0:
            one = replace(buckets[at], axes=axes, params=(p.name,))
            buckets[at] = replace(buckets[at], params=tuple(n for n in buckets[at].params if n != p.name))
        at = len(buckets)
        buckets.append(one)
    buckets[at] = replace(buckets[at], axes=axes)
    return replace(with_param(program, p.name, reduce=axes, bucket=at), buckets=tuple(buckets))


@kind("gradient not summed")
def unsummed(program: Program) -> Iterator[Callable[[], Program]]:
    for p in program.params:
        if p.reduce:
            yield lambda p=p: with_sum(program, p, p.reduce[:-1])  # type: ignore[misc]


@kind("gradient summed where it is whole")
def oversummed(program: Program) -> Iterator[Callable[[], Program]]:
    for p in program.params:
        more = [a for a in program.mesh.names if a not in p.reduce and a != program.axis and not p.layout.shards()]
        parts = {x for a in p.reduce if "[" not in a for x in program.mesh.digits(a)}
        more = [a for a in more if a not in parts]
        if p.requires_grad and more and (p.bucket >= 0 or not program.axis):
            yield lambda p=p, more=more: with_sum(program, p, (*p.reduce, more[0]))  # type: ignore[misc]


@kind("gradient in no bucket")
def unbucketed(program: Program) -> Iterator[Callable[[], Program]]:
    for i, b in enumerate(program.buckets):

        def without(i: int = i, b: Any = b) -> Program:
            buckets = list(program.buckets)
            buckets[i] = replace(b, params=b.params[1:])
            return replace(program, buckets=tuple(buckets))

        yield without


@kind("gradient in two buckets")
def rebucketed(program: Program) -> Iterator[Callable[[], Program]]:
    for i, b in enumerate(program.buckets):
        for j, other in enumerate(program.buckets):
            if i != j:

                def twice(i: int = i, b: Any = b, other: Any = other) -> Program:
                    buckets = list(program.buckets)
                    buckets[i] = replace(b, params=(*b.params, other.params[0]))
                    return replace(program, buckets=tuple(buckets))

                yield twice
                break


@kind("bucket summed over another group")
def bucket_axes(program: Program) -> Iterator[Callable[[], Program]]:
    for i, b in enumerate(program.buckets):
        if b.axes:

            def other(i: int = i, b: Any = b) -> Program:
                buckets = list(program.buckets)
                buckets[i] = replace(b, axes=tuple(other_axis(a, program) for a in b.axes))
                return replace(program, buckets=tuple(buckets))

            yield other


@kind("parameter stored split otherwise")
def stored(program: Program) -> Iterator[Callable[[], Program]]:
    for p in program.params:
        for axis, s in p.layout.shards():
            n, size = program.mesh.size(axis), p.shape[s.dim]
            if not s.sections and not s.padding and size % (2 * n) == 0 and size > 2 * n:
                split = 2 if s.split == 1 else 1
                layout = p.layout.replace(axis, replace(s, split=split), program.mesh)
                if not layout.problem(p.shape, program.mesh):
                    yield lambda p=p, layout=layout: with_param(program, p.name, layout=layout)  # type: ignore[misc]


@kind("input split otherwise")
def inputs(program: Program) -> Iterator[Callable[[], Program]]:
    for x in program.inputs:
        for axis, s in x.layout.shards():
            n = program.mesh.size(axis)
            if x.shape[s.dim] % (2 * n) == 0 and not s.padding:

                def other(x: Any = x, axis: str = axis, s: Shard = s) -> Program:
                    layout = x.layout.replace(axis, replace(s, split=2 * s.split), program.mesh)
                    if layout.problem(x.shape, program.mesh):
                        raise NothingError
                    return program.with_layouts({x.name: layout})

                yield other


@kind("microbatches cut otherwise")
def microbatches(program: Program) -> Iterator[Callable[[], Program]]:
    for x in program.inputs:
        if program.microbatches > 1:
            for cut in (None, *([replace(x.microbatch, split=2 * x.microbatch.split)] if x.microbatch else ())):
                if cut != x.microbatch:
                    yield lambda x=x, cut=cut: replace(  # type: ignore[misc]
                        program,
                        inputs=tuple(replace(i, microbatch=cut) if i.name == x.name else i for i in program.inputs),
                    )


@kind("sum over microbatches of another value")
def totals(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, program: Program) -> bool | None:
        prologue = program.prologue
        count = len(prologue.graph.output_node().args[0][0]) if prologue is not None else 0  # type: ignore[index, arg-type]
        number: Any = node.args[1]
        node.args = (node.args[0], (number + 1) % count if count > 1 else number + 1, *node.args[2:])
        return None

    return on_nodes(change, lambda n: n.target is ops.total)(program)


@kind("parameter read before it is published")
def unpublished(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, program: Program) -> bool | None:
        behind: Any = node.args[0]
        started = behind.args[0] if behind.target is ops.gather_wait else behind
        if started.target not in (ops.gather_start, ops.updated):
            return False
        source = started.args[0][node.args[1]]
        node.replace_all_uses_with(source)
        node.graph.erase_node(node)
        return None

    def wanted(n: fx.Node) -> bool:
        behind = n.args[0] if n.args else None
        return (
            n.target is operator.getitem
            and isinstance(behind, fx.Node)
            and behind.target in (ops.gather_wait, ops.updated)
        )

    return on_nodes(change, wanted)(program)


@kind("parameters of a bucket exchanged")
def wrong_parameter(program: Program) -> Iterator[Callable[[], Program]]:
    def change(node: fx.Node, program: Program) -> bool | None:
        behind: Any = node.args[0]
        for other in behind.users:
            if other is not node and shape_of(other) == shape_of(node):
                node.args = (behind, other.args[1])
                return None
        return False

    def wanted(n: fx.Node) -> bool:
        behind = n.args[0] if n.args else None
        return (
            n.target is operator.getitem
            and isinstance(behind, fx.Node)
            and behind.target in (ops.gather_wait, ops.updated)
        )

    return on_nodes(change, wanted)(program)


@kind("stage takes another stage's value")
def crossed(program: Program) -> Iterator[Callable[[], Program]]:
    for i, stage in enumerate(program.stages):
        names = list(stage.receives)
        for a, b in pairwise(names):
            if stage.receives[a].shape == stage.receives[b].shape:

                def exchange(i: int = i, stage: Stage = stage, a: str = a, b: str = b) -> Program:
                    graph = copy_graph(stage.graph)
                    nodes = {n.name: n for n in graph.nodes}
                    x, y = nodes[a], nodes[b]
                    users_x, users_y = list(x.users), list(y.users)
                    for u in users_x:
                        u.replace_input_with(x, y)
                    for u in users_y:
                        if u not in users_x:
                            u.replace_input_with(y, x)
                    stages = list(program.stages)
                    stages[i] = replace(stage, graph=graph, joint=None)
                    return _with_graphs(program, stages)

                yield exchange


@kind("schedule in another order")
def reordered(program: Program) -> Iterator[Callable[[], Program]]:
    schedule = program.schedule
    if schedule is None:
        return
    for rank, actions in enumerate(schedule.actions):
        for at in range(0, len(actions) - 1, 3):

            def other(rank: int = rank, at: int = at) -> Program:
                mine = list(schedule.actions[rank])
                mine[at], mine[at + 1] = mine[at + 1], mine[at]
                every = list(schedule.actions)
                every[rank] = tuple(mine)
                return replace(program, schedule=replace(schedule, actions=tuple(every)))

            yield other


@kind("new value of a buffer exchanged")
def buffers(program: Program) -> Iterator[Callable[[], Program]]:
    for i, stage in enumerate(program.stages):
        returned: Any = stage.graph.output_node().args[0]
        news = returned[1]
        for k in range(len(news) - 1):
            if shape_of(news[k]) == shape_of(news[k + 1]):

                def other(i: int = i, k: int = k, stage: Stage = stage) -> Program:
                    graph = copy_graph(stage.graph)
                    out = graph.output_node()
                    first: Any = out.args[0]
                    mine = list(first[1])
                    mine[k], mine[k + 1] = mine[k + 1], mine[k]
                    out.args = ((first[0], tuple(mine), *first[2:]),)
                    stages = list(program.stages)
                    stages[i] = replace(stage, graph=graph, joint=None)
                    return _with_graphs(program, stages)

                yield other


@dataclass
class Counted:
    """made: mutants that change what a step computes; static, run: noticed by which; missed: by the proof."""

    made: int = 0
    static: int = 0
    run: int = 0
    missed: int = 0


def noticed_by_run(program: Program) -> bool:
    """Does a step differ from one device, or fail?"""
    try:
        return not program.verify().ok
    except Exception:  # a broken program may fail in any way, and that is noticing it
        return True


def tried(
    programs: Iterator[tuple[str, Program]], each: int, *, run: bool, seed: int = 0
) -> tuple[dict[str, Counted], list[str], list[str]]:
    """Counts by kind; the mutants that the proof missed; the programs that it did not prove as they are. Stages
    are broken, with their graphs of a step, and these alone.
    """
    counts: dict[str, Counted] = defaultdict(Counted)
    missed, alarms = [], []
    for name, program in programs:
        draw = random.Random(f"{seed} {name}")  # the same mutants whichever other programs are asked for
        print(f"{name}: {sum(c.made for c in counts.values())} before", file=sys.stderr, flush=True)
        if not (proof := prove(program)).ok:
            alarms.append(f"{name}: {proof}")
            continue
        for what, make in (KINDS | OF_GRAPHS).items():
            try:
                mutants = list(make(program))
            except NothingError:
                continue
            for thunk in draw.sample(mutants, min(each, len(mutants))):
                try:
                    mutant = thunk()
                except NothingError:
                    continue
                if mutant is None:
                    continue
                static = not prove(mutant).ok
                ran = noticed_by_run(mutant) if run or not static else False
                if not static and not ran:
                    continue  # it computes the same
                count = counts[what]
                count.made += 1
                count.static += static
                count.run += ran
                if not static:
                    count.missed += 1
                    missed.append(f"{name}: {what}")
    return counts, missed, alarms


#: Meshes besides those of tests/verify/settings.py, for the models that take them.
MORE: dict[str, dict[str, Any]] = {
    "dp=2, ep=2": {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "*.experts", "axis": "ep"}]},
    "cp=2, ring": {"mesh": {"cp": 2}, "sequence": {"axis": "cp", "method": "ring"}},
    "cp=2, dp=2, gather": {"mesh": {"cp": 2, "dp": 2}, "sequence": {"axis": "cp", "method": "gather"}},
    "cp=2, tp=2, ulysses": {
        "mesh": {"cp": 2, "tp": 2},
        "sequence": {"axis": "cp", "method": "ulysses"},
        "shard": {"use": "structure"},
    },
    "pp=2, dp=2, tp=2, zero 1": {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "batch": {"microbatches": 2},
        "shard": {"use": "structure"},
        "pipeline": {"axis": "pp", "stages": 2, "schedule": "1f1b"},
        "data": {"axis": "dp", "zero": 1},
    },
}


def programs(names: list[str], wanted: str = "*", done: Collection[str] = ()) -> Iterator[tuple[str, Program]]:
    """done: those that are not asked for, by name."""
    from fnmatch import fnmatch

    from tests import zoo
    from tests.verify.settings import builders, settings

    for name in names:
        with zoo.Wide(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, batch = builders()[name]()
            for setting, spec in (settings(model) | MORE).items():
                if fnmatch(setting, wanted):
                    label = f"{name}, {setting}"
                    if label in done:
                        continue
                    try:
                        program = shardc.compile(model, batch, {"shardc": 1, **spec}, prove=False)
                    except shardc.ShardcError:
                        continue
                    yield label, program


def kept_in(
    file: Path, each: int, options: argparse.Namespace
) -> tuple[dict[str, Counted], list[str], list[str], bool]:
    """As `tried`, of what the file has and of what is added to it now; and whether that is all."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    until = time.monotonic() + 60 * options.minutes
    more = programs(options.models.split(), options.settings, {r["program"] for r in rows})
    whole = True
    for name, program in more:
        if time.monotonic() > until:
            whole = False
            break
        counts, missed, alarms = tried(iter([(name, program)]), each, run=options.run)
        found = {what: asdict(c) for what, c in counts.items()}
        rows.append({"program": name, "counts": found, "missed": missed, "alarms": alarms})
        with file.open("a") as to:
            to.write(json.dumps(rows[-1]) + "\n")
    total: dict[str, Counted] = defaultdict(Counted)
    for row in rows:
        for what, c in row["counts"].items():
            total[what] = Counted(**{k: n + c[k] for k, n in asdict(total[what]).items()})
    return total, [m for r in rows for m in r["missed"]], [a for r in rows for a in r["alarms"]], whole


BEGIN, END = "<!-- mutants:begin -->", "<!-- mutants:end -->"
MODELS = "gpt llama bert t5 mixtral resnet lstm vit unet mamba"


def table(counts: dict[str, Counted], *, run: bool) -> str:
    lines = ["| broken by | mutants | noticed by the proof |" + (" noticed by a step |" if run else "")]
    lines += ["|---|---:|---:|" + ("---:|" if run else "")]
    rows = sorted(counts.items())
    rows += [("all", Counted(*(sum(getattr(c, k) for _, c in rows) for k in ("made", "static", "run"))))]
    lines += [f"| {what} | {c.made} | {c.static} |" + (f" {c.run} |" if run else "") for what, c in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--settings", default="*")
    parser.add_argument("--each", type=int, default=2)
    parser.add_argument("--run", action="store_true")
    parser.add_argument("--write", action="store_true", help="the table into docs/measured/proof.md")
    parser.add_argument("--kept", type=Path, help="a file of what was tried before, to go on with")
    parser.add_argument("--minutes", type=float, default=math.inf)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    start = time.perf_counter()
    whole = True
    if options.kept is not None:
        counts, missed, alarms, whole = kept_in(options.kept, options.each, options)
    else:
        some = programs(options.models.split(), options.settings)
        counts, missed, alarms = tried(some, options.each, run=options.run)
    text = table(counts, run=options.run)
    print(text)
    if options.write and whole:
        page = ROOT / "docs" / "measured/proof.md"
        head, _, rest = page.read_text().partition(BEGIN)
        meshes = f"on the settings of `tests/verify/settings.py` and {len(MORE)} more"
        meshes += f", {options.each} of a kind and program"
        where = f"{options.models}, {meshes}, {time.strftime('%Y-%m-%d')}:"
        page.write_text(f"{head}{BEGIN}\n{where}\n\n{text}\n{END}{rest.partition(END)[2]}")
    print(f"{time.perf_counter() - start:.0f} s", file=sys.stderr)
    for line in (*(f"missed: {m}" for m in missed), *(f"not proven as it is: {a}" for a in alarms)):
        print(line, file=sys.stderr)
    sys.exit(1 if alarms else 0 if whole else 3)


if __name__ == "__main__":
    main()
