"""`pytest --prove FILE`: every program that a run compiles is proven, too, whatever its test is about. A gap in one is
a false alarm of the proof, or a program that is wrong. FILE gets a line of JSON for each program.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import shardc
from shardc.api import Program


def prove_all(file: Path) -> None:
    """Of this process from now on. Lines of several processes do not mix: each is one write."""
    compiled: Callable[..., Program] = shardc.compile
    module = sys.modules[compiled.__module__]

    @functools.wraps(compiled)
    def and_prove(*args: object, **kwargs: object) -> Program:
        program = compiled(*args, **kwargs)
        proof = program.prove()
        line = {"test": os.environ.get("PYTEST_CURRENT_TEST", ""), "ok": proof.ok, "lines": proof.lines}
        if not proof.ok:
            line |= {"spec": str(program.spec), "mesh": str(program.mesh), "gaps": [str(g) for g in proof.gaps]}
        with file.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
        return program

    shardc.compile = module.compile = and_prove  # type: ignore[attr-defined]
