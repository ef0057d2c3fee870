"""Greedy tokens of transformers' families beside transformers' own `generate`: writes docs/measured/generation.md.

    .venv/bin/python -m tests.bench.generate_families [FAMILY ...]

Tiny models in float64, four prompts of different lengths, ten tokens, all ranks as threads of one process. Named
families alone are run, and their rows of the page are written anew. Each prompt is given to transformers by itself, in
a model that nothing was generated with (RecurrentGemma keeps states from call to call).
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
from tests import zoo
from tests.zoo import hf, hf_more, sequences

PAGE = Path(__file__).parents[2] / "docs" / "measured" / "generation.md"
PROMPTS, TOKENS = [[5, 6, 7], [9, 8, 7, 6, 5, 4], [3], [11, 12]], 10
STAGES = {"axis": "pp", "stages": 2}
SPECS: dict[str, dict[str, Any]] = {
    "tp 2": {"mesh": {"tp": 2}},
    "tp 8": {"mesh": {"tp": 8}},
    "pp 2": {"mesh": {"pp": 2}, "pipeline": STAGES},
    "dp 2": {"mesh": {"dp": 2}},
    "dp 2, ZeRO 3": {"mesh": {"dp": 2}, "data": {"zero": 3}},
}
FAMILIES = {**hf.FAMILIES, **hf_more.FAMILIES, **sequences.FAMILIES}
CAUSAL = [name for name, f in FAMILIES.items() if f.model.endswith(("ForCausalLM", "LMHeadModel"))]
#: With an encoder, that is given the prompts; Whisper's are sounds of its batch.
ENCODERS = ["t5", "bart", "whisper", "mbart", "pegasus", "blenderbot", "m2m_100", "plbart", "mt5", "umt5", "longt5"]
HEAD = """# Generation: families

What `python -m tests.bench.generate_families` found, last on {date}: greedy tokens of tiny models in float64, by
[engine.generate](../generation.md) and by transformers' `generate`, for four prompts of different lengths; **=**: all
tokens of all prompts are the same. tp 8 has more ranks than most of these models have key-value heads (4).

**cache**: one token takes a forward of one token; **whole**: one of the whole sequence, as the family takes no cache or
takes it otherwise; **cache, whole**: on some meshes. ¹ filled up on the left, transformers' own tokens are others than
those of a prompt by itself, which are what is compared with (logits that are nan in float64, padding that is seen).

| family | how | {specs} |
|---|---|{rules}|
"""


def build(name: str) -> tuple[Any, Any]:
    return zoo.t5() if name == "t5" else hf.build(FAMILIES[name])


def theirs(model: Any, given: dict[str, Any], start: int) -> list[list[int]]:
    """Their tokens of one batch, made by a copy of the model; nothing is forced or suppressed."""
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": TOKENS}
    free = {"forced_eos_token_id": None, "forced_bos_token_id": None}
    free |= {"begin_suppress_tokens": None} if "input_features" in given else {}
    found: list[list[int]] = copy.deepcopy(model).generate(**given, **options, **free)[:, start:].tolist()
    return found


def wanted(model: Any, batch: Any, encodes: bool) -> tuple[Any, list[list[int]], bool]:
    """Prompts, their tokens of each by itself, and whether those of all in one batch are others."""
    if "input_features" in batch:
        sounds = batch["input_features"][: len(PROMPTS)]
        alone = [theirs(model, {"input_features": x[None]}, 0)[0] for x in sounds]
        return {"input_features": sounds}, alone, theirs(model, {"input_features": sounds}, 0) != alone

    def ids(prompts: list[list[int]]) -> dict[str, Any]:
        width = max(map(len, prompts))
        fill = [[0] * (width - len(p)) for p in prompts]
        rows = [p + f if encodes else f + p for p, f in zip(prompts, fill, strict=True)]
        seen = [[1] * len(p) + f if encodes else f + [1] * len(p) for p, f in zip(prompts, fill, strict=True)]
        return {"input_ids": torch.tensor(rows), "attention_mask": torch.tensor(seen)}

    alone = [theirs(model, ids([p]), 1 if encodes else len(p))[0] for p in PROMPTS]
    together = theirs(model, ids(PROMPTS), 1 if encodes else max(map(len, PROMPTS)))
    return PROMPTS, alone, together != alone


def found(model: Any, batch: Any, prompts: Any, spec: dict[str, Any]) -> tuple[list[list[int]], bool]:
    """Our tokens, and whether by a cache."""
    use = "model" if model_plan.read(model) else "structure"
    split = {"shard": {"use": use}} if "tp" in spec["mesh"] else {}
    program = shardc.compile(model, batch, {"shardc": 1, **spec, **split}, prove=False)
    said = io.StringIO()

    def work(mesh: Any) -> list[list[int]]:
        tokens: list[list[int]] = program.engine(model, None, mesh=mesh, check=False).generate(prompts, TOKENS, stop=())
        return tokens

    with contextlib.redirect_stderr(said):
        ranks = loopback(program.mesh, work)
    assert all(r == ranks[0] for r in ranks)
    return ranks[0], "whole sequence" not in said.getvalue()


def row(name: str) -> str:
    model, batch = build(name)
    model.eval()
    try:
        prompts, tokens, alone = wanted(model, batch, name in ENCODERS)
    except Exception as e:  # of any kind: some models of the library cannot generate at these sizes
        return f"| {name} | | transformers: {type(e).__name__} |" + " |" * (len(SPECS) - 1)
    cells, ways = [], []
    for spec in SPECS.values():
        try:
            made, cached = found(model, batch, prompts, spec)
            same = sum(a == b for a, b in zip(made, tokens, strict=True))
            cells.append("=" if same == len(tokens) else f"{same} of {len(tokens)}")
            ways.append("cache" if cached else "whole")
        except shardc.ShardcError as e:
            print(name, e, file=sys.stderr)
            cells.append("refused")
    return f"| {name} | {', '.join(dict.fromkeys(ways))}{' ¹' * alone} | {' | '.join(cells)} |"


def write(lines: dict[str, str]) -> None:
    """The page, with these rows and those that it had of others."""
    old = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    rows = {line.split("|")[1].strip(): line for line in old} | lines
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
