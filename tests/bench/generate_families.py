"""Greedy tokens of transformers' families beside transformers' own `generate`: writes docs/measured/generation.md.

    .venv/bin/python -m tests.bench.generate_families [FAMILY ...]

Tiny models in float64, four prompts of different lengths, ten tokens, all ranks as threads of one process. Where
transformers' logits of a batch that is filled up on its left are nan (float64 alone), or are others than those of a
prompt by itself, each prompt is given to transformers by itself.
"""

from __future__ import annotations

import contextlib
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
from tests.zoo import hf, hf_more

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
FAMILIES = {**hf.FAMILIES, **hf_more.FAMILIES}
CAUSAL = [name for name, f in FAMILIES.items() if f.model.endswith(("ForCausalLM", "LMHeadModel"))]
HEAD = """# Generation: families

What `python -m tests.bench.generate_families` found on {date}: greedy tokens of tiny models in float64, by
[engine.generate](../generation.md) and by transformers' `generate`, for four prompts of different lengths; **=**: all
tokens of all prompts are the same. tp 8 has more ranks than most of these models have key-value heads (4).

**cache**: one token takes a forward of one token; **whole**: one of the whole sequence, as the family takes no cache or
takes it otherwise. ¹ each prompt was given to transformers by itself: filled up on the left, its own logits are nan (in
float64), or others.

| family | how | {specs} |
|---|---|{rules}|
"""


def theirs(model: Any, prompts: list[list[int]]) -> list[list[int]]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": TOKENS}
    found: list[list[int]] = model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
    return found


def wanted(model: Any) -> tuple[list[list[int]], bool]:
    """Their tokens, and whether each prompt had to be given by itself."""
    alone = [theirs(model, [p])[0] for p in PROMPTS]
    return alone, theirs(model, PROMPTS) != alone


def found(model: Any, batch: Any, spec: dict[str, Any]) -> tuple[list[list[int]], bool]:
    """Our tokens, and whether by a cache."""
    use = "model" if model_plan.read(model) else "structure"
    split = {"shard": {"use": use}} if "tp" in spec["mesh"] else {}
    program = shardc.compile(model, batch, {"shardc": 1, **spec, **split}, prove=False)
    said = io.StringIO()

    def work(mesh: Any) -> list[list[int]]:
        tokens: list[list[int]] = program.engine(model, None, mesh=mesh, check=False).generate(PROMPTS, TOKENS, stop=())
        return tokens

    with contextlib.redirect_stderr(said):
        ranks = loopback(program.mesh, work)
    assert all(r == ranks[0] for r in ranks)
    return ranks[0], "whole sequence" not in said.getvalue()


def row(name: str) -> str:
    model, batch = hf.build(FAMILIES[name])
    model.eval()
    try:
        tokens, alone = wanted(model)
    except Exception as e:  # of any kind: some models of the library cannot generate at these sizes
        return f"| {name} | | transformers: {type(e).__name__} |" + " |" * (len(SPECS) - 1)
    cells, cached = [], True
    for spec in SPECS.values():
        try:
            made, cached = found(model, batch, spec)
            same = sum(a == b for a, b in zip(made, tokens, strict=True))
            cells.append("=" if same == len(tokens) else f"{same} of {len(tokens)}")
        except shardc.ShardcError as e:
            print(name, e, file=sys.stderr)
            cells.append("refused")
    return f"| {name} | {'cache' if cached else 'whole'}{' ¹' * alone} | {' | '.join(cells)} |"


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    lines = []
    for name in names or CAUSAL:
        lines.append(row(name))
        print(lines[-1], flush=True)
    if not names:
        head = HEAD.format(date=date.today(), specs=" | ".join(SPECS), rules="---|" * (len(SPECS) - 1) + "---")
        PAGE.write_text(head + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
