"""Write docs/measured/models.md: what the test run found of every model on every mesh. Run by `make table`; `--from
FILE` renders a run's report.

The tests that compare a model on a mesh with one device leave a row in pytest's report (tests/equality.py: `record`).
This runs them, and makes a table of the rows, with each test's own verdict.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "measured" / "models.md"
TESTS = ("tests/test_equal.py", "tests/test_models_plain.py", "tests/test_models_hf.py", "tests/passes/test_experts.py")
HEAD = """\
# Models, meshes and what is sent

Made by `make table` from a run of the tests {tests}: {equal} of {all} rows equal,
{models} models. Tiny models (two layers, 8 heads, 8 × 16 tokens), float64, against the same model in eager mode on one device.

- *loss*, *gradients*: relative differences; of gradients the worst. *equal*: the verdict of the test, which allows 1e-12.
- *collectives*: of one step, without the bucketed sums of gradients: AR all_reduce, AG all_gather, RS reduce_scatter, A2A all_to_all, SR send_recv.
- *export*: seconds of `torch.export` and what makes its graph functional; *compile*: seconds of all that comes after it.
- *sp*: sequence-parallel activations by one annotation. *ep*: an axis of experts' own (tests/passes/test_experts.py; of three A2A a layer one sends counts).

| model | mesh | equal | loss | gradients | collectives | export (s) | compile (s) |
|---|---|---|---:|---:|---|---:|---:|
"""


def rows(report: Path) -> list[dict[str, Any]]:
    """The rows that tests left in a JUnit report, with "equal": did the test pass."""
    table = []
    for case in ET.parse(report).iter("testcase"):
        passed = case.find("failure") is None and case.find("error") is None
        table += [
            json.loads(p.attrib["value"]) | {"equal": passed}
            for p in case.iter("property")
            if p.attrib["name"] == "row"
        ]
    return table


def line(row: dict[str, Any]) -> str:
    sent: dict[tuple[str, str], list[str]] = {}
    for axis, way, kind, n in sorted(row["collectives"], key=lambda c: (c[0], c[1] != "forward", c[2])):
        sent.setdefault((axis, way), []).append(f"{n} {kind}")
    shown = "; ".join(f"{axis} {way}: {', '.join(kinds)}" for (axis, way), kinds in sent.items())
    equal = "yes" if row["equal"] else "**no**"
    numbers = f"{row['loss']:.0e} | {row['gradients']:.0e} | {shown} | {row['export']:.2f} | {row['compile']:.2f}"
    return f"| {row['model']} | {row['mesh']} | {equal} | {numbers} |\n"


def main(argv: list[str]) -> int:
    tests = [t for t in TESTS if (ROOT / t).exists()]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        status = 0
        if argv[:1] == ["--from"]:
            report = Path(argv[1])
        else:
            options = ["-q", "-n", "2", "--dist", "worksteal", "--all-families"]
            options += ["-o", "junit_family=xunit1", f"--junitxml={report}"]
            command = [sys.executable, "-m", "pytest", *options, *tests]
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
        table = rows(report)
    equal = sum(r["equal"] for r in table)
    head = HEAD.format(
        tests=", ".join(Path(t).name for t in tests),
        equal=equal,
        all=len(table),
        models=len({r["model"] for r in table}),
    )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(head + "".join(map(line, table)), encoding="utf-8")
    print(f"{OUT}: {equal} of {len(table)} rows equal")
    return status


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
