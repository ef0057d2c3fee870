"""Pipelines as they run: what an engine does around them, checkpoints, artifacts, reports, failures, and real
processes.
"""

from __future__ import annotations

import ast
import functools
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardc
from shardc.api import Program
from shardc.cli import app
from shardc.report.comm import comm_rows
from shardc.runtime.mesh.loopback import loopback
from tests import warm, zoo
from tests.passes.pipeline.test_pipeline import SHARD, spec

STEPS = 3


@functools.cache
def small() -> zoo.Built:
    """A GPT that has no dropout, in float64."""
    return zoo.gpt(layers=2)


@functools.cache
def _program(text: str) -> Program:
    with zoo.Wide():
        return shardc.compile(*small(), ast.literal_eval(text), prove=False)


def of(asked: dict[str, Any]) -> Program:
    """A spec's program; two tests of one spec share it."""
    return _program(str(asked))


ONE: dict[str, Any] = {"shardc": 1, "mesh": {}}


def every(of_ranks: list[Any]) -> Any:
    """What all ranks found, alike."""
    first, *others = of_ranks
    assert all(torch.equal(torch.as_tensor(x), torch.as_tensor(first)) for x in others)
    return first


def still(params: Any) -> torch.optim.Optimizer:
    """An optimizer that changes nothing."""
    return torch.optim.SGD(params, lr=0.0)


# --- around the step


@pytest.mark.parametrize(
    "asked", [spec({"pp": 2}, 2), spec({"pp": 2, "dp": 2}, 2, schedule="zb-v", data={"axis": "dp", "zero": 2})], ids=str
)
def test_norms_and_clipping_count_every_parameter_once(asked: dict[str, Any]) -> None:
    """The tied embedding too; ranks agree, and train on as one device does."""

    def train(mesh: Any, p: Program) -> tuple[list[float], dict[str, Tensor]]:
        engine = p.engine(small()[0], lambda ps: torch.optim.SGD(ps, lr=0.1), mesh=mesh, clip_norm=0.05)
        norms = []
        for _ in range(STEPS):
            engine.step(small()[1])
            assert engine.grad_norm is not None
            norms.append(float(engine.grad_norm))
        return norms, engine.full_state_dict()

    ((norms, state),) = loopback(of(ONE).mesh, lambda mesh: train(mesh, of(ONE)))
    found = loopback(of(asked).mesh, lambda mesh: train(mesh, of(asked)))
    assert min(norms) > 0.05
    for n, s in found:
        assert n == pytest.approx(norms, rel=1e-12)
        for name, x in state.items():
            torch.testing.assert_close(s[name], x, rtol=0, atol=1e-12)


def test_groups_and_schedulers_of_parameters_that_a_rank_does_not_have() -> None:
    """A group that is empty on a stage, and a stage whose parameters are frozen: patterns fit the whole model."""
    model, batch = zoo.gpt(layers=2)
    for p in model.h[0].parameters():  # type: ignore[union-attr]
        p.requires_grad_(False)

    def optimizer(ps: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(shardc.groups(ps, {"h.1.*": {"lr": 1e-2}, "*bias": {"weight_decay": 0.0}}), lr=1e-3)

    def train(mesh: Any, p: Program) -> tuple[dict[str, Tensor], float]:
        engine = p.engine(model, optimizer, mesh=mesh, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5))
        for _ in range(STEPS):
            engine.step(batch)
        return engine.full_state_dict(), engine.lr or 0.0

    one = shardc.compile(model, batch, ONE, prove=False)
    ((expected, _),) = loopback(one.mesh, lambda mesh: train(mesh, one))
    asked = shardc.compile(model, batch, spec({"pp": 4}, 2, cut=["h.0", "h.1", "ln_f"]), prove=False)
    for state, _ in loopback(asked.mesh, lambda mesh: train(mesh, asked)):
        for name, x in expected.items():
            torch.testing.assert_close(state[name], x, rtol=0, atol=1e-10)


def test_every_rank_returns_the_loss_and_evaluates() -> None:
    p = of(spec({"pp": 2, "dp": 2}, 2, schedule="interleaved"))

    def run(mesh: Any) -> list[Tensor]:
        engine = p.engine(small()[0], still, mesh=mesh)
        batch = small()[1]
        return [torch.stack([engine.evaluate(batch), engine.step(batch), engine.evaluate(batch)])]

    with zoo.Wide(), torch.no_grad():
        expected = small()[0](**small()[1])[0]
    for (losses,) in loopback(p.mesh, run):
        torch.testing.assert_close(losses, expected.expand(3), rtol=1e-12, atol=0)


def test_local_parts_of_a_batch() -> None:
    """Ranks of one data coordinate take the same rows, whatever their stage."""
    p = of(spec({"pp": 2, "dp": 2}, 2))
    batch = small()[1]

    def run(mesh: Any) -> tuple[Tensor, Tensor]:
        engine = p.engine(small()[0], still, mesh=mesh)
        mine = {k: x.chunk(2)[mesh.coordinate("dp")] for k, x in batch.items()}
        return engine.step(batch), engine.step(mine, local=True)

    for whole, part in loopback(p.mesh, run):
        assert torch.equal(whole, part)


def test_an_error_in_a_stage_names_stage_microbatch_and_action_and_ends_all_ranks() -> None:
    p = of(spec({"pp": 2, "dp": 2}, 4))
    began = threading.active_count()

    def run(mesh: Any) -> None:
        engine = p.engine(small()[0], mesh=mesh)
        if mesh.coordinate("pp") == 1 and mesh.coordinate("dp") == 1:
            stage = engine.interpreter.stages[1]
            whole, seen = stage.joint.forward, []

            def broken(*args: Any) -> Any:
                seen.append(1)
                if len(seen) == 3:
                    raise FloatingPointError("the model's own")
                return whole(*args)

            stage.joint.forward = broken  # type: ignore[method-assign]
        engine.step(small()[1])

    with pytest.raises(FloatingPointError, match="the model's own") as e:
        loopback(p.mesh, run)
    assert e.value.__notes__ == ["at 1F2 of the schedule: stage 1, microbatch 2", "on rank 3 of 4 (pp=1, dp=1)"]
    assert threading.active_count() <= began + 1


MODEL = """
import os, signal
import torch, shardc
from torch import nn

seen = []

@torch.library.custom_op("failing{name}::through", mutates_args=())
def through(x: torch.Tensor) -> torch.Tensor:
    if "RANK" in os.environ:
        seen.append(x)
        if len(seen) == 6:
            {body}
    return x.clone()

through.register_fake(torch.empty_like)
through.register_autograd(lambda ctx, g: g)
shardc.rule(torch.ops.failing{name}.through.default, "... -> ...")

class Second(nn.Linear):
    def forward(self, x):
        return super().forward(through(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), Second(4, 4)

    def forward(self, x):
        return self.two(self.one(x).relu()).square().mean()

def model():
    return Net()

def batch():
    return {{"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(0))}}
"""


@pytest.mark.parametrize(
    ("name", "body", "said"),
    [
        (
            "kill",
            "os.kill(os.getpid(), signal.SIGKILL)",
            "rank 1 (pp=1) was killed by SIGKILL in step 2, at 1F1 of the schedule: stage 1, microbatch 1",
        ),
        (
            "raise",
            "raise ValueError('the culprit')",
            "rank 1 (pp=1) failed with exit status 1 in step 2, at 1F1 of the schedule: stage 1, microbatch 1",
        ),
    ],
)
def test_a_process_that_fails_ends_all_and_names_where_it_was(name: str, body: str, said: str, tmp_path: Path) -> None:
    """In its second step; whatever its peers say."""
    (tmp_path / "model.py").write_text(MODEL.format(name=name, body=body))
    (tmp_path / "spec.yaml").write_text(str(shardc.Spec.load(spec({"pp": 2}, 4, cut=["two"]))))
    done = warm.run("run", "model.py", "spec.yaml", "--steps", "1000", cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert f"{said}; all ranks were ended" in done.stderr
    if name == "raise":
        assert "ValueError: the culprit\nin two (model.py:22): " in done.stderr
        assert "\nat 1F1 of the schedule: stage 1, microbatch 1" in done.stderr


def test_modules_of_ones_own_loop_have_no_stages() -> None:
    p = of(spec({"pp": 2}))
    with pytest.raises(shardc.ShardcError, match="pipeline"):
        loopback(p.mesh, lambda mesh: p.module(small()[0], mesh=mesh))


# --- checkpoints: any mesh's on any other

MESHES = {
    "one": ONE,
    "dp=2": {"shardc": 1, "mesh": {"dp": 2}},
    "tp=2": {"shardc": 1, "mesh": {"tp": 2}, "shard": SHARD["gpt"]},
    "pp=2": spec({"pp": 2}, 2),
    "pp=4": spec({"pp": 4}, 2, schedule="zb-h1"),
    "pp=2 zb-v": spec({"pp": 2}, 2, schedule="zb-v"),
    "pp=2 dp=2 zero 3": spec({"pp": 2, "dp": 2}, 2, data={"axis": "dp", "zero": 3}),
}


def trained(name: str, steps: int, *, load: Path | None = None, save: Path | None = None) -> dict[str, Tensor]:
    """The whole model after so many steps of AdamW, from a checkpoint or the model; alike on all ranks."""
    p = of(MESHES[name])

    def run(mesh: Any) -> dict[str, Tensor]:
        engine = p.engine(small()[0], mesh=mesh)
        if load is not None:
            engine.load(load)
        for _ in range(steps):
            engine.step(small()[1])
        if save is not None:
            engine.save(save)
        return engine.full_state_dict()

    first, *others = loopback(p.mesh, run)
    for other in others:
        assert all(torch.equal(x, other[name]) for name, x in first.items())
    return first


@pytest.mark.parametrize("source", ["pp=2", "pp=2 dp=2 zero 3", "dp=2"])
def test_checkpoints_go_from_any_mesh_to_any_other(source: str, tmp_path: Path) -> None:
    """Bit for bit; and with the optimizer's state, so that they train on alike."""
    whole = trained(source, 2, save=tmp_path / "there")
    on = trained(source, 1, load=tmp_path / "there")
    for name in MESHES:
        if name == source or (source == "dp=2" and "pp" not in name):
            continue
        assert all(
            torch.equal(x, whole[k]) for k, x in trained(name, 0, load=tmp_path / "there", save=tmp_path / name).items()
        ), name
        for k, x in trained(source, 1, load=tmp_path / name).items():  # and back, with the moments
            assert torch.equal(x, on[k]), (name, k)


def test_export(tmp_path: Path) -> None:
    """The plain model's weights, once each, from all stages."""
    from safetensors.torch import load_model

    from shardc.runtime.state.export import export_safetensors
    from shardc.runtime.state.owners import RankState

    p = of(MESHES["pp=4"])

    def run(mesh: Any) -> None:
        engine = p.engine(small()[0], mesh=mesh)
        export_safetensors(tmp_path / "model.safetensors", RankState(p, mesh, engine.wholes(), engine.buffers))

    loopback(p.mesh, run)
    model = zoo.gpt(layers=2)[0]
    nn.init.zeros_(model.wte.weight)  # type: ignore[union-attr, arg-type]
    load_model(model, tmp_path / "model.safetensors")
    assert all(torch.equal(x, small()[0].state_dict()[k]) for k, x in model.state_dict().items())


# --- the program as a value


@pytest.mark.parametrize(
    "asked",
    [
        spec({"pp": 2, "tp": 2}, 2, schedule="zb-h1", shard=SHARD["gpt"]),
        spec({"pp": 2, "dp": 2}, 4, schedule="interleaved", data={"axis": "dp", "zero": 3}),
    ],
    ids=str,
)
def test_the_artifact_is_the_program(asked: dict[str, Any], tmp_path: Path) -> None:
    p = of(asked)
    p.save(tmp_path)
    loaded = shardc.load(tmp_path)
    assert str(loaded) == str(p)
    assert loaded.schedule == p.schedule
    assert (loaded.edges, loaded.axis, loaded.params, loaded.buffers, loaded.buckets) == (
        p.edges,
        p.axis,
        p.params,
        p.buffers,
        p.buckets,
    )
    a, b = shardc.verify.simulate(loaded, *small()), shardc.verify.simulate(p, *small())
    assert torch.equal(a.loss, b.loss)
    assert all(torch.equal(g, b.grads[n]) for n, g in a.grads.items())


def test_the_artifact_keeps_buffers_that_stages_share(tmp_path: Path) -> None:
    from tests.passes.pipeline.test_pipeline import BUILD

    model, batch = BUILD["self_supervised"]()
    p = shardc.compile(model, batch, spec({"pp": 2}), prove=False)
    p.save(tmp_path)
    sim = shardc.verify.simulate(shardc.load(tmp_path), model, batch, steps=2)
    for name, x in shardc.verify.simulate(p, model, batch, steps=2).state.items():
        assert torch.equal(sim.state[name], x)


def test_verify() -> None:
    model, batch = zoo.gpt(dtype=torch.float32, layers=2)
    report = shardc.compile(model, batch, spec({"pp": 2, "dp": 2}, 2, schedule="zb-v"), prove=False).verify()
    assert report.ok, report.findings


def test_inspect(tmp_path: Path) -> None:
    """One stage's text; and the bytes of what is sent are those that run."""
    p = of(spec({"pp": 2, "dp": 2}, 4, cut=["h.1"]))
    p.save(tmp_path)
    text = invoke("inspect", str(tmp_path), "--stage", "1")
    assert "def stage1(" in text
    assert "def stage0(" not in text
    assert "send_recv/send_recv pp 8192" in text
    table = invoke("inspect", str(tmp_path), "--comm")
    assert "bytes, all stages" in table
    assert "new values" not in table


@pytest.mark.parametrize(
    "asked",
    [
        spec({"pp": 2, "dp": 2}, 4, cut=["h.1"]),
        spec({"pp": 2}, 2, schedule="zb-v"),
        spec({"pp": 2, "tp": 2, "dp": 2}, 2, shard=SHARD["gpt"], data={"axis": "dp", "zero": 2}),
        spec({"pp": 2, "dp": 2}, 2, schedule="interleaved", data={"axis": "dp", "zero": 1}),
        spec({"pp": 2, "dp": 2}, 2, schedule="zb-v", data={"axis": "dp", "zero": 3}),
    ],
    ids=str,
)
def test_what_is_shown_is_what_is_sent(asked: dict[str, Any]) -> None:
    """All bytes by axis, kind and direction, over the ranks of one pipeline."""
    p = of(asked)
    shown: Counter[tuple[str, str, str]] = Counter()
    for row in comm_rows(p.cost()):
        shown[row.axes, row.kind, row.direction] += row.bytes

    def run(mesh: Any) -> list[Any]:
        engine = p.engine(small()[0], mesh=mesh)
        mesh.records.clear()
        engine.step(small()[1])
        return list(mesh.records) if all(mesh.coordinate(a) == 0 for a in p.mesh.names if a != "pp") else []

    ran: Counter[tuple[str, str, str]] = Counter()
    for r in [r for each in loopback(p.mesh, run) for r in each]:
        ran[r.axis, r.kind, r.direction] += r.bytes
    assert shown == ran


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, list(args))
    assert result.exit_code == 0, result.output
    return result.stdout
