"""Collect all messages between ranks in a step, with causes, and on a device what hides them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from shardc.artifact.emit import bucket_text, value_text
from shardc.cost import Cost
from shardc.ir.graph import source_of
from shardc.ir.metadata import CommRecord
from shardc.ir.offload import HOST_LINK
from shardc.ir.program import Program
from shardc.ir.repeats import Repeats
from shardc.layer_names import ranges
from shardc.report.comm import IMPLICIT, Row, Sent, bucket_number, comm_rows, host_rows, sent, timed
from shardc.report.drawn_ops import of_parameter, traced
from shardc.report.page.spec_lines import SpecLines
from shardc.runtime import ops
from shardc.runtime.zero.flat_partition import Flat


@dataclass
class Way:
    """A message's collectives of one direction in a step, including those of equal layers.

    count: on one rank of each coordinate; bytes: of each; seconds, exposed: of all (None: no device).
    """

    direction: str
    kind: str
    axes: str
    count: int
    bytes: int
    seconds: float | None = None
    exposed: float | None = None
    behind: str = ""


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
        self._tags: dict[str, int] = {}  # names of nodes and of buckets
        self._of_row: defaultdict[tuple[str, str, str, str], dict[int, None]] = defaultdict(dict)
        self._program, self._spec, self._params = program, spec, params
        of: defaultdict[fx.Node | int | None, list[Sent]] = defaultdict(list)
        for message in sent(program):
            of[message.of].append(message)
        gathers: dict[fx.Node, int] = {}  # each gather's bucket
        for i, stage in enumerate(program.stages):
            for n in (n for n in stage.graph.nodes if "collective" in n.meta):
                if n.target is ops.gather_start:
                    gathers[n] = bucket_number(n)
                elif n.op == "call_function" or n in of:  # a value from another stage of the same rank is no message
                    shown = layers.same(n) if n.op == "call_function" else n
                    if shown in self.of_node:
                        self.all[self.of_node[shown]].layers += 1
                    else:
                        self.of_node[shown] = len(self.all)
                        self.all.append(self._of_node(n, i))
                    self.of_node[n] = self._tags[n.name] = self.of_node[shown]
                    self._add(self.of_node[n], of[n])
        equal: dict[Hashable, list[int]] = {}
        for i, b in enumerate(program.buckets):
            if of[i]:
                key = replace(b, params=(), stages=()), tuple(params[n] for n in b.params), Flat.of(program, b).padded
                equal.setdefault(key, []).append(i)
        for buckets in equal.values():
            self._tags |= {f"bucket{i}": len(self.all) for i in buckets}
            self.all.append(self._of_buckets(buckets))
            for i in buckets:
                self._add(len(self.all) - 1, of[i])
        self.of_node |= {n: self._tags[f"bucket{i}"] for n, i in gathers.items() if f"bucket{i}" in self._tags}
        self.rows = self._rows(cost)
        if cost is not None:
            self._timed(cost)

    def _add(self, number: int, some: Iterable[Sent]) -> None:
        """Count collectives as those of a message."""
        for s in some:
            self._of_row[s.row][number] = None
            way = Way(s.direction, s.kind, "+".join(s.axes), 0, s.bytes)
            ways = self.all[number].ways
            known = next((w for w in ways if replace(w, count=0) == way), way)
            if known is way:
                ways.append(way)
            known.count += s.times

    def _of_node(self, n: fx.Node, stage: int) -> Message:
        source, c = source_of(n), n.meta["collective"]
        operand = next((x for x in n.all_input_nodes if x.meta.get("value") is not None), None)
        title = "between stages" if n.op == "placeholder" else ""
        if operand is not None and n.op == "call_function" and of_parameter(n):
            weight = next((p for p in self._program.params if p.name == traced(operand).name), None)
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
        return self._tags.get(record.tag) if record.axes != HOST_LINK else None

    def _timed(self, cost: Cost) -> None:
        """Replace the program's collectives of each message by those that a dry run of the step recorded."""
        by_kind: defaultdict[tuple[int, str, str, str], list[tuple[int, float, float, Mapping[tuple[str, str], float]]]]
        by_kind = defaultdict(list)
        for span in (s for of_rank in cost.spans() for s in of_rank):
            r = span.record
            number = self.number(r)
            if number is not None and r.kind != "send_recv":
                by_kind[number, r.direction, r.kind, r.axis].append((r.bytes, span.seconds, span.exposed, span.behind))
        ways: defaultdict[int, list[Way]] = defaultdict(list)
        for (number, direction, kind, axes), spans in by_kind.items():
            beside: defaultdict[str, float] = defaultdict(float)
            for _, _, _, behind in spans:
                for (part, op), together in behind.items():
                    beside[f"{part} of {cost.sources[op].module}" if op in cost.sources else part] += together
            way = Way(direction, kind, axes, len(spans), max(x[0] for x in spans), sum(x[1] for x in spans))
            way.exposed = sum(x[2] for x in spans)
            way.behind = max(beside, key=beside.__getitem__) if beside else ""
            ways[number].append(way)
        for number, its_ways in ways.items():
            self.all[number].ways = sorted(its_ways, key=lambda w: _ORDER.get(w.direction, 9))

    def _rows(self, cost: Cost | None) -> list[dict[str, object]]:
        """Return the table of `inspect --comm`, each row with the messages that it counts."""
        times = timed(cost) if cost is not None else {}
        rows = []
        for r in [*comm_rows(self._program), *(host_rows(cost) if cost is not None else [])]:
            t = times.get((r.axes, r.direction, r.kind, r.cause))
            rows.append(
                {
                    "axes": r.axes,
                    "direction": r.direction,
                    "kind": r.kind,
                    "count": r.count,
                    "bytes": r.bytes,
                    "cause": r.cause,
                    "lines": self._lines(r),
                    "seconds": t.seconds if t is not None else None,
                    "exposed": t.exposed if t is not None else None,
                    "behind": t.behind if t is not None else "",
                    "messages": sorted(self._of_row[r.axes, r.direction, r.kind, r.cause]),
                }
            )
        return rows

    def _lines(self, r: Row) -> list[int]:
        cited = self._spec.of(r.cause)
        of_zero = self._spec.at("data", "zero") if r.cause == "updated parameters" else []
        if r.cause == "gradients, in buckets":
            of_zero = list(dict.fromkeys(line for b in self._program.buckets for line in self._spec.of_bucket(b)))
        return cited or of_zero or self._spec.of_axes(tuple(r.axes.split("+")))


_ORDER = {"forward": 0, "recompute": 1, "backward": 2, "update": 3}
