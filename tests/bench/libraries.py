"""Write docs/measured/libraries.md: models of other libraries, each in five settings, equal to one device or refused.

    python -m tests.bench.libraries [--minutes 60] [--only 'timm *'] [--again]

`make libraries` runs it in an environment with those libraries. What came of a case is kept in build/libraries.jsonl;
a run goes on with the cases that are not in it. --again: tries the chosen ones anew.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
from pathlib import Path

from tests import libraries
from tests.bench import board

ROOT = Path(__file__).resolve().parents[2]
OUT, KEPT = ROOT / "docs" / "measured" / "libraries.md", ROOT / "build" / "libraries.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="then the page is written of what there is")
    parser.add_argument("--each", type=float, default=150, help="seconds of one case at most")
    parser.add_argument("--only", default="*", help="a pattern of names")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    cases = {n: c for n, c in libraries.cases().items() if fnmatch.fnmatch(n, args.only)}
    board.run(
        {n: functools.partial(board.tried, c.build, c.loss) for n, c in cases.items()},
        KEPT,
        args.minutes,
        args.each,
        args.again,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
