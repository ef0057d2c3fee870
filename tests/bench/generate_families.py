"""Tokens of transformers' families, greedy and drawn, beside transformers' own: writes docs/measured/generation.md.

    .venv/bin/python -m tests.bench.generate_families [FAMILY ...]

Tiny models in float64, four prompts of different lengths, ten tokens, all ranks as threads of one process. Named
families alone are run, and their rows of the page are written anew. Each prompt is given to transformers by itself, in
a model that nothing was generated with (RecurrentGemma keeps states from call to call). What it draws: tests/drawn.py.
"""

from __future__ import annotations

import contextlib
import copy
import io
import sys
import warnings
from datetime import date
from pathlib import Path
from typing import Any

import torch

import shardc
from shardc.passes.annotate import model_plan
from shardc.runtime.mesh.loopback import loopback
from tests import drawn, zoo
from tests.zoo import hf, hf_more, sequences

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "generation.md"
PROMPTS, TOKENS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3], [11, 12]], 10
STAGES = {"axis": "pp", "stages": 2}
SPECS: dict[str, dict[str, Any]] = {
    "tp 2": {"mesh": {"tp": 2}},
    "tp 4": {"mesh": {"tp": 4}},
    "tp 8": {"mesh": {"tp": 8}},
    "pp 2": {"mesh": {"pp": 2}, "pipeline": STAGES},
    "dp 2": {"mesh": {"dp": 2}},
    "dp 2, ZeRO 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
}
#: Greedy; and drawn of all tokens, of few, and of those of a probability.
CALLS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.5, "seed": 3},
    {"temperature": 2.0, "top_k": 9, "top_p": 0.8, "seed": 1},
    {"temperature": 1.0, "top_p": 0.6},
]
FAMILIES = {**hf.FAMILIES, **hf_more.FAMILIES, **sequences.FAMILIES}
CAUSAL = [name for name, f in FAMILIES.items() if f.model.endswith(("ForCausalLM", "LMHeadModel"))]
#: With an encoder, that is given the prompts; Whisper's are sounds of its batch.
ENCODERS = ["t5", "bart", "whisper", "mbart", "pegasus", "blenderbot", "m2m_100", "plbart", "mt5", "umt5", "longt5"]
HEAD = """# Generation: families

What `python -m tests.bench.generate_families` found, last on {date}: tokens of tiny models in float64, by
[engine.generate](../generation.md) and by transformers' `generate` on one device, for four prompts of different
lengths, greedy and drawn three times: at temperature 1.5; at 2 with `top_k` 9 and `top_p` 0.8; with `top_p` 0.6.
Transformers draws with its own temperature, top-k and top-p and shardc's random numbers (tests/drawn.py). **=**: all
tokens of all prompts are the same; else so many prompts of the four, greedy, and of the twelve, drawn. tp 8 has more
ranks than most of these models have key-value heads (4), tp 4 than some (2); (unsplit): no weight was split.

**cache**: one token takes a forward of one token; **whole**: one of the whole sequence, as the family takes no cache or
takes it otherwise; **cache, whole**: on some meshes. ¹ filled up on the left, transformers' own tokens are others than
those of a single prompt, which are what is compared with (logits that are nan in float64, padding that is seen).

| family | how | {specs} | drawn, on all six |
|---|---|{rules}|
"""


def build(name: str) -> tuple[Any, Any]:
    return zoo.t5() if name == "t5" else hf.build(FAMILIES[name])


def theirs(model: Any, given: dict[str, Any], start: int, rows: list[int], call: dict[str, Any]) -> list[list[int]]:
    """Their tokens of one batch, these rows of the call's, by a copy of the model; nothing is forced or suppressed."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": TOKENS}
    free = {"forced_eos_token_id": None, "forced_bos_token_id": None}
    free |= {"begin_suppress_tokens": None} if "input_features" in given else {}
    chosen = {"logits_processor": drawn.processors(call, rows)}
    made = copy.deepcopy(model).generate(**given, **options, **free, **chosen)
    found: list[list[int]] = made[:, start:].tolist()
    return found


def wanted(model: Any, batch: Any, encodes: bool) -> tuple[Any, list[list[list[int]]], bool]:
    """Prompts; of each call their tokens, of each prompt by itself; whether all in one batch have other greedy ones."""
    if "input_features" in batch:
        prompts: Any = {"input_features": batch["input_features"][: len(PROMPTS)]}
        given = [{"input_features": x[None]} for x in prompts["input_features"]]
        all_of_them, starts = prompts, [0] * len(given)
    else:
        prompts = PROMPTS
        given, starts = [_ids([p], encodes) for p in PROMPTS], [1 if encodes else len(p) for p in PROMPTS]
        all_of_them = _ids(PROMPTS, encodes)
    pairs = list(enumerate(zip(given, starts, strict=True)))
    alone = [[theirs(model, x, start, [row], call)[0] for row, (x, start) in pairs] for call in CALLS]
    together = theirs(model, all_of_them, max(starts), list(range(len(given))), {})
    return prompts, alone, together != alone[0]


def _ids(prompts: list[list[int]], encodes: bool) -> dict[str, Any]:
    """One batch of them, filled up: an encoder's on the right."""
    width = max(map(len, prompts))
    fill = [[0] * (width - len(p)) for p in prompts]
    rows = [p + f if encodes else f + p for p, f in zip(prompts, fill, strict=True)]
    seen = [[1] * len(p) + f if encodes else f + [1] * len(p) for p, f in zip(prompts, fill, strict=True)]
    return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(seen)}


def found(model: Any, batch: Any, prompts: Any, spec: dict[str, Any]) -> tuple[list[list[list[int]]], bool, bool]:
    """Our tokens of each call; whether by a cache; whether tp, where the mesh has it, splits any weight."""
    use = "model" if model_plan.read(model) else "structure"
    split = {"shard": {"use": use}} if "tp" in spec["mesh"] else {}
    program = shardc.compile(model, batch, {"shardc": 1, **spec, **split}, prove=False)
    said = io.StringIO()

    def work(mesh: Any) -> list[list[list[int]]]:
        engine = program.engine(model, None, mesh=mesh, check=False)
        return [engine.generate(prompts, TOKENS, stop=(), **call) for call in CALLS]

    with contextlib.redirect_stderr(said):
        ranks = loopback(program.mesh, work)
    assert all(r == ranks[0] for r in ranks)
    splits = any(axis.startswith("tp") for p in program.params for axis, _ in p.layout.shards())
    return ranks[0], "whole sequence" not in said.getvalue(), splits or not split


def row(name: str) -> str:
    model, batch = build(name)
    model.eval()
    try:
        prompts, tokens, alone = wanted(model, batch, name in ENCODERS)
    except Exception as e:  # of any kind: some models of the library cannot generate at these sizes
        return f"| {name} | | transformers: {type(e).__name__} |" + " |" * len(SPECS)
    cells, ways, others = [], [], []
    for mesh, spec in SPECS.items():
        try:
            made, cached, splits = found(model, batch, prompts, spec)
        except shardc.ShardcError as e:
            print(name, e, file=sys.stderr)
            cells.append("refused")
            others.append(f"{mesh}: refused")
            continue
        same = [a == b for one, other in zip(made, tokens, strict=True) for a, b in zip(one, other, strict=True)]
        greedy, drawn_too = same[: len(tokens[0])], same[len(tokens[0]) :]
        cells.append(("=" if all(greedy) else f"{sum(greedy)} of {len(greedy)}") + " (unsplit)" * (not splits))
        ways.append("cache" if cached else "whole")
        if not all(drawn_too):
            others.append(f"{mesh}: {sum(drawn_too)} of {len(drawn_too)}")
    how = f"{', '.join(dict.fromkeys(ways))}{' ¹' * alone}"
    return f"| {name} | {how} | {' | '.join(cells)} | {'; '.join(others) or '='} |"


def write(lines: dict[str, str]) -> None:
    """The page, with these rows and those that it had of others."""
    old = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    width = len(SPECS) + 5  # of a page that had other columns, rows are left out
    rows = {line.split("|")[1].strip(): line for line in old if line.count("|") + 1 == width} | lines
    known = [name for name in (*CAUSAL, *ENCODERS) if name in rows]
    head = HEAD.format(date=date.today(), specs=" | ".join(SPECS), rules="---|" * (len(SPECS) - 1) + "---")
    PAGE.write_text(head + "\n".join(rows[name] for name in known) + "\n")


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in names or (*CAUSAL, *ENCODERS):
        line = row(name)
        print(line, flush=True)
        write({name: line})


if __name__ == "__main__":
    main(sys.argv[1:])
