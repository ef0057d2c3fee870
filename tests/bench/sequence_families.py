"""Write docs/measured/sequences.md: model families x methods x ranks of `sequence:`, alone and with other sections, each
equal to one device, or refused with a reason.

    python -m tests.bench.sequence_families [--seconds 3600] [--only 'gemma*']

Cases come in rounds, one case of each family a round, so that a run that is cut short has as many of each. What was
found is kept in build/sequence_families.jsonl: the next run goes on behind it (`--again`: begins anew, and without the
page's rows).
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torch import nn

import shardc
from tests import equality, zoo
from tests.zoo import hf, hf_more, sequences

ROOT = Path(__file__).resolve().parents[2]
OUT, FOUND = ROOT / "docs" / "measured" / "sequences.md", ROOT / "build" / "sequence_families.jsonl"
FAMILIES = (
    *("gpt", "llama", "gpt2", "bert", "t5"),
    *("mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "gpt_neox", "opt", "bloom", "falcon", "falcon_alibi"),
    *("mpt", "gpt_neo", "cohere2", "deepseek_v3_dense", "modernbert_decoder", "mixtral", "qwen3_moe", "gpt_oss"),
    *("bart", "roberta", "deberta_v2", "mamba", "recurrent_gemma", "lfm2", "llama4", "prefix_lm", "dit"),
    *("mamba2", "rwkv", "zamba", "jamba", "nemotron_h", "qwen3_5", "minimax"),
)
EXPERTS = {"mixtral", "qwen3_moe", "gpt_oss", "llama4", "minimax"}
METHODS, SIZES = ("gather", "ring", "ulysses", "auto"), (2, 4, 3, 8)
SECTIONS = ("tp", "pp", "zero 3", "ep", "checkpoint")
HEAD = """\
# Families with a split sequence

Made by `make sequences` on {date}: {families} families, {cases} cases, of which {equal} are equal to one device, {refused} refused by name, and {wrong} neither.
A run keeps the rows of families that it did not try. Tiny models (two layers, 8 heads, 8 × 16 tokens), float64; equal: loss and every gradient within 1e-12, relatively.

- *gather*, *ring*, *ulysses*, *auto*: the method alone, on cp = 2, 3 (`uneven: pad`), 4, 8.
- *tp* (2 ranks, `use: structure`), *pp* (2 stages, 2 microbatches), *zero 3* (over cp), *ep* (2 ranks), *checkpoint* (layers computed again): with it, over the four methods{sizes}.
- A cell: equal cases; `+ n` refused by name, for the reason in the last column; **bold**: neither. Empty: not measured, or no experts.

| family | {columns} | refused |
|---|{line}|---|
"""
#: What refusals say, in fewer words.
REASONS = {
    "do not divide": "heads do not divide",
    "written out": "no ring: attention written out",
    "no gradient": "no ring: the mask has a gradient, or keys are not split",
    "is not divisible": "sizes do not divide",
}


@functools.cache
def reference(name: str) -> equality.Reference:
    families, built = hf.FAMILIES | hf_more.FAMILIES | sequences.FAMILIES, zoo.ALL | sequences.MODELS
    return equality.reference(built[name] if name in built else lambda: hf.build(families[name]))


def layers(model: nn.Module) -> str:
    """A pattern for the model's layers: the longest list of modules."""
    lists = [(len(m), f"{name}.*") for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    return max(lists)[1]


def cases() -> Iterator[tuple[str, str, int]]:
    """(section, method, ranks), the most telling first."""
    for cp in SIZES:
        yield from (("alone", method, cp) for method in METHODS)
    for cp in SIZES:
        for section in SECTIONS:
            yield from ((section, method, cp) for method in METHODS)


def spec(one: equality.Reference, section: str, method: str, cp: int) -> dict[str, Any]:
    mesh = {"cp": cp}
    more: dict[str, Any] = {"uneven": "pad"} if cp == 3 else {}
    if section == "tp":
        mesh["tp"], more["shard"] = 2, {"use": "structure"}
    elif section == "pp":
        mesh["pp"], more["pipeline"], more["batch"] = 2, {"axis": "pp", "stages": 2}, {"microbatches": 2}
    elif section == "zero 3":
        more["data"] = {"zero": 3}
    elif section == "ep":
        mesh["ep"], more["experts"] = 2, [{"match": "*.experts", "axis": "ep"}]
    elif section == "checkpoint":
        more["checkpoint"] = [{"match": layers(one.model), "save": []}]
    return {"shardc": 1, "mesh": mesh, "sequence": {"axis": "cp", "method": method}, **more}


def tried(name: str, section: str, method: str, cp: int) -> str:
    """ "equal", "refused: WHY", or what went wrong."""
    one = reference(name)
    try:
        program = one.compile(spec(one, section, method, cp))
        sim = shardc.verify.simulate(program, one.model, one.batch)
        of_loss, of_grads = equality.differences(sim, one.loss, one.grads)
    except shardc.ShardcError as e:
        return f"refused: {e.errors[0].what}"
    except Exception as e:
        return f"{type(e).__name__}: {e}"[:300]
    worst = max(of_loss, *of_grads.values())
    return "equal" if worst <= equality.RTOL else f"differs by {worst:.1e}"


def known() -> dict[tuple[str, str, str, int], str]:
    lines = FOUND.read_text().splitlines() if FOUND.exists() else []
    return {tuple(row[:-1]): row[-1] for row in map(json.loads, lines)}


def run(until: float, only: str) -> None:
    found = known()
    FOUND.parent.mkdir(exist_ok=True)
    for case in cases():
        for name in FAMILIES:
            key = (name, *case)
            if not fnmatch.fnmatch(name, only) or key in found or (case[0] == "ep" and name not in EXPERTS):
                continue
            if time.monotonic() > until:
                return
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                verdict = tried(*key)
            with FOUND.open("a") as file:
                file.write(json.dumps([*key, verdict]) + "\n")


def cell(verdicts: list[str]) -> str:
    equal, refused = verdicts.count("equal"), sum(v.startswith("refused") for v in verdicts)
    parts = [str(equal)] * bool(verdicts) + [f"+ {refused}"] * bool(refused)
    wrong = len(verdicts) - equal - refused
    return " ".join([*parts, *[f"**{wrong}**"] * bool(wrong)])


def reason(verdict: str) -> str:
    said = next((short for long, short in REASONS.items() if long in verdict), "")
    return said or re.sub(r"\s+", " ", verdict.removeprefix("refused: "))[:80]


def page() -> str:
    found, rows = known(), measured_before()
    for name in dict.fromkeys(key[0] for key in found):
        mine = {key[1:]: verdict for key, verdict in found.items() if key[0] == name}
        cells = [cell([v for (s, m, _), v in mine.items() if s == "alone" and m == method]) for method in METHODS]
        cells += [cell([v for (s, _, _), v in mine.items() if s == section]) for section in SECTIONS]
        why = Counter(reason(v) for v in mine.values() if v != "equal")
        said = "; ".join(f"{text} ({n})" for text, n in why.most_common())
        rows[name] = f"| {name} | {' | '.join(cells)} | {said} |\n"
    counts = " ".join(row.split("|", 2)[2].rpartition("|")[0].rpartition("|")[0] for row in rows.values())
    wrong = sum(map(int, re.findall(r"\*\*(\d+)", counts)))
    refused = sum(map(int, re.findall(r"\+ (\d+)", counts)))
    cases = sum(map(int, re.findall(r"\d+", counts)))
    ranks = sorted({key[3] for key in found if key[1] != "alone"})
    head = HEAD.format(
        date=datetime.now(timezone.utc).date(),
        families=len(rows),
        cases=cases,
        equal=cases - refused - wrong,
        refused=refused,
        wrong=wrong,
        sizes=f", on cp = {', '.join(map(str, ranks))}" if ranks else "",
        columns=" | ".join([*METHODS, *SECTIONS]),
        line="|".join(["---:"] * (len(METHODS) + len(SECTIONS))),
    )
    return head + "".join(rows.values())


def measured_before() -> dict[str, str]:
    """Rows of the page as it stands: those of families that were not tried since are kept."""
    lines = OUT.read_text(encoding="utf-8").splitlines(keepends=True) if OUT.exists() else []
    return {line.split("|")[1].strip(): line for line in lines if re.match(r"\| \w+ \| \d", line)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=7200, help="then the page is written of what was found so far")
    parser.add_argument("--only", default="*", help="a pattern of families")
    parser.add_argument("--again", action="store_true")
    args = parser.parse_args()
    if args.again:
        FOUND.unlink(missing_ok=True)
        OUT.unlink(missing_ok=True)
    run(time.monotonic() + args.seconds, args.only)
    OUT.write_text(page(), encoding="utf-8")
    print(f"{OUT}: {len(known())} cases")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
