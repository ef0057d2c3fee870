"""examples/documents.py at a small size: packed documents over two ranks, each with the loss of one device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import shardc
from examples import documents
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
