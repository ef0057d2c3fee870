"""What the boards of models share: the settings in which a model is tried, what came of it, and the file that keeps it.

A model is compiled for each setting, all ranks run in this process, loss and gradients are compared with one device,
and the program is proven. Each model runs in a process of its own, which ends when its seconds are over: a library may
crash or never return. What came of it is a line of JSON, so a run that was cut short goes on where it stopped.
"""

from __future__ import annotations

import json
import multiprocessing
import re
import resource
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

import shardc
from shardc.runtime.stage.op_errors import OutOfMemoryError
from tests import equality, zoo

Row = dict[str, Any]
#: setting -> sections of a spec; `layers` stands for a pattern of the model's own.
SETTINGS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "pp": {"mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}, "batch": {"microbatches": 2}},
    "zero 3": {"mesh": {"dp": 2}, "data": {"zero": 3}, "checkpoint": "layers"},
    "all": {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        "shard": {"use": "structure"},
        "pipeline": {"axis": "pp", "stages": 2},
        "batch": {"microbatches": 2},
        "data": {"zero": 3},
        "checkpoint": "layers",
    },
}
#: Relative differences up to this are equal. Both sides add in other orders, which norms of small numbers and many
#: layers multiply; the page says how many are beyond equality.RTOL.
EQUAL = 1e-9
#: Bytes of memory that one case may take.
MEMORY = 12 << 30
#: What a refusal says of a model whose batch norms take all rows of a step: it is tried again with one microbatch.
ALL_ROWS = "takes all rows of the batch"


def layers(model: nn.Module) -> str:
    """A pattern of the model's layers: the list of modules with the most weights. Without a list: all children."""
    lists = [
        (sum(p.numel() for p in m.parameters()), f"{name}.*" if name else "*")
        for name, m in model.named_modules()
        if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) > 1
    ]
    return max(lists)[1] if lists else "*"


def spec(model: nn.Module, setting: str, microbatches: int = 2) -> dict[str, Any]:
    sections = {"shardc": 1, **SETTINGS[setting]}
    if "checkpoint" in sections:
        sections["checkpoint"] = [{"match": layers(model), "save": []}]
    if "batch" in sections:
        sections["batch"] = {"microbatches": microbatches}
    return sections


def refusal(error: shardc.ShardcError) -> Row:
    first = error.errors[0]
    verdict = "out of memory" if isinstance(error, OutOfMemoryError) else "refused"
    return {"verdict": verdict, "what": first.what, "where": first.where or "", "fix": first.fix or ""}


def raw(error: BaseException) -> Row:
    lines = traceback.format_exception(error)[-6:]
    return {"verdict": "raw", "what": f"{type(error).__name__}: {error}"[:300], "trace": "".join(lines)[-1500:]}


def compared(one: equality.Reference, setting: str, bound: float = EQUAL, microbatches: int = 2) -> Row:
    """What came of one setting: equal, refused, differs or raw, and whether the proof holds."""
    try:
        program = one.compile(spec(one.model, setting, microbatches))
        sim = shardc.verify.simulate(program, one.model, one.batch)
        of_loss, of_grads = equality.differences(sim, one.loss, one.grads)
        proof = program.prove()
    except shardc.ShardcError as e:
        if microbatches > 1 and ALL_ROWS in e.errors[0].what:
            return compared(one, setting, bound, 1) | {"microbatches": 1}
        return refusal(e)
    except Exception as e:
        return raw(e)
    worst = max([of_loss, *of_grads.values()], key=lambda x: (x != x, x))
    row = {"verdict": "equal" if worst <= bound else "differs", "off": worst, "proven": bool(proof.ok)}
    return row if proof.ok else {**row, "gap": str(proof.gaps[0])[:300]}


def tried(build: Callable[[], Any], loss: Any = None, bound: float = 0.0) -> Iterator[tuple[str, Row]]:
    """(setting, what came of it) of each setting; before them "capture". bound: see Case."""
    start = time.monotonic()
    try:
        one = equality.reference(build, loss)
    except shardc.ShardcError as e:
        yield "capture", refusal(e) | {"seconds": time.monotonic() - start}
        return
    except Exception as e:
        yield "capture", raw(e) | {"seconds": time.monotonic() - start}
        return
    yield "capture", {"verdict": "captured", "seconds": time.monotonic() - start}
    for setting in SETTINGS:
        start = time.monotonic()
        yield setting, compared(one, setting, max(bound, EQUAL)) | {"seconds": time.monotonic() - start}


def _work(rows: Callable[[], Iterable[tuple[str, Row]]], key: str, file: Path, seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 60))  # of the CPU: other work does not count
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))  # a huge model fails, and ends no other process
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for setting, row in rows():
            with file.open("a") as out:
                out.write(
                    json.dumps({"model": key, "setting": setting, **row, "day": time.strftime("%Y-%m-%d")}) + "\n"
                )


def _import_once() -> None:
    """Import what a compilation needs, for all processes that begin from this one: most of a tiny model's seconds are
    such imports. No backward: a process that begins after one waits for threads that it has not.
    """
    model, batch = zoo.mlp()
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, prove=False).cost("h100-80g")


def in_own_process(rows: Callable[[], Iterable[tuple[str, Row]]], key: str, file: Path, seconds: float) -> None:
    """Add what `rows` gives to the file, for `seconds` of the CPU and four times as long at most."""
    process = multiprocessing.get_context("fork").Process(target=_work, args=(rows, key, file, seconds))
    process.start()
    process.join(4 * seconds)
    late = process.is_alive()
    if late:
        process.kill()
        process.join()
    if late or process.exitcode:
        if late or process.exitcode == -signal.SIGXCPU:
            verdict, what = "out of time", f"not done after {seconds:.0f} s of the CPU"
        elif process.exitcode == -signal.SIGKILL:
            verdict, what = "out of memory", "killed by the system"
        else:
            verdict, what = "raw", f"ended with status {process.exitcode}"
        row = {"model": key, "setting": "rest", "verdict": verdict, "what": what}
        with file.open("a") as out:
            out.write(json.dumps(row) + "\n")


def days(rows: Iterable[Row]) -> str:
    """The first and the last day on which rows were made."""
    every = sorted({row["day"] for row in rows if "day" in row})
    return " to ".join(dict.fromkeys([every[0], every[-1]])) if every else "no day"


def kept(file: Path) -> dict[str, dict[str, Row]]:
    """Read a file of rows: model -> setting -> what came of it. The last row of a key counts.

    A row after "rest" is of a second try, which takes the place of the first.
    """
    by_model: dict[str, dict[str, Row]] = {}
    for row in map(json.loads, file.read_text().splitlines() if file.exists() else []):
        of_model = by_model.setdefault(row["model"], {})
        if "rest" in of_model:
            of_model.clear()
        of_model[row["setting"]] = row
    return by_model


def run(
    cases: dict[str, Callable[[], Any]],
    file: Path,
    minutes: float,
    each: float,
    again: bool = False,
    load: Callable[[str], Any] = str,
) -> None:
    """Try the cases that the file has not, then those that were out of time, until the minutes are over.

    each: seconds of the CPU at most of one case; load: called with a case's key before its process is forked, so that
    the next cases find what it imports.
    """
    file.parent.mkdir(exist_ok=True)
    done = {} if again else kept(file)
    late = [key for key in cases if any(row["verdict"] == "out of time" for row in done.get(key, {}).values())]
    until = time.monotonic() + 60 * minutes
    _import_once()
    for key in [*(key for key in cases if key not in done), *late]:
        if time.monotonic() > until:
            return
        load(key)
        in_own_process(cases[key], key, file, each)
        last = " ".join(f"{s}:{r['verdict']}" for s, r in kept(file).get(key, {}).items())
        print(f"{key:40} {last}", flush=True)


def reasons(rows: Iterable[Row]) -> list[str]:
    """Rows of a table of refusals by kind: how many, an example, and the fix that its error names."""
    return [
        f"| {len(of)} | {cell(kind)} ({cell(of[0]['model'])}: {cell(of[0]['where'])}) | {cell(of[0]['fix'])} |"
        for kind, of in by_kind(rows, "refused")
    ]


def by_kind(rows: Iterable[Row], verdict: str) -> list[tuple[str, list[Row]]]:
    """The rows of a verdict, those of one cause together; most rows first."""
    kinds: dict[str, list[Row]] = {}
    for row in rows:
        if row["verdict"] == verdict:
            kinds.setdefault(kind_of(row["what"]), []).append(row)
    return sorted(kinds.items(), key=lambda kind: -len(kind[1]))


def kind_of(what: str) -> str:
    """A refusal without names, numbers and lines of one model: those of one cause read alike."""
    what = re.sub(r"\([^()]*(\([^()]*\)[^()]*)*\)", "", what)
    what = re.sub(r"\b[\w.]+\.\d[\w.]*|\[[^\]]*\]|'[^']*'|\b\d+\b", "…", what)
    return re.sub(r"\s+", " ", what)[:160].strip()


def cell(text: str) -> str:
    return re.sub(r"\s+", " ", str(text)).replace("|", "\\|")[:220]
