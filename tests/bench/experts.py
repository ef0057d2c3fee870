"""Writes docs/experts.md: how a layer of experts becomes one op, what is exchanged, and how experts may lie. Everything
in
it but the prose is what shardc prints, or what a run of examples/moe.py sent.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "experts.md"
sys.path.insert(0, str(ROOT / "examples"))

import moe  # noqa: E402
import torch  # noqa: E402

import shardc  # noqa: E402
from shardc.artifact import emit  # noqa: E402
from shardc.ir.program import Program  # noqa: E402

EXPERTS = [{"match": "moe", "axis": "ep"}]
MESHES: dict[str, dict[str, Any]] = {
    "ep=2": {"mesh": {"ep": 2}},
    "dp=2 × ep=2": {"mesh": {"dp": 2, "ep": 2}},
    "dp=4, experts over dp": {"mesh": {"dp": 4}, "experts": [{"match": "moe", "axis": "dp"}]},
    "ep=2 × tp=2": {"mesh": {"ep": 2, "tp": 2}, "shard": {"use": "structure"}},
    "pp=2 × ep=2, 2 microbatches": {
        "mesh": {"pp": 2, "ep": 2},
        "pipeline": {"axis": "pp", "stages": 2},
        "batch": {"microbatches": 2},
    },
}


def compiled(more: dict[str, Any]) -> Program:
    return shardc.compile(moe.model(), moe.batch(), {"shardc": 1, "experts": EXPERTS, **more}, prove=False)


def page() -> str:
    program = compiled(MESHES["dp=2 × ep=2"])
    whole, local = emit.function(program.graph, program), emit.function(program.stages[0].graph, program)
    return TEXT.format(
        source=inspect.getsource(moe.MoE).strip(),
        whole=experts_of(whole),
        local=experts_of(local),
        routes=routes(),
        sent=sent(program),
        meshes=meshes(),
    )


def experts_of(function: str) -> str:
    """The lines of the experts' op, and of those that it becomes, without the freeing of values."""
    lines = [line.strip() for line in function.splitlines()]
    return "\n".join(line for line in lines if "= ops.experts" in line)


def routes() -> str:
    """Of each rank's choices, how many go to the experts of each rank: what the router chose for the example's batch,
    on ep=2.
    """
    model, ranks = moe.model(), 2
    with torch.no_grad():
        index = model.moe.router(model.embed(moe.batch()["ids"])).topk(moe.CHOICES, -1).indices
    here = moe.EXPERTS // ranks
    head = ["tokens of", *(f"experts {r * here} - {r * here + here - 1}, on rank {r}" for r in range(ranks)), "choices"]
    rows = []
    for r, mine in enumerate(index.chunk(ranks)):
        counts = [int((mine // here == to).sum()) for to in range(ranks)]
        rows.append(
            [f"rank {r}", *(f"{n} {'stay' if to == r else 'go'}" for to, n in enumerate(counts)), str(sum(counts))]
        )
    return table(head, rows)


def sent(program: Program) -> str:
    """What the program says of its exchanges, and what a run sent."""
    ran = [c for c in shardc.verify.simulate(program, moe.model(), moe.batch()).comms if c.kind == "all_to_all"]
    rows = []
    for node in program.stages[0].graph.nodes:
        c = node.meta.get("collective")
        if c is not None and c.kind == "all_to_all":
            value = node.meta["value"]
            what = "counts" if isinstance(value, tuple) else f"`{value}`"
            rows.append([node.target.__name__, f"{c.kind}/{c.backward}", "+".join(c.axes), str(c.bytes), what])
    rows.append(
        ["a run, rank 0, forward", "", "ep", " + ".join(str(c.bytes) for c in ran if c.direction == "forward"), ""]
    )
    rows.append(
        ["a run, rank 0, backward", "", "ep", " + ".join(str(c.bytes) for c in ran if c.direction == "backward"), ""]
    )
    return table(["op", "forward/backward", "axis", "bytes a rank", "of"], rows)


def meshes() -> str:
    rows = []
    for name, more in MESHES.items():
        program = compiled(more)
        up, router = program.param("moe.up"), program.param("moe.router.weight")
        sent = [
            c for s in program.stages for n in s.graph.nodes if (c := n.meta.get("collective")) and c.kind != "none"
        ]
        kinds = sorted({f"{c.kind} {'+'.join(c.axes)}" for c in sent})
        rows.append(
            [
                name,
                f"`{up.value}`",
                f"{100 * up.value.nbytes(program.mesh) // up.value.nbytes()} %",
                "+".join(up.reduce) or "none",
                "+".join(router.reduce) or "none",
                ", ".join(kinds),
            ]
        )
    head = [
        "mesh",
        "moe.up",
        "of it on a rank",
        "its gradient is summed over",
        "the router's over",
        "collectives of the program",
    ]
    return table(head, rows)


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows])


TEXT = """# Experts

Made by `make table` (tests/bench/experts.py) from examples/moe.py.

Each rank has its experts; the rows that its tokens' routers chose go there by all_to_all and come back: tokens × choices × hidden bytes each way, and
nothing is gathered, padded or dropped. transformers' models (Mixtral, Qwen, OLMoE, DeepSeek-V3, gpt-oss) need nothing but the section of the spec.
An axis that only experts name splits the batch as well; a data axis is shared; tp inside of experts, sequence parallel, pipelines, ZeRO, checkpoints,
precision and padding go together with it. Tested in float64 against one device (tests/passes/test_experts.py): mixtral, qwen2_moe, qwen3_moe, olmoe,
deepseek_v3, gpt_oss, switch, top 2 and GShard's einsums on ep=2, ep=4, experts over dp=2, ep=2 × tp=2 and pp=2 × ep=2.

```yaml
experts:                                            # or none: `shard: {{use: model}}` reads the model's own plan, over an axis `ep`
  - {{match: "*.mlp.experts", axis: ep}}            # modules that hold experts; an axis of their own, or a data axis
  - {{match: moe, axis: ep, capacity: 1.25}}        # an expert takes at most 1.25 times its even share of the global batch
  - {{match: moe2, axis: ep, capacity: 1.25, per: microbatch}}      # of each microbatch instead
```

## A layer is one op

```python
{source}
```

In the graph of one device it is one op, whatever the model looks like: transformers' models bring it (`experts_implementation="grouped_mm"`
or "batched_mm"), a model of your own calls `shardc.nn.experts`, and one that sorts rows by expert for `torch._grouped_mm`, as torchtitan's, is taken
back to unsorted rows (passes/canonical/grouped_mm.py). A Python loop over experts is refused. GShard's einsums over an experts' dim are products like any
others, and need no op.

```python
{whole}
```

Its rule is `t h, t k, t k, e (2 i) h, e h i -> t h`: t split is data parallel, i tensor parallel (the text in the call says how gate and up lie in
the columns), e expert parallel. Where tokens and experts are split over the same ranks, only the chosen tokens travel.

## What is exchanged

The same on dp=2 × ep=2, as each rank runs it:

```python
{local}
```

    rank 0  tokens ── route ── send ─┐      ┌─ apply: experts 0-3 ─┐      ┌─ combine ── y      order: pairs (token, choice) by rank and expert
                                     all_to_all               all_to_all                       counts: rows by rank and expert, sent before
    rank 1  tokens ── route ── send ─┘      └─ apply: experts 4-7 ─┘      └─ combine ── y      backward: the same, the other way round

{routes}

How many rows go where the router decides, in every step anew; nothing is padded, and nothing dropped. The program has the average (tokens × choices
× hidden × 4 bytes), a run its own numbers; besides, ranks tell each other the counts.

{sent}

## How experts may lie

{meshes}

Experts' gradients are summed over the ranks that have copies of them only; what lies whole on all ranks, over all that split the batch.

## Exactly as one device

- Dropless by default: equal for any routing, also where one expert takes all tokens, or none.
- `capacity` drops what one device would drop: an expert takes the first choices of the global batch, token by token. With microbatches
  that cannot be known in time: `per: microbatch` takes the first of each microbatch, which is the same rows of every rank's batch.
- A router's losses are those of the global batch. z-losses are sums, which microbatches add up. A balancing loss is a product of two sums, of
  shares and of probabilities: with microbatches, forward of all of them runs once more before (a third more flops), in pipelines too,
  and finds the sums; each microbatch then gives its summand's gradient. A note of the program says so.
- `checkpoint:` regions send rows again, never the counts; `save: [collective]` keeps rows as well.
- `shardc run --routing`, or `program.engine(..., routing=True)` and `.loads`: tokens of each expert, the busiest rank's share, drops.

On GPUs that have torch's grouped product (bfloat16, widths of whole 16 bytes) a product of all of a rank's experts is one call; elsewhere
it is one an expert.
"""


if __name__ == "__main__":
    FILE.write_text(page())
