"""Write docs/measured/ops.md: PyTorch's operator database by shardc and by DTensor, every case against one device.

    python -m tests.op_db.board [--processes 2] [--only 'fft*'] [--minutes 60] [--again]

What was found is kept in build/op_db.jsonl: a run that is cut short goes on behind it (`--again`: begins anew). Each
process takes one op after the other; one that dies, or is silent for too long, is started anew.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import queue
import random
import re
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from tests.op_db.cases import Skip, database, references
from tests.op_db.runs import BOUND, by_dtensor, by_shardc, one_thread

ROOT = Path(__file__).resolve().parents[2]
OUT, FOUND = ROOT / "docs" / "measured" / "ops.md", ROOT / "build" / "op_db.jsonl"
MODES = ("first", "inplace", "second", "dtensor")
#: Seconds in which an op has to be done.
LIMIT = 300
#: From the worst on.
ORDER = ("wrong", "hang", "died", "raw", "refused", "equal", "skip")
#: What refusals say, as kinds, and what would lift each.
KINDS = (
    (
        r"depends on a tensor's value",
        "a size, a place or a number depends on a tensor's value",
        "nothing: a program's sizes are known when it is compiled. The message says how to keep the size",
    ),
    (
        r"does not divide|is not divisible",
        "what a view splits apart, or groups, are not divisible by the ranks, and padding would fall among them",
        "padding inside of each part of a dim",
    ),
    (
        r"changes an activation in place",
        "a weight is changed behind autograd's back",
        "nothing: eager's gradients are those of the changed weight",
    ),
    (
        r"running statistics|changes a tensor in place",
        "statistics are written by another op than batch_norm",
        "rewrites of these ops",
    ),
    (r"no rule", "an op has no rule", "a line in shardc/rules; `unknown_ops: replicate` runs it whole"),
    (r"sparse", "sparse tensors", "layouts of sparse tensors"),
    (r"model's forward failed|torch cannot", "torch cannot trace the call", "torch"),
    (r"differs from the model's own", "the captured graph differs from eager, which capture notices", "see the op"),
)
HEAD = """\
# Operators

Made by `make ops` on {date} with torch {torch}: {ops} ops of PyTorch's operator database (`op_db`, float64), each in a model whose loss weighs all of its results, against one device: the loss and
every gradient within {bound:g}, relatively. Compiled for rows over 2 ranks, each dim that divides over 2 (of the first operand and of others), padded over 3, and rows × a dim; two samples, the second compiled
on other values than it runs on, and the op in place.

| | shardc | DTensor |
|---|---:|---:|
{table}

DTensor has fewer cases: the first sample on two ranks (`distribute_tensor` of the first operand, others replicated). On the {both} cases that both have:

| shardc | DTensor | cases |
|---|---|---:|
{pairs}

Where both are equal, a split that DTensor keeps and shardc gathers: {only_dtensor}. One that shardc keeps and DTensor gathers: {only_shardc} cases.

## What is refused

Each by name, with the line and a fix. An op is here if one of its cases is refused.

| kind | ops | what would lift it |
|---|---|---|
{refused}

## What is wrong or raw

{wrong}

## What is left out

{skipped}
"""


def outcomes(name: str, mode: str) -> Iterator[dict[str, Any]]:
    """Of one op: rows of what is kept."""
    op = database()[name]
    seeded = "wrapper_set_seed" in getattr(getattr(op.op, "__code__", None), "co_names", ())
    for case in references(op, "first" if mode == "dtensor" else mode):
        if isinstance(case, Skip):
            yield {"spec": "", "how": "skip", "what": case.why}
            continue
        for o in by_dtensor(case) if mode == "dtensor" else by_shardc(case, mode, seeded):
            yield dataclasses.asdict(o)


def work() -> None:
    """A process: takes [op, mode] a line, and answers with a line of its rows."""
    warnings.simplefilter("ignore")
    one_thread()
    answers = sys.stdout
    sys.stdout = sys.stderr  # what ops print is no answer
    for line in sys.stdin:
        name, mode = json.loads(line)
        try:
            rows = list(outcomes(name, mode))
        except Exception as e:  # the database's own code
            rows = [{"spec": "", "how": "skip", "what": f"the database: {type(e).__name__}: {e}"[:150]}]
        print(json.dumps(rows), file=answers, flush=True)


class Worker:
    """A process that works, and its answers."""

    def __init__(self) -> None:
        pipe, command = subprocess.PIPE, [sys.executable, "-W", "ignore", "-m", "tests.op_db.board", "--work"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, bufsize=1
        )
        self.answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def ask(self, name: str, mode: str) -> list[dict[str, Any]]:
        """The op's rows: one row, and the end of the process, where it dies or is silent."""
        assert self.process.stdin is not None
        print(json.dumps([name, mode]), file=self.process.stdin, flush=True)
        try:
            line = self.answers.get(timeout=LIMIT)
        except queue.Empty:
            line = ""
        if line:
            return json.loads(line)  # type: ignore[no-any-return]
        how = "hang" if self.process.poll() is None else "died"
        self.process.kill()
        self.process.wait()
        return [{"spec": "", "how": how, "what": f"the process {how}"}]


def run(todo: list[tuple[str, str]], processes: int, end: float, keep: Callable[[dict[str, Any]], None]) -> None:
    """Tries ops until `end`, a moment of time.monotonic()."""
    left: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    for each in todo:
        left.put(each)

    def drive() -> None:
        worker = Worker()
        while time.monotonic() < end:
            try:
                name, mode = left.get_nowait()
            except queue.Empty:
                break
            for row in worker.ask(name, mode):
                keep({"op": name, "mode": mode, **row})
            if worker.process.poll() is not None:
                worker = Worker()
        worker.process.kill()

    threads = [threading.Thread(target=drive) for _ in range(processes)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()


# --- the page


def _worst(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """By op."""
    found: dict[str, str] = {}
    for r in rows:
        found[r["op"]] = min(found.get(r["op"], "skip"), r["how"], key=ORDER.index)
    return found


def _share(found: dict[str, str], *hows: str) -> str:
    tried = [how for how in found.values() if how != "skip"]
    count = sum(how in hows for how in tried)
    return f"{count} ({100 * count / max(1, len(tried)):.1f} %)"


def page(rows: list[dict[str, Any]]) -> str:
    ours, theirs = ([r for r in rows if (r["mode"] == "dtensor") is dtensor] for dtensor in (False, True))
    worst, other = _worst(ours), _worst(theirs)
    tried = {op for op, how in worst.items() if how != "skip"}
    lines = (
        ("ops", f"{len(tried)}", f"{sum(how != 'skip' for how in other.values())}"),
        ("equal in every case", _share(worst, "equal"), _share(other, "equal")),
        ("refused in some, equal in the others", _share(worst, "refused"), _share(other, "refused")),
        ("wrong in some", _share(worst, "wrong"), _share(other, "wrong")),
        ("another exception, a hang or an end in some", *(_share(w, "raw", "hang", "died") for w in (worst, other))),
        ("cases", str(sum(r["how"] != "skip" for r in ours)), str(sum(r["how"] != "skip" for r in theirs))),
    )
    first = {(r["op"], r["spec"]): r for r in ours if r["mode"] == "first" and r["spec"]}
    both = [(first[key], r) for r in theirs if (key := (r["op"], r["spec"])) in first]
    pairs = Counter((a["how"], b["how"]) for a, b in both)
    equal = [(a, b) for a, b in both if a["how"] == b["how"] == "equal"]
    only_dtensor = [f"`{a['op']}` ({a['spec']})" for a, b in equal if a["gathers"] and not b["gathers"]]
    kinds: dict[tuple[str, str], set[str]] = defaultdict(set)
    for r in ours:
        if r["how"] == "refused":
            kind = next((k for k in KINDS if re.search(k[0], r["what"])), None)
            kinds[kind[1:] if kind else (r["what"][:100], "")].add(r["op"])
    wrong = [
        f"- `{r['op']}`, {r['mode']}, {r['spec']}: {r['how']}, {r['what']}"
        for r in ours
        if r["how"] not in ("equal", "refused", "skip")
    ]
    skipped: dict[str, int] = Counter(
        r["what"].partition(":")[0] for r in ours if worst[r["op"]] == "skip" and r["mode"] == "first"
    )
    return HEAD.format(
        date=datetime.now(timezone.utc).date(),
        torch=torch.__version__.partition("+")[0],
        ops=len(tried),
        bound=BOUND,
        table="\n".join(f"| {' | '.join(line)} |" for line in lines),
        both=len(both),
        pairs="\n".join(f"| {a} | {b} | {n} |" for (a, b), n in pairs.most_common()),
        only_dtensor=f"{len(only_dtensor)} cases, {', '.join(only_dtensor)}" if only_dtensor else "0 cases",
        only_shardc=sum(b["gathers"] > 0 and not a["gathers"] for a, b in equal),
        refused="\n".join(
            f"| {what} | {', '.join(f'`{op}`' for op in sorted(ops))} | {lifts} |"
            for (what, lifts), ops in sorted(kinds.items(), key=lambda kind: -len(kind[1]))
        ),
        wrong="\n".join(wrong) or "Nothing.",
        skipped="\n".join(f"- {what}: {n} ops" for what, n in sorted(skipped.items(), key=lambda x: -x[1])),
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", default="*")
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        return work()
    if options.again:
        FOUND.unlink(missing_ok=True)
    FOUND.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in FOUND.read_text().splitlines()] if FOUND.exists() else []
    done = {(r["op"], r["mode"]) for r in rows}
    names = [name for name in database() if fnmatch.fnmatch(name, options.only)]
    random.Random(5).shuffle(names)  # heavy ops are neighbours
    lock = threading.Lock()
    with FOUND.open("a") as file:

        def keep(row: dict[str, Any]) -> None:
            with lock:
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)

        todo = [(name, mode) for mode in MODES for name in names if (name, mode) not in done]
        run(todo, options.processes, time.monotonic() + 60 * options.minutes, keep)
    if options.only == "*":
        OUT.write_text(page(rows), encoding="utf-8")
    worst = _worst(r for r in rows if r["mode"] != "dtensor")
    print(f"equal in every case {_share(worst, 'equal')}, refused {_share(worst, 'refused')}", end=", ")
    print(f"wrong {_share(worst, 'wrong')}, raw {_share(worst, 'raw', 'hang', 'died')}")
    if any(how in ("wrong", "raw", "hang", "died") for how in worst.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
