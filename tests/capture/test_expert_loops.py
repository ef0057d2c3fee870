"""Loops over experts, as people write them, are the experts op: captured, proven, equal on meshes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.ir.placement import Shard
from shardc.runtime import ops
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.state.export import export_safetensors
from shardc.runtime.state.owners import RankState
from tests import equality, zoo
from tests.zoo import expert_loops, hf, hf_more

MESHES: dict[str, dict[str, Any]] = {
    "dp=2": {"mesh": {"dp": 2}, "data": {"axis": "dp"}},
    "tp=2": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
}


def build(style: str) -> tuple[nn.Module, tuple[Tensor]]:
    torch.manual_seed(0)
    model = expert_loops.Model(expert_loops.STYLES[style])
    return model, (torch.randint(0, expert_loops.VOCAB, (4, 6)),)


@cache
def one(style: str) -> equality.Reference:
    return equality.reference(lambda: build(style))


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("style", expert_loops.STYLES)
def test_equal_to_one_device(style: str, mesh: str) -> None:
    reference = one(style)
    program = reference.compile({"shardc": 1, **MESHES[mesh]})
    assert len(program.graph.find_nodes(op="call_function", target=ops.experts)) == 1
    sim = reference.on({"shardc": 1, **MESHES[mesh]})
    equality.assert_equal(sim, reference.loss, reference.grads)


def test_eager_experts_of_transformers() -> None:
    model, batch = hf.build(hf_more.FAMILIES["mixtral"], torch.float32, experts_implementation="eager")
    program = capture(model, batch)
    assert len(program.graph.find_nodes(op="call_function", target=torch.ops.shardc.experts.default)) == 2
    assert not any("run on all rows" in n for n in program.notes)


# --- what stays a loop, and what is refused ---------------------------------------------------------------------------


class Rows(nn.Module):
    """function(rows of a mask) for two masks, put back."""

    def __init__(self, forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.first, self.second = forward, nn.Linear(8, 8), nn.Linear(8, 8)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.function(self, x, x.argmax(-1) % 2).square().sum()


def capture_rows(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> Program:
    torch.manual_seed(0)
    return capture(Rows(forward).double(), (torch.randn(10, 8, dtype=torch.float64),))


def norms(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    """Not two products with elementwise ops in between: right, and not one op."""
    out = torch.zeros_like(x)
    for e, linear in enumerate((s.first, s.second)):
        rows = torch.where(chosen == e)[0]
        out[rows] = F.layer_norm(linear(x[rows]).relu(), (8,)).softmax(-1)
    return out


def lists(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    rows = [(chosen == e).nonzero().view(-1) for e in range(2)]
    found = torch.cat([linear(x[r]) for linear, r in zip((s.first, s.second), rows, strict=True)])
    return torch.zeros_like(x).index_add(0, torch.cat(rows), found)


def rebinds(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    for e, linear in enumerate((s.first, s.second)):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            x = x.index_add(0, rows, linear(x[rows]))
    return x


def listed(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e, linear in enumerate((s.first, s.second)):
        rows = torch.where(chosen == e)[0].tolist()
        if not rows:
            continue
        out[rows] += linear(x[rows])
    return out


def known_too(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    """A mask whose values are known, beside those that are not."""
    return listed(s, x, chosen)[:, torch.tensor([True, False] * 4)] + listed(s, x, chosen)[:, ::2]


def replaced(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    """Rows of a mask with two dims, put in the place of others."""
    out = x * 1
    for e, linear in enumerate((s.first, s.second)):
        rows, _ = torch.where(chosen[:, None] == e)
        if len(rows):
            out[rows] = linear(x[rows])
    return out


def asked(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    """Rows are asked what does not depend on their number, which is checked as other values are."""
    out, numbers = torch.zeros_like(x), torch.bincount(chosen, minlength=2).tolist()
    for e, linear in enumerate((s.first, s.second)):
        rows = x[chosen == e]
        assert rows.dim() == rows.ndim == 2
        assert rows.dtype == x.dtype
        assert isinstance(numbers[e], int)
        assert numbers[e] <= 10
        if torch.numel(rows) > 0:
            out[chosen == e] = linear(rows).view(rows.size(0), 2, 4).flip(1).flatten(1)
    return out


@pytest.mark.parametrize("forward", [norms, lists, rebinds, listed, known_too, replaced, asked])
def test_any_rows_that_are_chosen(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Captured, and proven by the capture."""
    program = capture_rows(forward)
    assert not program.graph.find_nodes(op="call_function", target=torch.ops.shardc.experts.default)


def two_columns(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out, (rows, column) = torch.zeros_like(x), torch.where(torch.stack([chosen == 0, chosen == 2], 1))
    out[rows] = s.second(x[rows]) * (column[:, None] + 1)
    return out


def part_of_sorted(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    order, numbers = chosen.argsort(stable=True), torch.bincount(chosen, minlength=2).tolist()
    return torch.cat([s.second(x[order][: numbers[0]])]).mean(0)


@pytest.mark.parametrize("forward", [listed, two_columns, part_of_sorted])
def test_masks_of_other_sizes(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    """Also all rows and none: nothing depends on the sample batch."""
    model, x = Rows(forward).double(), torch.randn(10, 8, dtype=torch.float64)
    program = shardc.compile(model, (x,), {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    for y in (x.cos() * 3, *(x[i : i + 1].repeat(10, 1) for i in range(4))):
        run = shardc.simulate(program, model, (y,))
        torch.testing.assert_close(run.loss, model(y).detach(), rtol=1e-12, atol=0, equal_nan=True)


def number_of_a_list(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.shape[0] == 0:
            continue
        out[rows] = x[rows] / len(rows.tolist())
    return out


def test_a_refusal_names_the_line_that_rows_cannot_pass() -> None:
    """Not that of the first number which Python reads: rows of a mask take care of it."""
    with pytest.raises(shardc.ShardcError, match="their number is used") as e:
        capture_rows(number_of_a_list)
    assert e.value.where == f"test_expert_loops.py:{number_of_a_list.__code__.co_firstlineno + 6}"
    assert "len(rows.tolist())" in e.value.what


def test_a_loop_that_stays_one_is_noted() -> None:
    (note,) = [n for n in capture_rows(norms).notes if "experts" in n]
    assert "all 2 experts run on all rows" in note
    assert "test_expert_loops.py:" in note


def mixes_rows(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        out[rows] = x[rows] - x[rows].mean(0)
    return out


def uses_their_number(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        out[rows] = x[rows] * rows.numel()
    return out


def more_than_rows(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    for e in range(2):
        mask = chosen == e
        if mask.any():
            x = x * 2
    return x


def another_mask(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        if (chosen == e).any():
            out[chosen != e] += x[chosen != e]
    return out


def changes_all(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() == 0:
            continue
        out[rows] += x[rows]
        out.mul_(2)
    return out


def counts(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out, busy = torch.zeros_like(x), 0
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() == 0:
            continue
        out[rows] += x[rows]
        busy += 1
    return out * busy


def has_else(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 0:
            out[rows] += x[rows]
        else:
            out += 1
    return out


def only_many(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        if rows.numel() > 2:
            out[rows] += x[rows]
    return out


def one_more(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out, numbers = torch.zeros_like(x), torch.bincount(chosen, minlength=2).tolist()
    for e in range(2):
        if numbers[e] + 1 > 2:
            out[chosen == e] += x[chosen == e]
    return out


def more_than_others(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out, numbers = torch.zeros_like(x), torch.bincount(chosen, minlength=2).tolist()
    if numbers[0] > numbers[1]:
        out[chosen == 0] += x[chosen == 0]
    return out


def remembers(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out, last, numbers = torch.zeros_like(x), 0, torch.bincount(chosen, minlength=2).tolist()
    for e in range(2):
        if numbers[e] == 0:
            continue
        out[chosen == e] += x[chosen == e]
        last = numbers[e]
    out[:last] = 0.0
    return out


def first_of_a_list(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    return x[torch.where(chosen == 0)[0].tolist()[0]]


MORE = [first_of_a_list, mixes_rows, uses_their_number, more_than_rows, another_mask, changes_all, counts, has_else]
MORE += [only_many, one_more, more_than_others, remembers]


@pytest.mark.parametrize("forward", MORE)
def test_what_is_more_than_rows_is_refused(forward: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    with pytest.raises(shardc.ShardcError, match="depends on a tensor's value"):
        capture_rows(forward)


def drops(s: Rows, x: Tensor, chosen: Tensor) -> Tensor:
    out = torch.zeros_like(x)
    for e in range(2):
        rows = torch.where(chosen == e)[0]
        out[rows] += torch.nn.functional.dropout(x[rows], 0.1)
    return out


def test_dropout_inside_of_an_expert_is_refused_by_name() -> None:
    with pytest.raises(shardc.ShardcError, match="an expert draws random numbers for its rows") as e:
        capture_rows(drops)
    assert "move it after them" in e.value.fix


# --- lists of experts, spread over ranks ------------------------------------------------------------------------------

EP = {"mesh": {"ep": 2}, "experts": [{"match": "moe", "axis": "ep"}]}
SPREAD: dict[str, dict[str, Any]] = {
    "ep=2": EP,
    "ep=2 tp=2": {**EP, "mesh": {"ep": 2, "tp": 2}, "shard": {"use": "structure"}},
    "experts over dp, ZeRO 2": {
        "mesh": {"dp": 2},
        "data": {"axis": "dp", "zero": 2},
        "experts": [{"match": "moe", "axis": "dp"}],
    },
}


@pytest.mark.parametrize(
    ("style", "mesh"), [(s, m) for s in expert_loops.STYLES for m in SPREAD if m == "ep=2" or s in ("Mixtral", "Nano")]
)
def test_each_rank_has_its_experts(style: str, mesh: str) -> None:
    reference = one(style)
    spec = {"shardc": 1, **SPREAD[mesh]}
    sim = reference.on(spec)
    equality.assert_equal(sim, reference.loss, reference.grads)
    program = reference.compile(spec)
    axis = SPREAD[mesh]["experts"][0]["axis"]
    weights = [p for p in program.params if p.fqn.startswith(("moe.experts.", "moe.input", "moe.output"))]
    assert weights
    assert all(p.shape[0] == expert_loops.EXPERTS and p.layout[axis] == Shard(0) for p in weights)


def test_names_are_the_models_own() -> None:
    model, batch = build("Mixtral")
    program = shardc.compile(model, batch, {"shardc": 1, **EP})
    stack = program.param("moe.experts.2.w1.weight")
    assert stack.fqn == "moe.experts.*.w1.weight"
    assert stack.members == tuple(f"moe.experts.{i}.w1.weight" for i in range(expert_loops.EXPERTS))
    states = loopback(program.mesh, lambda mesh: program.engine(model, mesh=mesh).full_state_dict())
    want = model.state_dict()
    for state in states:
        assert state.keys() == want.keys()
        assert all(torch.equal(state[n], want[n]) for n in want)


def test_a_pattern_of_one_expert_of_a_stack_is_refused() -> None:
    """Experts that are one weight are split alike."""
    spec = {"shardc": 1, **EP, "mesh": {"ep": 2, "tp": 2}}
    for name in ("moe.experts.2.w1", "moe.experts.2.w1.weight", "moe.experts.{0,1}.w1"):
        with pytest.raises(shardc.ShardcError, match="experts that are one weight") as e:
            one("Mixtral").compile({**spec, "shard": {name: "column"}})
        assert "name all of them: 'moe.experts.*.w1.weight'" in e.value.fix
    one("Mixtral").compile({**spec, "shard": {"moe.experts.*.w2": "row"}})


def test_training_checkpoints_and_files(tmp_path: Path) -> None:
    """AdamW on ep=2, saved after two steps; dp=2, which keeps experts by themselves, goes on alike, and one device."""
    with zoo.Wide():
        model, batch = build("Mixtral")
        ep = shardc.compile(model, batch, {"shardc": 1, **EP})
        dp = shardc.compile(model, batch, {"shardc": 1, **MESHES["dp=2"]})

    def first(mesh: Any) -> list[float]:
        engine = ep.engine(model, adamw, mesh=mesh)
        losses = [float(engine.step(batch)) for _ in range(2)]
        engine.save(tmp_path / "ep")
        export_safetensors(tmp_path / "out", RankState(ep, mesh, engine.wholes(), engine.buffers))
        return [*losses, float(engine.step(batch))]

    def again(program: Program, folder: str) -> Callable[[Any], list[float]]:
        def work(mesh: Any) -> list[float]:
            engine = program.engine(model, adamw, mesh=mesh)
            engine.load(tmp_path / folder)
            engine.save(tmp_path / "next")
            return [float(engine.step(batch))]

        return work

    *_, third = losses = loopback(ep.mesh, first)[0]
    one_device = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(one_device.parameters(), lr=1e-2)
    for loss in losses:
        with zoo.Wide():
            found = one_device(*batch)
        assert abs(found.item() - loss) < 1e-12
        optimizer.zero_grad()
        found.backward()
        optimizer.step()
    assert abs(loopback(dp.mesh, again(dp, "ep"))[0][0] - third) < 1e-12
    assert abs(loopback(ep.mesh, again(ep, "next"))[0][0] - third) < 1e-12  # what dp=2 saved
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert {n: x.shape for n, x in saved.items()} == {n: x.shape for n, x in model.state_dict().items()}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def test_a_builder_an_artifact_and_verify(tmp_path: Path) -> None:
    """Weights of a builder are the same stacked and by themselves; a stack survives its text."""
    model, batch = build("Nano")
    program = shardc.compile(model, batch, {"shardc": 1, **EP})
    assert program.verify().ok
    program.save(tmp_path / "program")
    loaded = shardc.load(tmp_path / "program")
    assert loaded.params == program.params

    def weights(p: Program) -> dict[str, Tensor]:
        return loopback(p.mesh, lambda mesh: p.engine(lambda: build("Nano")[0], mesh=mesh, seed=3).full_state_dict())[0]

    plain = weights(shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 2}}))
    assert plain.keys() == model.state_dict().keys()
    assert all(torch.equal(x, plain[n]) for n, x in weights(loaded).items())
    assert program.cost().memory.peak > 0


def test_an_optimizer_of_whole_parameters_is_refused_for_a_stack() -> None:
    """It would scale the update of one expert by the size of another."""
    model, batch = build("Mixtral")
    program = shardc.compile(model, batch, {"shardc": 1, **EP})
    with pytest.raises(shardc.ShardcError, match="experts"):
        loopback(program.mesh, lambda mesh: program.engine(model, torch.optim.Adafactor, mesh=mesh))
