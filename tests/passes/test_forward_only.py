"""Forward-only programs: scores and outputs equal one device's on every mesh, and nothing is kept for a backward."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.errors import ShardcError
from shardc.ir.graph import source_of, values_of
from shardc.ir.metadata import Value
from shardc.layer_names import layer_of
from shardc.recompile import in_eval_mode
from shardc.runtime.mesh.loopback import loopback
from tests import live_bytes, zoo
from tests.zoo import hf, hf_more

#: Whose labels the loss compares with the logits beside them, not with those of the position before.
UNSHIFTED = {"bert", "bart", "t5"}
FAMILIES = [
    *("llama", "gpt2", "mistral", "qwen2", "qwen3", "gemma2", "persimmon", "gpt_neox", "opt", "bloom", "falcon"),
    *("mixtral", *sorted(UNSHIFTED)),
]
TP = {"shard": {"use": "structure"}}
SPECS: dict[str, dict[str, Any]] = {
    "pp dp tp zero3": {
        "mesh": {"pp": 2, "dp": 2, "tp": 2},
        **TP,
        "data": {"zero": 3},
        "pipeline": {"axis": "pp", "stages": 2, "schedule": "1f1b"},
        "batch": {"microbatches": 2},
    },
    "cp, microbatches": {"mesh": {"cp": 2}, "sequence": {"axis": "cp"}, "batch": {"microbatches": 2}},
    "dp tp padded": {"mesh": {"dp": 3, "tp": 3}, **TP, "uneven": "pad", "batch": {"microbatches": 2}},
}


def built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    families = hf.FAMILIES | hf_more.FAMILIES
    model, batch = zoo.ALL[name]() if name in zoo.ALL else hf.build(families[name])
    return model, batch


def plain_score(model: nn.Module, batch: dict[str, Tensor], *, shifted: bool) -> Tensor:
    """Of one device, over all logits at once."""
    with torch.no_grad(), in_eval_mode(model):
        logits = model(**batch).logits
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:] if shifted else batch["labels"]
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return picked.masked_fill(targets == -100, 0.0)


def run(program: Program, model: nn.Module, batch: Any, **options: Any) -> list[dict[str, Tensor]]:
    return loopback(program.mesh, lambda mesh: program.forward(model, mesh=mesh)(batch, **options))


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_equal_one_device(name: str) -> None:
    model, batch = built(name)
    with zoo.Wide(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own
        with in_eval_mode(model):
            captured = capture(model, batch, prove=False)
        want = plain_score(model, batch, shifted=name not in UNSHIFTED)
        for spec in SPECS.values():
            program = shardc.compile(model, batch, {"shardc": 1, **spec}, captured=captured, forward="score")
            for got in run(program, model, batch, gather=True):
                off = (got["score"] - want).norm() / want.norm()
                assert off <= 1e-12, f"{off:.1e}"
                assert got["logprob"] == pytest.approx(float(want.sum() / (want != 0).sum()), rel=1e-12)
            check(program, proven=name != "bloom" or "uneven" not in spec)  # head biases: docs/reference/support.md
            found, all_of_it = logits(program), batch["labels"].numel() * zoo.VOCAB
            assert all(math.prod(v.local_shape(program.mesh)) < all_of_it for v in found)
            assert name in ("gemma2", "bart") or not found  # a soft cap, a bias: behind the head


def check(program: Program, *, proven: bool = True) -> None:
    """It is proven, has no gradient, and every stage forwards alone."""
    assert program.forward_only
    proof = program.prove()
    assert proof.ok or not proven, str(proof)
    values = [v for s in program.stages for n in s.graph.nodes for v in values_of(n) if v is not None]
    assert not any(v.requires_grad for v in values)
    if program.schedule is not None:
        assert {a.kind for each in program.schedule.actions for a in each} <= {"F", "SEND_F", "RECV_F"}


def logits(program: Program) -> list[Value]:
    """The values outside of layers that have a number for every class."""
    calls = (n for s in program.stages for n in s.graph.nodes if n.op == "call_function")
    values = (v for n in calls if layer_of(source_of(n).module) is None for v in values_of(n))
    return [v for v in values if v is not None and math.prod(v.shape[:-1]) > 2 and v.shape[-1] == zoo.VOCAB]


@pytest.mark.parametrize(("name", "spec"), list(zip(("gpt", "llama", "resnet_bn"), SPECS, strict=True)))
def test_outputs_equal_one_device(name: str, spec: str) -> None:
    model, batch = zoo.ALL[name]()
    with zoo.Wide():
        model.train()
        program = shardc.compile(model, batch, {"shardc": 1, **SPECS[spec]}, forward=True)
        assert model.training
        with torch.no_grad(), in_eval_mode(model):
            want = model(**batch)
        tensors = {"output": want}
        if name != "resnet_bn":
            tensors = {n: want[n] for n in (("logits", "loss") if name == "llama" else ())} or dict(enumerate(want))
        tensors = {str(n): x for n, x in tensors.items()}
        before = {n: b.clone() for n, b in model.named_buffers()}
        for got in run(program, model, batch, gather=True):
            assert got.keys() == set(tensors)
            for key, x in got.items():
                torch.testing.assert_close(x, tensors[key], rtol=1e-12, atol=1e-12)
        assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
        check(program)
        report = program.verify()
        assert report.ok, report


@pytest.mark.parametrize(
    "spec", [{"mesh": {"dp": 2}, "data": {"zero": 3, "bucket_mb": 0.05}}, {"mesh": {"tp": 2}, **TP}]
)
def test_live_bytes(spec: dict[str, Any]) -> None:
    """Neither logits nor activations of layers that are done: more layers take their weights' bytes, and no more."""
    vocab, length, beside = 2048, 64, {}
    batch = {"ids": zoo.tokens().repeat(1, 4), "targets": zoo.labels().repeat(1, 4)}
    for layers in (2, 4):
        model = zoo.ready(zoo.GPT(vocab, length, 32, 4, layers, 0.0), torch.float32)
        program = shardc.compile(model, batch, {"shardc": 1, **spec}, forward="score", prove=False)
        peak = max(live_bytes.measured(program, model, batch))
        beside[layers] = peak - program.parameter_bytes()
        assert layers > 2 or peak <= program.cost("h100-80g").memory.peak * 1.01
    local_logits = zoo.BATCH * length * vocab * 4 // 2
    assert beside[2] < local_logits / 2
    assert beside[4] < 1.1 * beside[2]


def test_a_pipeline_fills_with_forwards_alone() -> None:
    model, batch = zoo.gpt()
    spec = {"shardc": 1, **SPECS["pp dp tp zero3"]}
    program = shardc.compile(model, batch, spec, forward=True)
    assert program.schedule is not None
    rows = [[str(a) for a in each if a.kind == "F"] for each in program.schedule.actions]
    assert rows == [["0F0", "0F1"], ["1F0", "1F1"]]
    cost = program.cost("h100-80g")
    trained = shardc.compile(model, batch, spec).cost("h100-80g")
    assert cost.flops * 2.9 < trained.flops
    assert cost.memory.peak < trained.memory.peak / 2


def test_what_trains_is_left_out_and_told_once() -> None:
    model, batch = zoo.gpt()
    spec = {
        "mesh": {"dp": 2},
        "data": {"zero": 1},
        "checkpoint": [{"match": "h.*"}],
        "precision": {"compute": "float16", "loss_scale": "dynamic"},
        "execution": {"compile": "layers"},
    }
    program = shardc.compile(model, batch, {"shardc": 1, **spec}, forward=True)
    (note,) = [n for n in program.notes if n.startswith("forward only")]
    for name in ("checkpoint", "execution", "zero: 1", "loss_scale"):
        assert name in note
    assert not program.regions
    assert not program.buckets
    assert program.spec.precision.loss_scale is None
    check(program)


@pytest.mark.parametrize("spec", ["dp tp padded", "pp dp tp zero3"])
def test_folder(spec: str, tmp_path: Path) -> None:
    model, batch = zoo.gpt()
    program = shardc.compile(model, batch, {"shardc": 1, **SPECS[spec]}, forward="score")
    program.save(tmp_path / "p")
    loaded = shardc.load(tmp_path / "p")
    assert loaded.text(full=True) == program.text(full=True)
    assert "return (None, " in program.text()
    check(loaded)
    for a, b in zip(run(program, model, batch), run(loaded, model, batch), strict=True):
        assert all(torch.equal(a[n], b[n]) for n in a)
    assert "score" in loaded.html()
    (tmp_path / "p" / "single.py").write_text(
        (tmp_path / "p" / "single.py").read_text().replace("return (None, ", "return (wte_weight, ")
    )
    with pytest.raises(ShardcError, match="the loss is returned by no stage"):
        shardc.load(tmp_path / "p", trust=True)


def two_losses(output: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = output[1].flatten(0, 1)
    return F.cross_entropy(logits, batch["targets"].flatten()) + F.cross_entropy(-logits, batch["ids"].flatten())


@pytest.mark.parametrize(
    ("loss", "what"),
    [
        (two_losses, "2 cross entropies"),
        (lambda output, batch: output[1].square().mean(), "no cross entropy of class indices"),
    ],
)
def test_what_has_no_score(loss: Any, what: str) -> None:
    with pytest.raises(ShardcError, match=what) as e:
        shardc.compile(*zoo.gpt(), {"shardc": 1, "mesh": {"dp": 2}}, loss=loss, forward="score")
    assert "forward=" in str(e.value)


def test_a_score_of_one_s_own() -> None:
    model, batch = zoo.gpt()

    def twice(output: Any, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        rows = output[1].flatten(0, 1)
        each = [-F.cross_entropy(rows, batch[n].flatten(), reduction="none") for n in ("ids", "targets")]
        return {"ids": each[0].view_as(batch["ids"]), "targets": each[1].view_as(batch["ids"])}

    program = shardc.compile(model, batch, {"shardc": 1, **SPECS["dp tp padded"]}, forward=twice)
    with torch.no_grad(), in_eval_mode(model):
        want = twice(model(**batch), batch)
    for got in run(program, model, batch, gather=True):
        for name, x in want.items():
            torch.testing.assert_close(got[name], x, rtol=1e-12, atol=1e-12)
    check(program)


def test_what_forward_may_be() -> None:
    spec = {"shardc": 1, "mesh": {"dp": 2}}
    with pytest.raises(ShardcError, match="forward is a str, not a function"):
        shardc.compile(*zoo.gpt(), spec, forward="scores")  # type: ignore[arg-type]
    with pytest.raises(ShardcError, match="there is no tensor in it"):
        shardc.compile(*zoo.gpt(), spec, forward=lambda output, batch: {})
    with pytest.raises(ShardcError, match="reads 'labels', but the batch has"):
        shardc.compile(*zoo.gpt(), spec, forward=lambda output, batch: batch["labels"])


@pytest.mark.parametrize(
    ("outputs", "shapes", "gathers"),
    [
        ({}, (4, 16, 128), ["tp"]),  # rows where they are, the classes gathered
        ({"logits": {2: "tp"}}, (4, 16, 64), []),
        ({"*": {1: "tp"}}, (4, 8, 128), []),
        ({"logits": "whole"}, (8, 16, 128), ["dp", "tp"]),
    ],
)
def test_outputs_stay_as_split_as_the_spec_says(outputs: Any, shapes: tuple[int, ...], gathers: list[str]) -> None:
    model, batch = zoo.llama()
    shard = {"*.{q,k,v,gate,up}_proj": "column", "*.{o,down}_proj": "row", "lm_head": "column"}
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": shard, "outputs": outputs, "strict": True}
    program = shardc.compile(model, batch, spec, forward=lambda output, batch: {"logits": output.logits})
    assert program.spec is not None
    assert shardc.Spec.parse(str(program.spec)) == program.spec
    with torch.no_grad(), in_eval_mode(model):
        want = model(**batch).logits
    for rank, got in enumerate(run(program, model, batch)):
        assert got["logits"].shape == shapes
        part = program.outputs[0].layout.local(want, program.mesh, program.mesh.coords(rank))
        torch.testing.assert_close(got["logits"], part, rtol=1e-12, atol=1e-12)
    for got in run(program, model, batch, gather=True):
        torch.testing.assert_close(got["logits"], want, rtol=1e-12, atol=1e-12)
    check(program)
    sent = [n.meta["collective"] for s in program.stages for n in s.graph.nodes if "collective" in n.meta]
    assert sorted(a for c in sent if c.kind == "all_gather" for a in c.axes) == gathers


def test_outputs_of_a_spec_that_cannot_be() -> None:
    def compiled(outputs: Any, mesh: Any) -> None:
        shardc.compile(*zoo.gpt(), {"shardc": 1, "mesh": mesh, "outputs": outputs}, forward=True)

    with pytest.raises(ShardcError, match=r"'logits' matches no output") as e:
        compiled({"logits": {2: "tp"}}, {"tp": 2})
    assert "the outputs are 0, 1" in str(e.value)
    with pytest.raises(ShardcError, match=r"output 1 of shape \[8, 16, 128\].*128 is not divisible by tp=3"):
        compiled({"1": {2: "tp"}}, {"tp": 3})
    with pytest.raises(ShardcError, match="the mesh has no axis 'tq'"):
        compiled({"1": {2: "tq"}}, {"tp": 2})
    with pytest.raises(ShardcError, match="must be `whole`, or a mapping from dim to axis"):
        compiled({"1": "tp"}, {"tp": 2})


def test_an_output_that_a_training_program_does_not_have_is_a_note() -> None:
    """One spec may be for training and for a forward-only program."""
    model, batch = zoo.gpt()
    spec = {"shardc": 1, "mesh": {"tp": 2}, **TP, "outputs": {"logits": {2: "tp"}}}
    notes = shardc.compile(model, batch, spec, loss=lambda output, batch: output[0]).notes
    assert "spec: outputs.logits: pattern 'logits' matches no output: the outputs are the loss alone" in notes


def test_outputs_beside_a_loss() -> None:
    """As split as the spec says, too."""
    model, batch = zoo.gpt()
    spec = {"shardc": 1, "mesh": {"dp": 2, "tp": 2}, **TP, "outputs": {"logits": {2: "tp"}, "other": "whole"}}
    program = shardc.compile(model, batch, spec, loss=lambda output, batch: (output[0], {"logits": output[1]}))
    sim = shardc.simulate(program, model, batch)
    with torch.no_grad():
        torch.testing.assert_close(sim.outputs["logits"], model(**batch)[1], rtol=1e-12, atol=1e-12)
    assert [a for a, _ in program.outputs[0].layout.shards()] == ["dp", "tp"]
