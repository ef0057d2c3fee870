"""Choices that are recorded and replayed: one device's on any mesh, and what is said of those that do not fit."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from shardc.api import Program
from shardc.runtime.mesh.loopback import loopback
from shardc.verify.simulate import Simulation
from tests import equality
from tests.features.choices import models
from tests.features.choices.models import EXPERTS, ROWS, TOKENS, Drawn, Layer, Sparse

PP = {"axis": "pp"}
SPECS: dict[str, dict[str, Any]] = {
    "dp": {"mesh": {"dp": 2}},
    "microbatches": {"mesh": {"dp": 2}, "batch": {"microbatches": 2}},
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "tp+sp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}, "activations": {"embed": {1: "tp"}}},
    "cp": {"mesh": {"cp": 2}, "sequence": {"axis": "cp"}},
    "dp × cp": {"mesh": {"dp": 2, "cp": 2}, "sequence": {"axis": "cp"}, "data": {"zero": 3}},
    "pp": {"mesh": {"pp": 2}, "pipeline": PP, "batch": {"microbatches": 4}},
    "pp × dp": {"mesh": {"pp": 2, "dp": 2}, "pipeline": {**PP, "schedule": "zb-h1"}, "batch": {"microbatches": 2}},
    "recomputed": {"mesh": {"dp": 2}, "checkpoint": [{"match": "layers.*", "save": []}]},
}
EP = {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "layers.*", "axis": "ep"}]}
GATES = ("layers.0.gate", "layers.1.gate")


@lru_cache(maxsize=4)
def built(layer: type = Layer) -> tuple[Any, dict[str, Tensor]]:
    return models.built(layer)


def program(choices: Any, layer: type = Layer, **spec: Any) -> Program:
    model, batch = built(layer)
    choices = choices if isinstance(choices, dict) else {"*.gate" if layer is Layer else "layers.*": choices}
    return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}, **spec, "choices": choices}, loss=models.loss)


def simulated(p: Program, layer: type = Layer, **choices: Any) -> Simulation:
    model, batch = built(layer)
    return shardc.simulate(p, model, {**batch, **choices})


@lru_cache(maxsize=4)
def recorded(layer: type = Layer) -> Simulation:
    return simulated(program("record", layer), layer)


def others() -> dict[str, Tensor]:
    """Choices that the model does not make."""
    generator = torch.Generator().manual_seed(1)
    shape = (ROWS, TOKENS, EXPERTS)
    return {n: torch.rand(shape, generator=generator).argsort(-1)[..., :2].int() for n in GATES}


@pytest.mark.parametrize("layer", [Layer, Sparse, Drawn])
def test_what_was_recorded_replays_bit_by_bit(layer: type) -> None:
    one = recorded(layer)
    again = simulated(program("replay", layer), layer, choices=one.outputs)
    assert torch.equal(again.loss, one.loss)
    assert again.grads.keys() == one.grads.keys()
    assert all(torch.equal(again.grads[n], g) for n, g in one.grads.items())
    assert all(x.dtype == torch.int32 for x in one.outputs.values())


@pytest.mark.parametrize("name", [*SPECS, "ep"])
def test_fixed_choices_are_one_devices_on_any_mesh(name: str) -> None:
    given, spec = others(), SPECS.get(name, EP)
    one = simulated(program("replay"), choices=given)
    assert abs(float(one.loss - recorded().loss)) > 1e-3
    p = program("replay", **spec)
    assert p.prove().ok
    equality.assert_equal(simulated(p, choices=given), one.loss, one.grads)
    p = program("record", **spec)
    assert p.prove().ok
    sim = simulated(p)
    assert all(torch.equal(sim.outputs[n], recorded().outputs[n]) for n in GATES)


@pytest.mark.parametrize("layer", [Sparse, Drawn])
@pytest.mark.parametrize("name", ["dp", "cp", "pp"])
def test_keys_of_attention_and_drawn_tokens(layer: type, name: str) -> None:
    one, p = recorded(layer), program("replay", layer, **SPECS[name])
    assert p.prove().ok
    equality.assert_equal(simulated(p, layer, choices=one.outputs), one.loss, one.grads)


@pytest.mark.parametrize("name", ["dp", "tp+sp", "cp", "pp"])
def test_at_most_four_bytes_per_token_and_choice_are_sent(name: str) -> None:
    spec = SPECS[name]
    model, batch = built()
    plain = shardc.compile(model, batch, {"shardc": 1, **spec}, loss=models.loss)

    def sent(p: Program, **more: Any) -> int:
        return sum(c.bytes for c in simulated(p, **more).comms)

    choices = 2 * ROWS * TOKENS * 2  # layers, tokens, experts of each
    assert sent(program("replay", **spec), choices=recorded().outputs) <= sent(plain)
    assert sent(program("record", **spec)) <= sent(plain) + 4 * choices


def test_an_engine_takes_choices_and_returns_them() -> None:
    model, batch = built()
    p, given = program("replay", mesh={"dp": 2}), recorded().outputs
    model_own = {n: x.reshape(-1, 2).long() for n, x in given.items()}  # [rows * tokens, k], as the model has it

    def work(mesh: Any) -> list[Tensor]:
        engine = p.engine(model, None, mesh=mesh)
        part = engine.local({**batch, "choices": given})
        return [
            engine.backward(batch, choices=given),
            engine.backward(batch, choices=model_own),
            engine.backward({**batch, "choices": given}),
            engine.backward(part, local=True),
            engine.evaluate(batch, choices=given),
        ]

    for losses in loopback(p.mesh, work):
        assert all(abs(float(x - recorded().loss)) < 1e-12 for x in losses)
    forward = shardc.compile(
        model, batch, {"shardc": 1, "mesh": {"dp": 2}, "choices": {"*.gate": "record"}}, forward=True
    )
    values = loopback(forward.mesh, lambda mesh: forward.forward(model, mesh=mesh)(batch, gather=True))[0]
    assert all(torch.equal(values[n], given[n]) for n in GATES)


class Router(torch.nn.Module):
    """A router whose batch is a tensor, or a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = models.Gate()

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        weights, index = self.gate(x)
        taken = (torch.nn.functional.one_hot(index, EXPERTS) * weights[..., None]).sum(-2)
        return (x[:, :EXPERTS] * taken).square().mean() + (0.0 if y is None else y.mean())


@pytest.mark.parametrize("kind", ["tensor", "tuple"])
def test_a_batch_without_names_and_a_module(kind: str) -> None:
    torch.manual_seed(0)
    model, x = Router().double(), torch.randn(8, models.HIDDEN).double()
    batch: Any = x if kind == "tensor" else (x, x + 1)
    spec = {"shardc": 1, "mesh": {"dp": 2}}
    one = shardc.simulate(shardc.compile(model, batch, spec | {"choices": {"gate": "record"}}), model, batch)
    p = shardc.compile(model, batch, spec | {"choices": {"gate": "replay"}})
    assert p.verify().ok

    def work(mesh: Any) -> list[Tensor]:
        mine = slice(4 * mesh.rank, 4 * mesh.rank + 4)
        rows = [t[mine] for t in ([batch] if kind == "tensor" else batch)]
        module = p.module(model, mesh=mesh)
        given = {n: c[mine] for n, c in one.outputs.items()}
        return [p.engine(model, None, mesh=mesh).backward(batch, choices=one.outputs), module(*rows, choices=given)]

    for losses in loopback(p.mesh, work):
        assert all(abs(float(loss.detach() - one.loss)) < 1e-12 for loss in losses)


class Rows(torch.utils.data.Dataset[Any]):
    """Samples with their choices."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> dict[str, Any]:
        own = {n: x[i] for n, x in built()[1].items()}
        return {**own, "choices": {n: x[i] for n, x in recorded().outputs.items()}}


@pytest.mark.parametrize("name", ["dp", "dp × cp"])
def test_a_dataset_gives_choices(name: str) -> None:
    p = program("replay", **SPECS[name])

    def work(mesh: Any) -> list[Tensor]:
        engine = p.engine(built()[0], None, mesh=mesh)
        return [engine.backward(part, local=True) for part in engine.loader(Rows(), shuffle=True)]

    for (loss,) in loopback(p.mesh, work):
        assert abs(float(loss - recorded().loss)) < 1e-12


def test_a_score_records() -> None:
    model, batch = built()
    spec = {"shardc": 1, "mesh": {"dp": 2}, "choices": {"*.gate": "record"}}
    p = shardc.compile(model, batch, spec, loss=models.loss, forward="score")
    assert p.scores
    assert p.prove().ok

    def work(mesh: Any) -> tuple[dict[str, Tensor], dict[str, float]]:
        run = p.forward(model, mesh=mesh)
        return run(batch, gather=True), run.score_all([batch])

    values, means = loopback(p.mesh, work)[0]
    assert all(torch.equal(values[n], recorded().outputs[n]) for n in GATES)
    assert abs(means["logprob"] + float(recorded().loss)) < 1e-12


def test_a_batch_of_other_sizes_and_a_score() -> None:
    model, batch = built()
    p, given = program("replay", mesh={"dp": 2}), recorded().outputs
    few = {n: x[:2, :6] for n, x in batch.items()}

    def work(mesh: Any) -> tuple[Tensor, Tensor, Tensor]:
        engine = p.engine(model, None, mesh=mesh)
        some = {n: x[:2, :6] for n, x in given.items()}
        score = engine.score(batch, choices=given, gather=True)
        return engine.backward(few, choices=some), score, engine.evaluate(batch, choices=given)

    one = shardc.compile(model, few, {"shardc": 1, "mesh": {"dp": 1}}, loss=models.loss)
    loss, score, whole = loopback(p.mesh, work)[0]
    assert abs(float(loss - shardc.simulate(one, model, few).loss)) < 1e-12
    assert abs(float(score.mean() + whole)) < 1e-12


def test_a_batch_that_is_padded_to_a_length() -> None:
    model, batch = built()
    lengths = {"batch": {"lengths": [TOKENS], "pad": {"ids": 0, "labels": -100}}}
    p, few = program("replay", mesh={"dp": 2}, **lengths), {n: x[:, :6] for n, x in batch.items()}
    given = {n: x[:, :6] for n, x in others().items()}
    whole = {n: x.clone() for n, x in others().items()}
    one = simulated(program("replay"), ids=few["ids"], labels=few["labels"], choices=given)

    def work(mesh: Any) -> list[Tensor]:
        engine = p.engine(model, None, mesh=mesh)
        return [engine.backward(few, choices=given), engine.backward(few, choices=whole)]

    for losses in loopback(p.mesh, work):
        assert all(abs(float(loss - one.loss)) < 1e-12 for loss in losses)


def test_weights_are_given_beside_the_indices() -> None:
    both = {"*.gate": {"mode": "record", "weights": True}}
    one = simulated(program(both))
    assert one.outputs["layers.0.gate.weights"].shape == (ROWS, TOKENS, 2)
    p = program({"*.gate": {"mode": "replay", "weights": True}}, mesh={"dp": 2})
    sim = simulated(p, choices=one.outputs)
    assert abs(float(sim.loss - one.loss)) < 1e-12
    assert one.grads.keys() - sim.grads.keys() == {f"{n}.linear.weight" for n in GATES}  # nothing reaches the router
    with pytest.raises(shardc.ShardcError, match="no weights beside it"):
        program({"layers.*": {"mode": "record", "weights": True}}, Sparse)


def test_a_saved_program_replays_and_is_priced(tmp_path: Path) -> None:
    p = program("replay", mesh={"dp": 2})
    p.save(tmp_path / "p")
    loaded = shardc.load(tmp_path / "p", as_compiled=True)
    assert loaded.inputs == p.inputs
    assert "input choices.layers.0.gate" in loaded.text()
    assert loaded.verify().ok
    assert loaded.cost().step_seconds > 0
    assert abs(float(simulated(loaded, choices=recorded().outputs).loss - recorded().loss)) < 1e-12


def changed(value: int) -> dict[str, Tensor]:
    given = {n: x.clone() for n, x in recorded().outputs.items()}
    given["layers.1.gate"][3, 5, 1] = value
    return given


WRONG: dict[str, tuple[Any, str]] = {
    "too large": (lambda: changed(300), r"layers.1.gate chooses 300 at row 3, position 5, \[1\], but there are 8"),
    "negative": (lambda: changed(-1), "layers.1.gate chooses -1 at row 3, position 5"),
    "twice": (
        lambda: changed(int(recorded().outputs["layers.1.gate"][3, 5, 0])),
        "twice at row 3, position 5, .*, and the op gives each once",
    ),
    "length": (lambda: {n: x[:, :5] for n, x in recorded().outputs.items()}, r"i32\[4, 5, 2\], which does not fit"),
    "dtype": (lambda: {n: x.double() for n, x in recorded().outputs.items()}, "(?s)it is f64.*give integers"),
    "missing": (
        lambda: {"layers.0.gate": recorded().outputs["layers.0.gate"]},
        "the choice of layers.1.gate is missing",
    ),
    "unknown": (
        lambda: {**recorded().outputs, "layers.2.gate": torch.zeros(1)},
        "(?s)of this name: layers.2.gate.*mean",
    ),
    "none": (lambda: None, "the program replays choices, and it was given none"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_choice_that_does_not_fit_stops_all_ranks(kind: str) -> None:
    model, batch = built()
    p, (make, text) = program("replay", mesh={"dp": 2}), WRONG[kind]
    errors = []

    def work(mesh: Any) -> None:
        engine = p.engine(model, None, mesh=mesh, check=False)
        with pytest.raises(shardc.ShardcError, match=text) as e:
            engine.backward(batch, choices=make())
        errors.append(str(e.value))

    loopback(p.mesh, work)
    assert len(errors) == 2
    assert errors[0] == errors[1]


@pytest.mark.parametrize(
    ("choices", "text"),
    [
        ({"*.gatt": "replay"}, "did you mean '*.gate'"),
        ({"embed": "record"}, "matches embed, which makes no choice\n  fix: modules that make one: layers.0.gate"),
        ({"*.gate": "both"}, "one of record, replay"),
        ({"*.gate": {"weights": True}}, "needs `mode`"),
    ],
)
def test_a_spec_that_names_no_choice(choices: Any, text: str) -> None:
    with pytest.raises(shardc.ShardcError) as e:
        program(choices)
    assert text in str(e.value)


def test_a_program_that_replays_none_takes_none() -> None:
    model, batch = built()
    p = program("record")
    with pytest.raises(shardc.ShardcError, match="the program replays none"):
        p.engine(model, None, mesh=None if p.mesh.world > 1 else _one(p)).backward(batch, choices=others())


def _one(p: Program) -> Any:
    return loopback(p.mesh, lambda mesh: mesh)[0]


def test_a_pattern_of_some_modules_that_choose_is_noted() -> None:
    p = program({"{embed,layers.0.gate}": "record"})
    assert [o.name for o in p.outputs] == ["layers.0.gate"]
    assert any("also matches modules that make no choice: embed" in note for note in p.notes)
