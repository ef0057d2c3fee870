"""Write docs/measured/families.md: every model class of transformers, tiny: compiled, proven, equal, priced, or why not.

    python -m tests.bench.families [--minutes 60] [--only '*ForCausalLM'] [--again]

Each on dp=2 x tp=2, split by structure. What came of a class is kept in docs/measured/families.jsonl; a run goes on with
the classes that are not in it. Classes of a family follow each other; a family is one row of the page.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import functools
import importlib
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import shardc
from shardc.api import Program
from tests import equality, zoo
from tests.bench import board
from tests.libraries import waves
from tests.zoo import hf_any

ROOT = Path(__file__).resolve().parents[2]
OUT, KEPT = ROOT / "docs" / "measured" / "families.md", ROOT / "docs" / "measured" / "families.jsonl"
SPEC: dict[str, Any] = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
ALONE: dict[str, Any] = {"shardc": 1, "mesh": {"dp": 1}}
#: What is said of a model that has no weight to split.
NOTHING = "finds nothing to split"
#: What people ask for by name -> the model types of transformers that are it.
NAMED = {
    "DeepSeek V4": ("deepseek_v4",),
    "Kimi K3": ("kimi_k3",),
    "GLM 5": ("glm_moe_dsa", "glm5_next", "glm5_next_text"),
    "MiniMax M3": ("minimax_m3_vl", "minimax_m3_vl_text"),
}
HEAD = """\
# Model classes of transformers

Made by `make families` on {date}, transformers {version}: {classes} classes, of which {tried} were tried: {equal} equal to one device and proven, {refused} refused by name,
{unbuilt} not built (the rules of tests/zoo/hf_any.py make no tiny model or batch that its own code runs), {wrong} neither. `make families` tries those that it has not tried yet.
Tiny models, random weights, float64, dp = 2 × tp = 2 by `use: structure`; equal: loss and every gradient within {equal_to:.0e}, relatively; of the {known} whose difference is on record {within} within {rtol:.0e}.
{whole} have no weight that structure could split, and ran on dp = 4; {drawn} draw random numbers in every step, and were compared with their program of one rank. Each was priced for 4 devices (`program.cost("h100-80g")`).

| requested | in transformers {version} |
|---|---|
{named}

Refused, by reason, and what lifts it:

| classes | why | what lifts it |
|---:|---|---|
{why}

Not built, by reason (a package that is not installed, or no rule for a config or batch):

| classes | why | which |
|---:|---|---|
{unbuilt_why}

| model type | equal | refused | not built | neither |
|---|---|---|---|---|
{rows}
"""


def default_or_waves(output: Any, batch: Any) -> Tensor:
    """The loss of a model that gives one; else one of all that it gives."""
    loss = getattr(output, "loss", None)
    return loss if isinstance(loss, Tensor) else waves(output, batch)


def _imported(name: str) -> None:
    """Import a class's module here, which takes as long as all else: other classes of the family find it."""
    with contextlib.suppress(Exception):  # `rows` says why
        getattr(importlib.import_module("transformers"), name)


def rows(name: str) -> Iterator[tuple[str, board.Row]]:
    """One row of a class."""
    start = time.monotonic()

    def seconds() -> dict[str, Any]:
        return {"seconds": round(time.monotonic() - start, 1)}

    try:
        with zoo.Wide():
            model, batch = hf_any.build(name)
            default_or_waves(model(**batch), batch)
    except Exception as e:
        yield "dp x tp", {"verdict": "not built", "what": f"{type(e).__name__}: {e}"[:200], **seconds()}
        return
    yield "dp x tp", {**_tried(lambda: (model, batch)), **seconds()}


def _tried(build: Any) -> board.Row:
    try:
        one = equality.reference(build, default_or_waves)
        program, split = _compiled(one)
        sim = shardc.verify.simulate(program, one.model, one.batch)
        of_loss, of_grads = equality.differences(sim, one.loss, one.grads)
        drawn = of_loss > board.EQUAL and _draws(one)
        if drawn:
            alone = shardc.verify.simulate(one.compile(ALONE), one.model, one.batch)
            of_loss, of_grads = equality.differences(sim, alone.loss, alone.grads)
        proof, price = program.prove(), program.cost("h100-80g")
    except shardc.ShardcError as e:
        return board.refusal(e)
    except Exception as e:
        return board.raw(e)
    worst = max([of_loss, *of_grads.values()], key=lambda x: (x != x, x))
    fine = worst <= board.EQUAL and proof.ok
    row = {
        "verdict": "equal" if fine else "differs",
        **{name: True for name, holds in (("drawn", drawn), ("whole", not split)) if holds},
        "off": worst,
        "proven": bool(proof.ok),
        "step": price.step_seconds,
    }
    return row if proof.ok else {**row, "what": str(proof.gaps[0])[:300]}


def _compiled(one: equality.Reference) -> tuple[Program, bool]:
    """The program on dp x tp, and whether a weight is split; on dp alone, if structure finds none that can be."""
    try:
        return one.compile(SPEC), True
    except shardc.ShardcError as e:
        if NOTHING not in e.errors[0].what:
            raise
        return one.compile(ALONE | {"mesh": {"dp": 4}}), False


def _draws(one: equality.Reference) -> bool:
    """Does the model give another loss with one of a few other seeds?"""
    for seed in range(1, 6):
        with zoo.Wide(), torch.random.fork_rng():
            torch.manual_seed(seed)
            loss = default_or_waves(one.model(**one.batch), one.batch).detach()  # `waves` looks at what has gradients
        if float((loss - one.loss).abs()) > board.EQUAL * float(one.loss.abs()):
            return True
    return False


def page() -> str:
    import transformers

    kinds, kept = hf_any.names(), {n: r for n, rs in board.kept(KEPT).items() for r in rs.values()}
    by_kind: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, kind in kinds.items():
        if name in kept:
            verdict = kept[name]["verdict"]
            by_kind[kind][verdict if verdict in ("equal", "refused", "not built") else "neither"].append(name)
    counts = Counter(
        {v: sum(len(r[v]) for r in by_kind.values()) for v in ("equal", "refused", "not built", "neither")}
    )
    named = [f"| {asked} | {_named(types, by_kind, kept)} |" for asked, types in NAMED.items()]
    table = [
        f"| {kind} | {' | '.join(', '.join(r[v]) for v in ('equal', 'refused', 'not built', 'neither'))} |"
        for kind, r in sorted(by_kind.items())
    ]
    return HEAD.format(
        date=board.days(kept.values()),
        version=transformers.__version__,
        classes=len(kinds),
        tried=sum(counts.values()),
        equal=counts["equal"],
        refused=counts["refused"],
        unbuilt=counts["not built"],
        wrong=counts["neither"],
        equal_to=board.EQUAL,
        rtol=equality.RTOL,
        known=sum(r["verdict"] == "equal" and "off" in r for r in kept.values()),
        within=sum(r["verdict"] == "equal" and r.get("off", 1) <= equality.RTOL for r in kept.values()),
        whole=sum("whole" in r for r in kept.values()),
        drawn=sum("drawn" in r for r in kept.values()),
        named="\n".join(named),
        why="\n".join(board.reasons(kept.values())),
        unbuilt_why="\n".join(
            f"| {len(of)} | {board.cell(kind)} | {board.cell(', '.join(r['model'] for r in of))} |"
            for kind, of in board.by_kind(map(_plain, kept.values()), "not built")
        ),
        rows="\n".join(table),
    )


def _plain(row: board.Row) -> board.Row:
    """A row whose missing package is its reason, whatever class wants it."""
    package = re.search(r"requires the (\S+) library|No module named '(\w+)'", row.get("what", ""))
    return {**row, "what": f"{package[1] or package[2]} is not installed"} if package else row


def _named(types: tuple[str, ...], by_kind: Any, kept: dict[str, board.Row]) -> str:
    parts = []
    for kind in types:
        if kind not in set(hf_any.names().values()):
            continue
        tried = [n for names in by_kind[kind].values() for n in names] if kind in by_kind else []
        what = ", ".join(f"{n} {kept[n]['verdict']}" for n in tried) or "not tried yet"
        parts.append(f"`{kind}`: {what}")
    return "; ".join(parts) or "no class"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60, help="then the page is written of what there is")
    parser.add_argument("--each", type=float, default=90, help="seconds of one class at most")
    parser.add_argument("--only", default="*", help="a pattern of names of classes")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    asked = {kind for types in NAMED.values() for kind in types}
    names = sorted(
        hf_any.names().items(), key=lambda row: (row[1] not in asked, row[1])
    )  # those that are asked for by name first
    cases = {n: functools.partial(rows, n) for n, _ in names if fnmatch.fnmatch(n, args.only)}
    board.run(cases, KEPT, args.minutes, args.each, args.again, _imported)
    OUT.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
