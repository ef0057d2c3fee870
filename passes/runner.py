"""Run passes: time them, lint graphs, check that graphs and tables agree, and dump a text of each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import fx

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.passes.base import CAPTURE
from shardc.passes.dump import dump
from shardc.runtime.stage import op_errors

#: The fix when compile itself runs out of memory: it needs only shapes.
LESS_TO_COMPILE = (
    'build the model on the meta device (`with torch.device("meta")`), and pass a small batch, or one on it'
)


@dataclass
class Runner:
    """Runs passes one by one.

    dump: folder for `NN-pass.txt` and `NN-pass.diff`. on_pass: called with each pass's name when it begins.
    seconds: measured, by pass.
    """

    dump: Path | None = None
    on_pass: Callable[[str], None] | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    _checked: dict[int, fx.Graph] = field(default_factory=dict)  # by identity: no pass changes a graph that it gets
    _last: str = ""

    def run(self, name: str, work: Callable[..., Program], *args: Any) -> Program:
        """Run a pass or capture under its name. Raises ShardcError if this machine has too little memory."""
        if self.on_pass:
            self.on_pass(name)
        start = time.perf_counter()
        try:
            program = work(*args)
        except ShardcError:
            raise
        except (RuntimeError, MemoryError) as e:
            if op_errors.no_memory(e):
                raise op_errors.out_of_memory(e, f"compile, {name}", fix=LESS_TO_COMPILE) from e
            raise
        self.seconds[name] = round(time.perf_counter() - start, 3)
        for graph in (program.graph, *(s.graph for s in program.stages)):
            check_placeholders(graph, program, piped=bool(program.axis) and graph is not program.graph)
            if id(graph) not in self._checked:
                check(graph, typed=name != CAPTURE)
                self._checked |= {id(graph): graph} if name != CAPTURE else {}
        if self.dump:
            self._dump(name, program)
        return program

    def _dump(self, name: str, program: Program) -> None:
        assert self.dump is not None
        self._last = dump(self.dump, len(self.seconds) - 1, name, program, self._last)


def check_placeholders(graph: fx.Graph, program: Program, *, piped: bool) -> None:
    """Assert that a graph takes what the program's tables list, in order. piped: it is one pipeline stage."""
    names = [n.name for n in graph.nodes if n.op == "placeholder" and "collective" not in n.meta]
    expected = ["mesh", "rng", *(x.name for xs in (program.params, program.buffers, program.inputs) for x in xs)]
    if piped:  # a stage takes what it uses
        expected = [n for n in expected if n in names]
    assert names == expected, f"placeholders {names} are not {expected}"


def check(graph: fx.Graph, *, typed: bool) -> None:
    """Assert what holds for every graph (see shardc.ir.program): lint, and metadata on every op.

    typed: every op has a value. A captured graph still has asserts, ops without a value; canonical drops them.
    """
    graph.lint()
    for node in graph.nodes:
        if node.op == "call_function":
            assert not typed or node.meta.get("value") is not None, f"{node} has no type"
            assert "source" in node.meta, f"{node} has no source"
        else:
            assert node.op in ("placeholder", "output"), f"{node} is a {node.op}"
