"""Pictures of a page for the documentation, and how long it takes to open: python -m tests.report.page.pictures PAGE.

PAGE: what `shardc inspect --html PAGE` wrote. Prints a table for docs/measured/features.md.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from tests.report.page.browser import Browser

DOCS = Path(__file__).resolve().parents[3] / "docs" / "pictures"
TIMES = 5
#: Until colours have changed.
LIT = "new Promise((done) => setTimeout(done, 400))"


def main(page: Path) -> None:
    with Browser() as browser:
        ready, shown = [], []
        for _ in range(TIMES):
            browser.open(page)
            ready.append(int(browser.run("document.documentElement.dataset.ready")))
            layer = "D.modules.find((m) => m.layers) || D.modules[0]"
            begun = f"(async () => {{ const t = performance.now(); openModule(({layer}).path);"
            painted = "await new Promise((r) => requestAnimationFrame(() => setTimeout(r)));"
            shown.append(browser.run(f"{begun} {painted} return performance.now() - t }})()"))
        print("| | |\n|---|---|")
        print(f"| size of the file | {page.stat().st_size / 1e6:.1f} MB |")
        print(f"| opened and drawn, median of {TIMES} | {statistics.median(ready) / 1000:.2f} s |")
        print(f"| a layer's graph laid out and drawn | {statistics.median(shown) / 1000:.2f} s |")
        sent = "D.messages.find((m) => m.layers > 1 && m.cause.includes('o_proj'))"
        browser.run(f"pick(({sent}).x); reveal(state.picked); document.activeElement.blur(); light(null)")
        browser.run(LIT)
        browser.picture(DOCS / "inspect-graph.webp")
        browser.open(page, dark=True, hash_="#timeline")
        browser.run(f"pick(({sent}).x)")
        browser.run(LIT)
        browser.picture(DOCS / "inspect-timeline.webp")
        assert browser.problems == []


if __name__ == "__main__":
    main(Path(sys.argv[1]))
