"""Collect all messages between ranks in a step, with causes, and on a device what hides them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from shardc.artifact.emit import bucket_text, value_text
from shardc.cost import Cost
from shardc.ir.graph import source_of
from shardc.ir.metadata import CommRecord
from shardc.ir.program import Program
from shardc.ir.repeats import Repeats
from shardc.layer_names import ranges
from shardc.report.comm import Row, added_up, comm_rows
from shardc.report.page.spec_lines import SpecLines
from shardc.runtime import ops
from shardc.runtime.zero.flat_partition import Flat
from shardc.verify.simulate import IMPLICIT, Tag, tag


class Messages:
    """The messages of a program: `all`, in the order of forward, those of buckets last.

    A message is a collective of the program, whose box in the graph has its line and type, or that of a bucket, each
    including those of equal layers. name; axes; cause; lines: of the spec; module; before: the type that it converts;
    layers: number of equal ones; ways: rows of its collectives (shardc.report.comm). Of a bucket: title: what it
    carries; buckets: the numbers of equal ones; params: the numbers of their parameters; stage.

    of_node: their numbers by node of a stage; rows: the table of `inspect --comm`, with the messages of each row.
    cost: None: of a program that is not compiled, which sends nothing.
    """

    def __init__(
        self, program: Program, layers: Repeats, spec: SpecLines, params: Mapping[str, int], cost: Cost | None
    ) -> None:
        self.all: list[dict[str, Any]] = []
        self.of_node: dict[fx.Node, int] = {}
        self._numbers: dict[Tag, int] = {}
        self._program, self._spec = program, spec
        table = comm_rows(cost) if cost is not None else []
        ran = {t for r in table for t in r.tags}
        gathers, received = list[fx.Node](), dict[str, fx.Node]()  # several stages may receive one value
        for n in (n for stage in program.stages for n in stage.graph.nodes if "collective" in n.meta):
            own = n.name, "send_recv" if n.op == "placeholder" else ""
            if n.target is ops.gather_start:
                gathers.append(n)
            elif own in ran or cost is None:  # not: values of the same rank's stages, backward of frozen ops
                shown = layers.same(n) if n.op == "call_function" else received.setdefault(n.name, n)
                if shown not in self.of_node:
                    self.of_node[shown] = len(self.all)
                    self.all.append(self._of_node(n))
                self.of_node[n] = self._numbers[own] = self.of_node[shown]
                self.all[self.of_node[n]]["layers"] += 1
        equal: dict[Hashable, list[int]] = {}
        for i, b in enumerate(program.buckets):
            if (f"bucket{i}", "") in ran:
                key = replace(b, params=(), stages=()), tuple(params[n] for n in b.params), Flat.of(program, b).padded
                equal.setdefault(key, []).append(i)
        for buckets in equal.values():
            self._numbers |= {(f"bucket{i}", ""): len(self.all) for i in buckets}
            self.all.append(self._of_buckets(buckets, params))
        self.of_node |= {n: self._numbers[of] for n in gathers if (of := (str(n.args[1]), "")) in self._numbers}
        for number, way in added_up(cost, self.number) if cost is not None else ():
            if number is not None:
                self.all[number]["ways"].append(way.to_json())
        known = self._numbers.keys()
        self.rows = [
            r.to_json() | {"lines": self._lines(r), "messages": sorted({self._numbers[t] for t in r.tags & known})}
            for r in table
        ]

    def _of_node(self, n: fx.Node) -> dict[str, Any]:
        c = n.meta["collective"]
        operand = next((x for x in n.all_input_nodes if x.meta.get("value") is not None), None)
        return {
            "name": n.name,
            "axes": c.axes,
            "cause": c.cause or IMPLICIT,
            "lines": self._spec.of(c.cause) or self._spec.of_axes(c.axes),
            "module": source_of(n).module,
            "before": value_text(operand.meta["value"]) if operand is not None else "",
            "implicit": c.implicit,
            "layers": 0,
            "ways": [],
        }

    def _of_buckets(self, those: Sequence[int], params: Mapping[str, int]) -> dict[str, Any]:
        """Return the message of equal buckets, which have the parameters of equal layers."""
        b = self._program.buckets[those[0]]
        return {
            "name": f"bucket {those[0]}" + (f" and {len(those) - 1} like it" if len(those) > 1 else ""),
            "axes": tuple(dict.fromkeys((*b.axes, *filter(None, (b.shard,))))),
            "cause": bucket_text(b, self._program),
            "lines": self._spec.of_bucket(b),
            "title": "gradients" if b.zero != 3 else "parameters and gradients",
            "stage": b.stages[0] if self._program.axis else -1,
            "layers": len(those),
            "buckets": ranges(map(str, those)),
            "params": list(dict.fromkeys(params[n] for n in b.params)),
            "ways": [],
        }

    def number(self, record: CommRecord) -> int | None:
        """Return the message that a recorded collective belongs to; None for a copy to or from the host."""
        return self._numbers.get(tag(record))

    def _lines(self, r: Row) -> list[int]:
        cited = self._spec.of(r.cause)
        of_zero = self._spec.at("data", "zero") if r.cause == "updated parameters" else []
        if r.cause == "gradients, in buckets":
            of_zero = list(dict.fromkeys(line for b in self._program.buckets for line in self._spec.of_bucket(b)))
        return cited or of_zero or self._spec.of_axes(r.axes.split("+"))
