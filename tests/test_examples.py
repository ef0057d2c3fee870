"""examples/documents.py at a small size: packed documents over two ranks, each with the loss of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardc
from examples import adapters, documents, llama
from tests import zoo
from tests.equality import assert_equal


def test_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "SEQ", 96)
    monkeypatch.setattr(documents, "LONGEST", 40)
    monkeypatch.setattr(documents, "DOCUMENTS", 8)
    texts = [b"a" * 30, b"bc" * 20, b"def" * 13, b"g" * 20, b"hij" * 10]
    rows = documents.Rows(texts)
    assert [[len(t) for t in r] for r in rows.rows] == [[30, 40], [39, 20, 30]]
    spec = str(Path(documents.__file__).with_suffix(".yaml"))
    with zoo.Wide():
        torch.manual_seed(0)
        model = documents.Model(layers=2, hidden=16, heads=2)
        for i, batch in enumerate({name: x[None] for name, x in rows[i].items()} for i in range(2)):
            program = shardc.compile(model, batch, spec, loss=documents.loss)
            assert "attention_reach" in str(program)
            output = model(batch["input_ids"], batch["document"], batch["position"])
            want, beside = documents.loss(output, batch)
            model.zero_grad()
            want.backward()
            grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            got = shardc.verify.simulate(program, model, batch)
            assert_equal(got, want.detach(), grads)
            each = got.outputs["per_document"][0]
            assert (each > 0).tolist() == [j < len(rows.rows[i]) for j in range(8)]
            assert torch.allclose(each, beside["per_document"][0].detach(), rtol=1e-12)


def test_adapters() -> None:
    """The base is frozen, and split as the Llama is: each rank has two of the four heads."""
    spec = str(Path(adapters.__file__).with_suffix(".yaml"))
    program = shardc.compile(adapters.model(), adapters.batch(), spec)
    trained = {p.fqn.split(".")[-2] for p in program.params if p.requires_grad}
    assert trained == {"lora_A", "lora_B"}
    base = shardc.compile(llama.model(), llama.batch(), str(Path(llama.__file__).with_suffix(".yaml")))
    layouts = {p.fqn: str(p.value) for p in base.params}
    assert layouts["model.layers.0.self_attn.k_proj.weight"] == "f32[64@tp, 128]"
    rows = llama.batches(torch.arange(200, dtype=torch.uint8), 2)
    assert [int(x["input_ids"].max()) for x in rows] == [161, 199]
    assert torch.equal(rows[0]["input_ids"], rows[0]["labels"])
