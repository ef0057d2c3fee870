"""Running forward-only programs, and scoring in the middle of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.recompile import in_eval_mode
from shardc.runtime.mesh.loopback import loopback
from tests import zoo

TP = {"shard": {"use": "structure"}}
SPECS: dict[str, dict[str, Any]] = {
    "dp tp zero2": {"mesh": {"dp": 2, "tp": 2}, **TP, "data": {"zero": 2}, "checkpoint": [{"match": "h.*"}]},
    "pp zero3": {
        "mesh": {"pp": 2, "dp": 2},
        "data": {"zero": 3},
        "pipeline": {"axis": "pp", "cut": ["h.1"], "schedule": "1f1b"},
        "batch": {"microbatches": 2},
    },
}


def of_model(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad(), in_eval_mode(model):
        _, logits = model(**batch)
    each = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), reduction="none")
    return -each.view_as(batch["targets"])


def of(seed: int, rows: int = zoo.BATCH) -> dict[str, Tensor]:
    return {"ids": zoo.tokens(seed=seed)[:rows], "targets": zoo.labels(seed=seed + 100)[:rows]}


@pytest.mark.parametrize("spec", SPECS)
def test_scoring_in_training(spec: str) -> None:
    """With the weights as they stand, on the same parameters and buckets; training then goes on as if nothing was."""
    model, batch = zoo.gpt(dropout=0.1)
    program = shardc.compile(model, batch, {"shardc": 1, **SPECS[spec]})
    held_out = [of(5), of(6), of(7, rows=3)]

    def work(mesh: Any) -> tuple[list[Tensor], dict[str, float], dict[str, Tensor], Tensor]:
        engine, other = (program.engine(model, mesh=mesh) for _ in range(2))
        engine.step(batch)
        scores = [engine.score(b, gather=True) for b in held_out]
        part = engine.score(program.local(held_out[0], mesh.rank), local=True)
        totals = engine.score_all(held_out)
        weights = engine.full_state_dict()
        other.step(batch)
        assert torch.equal(engine.step(batch), other.step(batch))
        return scores, totals, weights, part

    for scores, totals, weights, part in loopback(program.mesh, work):
        trained, _ = zoo.gpt()
        trained.load_state_dict(weights)
        want = [of_model(trained, b) for b in held_out]
        for got, x in zip(scores, want, strict=True):
            torch.testing.assert_close(got, x, rtol=1e-12, atol=1e-12)
        assert len(part) == zoo.BATCH // 2
        assert any(torch.allclose(part, half) for half in want[0].chunk(2))
        every = torch.cat([x[b["targets"] != -100] for x, b in zip(want, held_out, strict=True)])
        assert totals["tokens"] == len(every)
        assert totals["logprob"] == pytest.approx(float(every.mean()), rel=1e-12)
        assert totals["perplexity"] == pytest.approx(float((-every.mean()).exp()), rel=1e-12)


def test_running_a_forward_only_program(tmp_path: Path) -> None:
    model, batch = zoo.gpt(dropout=0.1)
    trains = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}})

    def train(mesh: Any) -> None:
        engine = trains.engine(model, mesh=mesh)
        engine.step(batch)
        engine.save(tmp_path / "run")

    loopback(trains.mesh, train)
    program = shardc.compile(
        model,
        batch,
        {"shardc": 1, **SPECS["pp zero3"]},
        forward=lambda output, batch: {
            "logits": output[1],
            "right": (output[1].argmax(-1) == batch["targets"]).sum(),
            "nll": (F.cross_entropy(output[1].flatten(0, 1), batch["targets"].flatten(), reduction="sum"),
                    (batch["targets"] != -100).sum()),
        },
    )  # fmt: skip
    batches = [of(5), of(6), of(7, rows=3)]

    def work(mesh: Any) -> Any:
        run = program.forward(model, mesh=mesh)
        run.load(tmp_path / "run")
        values = [run(b, gather=True) for b in batches]
        part = run(program.local(batches[0], mesh.rank), local=True)
        return values, part, run.evaluate_all(batches), run.full_state_dict(), run.score(batches[0])

    for values, part, means, weights, score in loopback(program.mesh, work):
        trained, _ = zoo.gpt()
        trained.load_state_dict(weights)
        assert not torch.equal(trained.state_dict()["ln_f.weight"], model.state_dict()["ln_f.weight"])
        with torch.no_grad(), in_eval_mode(trained):
            logits = [trained(**b)[1] for b in batches]
        for got, x in zip(values, logits, strict=True):
            torch.testing.assert_close(got["logits"], x, rtol=1e-12, atol=1e-12)
        assert part["logits"].shape == (zoo.BATCH // 2, *logits[0].shape[1:])
        scores = torch.cat([of_model(trained, b)[b["targets"] != -100] for b in batches])
        assert means["nll"] == pytest.approx(float(-scores.mean()), rel=1e-12)
        assert means["right"] == sum(
            int((x.argmax(-1) == b["targets"]).sum()) for x, b in zip(logits, batches, strict=True)
        )
        assert any(torch.allclose(score, half) for half in of_model(trained, batches[0]).chunk(2))


def test_a_folder_scores(tmp_path: Path) -> None:
    model, batch = zoo.gpt()
    shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}, forward="score").save(tmp_path / "p")
    program = shardc.load(tmp_path / "p")
    for got in loopback(program.mesh, lambda mesh: program.forward(model, mesh=mesh).score(batch, gather=True)):
        torch.testing.assert_close(got, of_model(model, batch), rtol=1e-12, atol=1e-12)


def refused(program: Program, work: Any) -> str:
    with pytest.raises(ShardcError) as e:
        loopback(program.mesh, work)
    return str(e.value)


def test_what_is_refused(tmp_path: Path) -> None:
    model, batch = zoo.gpt()
    spec = {"shardc": 1, "mesh": {"dp": 1}}
    trains, forward = shardc.compile(model, batch, spec), shardc.compile(model, batch, spec, forward=True)
    assert "there is no loss to train by" in refused(forward, lambda m: forward.engine(model, mesh=m).step(batch))
    assert "use program.forward(model)" in refused(forward, lambda m: forward.module(model, mesh=m))
    assert "shardc.compile(..., forward=True)" in refused(trains, lambda m: trains.forward(model, mesh=m))
    with pytest.raises(ShardcError, match="optimizer"):
        forward.forward(model, optimizer=None)
    trains.save(tmp_path / "p")
    loaded = shardc.load(tmp_path / "p")
    assert 'forward="score"' in refused(loaded, lambda m: loaded.engine(model, mesh=m).score(batch))
