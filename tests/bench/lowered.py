"""Every model of the zoo, lowered and under autograd: equal to the bit? And the predicted peaks of memory of both, of
every model and setting of docs/measured/memory.md. `make lowered` runs it and prints two tables.

    python tests/bench/lowered.py [--only 'gpt*'] [--setting 'dp=2*'] [--each 4] [--seconds 120] [--equal | --peaks]

--seconds: of the CPU, for one model and setting; what takes longer is listed. --each: so many settings of every model,
in turns. Exit status 1 if something differs by more than rounding (1e-14 relative), fails, stays under autograd, or has
a lowered peak above autograd's.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any
from unittest import mock

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from shardc.capture import capture  # noqa: E402
from shardc.ir.graph import is_call  # noqa: E402
from shardc.ir.stage import Stage  # noqa: E402
from shardc.passes.annotate import model_plan  # noqa: E402
from shardc.runtime import ops  # noqa: E402
from shardc.runtime.step.activation_offload import OffloadedTensors  # noqa: E402
from shardc.verify.simulate import Simulation  # noqa: E402
from tests import zoo  # noqa: E402
from tests.bench import memory  # noqa: E402
from tests.zoo import hf, hf_more, plain, plain_gradients, plain_losses, plain_more  # noqa: E402, F401 (they fill the zoo)

ROUNDING = 1e-14
HEAD = """\
Two steps with momentum on the loopback mesh, with `lower: true` and without. *Refused*: specs that the model does not take (nothing
to split, batch statistics over microbatches). *Equal*: loss, gradients, parameters and
buffers after the second step, to the bit; *rounding*: within 1e-14, relative. *Stages*: of the programs that compiled; *under autograd*:
those of them without a backward of their own.

| setting | models | refused | compiled | equal | rounding | stages | under autograd |
|---|---:|---:|---:|---:|---:|---:|---:|
"""
MICRO = {"batch": {"microbatches": 2}, "uneven": "pad"}
PIPE: dict[str, Any] = {"mesh": {"pp": 2}, **MICRO}
Check = dict[str, Any]


def settings(model: Any) -> dict[str, Check]:
    """By name, the specs that a model is tried on."""
    split = "model" if model_plan.read(model) else "structure"
    two: Check = {"mesh": {"dp": 2}}
    both: Check = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": split}}
    zero = {z: {"data": {"zero": z, "bucket_mb": 0.01}} for z in (1, 2, 3)}
    return {
        "dp=2": two,
        "dp=3, padded": {"mesh": {"dp": 3}, "uneven": "pad"},
        "dp=2, tp=2": both,
        "dp=2, tp=2, zero 1, 2 microbatches": both | zero[1] | MICRO,
        "dp=2, zero 2, 2 microbatches": two | zero[2] | MICRO,
        "dp=2, zero 3, 2 microbatches": two | zero[3] | MICRO,
        "dp=2, zero 3, recomputed": two | zero[3] | {"checkpoint": [{"match": "*", "save": []}]},
        "dp=2, tp=2, zero 3, recompute cheap": both | zero[3] | {"checkpoint": [{"match": "*", "recompute": "cheap"}]},
        "dp=2, recomputed, offload": two | {"checkpoint": [{"match": "*", "save": ["linear"], "offload": "cpu"}]},
        "dp=2, bfloat16": two | {"precision": {"compute": "bfloat16"}},
        "pp=2, 1f1b": PIPE | {"pipeline": {"axis": "pp", "stages": 2, "schedule": "1f1b"}},
        "pp=2, interleaved": PIPE | {"pipeline": {"axis": "pp", "stages": 4, "schedule": "interleaved"}},
        "pp=2, zb-h1": PIPE | {"pipeline": {"axis": "pp", "stages": 2, "schedule": "zb-h1"}},
        "pp=2, dp=2, zb-v, zero 3": PIPE
        | {"mesh": {"pp": 2, "dp": 2}, "pipeline": {"axis": "pp", "stages": 4, "schedule": "zb-v"}}
        | zero[3],
    }


def builders() -> dict[str, Callable[[], zoo.Built]]:
    """Every model of the zoo, by name."""
    families = hf.FAMILIES | hf_more.FAMILIES
    return zoo.ALL | plain.ALL | {n: lambda family=family: hf.build(family) for n, family in families.items()}  # type: ignore[misc]


class TooLongError(BaseException):
    """No `except Exception` is to catch it."""


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01, momentum=0.9)


def differing(want: Simulation, have: Simulation) -> dict[str, float]:
    """What is not equal to the bit, with its relative difference; against the size of the whole gradient, where a
    gradient is zero but for rounding.
    """
    scale = 1e-3 * max((float(g.norm()) for g in want.grads.values()), default=1.0)

    def off(a: Any, b: Any) -> float:
        if a is None or b is None:
            return 0.0 if a is b else float("inf")
        if torch.equal(a.nan_to_num(), b.nan_to_num()):
            return 0.0
        return float((a.double() - b.double()).norm()) / max(float(a.double().norm()), scale)

    pairs = {"loss": (want.loss, have.loss)}
    pairs |= {f"gradient of {n}": (want.grads.get(n), have.grads.get(n)) for n in want.grads | have.grads}
    pairs |= {n: (want.state[n], have.state[n]) for n in want.state}
    return {n: d for n, (a, b) in pairs.items() if (d := off(a, b)) != 0}


@dataclass
class Texts:
    """What the lowered programs of a setting consist of. calls: of forward's texts; taped: of these, calls whose
    backward is one op, by op.
    """

    stages: int = 0
    under_autograd: int = 0
    calls: int = 0
    taped: Counter[str] = field(default_factory=Counter)

    def add(self, stages: Iterable[Stage]) -> None:
        for s in stages:
            self.stages += 1
            if s.lowered is None:
                self.under_autograd += 1
                continue
            calls = [n for n in s.graph.nodes if is_call(n)]
            self.calls += len(calls)
            self.taped.update(str(n.args[0]) for n in s.lowered.forward.nodes if n.target is ops.taped)


def equal(model: Any, batch: Any, captured: Any, spec: Check, texts: Texts) -> str:
    """ "equal", "refused: ...", "rounding: ...", "differs: ..."."""
    try:
        lowered = shardc.compile(model, batch, {"shardc": 1, **spec, "lower": True}, captured=captured, prove=False)
    except shardc.ShardcError as e:
        return f"refused: {e.errors[0].what}"
    texts.add(lowered.stages)
    eager = shardc.compile(model, batch, {"shardc": 1, **spec}, captured=captured, prove=False)
    with mock.patch.object(OffloadedTensors, "useful", staticmethod(lambda x: True)):  # copies are made, on a CPU too
        want, have = (shardc.verify.simulate(p, model, batch, steps=2, optimizer=momentum) for p in (eager, lowered))
    if off := differing(want, have):
        worst = max(off, key=lambda n: off[n])
        return f"{'rounding' if off[worst] <= ROUNDING else 'differs'}: {len(off)}, {worst} by {off[worst]:.1e}"
    return "equal"


def all_equal(only: str, setting: str, seconds: int, each: int) -> tuple[str, bool]:
    """(the table, whether all is equal). each: so many settings of a model, the next ones of the next model; 0: all."""
    found: dict[str, Counter[str]] = {}
    texts: dict[str, Texts] = {}
    turn = 0
    others: list[str] = []
    for name, make in builders().items():
        if not fnmatch(name, only):
            continue
        with zoo.Wide(), limited(seconds):
            try:
                model, batch = make()
                captured = capture(model, batch, prove=False)
            except TooLongError:
                others.append(f"{name}: capture takes longer")
                print(others[-1], flush=True)
                continue
        wanted = [(label, spec) for label, spec in settings(model).items() if fnmatch(label, setting)]
        if each:
            wanted = [wanted[(turn + k) % len(wanted)] for k in range(min(each, len(wanted)))]
            turn += each
        for label, spec in wanted:
            began = time.process_time()
            with zoo.Wide(), limited(seconds):
                try:
                    result = equal(model, batch, captured, spec, texts.setdefault(label, Texts()))
                except TooLongError:
                    result = f"takes longer than {seconds} s"
                except Exception as e:
                    result = f"fails: {type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''}"
            kind = result.partition(":")[0].partition(" than")[0]
            found.setdefault(label, Counter())[kind] += 1
            if kind not in ("equal", "refused"):
                others.append(f"{name}, {label}: {result}")
            print(f"{name}, {label}: {result} ({time.process_time() - began:.1f} s)", flush=True)
    lines = []
    for label, kinds in found.items():
        compiled = kinds.total() - kinds["refused"] - kinds["takes longer"]
        of = texts[label]
        cells = (
            label,
            kinds.total(),
            kinds["refused"],
            compiled,
            kinds["equal"],
            kinds["rounding"],
            of.stages,
            of.under_autograd,
        )
        lines.append(f"| {' | '.join(map(str, cells))} |\n")
    notes = "\n" + "".join(f"- {line}\n" for line in others) if others else ""
    taped = sum((t.taped for t in texts.values()), Counter())
    whole = f"\nOf {sum(t.calls for t in texts.values())} calls of forward {taped.total()} have a backward that is one op, `ops.untaped`: "
    whole += ", ".join(f"{op} {n}" for op, n in taped.most_common()) + "\n"
    ok = not any(kind.startswith(("differs", "fails")) for kinds in found.values() for kind in kinds)
    return HEAD + "".join(lines) + notes + whole, ok and not any(t.under_autograd for t in texts.values())


def peaks(only: str, setting: str) -> tuple[str, bool]:
    """(a table of the predicted peaks, whether no lowered one is above autograd's)."""
    rows: list[tuple[float, str, str, int, int]] = []
    for name, make in memory.models():
        if not fnmatch(name, only):
            continue
        model, batch = make()
        captured = capture(model, batch, prove=False)
        for label, spec, options in memory.settings(name):
            if not fnmatch(label, setting):
                continue
            both = [
                shardc.compile(model, batch, {"shardc": 1, **spec, **more}, captured=captured, prove=False)
                for more in ({}, {"lower": True})
            ]
            costs = [p.cost("h100-80g", **options).ranks for p in both]
            for eager, lowered in zip(*costs, strict=True):
                one, other = eager.memory.peak, lowered.memory.peak
                rows.append((other / one - 1, name, f"{label}, pp={eager.at}" if both[0].axis else label, one, other))
                print(f"{name}, {rows[-1][2]}: {one} {other} {100 * rows[-1][0]:+.2f} %", flush=True)
                if other > one:
                    at = [f"{x.memory.part} {x.memory.op}" for x in (eager, lowered)]
                    print(f"    under autograd at {at[0]}; lowered at {at[1]}", flush=True)
    above = [r for r in rows if r[0] > 0]
    head = (
        f"\nPredicted peaks of memory, rank by rank: {len(rows)}, {len(above)} of lowered steps above autograd's"
        f"{f', by at most {100 * max(above)[0]:.2f} %' if above else ''}; {sum(r[0] < 0 for r in rows)} below.\n\n"
        "| model | setting | under autograd, bytes | lowered | difference |\n|---|---|---:|---:|---:|\n"
    )
    worst = sorted(rows, reverse=True)[:5] + sorted(rows)[:5]
    lines = (f"| {name} | {label} | {one} | {other} | {100 * off:+.2f} % |\n" for off, name, label, one, other in worst)
    return head + "".join(lines), not above


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="*", help="models whose names match")
    parser.add_argument("--setting", default="*", help="settings whose names match")
    parser.add_argument("--seconds", type=int, default=120, help="of the CPU, for one model and setting")
    parser.add_argument("--each", type=int, default=0, help="so many settings of every model, in turns")
    parser.add_argument("--equal", action="store_true", help="no peaks")
    parser.add_argument("--peaks", action="store_true", help="peaks alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    text, ok = "", True
    if not options.peaks:
        text, ok = all_equal(options.only, options.setting, options.seconds, options.each)
    if not options.equal:
        more, none_above = peaks(options.only, options.setting)
        text, ok = text + more, ok and none_above
    print(text)
    return int(not ok)


if __name__ == "__main__":
    sys.exit(main())
