"""Sequences packed into a row, told by positions that restart: a step computes what it would of each alone, on any
mesh; a note says where a model does not part them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from tests import equality, zoo
from tests.zoo import BATCH, SEQ, VOCAB, hf, sequences, tokens
from tests.zoo.hf import EXPERTS, GQA, row

FAMILIES = {
    "llama": row("LlamaForCausalLM", **GQA),
    "gemma": row("GemmaForCausalLM", **GQA, head_dim=8),
    "gpt2": row("GPT2LMHeadModel"),
    "phi": row("PhiForCausalLM"),
    "mixtral": row("MixtralForCausalLM", **GQA, **EXPERTS, num_local_experts=4, num_experts_per_tok=2),
    **{name: hf.FAMILIES[name] for name in ("mistral", "qwen2", "qwen3", "gemma2", "gpt_neox", "phi3")},
}
CP: dict[str, Any] = {"mesh": {"cp": 2}, "sequence": {"axis": "cp"}}
SPECS = [
    {"mesh": {"dp": 1}},
    {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
    {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    CP,
]
LENGTHS = [(3, 6, 7), (SEQ,), (5, 4, 4, 3), (9, 7), (2, 14), (8, 8), (1, 15), (6, 5, 5)]


def packed(lengths: list[tuple[int, ...]] = LENGTHS) -> dict[str, Tensor]:
    """What transformers' DataCollatorWithFlattening makes, in several rows."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    return {"input_ids": tokens(), "position_ids": positions, "labels": tokens().masked_fill(positions == 0, -100)}


def saved(family: hf.Family, folder: Path) -> nn.Module:
    """The model as a folder of save_pretrained has it: the config says `use_cache: true`."""
    made, _ = hf.build(family)
    made.save_pretrained(folder)
    experts = {key: value for key, value in family.config.items() if key in EXPERTS}
    loaded: nn.Module = type(made).from_pretrained(folder, dtype=torch.float64, **experts).train()
    assert loaded.config.use_cache
    return loaded


def of_each_alone(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of the mean over all tokens with a label, sequence by sequence."""
    with zoo.Wide():
        total, count = torch.zeros((), dtype=torch.float64), 0
        for ids, first in zip(batch["input_ids"], batch["position_ids"].expand(BATCH, SEQ) == 0, strict=True):
            for one in ids.split([*torch.diff(first.nonzero()[:, 0], append=torch.tensor([SEQ]))]):
                if (n := len(one) - 1) > 0:
                    total, count = total + n * model(one[None], labels=one[None]).loss, count + n
        (total / count).backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return total.detach() / count, grads


@pytest.mark.parametrize("family", FAMILIES)
def test_each_sequence_is_computed_as_if_alone(family: str, tmp_path: Path) -> None:
    model, batch = saved(FAMILIES[family], tmp_path), packed()
    loss, grads = of_each_alone(model, batch)
    with zoo.Wide():
        captured = capture(model, batch)
        programs = [shardc.compile(model, batch, {"shardc": 1, **s}, captured=captured) for s in SPECS]
    assert [n for n in captured.notes if "restart" in n] == []
    for program in programs:
        equality.assert_equal(shardc.verify.simulate(program, model, batch), loss, grads)


FORMS = {
    "of all rows": lambda p: p[:1],
    "int32": lambda p: p.int(),
    "from another number": lambda p: p + 2,
    "as a view": lambda p: p.t().contiguous().t(),
}


HOW = ["loss", "use_cache", "eager", "flex_attention"]


@pytest.mark.parametrize(
    ("form", "how"), [*((form, "labels") for form in FORMS), *(("of all rows", how) for how in HOW)]
)
def test_however_positions_come_and_the_step_is_written(form: str, how: str) -> None:
    model, batch = hf.build(FAMILIES["llama"])
    alike = packed([LENGTHS[0]] * BATCH)
    loss, grads = of_each_alone(model, alike)
    assert model.config.use_cache
    batch = {**alike, "position_ids": FORMS[form](alike["position_ids"])}
    options: dict[str, Any] = {}
    if how == "loss":
        options["loss"] = lambda y, b: F.cross_entropy(y.logits[:, :-1].flatten(0, 1), b["targets"][:, 1:].flatten())
        batch["targets"] = batch.pop("labels")
    elif how == "use_cache":
        batch["use_cache"] = True  # type: ignore[assignment]
    elif how != "labels":
        model.set_attn_implementation(how)
    with zoo.Wide():
        program = shardc.compile(model, batch, {"shardc": 1, **CP}, **options)
    equality.assert_equal(shardc.verify.simulate(program, model, batch), loss, grads)
    assert [n for n in program.notes if "restart" in n] == []


def own(mask: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of one's own with learned positions, whose mask is made of ids of documents, or causal."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place, self.out = nn.Embedding(VOCAB, 8), nn.Embedding(SEQ, 8), nn.Linear(8, VOCAB)

        def forward(self, ids: Tensor, pos: Tensor, document: Tensor) -> Tensor:
            x = (self.embed(ids) + self.place(pos))[:, None]
            same = (document[:, None, :, None] == document[:, None, None, :]).tril()
            how: Any = {"attn_mask": same} if mask == "documents" else {"is_causal": True}
            y = self.out(F.scaled_dot_product_attention(x, x, x, **how))
            return F.cross_entropy(y.flatten(0, 2), ids.flatten())

    pos = packed()["position_ids"]
    return Own(), {"ids": tokens(), "pos": pos, "document": (pos == 0).cumsum(1)}


def of(family: Any, **more: Any) -> tuple[nn.Module, dict[str, Any]]:
    return hf.build(family, torch.float32)[0], {**packed(), **more}


ONES = torch.ones(BATCH, SEQ, dtype=torch.long)
WITHIN = torch.block_diag(*[torch.ones(n, n) for n in LENGTHS[0]]).tril().bool().expand(BATCH, 1, SEQ, SEQ)
LEFT = hf.padding().flip(1)
PADDED = {"attention_mask": LEFT, "position_ids": (LEFT.cumsum(1) - 1).masked_fill(LEFT == 0, 1)}
NOTES: dict[str, tuple[Any, str]] = {
    "a mask of two dims": (lambda: of(FAMILIES["llama"], attention_mask=ONES), "leave attention_mask out of the batch"),
    "the same, written out": (
        lambda: of(row("LlamaForCausalLM", attn_implementation="eager"), attention_mask=ONES),
        "leave attention_mask out of the batch",
    ),
    "a family that does not look": (lambda: of(hf.FAMILIES["opt"]), "pass an attention_mask [rows, 1, tokens, tokens]"),
    "the same, with a mask": (lambda: of(hf.FAMILIES["opt"], attention_mask=WITHIN), ""),
    "an encoder": (lambda: of(hf.FAMILIES["roberta"]), "tokens see the sequences before theirs"),
    "one's own": (lambda: own("causal"), "(pos), as in packed rows, but the mask of this attention"),
    "one's own, by documents": (lambda: own("documents"), ""),
    "a convolution": (lambda: of(sequences.FAMILIES["qwen3_5"]), "this convolution, and a scan after it, run"),
    "a recurrence": (lambda: of(hf.families("hf_more")["rwkv"]), "as in packed rows, but nothing reads them"),
    "padding on the left": (lambda: of(FAMILIES["llama"], **PADDED), ""),
    "one sequence a row": (lambda: of(FAMILIES["llama"], position_ids=torch.arange(SEQ).expand(BATCH, SEQ)), ""),
}


@pytest.mark.parametrize("what", NOTES)
def test_positions_that_begin_anew_and_that_nothing_reads_are_noted(what: str) -> None:
    make, said = NOTES[what]
    model, batch = make()
    notes = [n for n in capture(model, batch, prove=False).notes if "restart" in n]
    assert len(notes) == bool(said), notes
    assert all(said in n for n in notes)
