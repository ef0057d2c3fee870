"""Write docs/reference/support.md, which features go together: `make support` compiles a small model for each pair.

The model is a Mixtral of transformers with tiny sizes: attention, experts, a head and a cross entropy. A cell is what
`shardc.compile` says of a spec with both features, and what the proof says of the program. tests/docs/test_support.py
compiles the refused pairs and a sample of the others again.
"""

from __future__ import annotations

import re
import sys
import textwrap
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reference" / "support.md"


class Feature(NamedTuple):
    """A row and a column. spec: what a spec says for it. family: features of one family exclude each other.

    how: "forward" and "module" are no part of a spec, but another way to compile or to run.
    """

    name: str
    spec: dict[str, Any]
    family: str = ""
    how: str = ""


_PIPE = {"mesh": {"pp": 2}, "batch": {"microbatches": 2}}
_SAVE = {"match": "model.layers.*", "save": ["linear"]}
_EXPERTS = {"match": "*.mlp.experts", "axis": "ep"}
_SPLIT: dict[str, Any] = {"mesh": {"tp": 2}, "shard": {"use": "model"}}
_ROWS = {"dp": -1}
FEATURES = (
    Feature("data parallel", {"mesh": {"dp": 2}, "data": {"zero": 0}}, "zero"),
    Feature("ZeRO 1", {"mesh": {"dp": 2}, "data": {"zero": 1}}, "zero"),
    Feature("ZeRO 2", {"mesh": {"dp": 2}, "data": {"zero": 2}}, "zero"),
    Feature("ZeRO 3", {"mesh": {"dp": 2}, "data": {"zero": 3}}, "zero"),
    Feature("optimizer offload", {"mesh": {"dp": 2}, "data": {"offload": {"optimizer": "cpu"}}}),
    Feature("padding (`uneven`)", {"mesh": {"dp": 3}, "uneven": "pad"}),
    Feature("tensor parallel", _SPLIT),
    Feature("sequence parallel", {**_SPLIT, "activations": {"model.layers.*": {1: "tp"}}}),
    Feature("ring attention", {"mesh": {"cp": 2}, "sequence": {"axis": "cp", "method": "ring"}}, "context"),
    Feature("Ulysses attention", {"mesh": {"cp": 2}, "sequence": {"axis": "cp", "method": "ulysses"}}, "context"),
    Feature("microbatches", {"batch": {"microbatches": 2}}),
    Feature("pipeline 1f1b", {**_PIPE, "pipeline": {"axis": "pp", "stages": 2}}, "pipeline"),
    Feature("pipeline zb-v", {**_PIPE, "pipeline": {"axis": "pp", "stages": 4, "schedule": "zb-v"}}, "pipeline"),
    Feature(
        "pipeline dualpipe-v", {**_PIPE, "pipeline": {"axis": "pp", "stages": 4, "schedule": "dualpipe-v"}}, "pipeline"
    ),
    Feature("experts", {"mesh": {"ep": 2}, "experts": [_EXPERTS]}, "experts"),
    Feature("experts with capacity", {"mesh": {"ep": 2}, "experts": [{**_EXPERTS, "capacity": 1.25}]}, "experts"),
    Feature("choices recorded", {"choices": {"*.mlp.gate": "record"}}, "choices"),
    Feature("choices replayed", {"choices": {"*.mlp.gate": "replay"}}, "choices"),
    Feature("balanced rows", {"batch": {"balance": True, "lengths": [8, 16], "pad": {"input_ids": 0, "labels": -100}}}),
    Feature("a part's own mesh", {"mesh": {"tp": 2}, "parts": {"first": {"modules": "model.layers.0", "mesh": _ROWS}}}),
    Feature("recomputation", {"checkpoint": [_SAVE]}, "checkpoint"),
    Feature("activation offload", {"checkpoint": [{**_SAVE, "offload": "cpu"}]}, "checkpoint"),
    Feature("loss in chunks", {"loss": {"chunks": 2}}),
    Feature("bfloat16", {"precision": {"compute": "bfloat16"}}, "precision"),
    Feature("float16 with loss scale", {"precision": {"compute": "float16", "loss_scale": "dynamic"}}, "precision"),
    Feature("fp8-rowwise", {"precision": {"compute": "bfloat16", "products": "fp8-rowwise"}}, "precision"),
    Feature("fp8-tensorwise", {"precision": {"compute": "bfloat16", "products": "fp8-tensorwise"}}, "precision"),
    Feature("adapters", {"adapters": [{"match": "*.{q,v}_proj", "rank": 2}]}),
    Feature("whole matrices", {"optimizer": {"matrices": "whole"}}),
    Feature("compiled layers", {"execution": {"compile": "layers"}}),
    Feature("overlapped microbatches", {"batch": {"microbatches": 2}, "execution": {"overlap": "microbatches"}}),
    Feature("CUDA graph", {"execution": {"graphs": True}}),
    Feature("forward-only program", {}, how="forward"),
    Feature("`program.module`", {}, how="module"),
)


def pairs() -> Iterator[tuple[Feature, Feature]]:
    """Yield the cells of the table, (column, row), row by row, without those that exclude each other."""
    for i, row in enumerate(FEATURES):
        for column in FEATURES[:i]:
            if not (row.family and row.family == column.family):
                yield column, row


def together(a: Any, b: Any) -> Any:
    """Join two parts of a spec; of two values the second one wins."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a | {key: together(a[key], value) if key in a else value for key, value in b.items()}
    return b


@lru_cache(maxsize=1)
def model() -> tuple[Any, Any, Any, Any]:
    """Return the model, its batch, its graph with the loss, and its graph of forward alone."""
    import torch

    from shardc.capture import capture
    from shardc.recompile import in_eval_mode
    from tests.zoo import hf, hf_more

    built, batch = hf.build(hf_more.FAMILIES["mixtral"], torch.float32)
    with in_eval_mode(built):
        forward = capture(built, batch, forward=True, prove=False)
    return built, batch, capture(built, batch, prove=False), forward


def cell(a: Feature, b: Feature) -> str:
    """Return why two features do not go together, or nothing if they do.

    A reason is an error of `compile` or of `program.module`, or "not proven: ..." with the first gap.
    """
    import shardc
    from shardc.runtime.mesh.loopback import loopback

    built, batch, captured, forward = model()
    spec = together(together({"shardc": 1, "mesh": {"dp": 1}}, a.spec), b.spec)
    hows = {a.how, b.how}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph = forward if "forward" in hows else captured
            program = shardc.compile(built, batch, spec, captured=graph, forward="forward" in hows, prove=False)
            if "module" in hows:
                loopback(program.mesh, lambda mesh: program.module(built, mesh=mesh))
    except shardc.ShardcError as error:
        return error.what
    proof = program.prove()
    return "" if proof.ok else f"not proven: {proof.gaps[0]}"


def table(cells: dict[tuple[str, str], str]) -> str:
    """Write the reasons and the table as Markdown. cells: {(column, row): what `cell` returns}."""
    reasons = list(dict.fromkeys(filter(None, cells.values())))
    lines = ["| | | " + " | ".join(str(j) for j in range(1, len(FEATURES))) + " |"]
    lines.append("|---:|---|" + ":-:|" * (len(FEATURES) - 1))
    for i, row in enumerate(FEATURES):
        shown = []
        for column in FEATURES[: max(i, 1)]:
            reason = cells.get((column.name, row.name))
            shown.append("–" if reason is None else str(reasons.index(reason) + 1) if reason else "✓")
        shown[i:] = [""] * (len(FEATURES) - 1 - i)
        lines.append(f"| {i + 1} | {row.name} | " + " | ".join(shown) + " |")
    notes = []
    for n, reason in enumerate(reasons, 1):
        refused: dict[str, list[str]] = {}
        for (first, second), why in cells.items():
            if why == reason:
                refused.setdefault(second, []).append(first)
        pairs = "; ".join(f"*{second}* with {', '.join(first)}" for second, first in refused.items())
        notes.append(
            f"{n}. {reason}\n" + textwrap.fill(f"({pairs})", 150, initial_indent="   ", subsequent_indent="   ")
        )
    return "\n".join([*notes, "", *lines])


def written(page: str) -> dict[tuple[str, str], str]:
    """Read {(column, row): "", or the reason} from a page."""
    rows = [
        [c.strip() for c in line.strip("| \n").split("|")] for line in page.splitlines() if re.match(r"\| \d+ \|", line)
    ]
    reasons = dict(re.findall(r"^(\d+)\. (.*)$", page, re.MULTILINE))
    names = [row[1] for row in rows]
    return {
        (names[j], row[1]): reasons.get(text, "")
        for row in rows
        for j, text in enumerate(row[2:])
        if text not in ("", "–")
    }


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    from docs.generate import write

    write(PAGE, {"support": table({(a.name, b.name): cell(a, b) for a, b in pairs()})})
