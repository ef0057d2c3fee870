"""The share of the product's functions that the main job enters: how much of the code a reader of that job meets.

The job: compile a GPT for dp=2 x tp=2, print it, save it, load it, verify it, prove it, two steps on four ranks, a
checkpoint out and in. `python -m tests.bench.entered` prints the share by lines, and by folder.
"""

from __future__ import annotations

import ast
import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from tests.test_budget import PRODUCT, ROOT

#: (file, first line) of every function that was entered.
Entered = set[tuple[str, int]]


def functions() -> Iterator[tuple[Path, int, int]]:
    """(file, first line, lines) of every function of the product. An inner function counts as a part of the outer."""
    for path in (p for top in PRODUCT for p in sorted((ROOT / top).rglob("*.py"))):
        todo: list[ast.AST] = [ast.parse(path.read_text())]
        while todo:
            node = todo.pop()
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                assert node.end_lineno is not None
                first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
                yield path, first, node.end_lineno - first + 1
            else:
                todo += ast.iter_child_nodes(node)


def record(job: Any) -> Entered:
    """Run a function. Returns what it enters, in threads too."""
    entered: Entered = set()
    folder = str(ROOT / "shardc") + "/"

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            entered.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        job()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return {(os.path.realpath(file), line) for file, line in entered}  # shardc/passes is a link


def main_job() -> None:
    import torch

    import shardc
    from shardc.runtime.mesh.loopback import loopback
    from tests import zoo

    model, batch = zoo.gpt()
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
    with tempfile.TemporaryDirectory() as folder:
        shardc.compile(model, batch, spec).save(f"{folder}/out")
        program = shardc.load(f"{folder}/out")
        assert str(program)
        assert program.verify().ok
        assert program.prove().ok

        def work(mesh: Any) -> None:
            engine = program.engine(model, lambda ps: torch.optim.AdamW(ps, 1e-3), mesh=mesh)
            for _ in range(2):
                engine.step(batch)
            engine.save(f"{folder}/checkpoint")
            engine.load(f"{folder}/checkpoint")

        loopback(program.mesh, work)


def main() -> None:
    entered = record(main_job)
    every, met = Counter[str](), Counter[str]()
    for path, first, lines in functions():
        folder = str(path.parent.relative_to(ROOT))
        every[folder] += lines
        met[folder] += lines if (str(path), first) in entered else 0
    for folder in sorted(every):
        print(f"{folder:32} {met[folder]:6} of {every[folder]:6} lines  {met[folder] / every[folder]:4.0%}")
    print(
        f"the main job enters {sum(met.values()) / sum(every.values()):.1%} of {sum(every.values())} lines of functions"
    )


if __name__ == "__main__":
    main()
