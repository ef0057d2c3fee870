"""Write docs/measured/libraries.md: models of other libraries, each in five settings, equal to one device or refused.

    python -m tests.bench.libraries [--minutes 60] [--only 'timm *'] [--again]

`make libraries` runs it in an environment with those libraries. What came of a case is kept in docs/measured/libraries.jsonl;
a run goes on with the cases that are not in it. --again: tries the chosen ones anew.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from tests import equality, libraries
from tests.bench import board

ROOT = Path(__file__).resolve().parents[2]
OUT, KEPT = ROOT / "docs" / "measured" / "libraries.md", ROOT / "docs" / "measured" / "libraries.jsonl"
HEAD = """\
# Models of other libraries

Made by `make libraries` on {date}, torch {torch}: {models} of {cases} models of {libraries} libraries, {runs} runs: {equal} equal to one device ({within} of them within {rtol:.0e}, all within {bound:.0e}, but for {narrow} of models that round to bfloat16 themselves), {proven} of these proven;
{refused} refused by name, {wrong} neither. A run tries the models that it has not tried yet. Tiny configurations, random weights, float64, a batch of 8 rows, nothing dropped at random; loss and every gradient.

- *dp* 2 ranks; *tp* 2 ranks, `use: structure`; *pp* 2 stages, 2 microbatches; *zero 3* over 2 ranks, layers computed again; *all* of these at once on 8 ranks.
- =: equal. ¹: with one microbatch, as batch norms take all rows of a step ({one} runs). r: refused, below. A model that cannot be captured is refused in all five.

Refused, by reason, and what lifts it:

| runs | why | what lifts it |
|---:|---|---|
{why}
{others}
| model | dp | tp | pp | zero 3 | all | worst |
|---|---|---|---|---|---|---:|
{rows}

Versions: {versions}.
"""
SIGNS = {"equal": "=", "refused": "r"}


#: Names of cases whose package is called otherwise.
PACKAGES = {
    "segmentation": "segmentation-models-pytorch",
    "open_clip": "open-clip-torch",
    "esm": "fair-esm",
    "esm-1": "fair-esm",
    "esm-1b": "fair-esm",
    "esm-2": "fair-esm",
}


def page(cases: dict[str, libraries.Case]) -> str:
    kept = {name: rows for name, rows in board.kept(KEPT).items() if name in cases}
    every = [row for rows in kept.values() for row in _runs(rows)]
    equal = [row for row in every if row["verdict"] == "equal"]
    refused = [row for rows in kept.values() for row in rows.values() if row["verdict"] == "refused"]
    wrong = [row for row in every if row["verdict"] not in SIGNS]
    names = dict.fromkeys(map(_library, kept))
    lines = (
        f"- {r['model']}, {r['setting']}: {r['verdict']} {board.cell(r.get('what') or r.get('off'))}" for r in wrong
    )
    listed = list(dict.fromkeys(lines))
    return HEAD.format(
        date=board.days(every),
        torch=torch.__version__,
        models=len(kept),
        cases=len(cases),
        libraries=len(names),
        runs=len(every),
        equal=len(equal),
        within=sum(row["off"] <= equality.RTOL for row in equal),
        rtol=equality.RTOL,
        bound=board.EQUAL,
        narrow=sum(row["off"] > board.EQUAL for row in equal),
        proven=sum(row["proven"] for row in equal),
        refused=sum(row["verdict"] == "refused" for row in every),
        wrong=len(wrong),
        one=sum(row.get("microbatches") == 1 for row in equal),
        why="\n".join(board.reasons(refused)),
        others="\n".join(["", "Neither:", "", *listed, ""]) if listed else "",
        rows="\n".join(_row(name, rows) for name, rows in sorted(kept.items(), key=lambda item: item[0].lower())),
        versions=", ".join(f"{name} {_version(name)}" for name in sorted(names, key=str.lower)),
    )


def _runs(rows: dict[str, board.Row]) -> list[board.Row]:
    """What came of the five settings: of a model that was not captured, that five times."""
    first = rows.get("capture") or rows["rest"]
    if first["verdict"] != "captured":
        return [first] * len(board.SETTINGS)
    return [row for setting, row in rows.items() if setting != "capture"]


def _row(name: str, rows: dict[str, board.Row]) -> str:
    first = rows.get("capture") or rows["rest"]
    cells = []
    for setting in board.SETTINGS:
        row = rows.get(setting) or (rows.get("rest", first) if first["verdict"] == "captured" else first)
        sign = SIGNS.get(row["verdict"], f"**{row['verdict']}**")
        cells.append(sign + "¹" * (row.get("microbatches") == 1))
    worst = max((row["off"] for row in rows.values() if "off" in row), default=None)
    return f"| {name} | {' | '.join(cells)} | {'' if worst is None else f'{worst:.0e}'} |"


@functools.cache
def _library(name: str) -> str:
    """The package of a case: its name up to the first space or comma."""
    first = name.replace(",", " ").split()[0]
    return PACKAGES.get(first, first)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "?"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="then the page is written of what there is")
    parser.add_argument("--each", type=float, default=150, help="seconds of one case at most")
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    cases = libraries.cases()
    chosen = {n: c for n, c in cases.items() if fnmatch.fnmatch(n, args.only)}
    tried = {n: functools.partial(board.tried, c.build, c.loss, c.bound) for n, c in chosen.items()}
    board.run(tried, KEPT, args.minutes, args.each, args.again)
    OUT.write_text(page(cases), encoding="utf-8")
    counts = Counter(row["verdict"] for rows in board.kept(KEPT).values() for row in rows.values())
    print(OUT, dict(counts))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
