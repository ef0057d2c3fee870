"""Collect all messages between ranks in a step, with causes, and on a device what hides them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from shardc.artifact.emit import bucket_text, value_text
from shardc.cost import Cost
from shardc.ir.graph import source_of
from shardc.ir.metadata import CommRecord
from shardc.ir.program import Program
from shardc.ir.repeats import Repeats
from shardc.layer_names import ranges
from shardc.report.comm import DIRECTIONS, IMPLICIT, Row, Tag, added_up, comm_rows, tag
from shardc.report.page.graphs import drawn, of_parameter
from shardc.report.page.spec_lines import SpecLines
from shardc.runtime import ops
from shardc.runtime.zero.flat_partition import Flat


@dataclass
class Way:
    """A message's collectives of one direction in a step, including those of equal layers.

    count: on one rank of each coordinate; bytes: of the largest; seconds, exposed: of all (None: between stages).
    """

    direction: str
    kind: str
    axes: str
    count: int
    bytes: int
    seconds: float | None
    exposed: float | None
    behind: str


@dataclass
class Message:
    """A collective of the program, or of a bucket, including those of equal layers.

    title: what it carries; before, after: the types that it converts between; lines: of the spec; ways: its
    collectives. layers: number of equal ones. buckets: their numbers; params: the numbers of their parameters.
    """

    name: str
    axes: tuple[str, ...]
    cause: str
    lines: list[int]
    ways: list[Way] = field(default_factory=list)
    title: str = ""
    module: str = ""
    line: str = ""
    code: str = ""
    before: str = ""
    after: str = ""
    stage: int = -1
    implicit: bool = False
    layers: int = 1
    buckets: str = ""
    params: list[int] = field(default_factory=list)


class Messages:
    """The messages of a program: `all`, in the order of forward, those of buckets last.

    of_node: their numbers by node of a stage; rows: the table of `inspect --comm`, with the messages of each row.
    cost: None: of a program that is not compiled, which sends nothing.
    """

    def __init__(
        self,
        program: Program,
        layers: Repeats,
        spec: SpecLines,
        params: Mapping[str, int],
        cost: Cost | None,
    ) -> None:
        self.all: list[Message] = []
        self.of_node: dict[fx.Node, int] = {}
        self._numbers: dict[Tag, int] = {}
        self._program, self._spec, self._params = program, spec, params
        ran = added_up(cost, tag) if cost is not None else {}
        gathers: list[fx.Node] = []
        for i, stage in enumerate(program.stages):
            for n in (n for n in stage.graph.nodes if "collective" in n.meta):
                own = n.name, "send_recv" if n.op == "placeholder" else ""
                if n.target is ops.gather_start:
                    gathers.append(n)
                elif n.op == "call_function" or own in ran:  # a value from another stage of the same rank is no message
                    shown = layers.same(n) if n.op == "call_function" else n
                    if shown in self.of_node:
                        self.all[self.of_node[shown]].layers += 1
                    else:
                        self.of_node[shown] = len(self.all)
                        self.all.append(self._of_node(n, i))
                    self.of_node[n] = self._numbers[own] = self.of_node[shown]
        equal: dict[Hashable, list[int]] = {}
        for i, b in enumerate(program.buckets):
            if (f"bucket{i}", "") in ran:
                key = replace(b, params=(), stages=()), tuple(params[n] for n in b.params), Flat.of(program, b).padded
                equal.setdefault(key, []).append(i)
        for buckets in equal.values():
            self._numbers |= {(f"bucket{i}", ""): len(self.all) for i in buckets}
            self.all.append(self._of_buckets(buckets))
        self.of_node |= {n: self._numbers[of] for n in gathers if (of := (str(n.args[1]), "")) in self._numbers}
        self.rows: list[dict[str, Any]] = []
        if cost is not None:
            self._count(cost)

    def _count(self, cost: Cost) -> None:
        """Set the ways of all messages and the table, from the collectives of a dry run."""
        ways = added_up(cost, lambda r: (self.number(r), r.direction, r.kind, r.axis))
        for (number, direction, kind, axes), s in sorted(ways.items(), key=lambda x: DIRECTIONS.index(x[0][1])):
            if number is not None:
                way = Way(direction, kind, axes, s.count, s.largest, s.seconds, s.exposed, s.behind)
                self.all[number].ways.append(way)
        for r in comm_rows(cost):
            messages = sorted({self._numbers[t] for t in r.tags & self._numbers.keys()})
            self.rows.append(r.to_json() | {"lines": self._lines(r), "messages": messages})

    def _of_node(self, n: fx.Node, stage: int) -> Message:
        source, c = source_of(n), n.meta["collective"]
        operand = next((x for x in n.all_input_nodes if x.meta.get("value") is not None), None)
        title = "between stages" if n.op == "placeholder" else ""
        if operand is not None and n.op == "call_function" and of_parameter(n):
            weight = next(
                (p for p in self._program.params if p.name == drawn(operand, through_gathers=True).name), None
            )
            title = f"of the weight {weight.fqn}" if weight is not None else ""
        return Message(
            n.name,
            c.axes,
            c.cause or IMPLICIT,
            self._spec.of(c.cause) or self._spec.of_axes(c.axes),
            title=title,
            module=source.module,
            line=source.line,
            code=source.code,
            before=value_text(operand.meta["value"]) if operand is not None else "",
            after=value_text(n.meta.get("value")),
            stage=stage if self._program.axis else -1,
            implicit=c.implicit,
        )

    def _of_buckets(self, those: Sequence[int]) -> Message:
        """Return the message of equal buckets, which have the parameters of equal layers."""
        b = self._program.buckets[those[0]]
        return Message(
            f"bucket {those[0]}" + (f" and {len(those) - 1} like it" if len(those) > 1 else ""),
            tuple(dict.fromkeys((*b.axes, *filter(None, (b.shard,))))),
            bucket_text(b, self._program),
            self._spec.of_bucket(b),
            title="gradients" if b.zero != 3 else "parameters and gradients",
            stage=b.stages[0] if self._program.axis else -1,
            layers=len(those),
            buckets=ranges(map(str, those)),
            params=list(dict.fromkeys(self._params[n] for n in b.params)),
        )

    def number(self, record: CommRecord) -> int | None:
        """Return the message that a recorded collective belongs to; None for a copy to or from the host."""
        return self._numbers.get(tag(record))

    def _lines(self, r: Row) -> list[int]:
        cited = self._spec.of(r.cause)
        of_zero = self._spec.at("data", "zero") if r.cause == "updated parameters" else []
        if r.cause == "gradients, in buckets":
            of_zero = list(dict.fromkeys(line for b in self._program.buckets for line in self._spec.of_bucket(b)))
        return cited or of_zero or self._spec.of_axes(tuple(r.axes.split("+")))
