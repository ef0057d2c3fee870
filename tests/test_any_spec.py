"""Any spec that compiles gives what one device gives: random meshes, splits, annotations, schedules, ZeRO,
recomputation, on the host or not, padding, compiled or not.

Two steps with dropout and momentum, against the same program on one rank. A few specs of a few models here;
`make fuzz` tries many, their price and artifacts as well, of every model (`make fuzz EXAMPLES=200 MODELS='gpt unet'`).
hypothesis shrinks what fails to the smallest spec that does.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.cost import Cost
from shardc.passes.annotate import model_plan
from shardc.recompile import in_eval_mode
from shardc.report.page.data import data as page_data
from shardc.runtime.data.inputs import with_choices
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.stage.activation_offload import OffloadedTensors
from shardc.runtime.step.engine import Engine
from shardc.verify.simulate import Simulation
from tests import stand_in_compiler, zoo
from tests.features.matrices.optimizers import Lamb
from tests.zoo import hf, hf_more, plain, plain_gradients, plain_losses, plain_more  # noqa: F401 (they fill the zoo)

FEW = ("gpt", "detector", "llama")
MESHES: tuple[dict[str, int], ...] = (
    {"dp": 2},
    {"tp": 2},
    {"pp": 2},
    {"dp": 3},
    {"tp": 3},
    {"tp": 8},
    {"dp": 2, "tp": 2},
    {"tp": 2, "dp": 2},
    {"pp": 2, "dp": 2},
    {"pp": 2, "tp": 2},
    {"dp_outer": 2, "dp": 2},
    {"pp": 4},
    {"pp": 3, "tp": 2},
    {"pp": 2, "dp": 2, "tp": 2},
    {"dp": 4, "tp": 2},
    {"dp_outer": 2, "dp": 2, "tp": 2},
    {"cp": 2},
    {"dp": 2, "cp": 2},
    {"cp": 2, "tp": 2},
    {"cp": 2, "cp_near": 2},
    {"pp": 2, "cp": 2},
)
CHECKPOINTS: tuple[dict[str, Any], ...] = (
    {"save": []},
    {"save": ["linear"]},
    {"save": ["linear", "attention", "collective"]},
    {"budget": 0.5},
    {"recompute": "cheap"},
)
TOLERANCE = 1e-9  # of two steps; the second one's errors are those of the first, times what a step magnifies


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    examples: int | None = metafunc.config.getoption("--fuzz")
    if "examples" in metafunc.fixturenames:
        named: str = metafunc.config.getoption("--fuzz-models")
        metafunc.parametrize("examples", [examples or 6])
        metafunc.parametrize("name", named.split() or (builders() if examples else FEW))


def builders() -> dict[str, Callable[[], zoo.Built]]:
    families = hf.FAMILIES | hf_more.FAMILIES
    return zoo.ALL | plain.ALL | {n: lambda family=family: hf.build(family) for n, family in families.items()}  # type: ignore[misc]


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, 0.01, momentum=0.9)


@lru_cache(maxsize=2)  # examples come model by model
def one(name: str) -> tuple[nn.Module, Any, Program, Simulation]:
    with zoo.Wide(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the model's own
        model, batch = builders()[name]()
        captured = capture(model, batch)
        alone = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, captured=captured)
        return model, batch, captured, shardc.verify.simulate(alone, model, batch, steps=2, optimizer=momentum)


@lru_cache(maxsize=2)
def alone(name: str, own: str) -> Simulation:
    """As `one`, with what a spec says of what is trained."""
    model, batch, captured, _ = one(name)
    program = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}, **json.loads(own)}, captured=captured)
    return shardc.verify.simulate(program, model, batch, steps=2, optimizer=momentum)


@lru_cache(maxsize=2)
def forward(name: str) -> tuple[Program, dict[str, Tensor]] | None:
    """The model's outputs in eval mode: captured, and as one device gives them; None if it writes to weights then."""
    with zoo.Wide(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, batch, *_ = one(name)
        with in_eval_mode(model):
            try:
                captured = capture(model, batch, forward=True)
            except shardc.ShardcError as e:
                if "writes to the parameter" not in str(e):
                    raise
                return None
        alone = shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, captured=captured, forward=True)
        return captured, shardc.verify.simulate(alone, model, batch).outputs


@st.composite
def specs(draw: Any, model: nn.Module, batch: Any) -> dict[str, Any]:
    """Specs that are mostly right: names are the model's own, sizes that do not divide are padded."""
    mesh = draw(st.sampled_from(MESHES))
    spec: dict[str, Any] = {"shardc": 1, "mesh": mesh}
    modules = [n for n, _ in model.named_modules() if n]
    microbatches = draw(st.sampled_from((2, 4, 3) if "pp" in mesh else (1, 2, 4, 3)))
    rows = Counter(x.shape[0] for x in tree_leaves(batch) if isinstance(x, Tensor) and x.dim()).most_common(1)[0][0]
    ranks = math.prod(mesh.get(a, 1) for a in ("dp", "dp_outer")) * microbatches
    if microbatches > 1:
        spec["batch"] = {"microbatches": microbatches}
    if rows % ranks or draw(st.booleans()):
        spec["uneven"] = "pad"
    if "tp" in mesh:
        named = st.dictionaries(
            st.sampled_from(layers(model, *LAYERS) or ["*"]), st.sampled_from(("column", "row")), min_size=1, max_size=4
        )
        use = st.sampled_from(("model", "structure") if model_plan.read(model) else ("structure",)).map(
            lambda u: {"use": u}
        )
        spec["shard"] = draw(use | named)
        places = st.sampled_from(modules).map(starred), st.sampled_from(("", ":in"))
        spec["activations"] = {
            "".join(draw(st.tuples(*places))): {draw(st.sampled_from((1, 0, 2))): "tp"}
            for _ in range(draw(st.integers(0, 2)))
        }
    if "pp" in mesh:
        times, schedules = draw(
            st.sampled_from(((1, ("gpipe", "1f1b", "zb-h1")), (2, ("interleaved", "zb-v", "dualpipe-v"))))
        )
        spec["pipeline"] = {"axis": "pp", "stages": mesh["pp"] * times, "schedule": draw(st.sampled_from(schedules))}
    if "dp" in mesh:
        axis = ["dp_outer", "dp"] if "dp_outer" in mesh else "dp"
        spec["data"] = {"axis": axis, "zero": draw(st.integers(0, 3)), "bucket_mb": draw(st.sampled_from((25, 0.01)))}
    if "cp" in mesh:
        methods, balances = st.sampled_from(("auto", "gather", "ring", "ulysses")), st.sampled_from(("auto", "none"))
        method, axis = draw(methods), "cp"
        if "cp_near" in mesh:
            axis, method = ["cp", "cp_near"], ["ring", draw(methods.filter(lambda m: m != "ring"))]
        spec["sequence"] = {"axis": axis, "method": method, "balance": draw(balances)}
        if draw(st.booleans()):
            spec["data"] = {"axis": ["dp", "cp"] if "dp" in mesh else "cp", "zero": draw(st.integers(0, 3))}
    if draw(st.booleans()):
        spec["loss"] = {"chunks": draw(st.integers(2, 5))}
    if draw(st.booleans()):
        spec["checkpoint"] = [
            {"match": draw(st.sampled_from(modules).map(starred)), **draw(st.sampled_from(CHECKPOINTS))}
        ]
        if len(str(spec)) % 2:  # not drawn, as that would be other examples everywhere
            spec["checkpoint"][0]["offload"] = "cpu"
    if draw(st.booleans()):
        ways: tuple[Any, ...] = ({}, {}, {"compile": "layers"})
        if microbatches > 1 and "pp" not in mesh:
            ways += ({"overlap": "microbatches"}, {"overlap": "microbatches", "compile": "layers"})
            if len(str(spec)) % 2:  # not drawn, as above
                ways = (*ways[:3], {"overlap": "forwards"}, {"overlap": "forwards", "compile": "layers"})
        spec["execution"] = draw(st.sampled_from(ways))
        if len(str(spec)) % 3 == 0:  # not drawn, as above
            spec["execution"] = {**spec["execution"], "graphs": True}
    if draw(st.integers(0, 3)) == 0:
        spec["precision"] = {"products": draw(st.sampled_from(("fp8-rowwise", "mxfp8", "fp8-tensorwise")))}
    if draw(st.integers(0, 3)) == 0:
        linear = layers(model, nn.Linear)
        if linear and draw(st.booleans()):
            kind, match = draw(st.sampled_from(("lora", "dora"))), draw(st.sampled_from(linear))
            spec["adapters"] = [{"match": match, "rank": 2, "alpha": 3, "dropout": 0.1, "kind": kind}]
        else:
            spec["freeze"] = ["*", f"!{draw(st.sampled_from(layers(model, *LAYERS) or ['*']))}"]
    experts = sorted({starred(n) for n in modules if n.endswith("experts")})
    if experts and "dp" in mesh and len(str(spec)) % 2:  # not drawn, as above
        spec |= {"mesh": {**mesh, "ep": 2}, "experts": [{"match": m, "axis": "ep"} for m in experts], "uneven": "pad"}
        axes = spec["data"]["axis"]
        spec["data"]["axis"] = [*([axes] if isinstance(axes, str) else axes), "ep"]
    each = math.prod(n for a, n in mesh.items() if a != "pp") * microbatches
    if "dp" in mesh and mesh.keys() & {"tp", "cp"} and rows % each == 0 and len(str(spec)) % 2:  # not drawn, as above
        own_meshes(spec, [n for n, m in model.named_modules() if n and any(True for _ in m.parameters())])
    if "data" in spec:  # not drawn, as above
        size, zero = len(str(spec)), spec["data"]["zero"]
        spec["data"] |= {"keep": True} if zero == 3 and size % 4 == 0 else {"prefetch": 2} if size % 4 == 1 else {}
        spec["data"] |= {"offload": {"optimizer": "cpu", "parameters": "cpu"}} if zero == 3 and size % 5 == 0 else {}
    return spec


def own_meshes(spec: dict[str, Any], modules: list[str]) -> None:
    """Give some modules, or the stages of a pipeline of two, a mesh whose data ranks are all ranks of a stage."""
    mesh, size = spec["mesh"], len(str(spec))
    kept = {a: n for a, n in mesh.items() if a in ("dp_outer", "ep")}
    wide = {**kept, "dp": math.prod(n for a, n in mesh.items() if a != "pp") // math.prod(kept.values())}
    if spec.get("pipeline", {}).get("stages") == 2:
        del spec["pipeline"]["stages"]
        spec["pipeline"] |= {"cut": [modules[len(modules) // 2]], "meshes": {size // 2 % 2: wide}}
    else:
        spec["parts"] = {"some": {"modules": starred(modules[size % len(modules)]), "mesh": wide}}


LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d)


def layers(model: nn.Module, *kinds: type[nn.Module]) -> list[str]:
    """Names of modules of these kinds that have something to train."""
    modules = ((n, m) for n, m in model.named_modules() if n and isinstance(m, kinds))
    return sorted({starred(n) for n, m in modules if any(p.requires_grad for p in m.parameters())})


def starred(name: str) -> str:
    """h.0.mlp -> h.*.mlp"""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def test_any_spec(name: str, examples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_compiler.put_in(monkeypatch)
    monkeypatch.setattr(OffloadedTensors, "useful", staticmethod(lambda x: True))  # copies are made, on a CPU too
    model, batch, captured, want = one(name)
    ran: list[bool] = []
    before, earlier = dict[int, Program](), list[Program]()
    fuzz = examples > 6

    @settings(
        max_examples=examples,
        derandomize=not fuzz,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
        print_blob=False,
    )
    @given(specs(model, batch))
    def equal(spec: dict[str, Any]) -> None:
        with zoo.Wide():
            try:
                program = shardc.compile(model, batch, spec, captured=captured)
            except shardc.ShardcError as e:
                event(e.errors[0].what)
                ran.append(False)
                return
            ran.append(True)
            own = {n: spec[n] for n in ("adapters", "freeze", "precision") if n in spec}
            if any("is the same in all microbatches" in note for note in program.notes):  # fp8 leaves that layer
                own |= {n: spec[n] for n in ("batch", "uneven") if n in spec}
            check(program, model, batch, alone(name, json.dumps(own)) if own else want)
            if not own and (fuzz or len(str(spec)) % 4 == 0):
                whole_matrices(name, spec)
            if not own:
                chosen(name, spec)
            if not own and (fuzz or len(str(spec)) % 2 == 0):
                resharded(before.setdefault(program.mesh.world, program), program, model, batch)
                before[program.mesh.world] = program
            proof = program.prove()
            assert proof.ok, str(proof)
            looked_at(program)
            if (fuzz or len(str(spec)) % 3 == 0) and not {"adapters", "precision"} & spec.keys():
                forwards(name, spec)
            if fuzz:
                own_loop(program, model, batch, alone(name, json.dumps(own)) if own else want)
                on_disk(earlier[-1] if earlier and not own else program, program, model, batch)
                earlier.extend([] if own else [program])
        if fuzz:  # outside of Wide, which reads a constant's float32 as float64
            written(program)

    equal()
    assert fuzz or sum(ran) > examples // 3


def check(program: Program, model: nn.Module, batch: Any, want: Simulation, optimizer: Any = momentum) -> None:
    sim = shardc.verify.simulate(program, model, batch, steps=2, optimizer=optimizer)
    close(sim.loss, sim.state, want)
    assert not want.grads.keys() - sim.grads.keys()


def close(loss: Tensor, state: Mapping[str, Tensor], want: Simulation) -> None:
    pairs = {"the loss": (loss, want.loss)} | {n: (x, want.state[n]) for n, x in state.items()}
    scale = 1e-3 * max((float(x.norm()) for _, x in pairs.values() if x.is_floating_point()), default=1.0)
    off = {
        n: float((a - b).norm()) / max(float(b.norm()), scale)
        for n, (a, b) in pairs.items()
        if a.is_floating_point() and b.isfinite().all()
    }
    assert not {n: e for n, e in off.items() if not e <= TOLERANCE}


def lamb(params: Any) -> torch.optim.Optimizer:
    return Lamb(params, 0.01)


@lru_cache(maxsize=2)
def one_of_matrices(name: str) -> Simulation:
    model, batch, captured, _ = one(name)
    spec = {"shardc": 1, "mesh": {"dp": 1}, "optimizer": {"matrices": "whole"}}
    alone = shardc.compile(model, batch, spec, captured=captured)
    return shardc.verify.simulate(alone, model, batch, steps=2, optimizer=lamb)


def whole_matrices(name: str, spec: dict[str, Any]) -> None:
    """The same spec with an optimizer that needs whole parameters."""
    model, batch, captured, _ = one(name)
    program = shardc.compile(model, batch, {**spec, "optimizer": {"matrices": "whole"}}, captured=captured)
    check(program, model, batch, one_of_matrices(name), lamb)


@lru_cache(maxsize=2)
def recorded(name: str) -> tuple[dict[str, Tensor], Simulation] | None:
    """All choices of a model, and two steps with these on one device; None if it makes none."""
    model, batch, captured, _ = one(name)
    spec = {"shardc": 1, "mesh": {"dp": 1}}
    try:
        record, replay = (
            shardc.compile(model, batch, {**spec, "choices": {"*": mode}}, captured=captured)
            for mode in ("record", "replay")
        )
    except shardc.ShardcError as e:
        if "makes no choice" not in str(e) and "do not follow from it" not in str(e):
            raise
        return None
    outputs = shardc.verify.simulate(record, model, batch).outputs
    given = {n: outputs[n] for n in record.features.get("choices", ())}
    batch = with_choices(batch, given)
    return given, shardc.verify.simulate(replay, model, batch, steps=2, optimizer=momentum)


def chosen(name: str, spec: dict[str, Any]) -> None:
    """The same spec with all choices given."""
    model, batch, captured, _ = one(name)
    if (known := recorded(name)) is None:
        return
    given, want = known
    try:
        program = shardc.compile(model, batch, {**spec, "choices": {"*": "replay"}}, captured=captured)
    except shardc.ShardcError as e:  # `use: structure` finds other pairs in a graph without what made the choices
        event(e.errors[0].what)
        return
    check(program, model, with_choices(batch, given), want)
    proof = program.prove()
    assert proof.ok, str(proof)


def resharded(old: Program, new: Program, model: nn.Module, batch: Any) -> None:
    """From one plan to the other in memory, and back: the same weights, and then the same step, to the bit."""

    def work(mesh: LoopbackMesh) -> None:
        engine = old.engine(model, momentum, mesh=mesh)
        engine.step(batch)
        there = engine.to(new)
        same(engine, there)
        back = there.to(old)
        assert torch.equal(back.step(batch).nan_to_num(), engine.step(batch).nan_to_num())
        same(engine, back)

    loopback(old.mesh, work)


def own_loop(program: Program, model: nn.Module, batch: Any, want: Simulation) -> None:
    """A loop of the user's own around the module trains as the engine does."""
    scaled = program.spec.precision.loss_scale is not None
    padded = any(x.layout.paddings() for x in program.inputs)  # `module.local` refuses them
    if program.microbatches > 1 or program.axis or scaled or padded or program.spec.data.offload.used:
        return

    def work(mesh: LoopbackMesh) -> tuple[Tensor, dict[str, Tensor]]:
        module = program.module(model, mesh=mesh)
        optimizer, part, loss = momentum(module.parameters()), module.local(batch), torch.tensor(0.0)
        for _ in range(2):
            optimizer.zero_grad()
            result = module(**part) if isinstance(part, dict) else module(*part if isinstance(part, tuple) else (part,))
            loss = result[0] if isinstance(result, tuple) else result
            loss.backward()
            optimizer.step()
        return loss.detach(), module.full_state_dict()

    for loss, state in loopback(program.mesh, work):
        close(loss, {n: x for n, x in state.items() if n in want.state}, want)


def on_disk(old: Program, new: Program, model: nn.Module, batch: Any) -> None:
    """A checkpoint of one plan is loaded by another one, bit for bit, which goes on with the same step."""
    with tempfile.TemporaryDirectory() as folder:

        def save(mesh: LoopbackMesh) -> tuple[dict[str, Tensor], Tensor]:
            engine = old.engine(model, momentum, mesh=mesh)
            engine.step(batch)
            engine.save(folder)
            return engine.full_state_dict(), first(engine.step(batch))

        def load(mesh: LoopbackMesh) -> tuple[dict[str, Tensor], Tensor]:
            engine = new.engine(model, momentum, seed=1, mesh=mesh)
            engine.load(folder)
            return engine.full_state_dict(), first(engine.step(batch))

        (saved, loss), (loaded, then) = loopback(old.mesh, save)[0], loopback(new.mesh, load)[0]
        assert all(torch.equal(x.nan_to_num(), loaded[n].nan_to_num()) for n, x in saved.items())
        assert not loss.isfinite() or float((then - loss).abs()) <= TOLERANCE * max(1e-3, float(loss.abs()))


def first(result: Any) -> Tensor:
    loss: Tensor = result[0] if isinstance(result, tuple) else result
    return loss


def same(one: Engine, other: Engine) -> None:
    left, right = one.full_state_dict(), other.full_state_dict()
    assert all(torch.equal(x.nan_to_num(), right[n].nan_to_num()) for n, x in left.items())


def forwards(name: str, spec: dict[str, Any]) -> None:
    """The same spec forward-only gives the same outputs, if it compiles: what has no rows in a microbatch does not."""
    model, batch, *_ = one(name)
    if (reference := forward(name)) is None:
        return
    captured, want = reference
    try:
        program = shardc.compile(model, batch, spec, captured=captured, forward=True)
    except shardc.ShardcError as e:
        event(e.errors[0].what)
        return
    got = shardc.verify.simulate(program, model, batch).outputs
    for n, x in want.items():
        if x.is_floating_point():
            assert float((got[n] - x).norm()) <= TOLERANCE * float(x.norm())
        else:
            assert torch.equal(got[n], x)
    proof = program.prove()
    assert proof.ok, str(proof)
    looked_at(program)


def looked_at(program: Program, cost: Cost | None = None) -> None:
    """Its page draws every collective but sums of buckets; every row of the table of collectives leads to those that
    it counts.
    """
    shown = page_data(program, cost, None)
    drawn = {op["message"] for op in shown["after"] if "message" in op}  # gathers of ZeRO 3 are their buckets'
    assert (
        {i for i, m in enumerate(shown["messages"]) if "buckets" not in m}
        <= drawn
        <= set(range(len(shown["messages"])))
    )
    if cost is not None:
        assert {i for r in shown["rows"] for i in r["messages"]} == set(range(len(shown["messages"])))


def written(program: Program) -> None:
    """It has a price, and comes back from disk."""
    cost = program.cost()
    assert cost.memory.peak > 0
    looked_at(program, cost)
    with tempfile.TemporaryDirectory() as folder:
        program.save(folder)
        assert shardc.load(folder).text(full=True) == program.text(full=True)
