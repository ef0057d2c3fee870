"""Weights for engines that are no programs of shardc: every byte where the engine's own loader puts it, each once, and
wrong layouts refused before anything is sent. `python -m tests.features.reshard.engine_sweep` tries many families."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardc
from shardc import engines
from shardc.api import Program
from shardc.features.reshard import conventions
from shardc.features.reshard.engines import sizes, ties
from shardc.features.reshard.layout import Held, Layout, Scale, by_rank, check
from shardc.runtime import launch
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from tests import warm
from tests.features.reshard import engine_slices
from tests.zoo import hf, hf_more

torch.set_num_threads(1)
SPECS: dict[str, dict[str, Any]] = {
    "zero": {"mesh": {"dp": 4}, "data": {"zero": 3}},
    "tp": {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "model"}, "data": {"zero": 1}},
}


def build(**more: Any) -> nn.Module:
    """A mixture of experts with a dense layer, fewer heads of keys than ranks, a vocabulary that 64 does not divide."""
    transformers = pytest.importorskip("transformers")
    settings: dict[str, Any] = {
        "num_hidden_layers": 2,
        "mlp_only_layers": [0],
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
    width = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 16, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "use_cache": False}
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**(settings | width | heads | more))
    )
    return model


def batch() -> dict[str, Tensor]:
    ids = torch.arange(4 * 8).reshape(4, 8)
    return {"input_ids": ids, "labels": ids}


@functools.cache
def compiled(name: str) -> tuple[nn.Module, Program]:
    model = build()
    return model, shardc.compile(model, batch(), {"shardc": 1, **SPECS[name]})


def engine_tensors(layout: Layout, program: Program, rank: int, fill: float = 7.0) -> dict[str, Tensor]:
    held = layout.every(sizes(program)).items()
    return {n: torch.full(by_rank(x.shapes, rank), fill).to(getattr(torch, x.dtype)) for n, x in held}


def moved(model: nn.Module, program: Program, layout: Layout) -> tuple[list[dict[str, Tensor]], list[int]]:
    """The engine's tensors by rank, and the bytes that each rank sent."""
    tensors = [engine_tensors(layout, program, r) for r in range(layout.ranks)]

    def work(mesh: LoopbackMesh) -> int:
        engine = program.engine(model, None, mesh=mesh)
        return sum(engine.weights_to(engines.here(layout, dict(enumerate(tensors)).get(mesh.rank))).sent)

    return tensors, loopback(program.mesh, work)


LAYOUTS: dict[str, tuple[Callable[[nn.Module], Layout], Callable[[nn.Module, int], dict[str, Tensor]]]] = {
    f"{kind} {tp}{' ep' * ep}": (
        functools.partial(getattr(engines, kind), tp=tp, dtype="float32", ep=ep),
        functools.partial(getattr(engine_slices, kind), tp=tp, **({"ep": True} if ep else {})),  # type: ignore[misc]
    )
    for kind, tp, ep in (("vllm", 2, False), ("vllm", 4, False), ("vllm", 2, True), ("transformers", 2, False))
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_byte_is_where_the_engine_keeps_it_and_is_sent_once(name: str, spec: str) -> None:
    model, program = compiled(spec)
    make, expected = LAYOUTS[name]
    layout = make(model)
    tensors, sent = moved(model, program, layout)
    for rank, made in enumerate(tensors):
        engine_slices.equal(made, expected(model, rank=rank))
    read = [
        sum(math.prod(b[1]) for p in x.parts if p.of and (b := by_rank(p.boxes, r)))
        for x in layout.tensors.values()
        for r in range(layout.ranks)
    ]
    report = program.reshard(layout)  # to other processes: all that the engine reads
    assert report.bytes == 4 * sum(read)
    assert sum(sent) < report.bytes if name != "transformers 2" or spec != "tp" else sum(sent) <= report.bytes
    assert max(sum(x.numel() for x in made.values()) for made in tensors) < sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("spec", SPECS)
def test_eight_bits_are_those_of_a_cast_on_one_device(spec: str, dtype: str) -> None:
    model, program = compiled(spec)
    layout = engines.vllm(model, 2, dtype=dtype, block=(8, 4))
    tensors, _ = moved(model, program, layout)
    low: torch.dtype = getattr(torch, dtype)
    for rank, made in enumerate(tensors):
        for name, x in engine_slices.vllm(model, 2, rank).items():
            if layout.tensors[name].dtype != dtype:
                assert torch.equal(made[name], x.to(torch.bfloat16)), name
                continue
            *outer, rows, columns = x.shape
            blocks = x.view(*outer, rows // 8, 8, columns // 4, 4)
            scale = blocks.abs().amax((-3, -1)) / torch.finfo(low).max
            cast = (blocks / scale[..., :, None, :, None]).to(low).view(x.shape)
            assert torch.equal(made[f"{name}_scale_inv"], scale), name
            assert torch.equal(made[name].view(torch.uint8), cast.view(torch.uint8)), name


def test_only_changes_are_sent() -> None:
    model, program = compiled("zero")
    layout = engines.vllm(model, 2, dtype="float32")
    tensors = [engine_tensors(layout, program, r) for r in range(2)]

    def work(mesh: LoopbackMesh) -> list[int]:
        engine = program.engine(model, None, mesh=mesh)
        target = engines.here(layout, dict(enumerate(tensors)).get(mesh.rank), only_changes=True)
        counts = [engine.weights_to(target).moved, engine.weights_to(target).moved]
        changed(engine)
        return [*counts, engine.weights_to(target).moved]

    counts = loopback(program.mesh, work)
    assert sum(c[0] for c in counts) > 0
    assert [c[1] for c in counts] == [0] * 4
    assert 0 < sum(c[2] for c in counts) <= 2 * 32 * 4
    assert all(made["model.norm.weight"].eq(3).all() for made in tensors)


def test_files_for_more_ranks_than_train(tmp_path: Path) -> None:
    model = build()
    program = shardc.compile(model, batch(), {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 3}})
    layout = engines.vllm(model, 4)

    def work(mesh: LoopbackMesh) -> None:
        program.engine(model, None, mesh=mesh).weights_to(engines.files(layout, tmp_path))

    loopback(program.mesh, work)
    assert Layout.load(tmp_path / "layout.json") == layout
    assert len(list(tmp_path.iterdir())) == 5
    for rank in range(4):
        engine_slices.equal(
            load_file(tmp_path / f"rank-{rank:05d}-of-00004.safetensors"), engine_slices.vllm(model, 4, rank)
        )


def _trains(rank: int, ports: tuple[int, int], folder: str) -> None:
    """Ranks 0 and 1 train; 2 and 3 are an engine, a world that has neither the model nor a program."""
    torch.set_num_threads(1)
    layout, at = Layout.load(Path(folder) / "layout.json"), f"127.0.0.1:{ports[1]}"
    if rank < 2:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(ports[0]), "RANK": str(rank), "WORLD_SIZE": "2"}
        engine = shardc.load(Path(folder) / "program").engine(build(), None)
        target = engines.at(at, layout, only_changes=True)
        moves = engine.weights_to(target)
        changed(engine)
        engine.weights_to(target)
        engine.to(engine.program).weights_to(target)  # another plan: the engine gets it
        (Path(folder) / f"sent-{rank}").write_text(str(sum(moves.sent)))
        engine.close()
    else:
        shapes = json.loads((Path(folder) / "shapes.json").read_text())[rank - 2]
        tensors = {n: torch.full(shape, 7.0) for n, shape in shapes.items()}
        sync = engines.receive(at, layout, tensors, rank - 2, trainers=2, only_changes=True)
        for turn in range(3):
            sync()
            torch.save(tensors, Path(folder) / f"engine-{rank - 2}-{turn}.pt")


def changed(engine: Any) -> None:
    """Set the last norm's weights to 3."""
    (name,) = (p.name for p in engine.program.params if p.fqn == "model.norm.weight")
    if name in engine.owned:
        engine.owned[name].data.fill_(3.0)


def _positional(rank: int, run: functools.partial[None]) -> None:
    run(rank)


def shorter(box: Any) -> Any:
    offset, shape = box
    return offset, (shape[0] - 1, *shape[1:])


def changed_part(x: Held, **facts: Any) -> Held:
    return replace(x, parts=(replace(x.parts[0], **facts), *x.parts[1:]))


def swapped(x: Held) -> Held:
    one, two, *rest = x.parts
    first, second = replace(one, of=two.of, boxes=two.boxes), replace(two, of=one.of, boxes=one.boxes)
    return replace(x, parts=(first, second, *rest))


#: Faults of a tensor; None: it is missing, or has another name.
FAULTS: dict[str, Callable[[Held], Held] | None] = {
    "order": swapped,
    "short": lambda x: changed_part(x, boxes=(shorter(x.parts[0].boxes[0]), *x.parts[0].boxes[1:])),
    "missing": None,
    "dtype": lambda x: replace(x, dtype="float64"),
    "rank twice": lambda x: replace(x, parts=tuple(replace(p, boxes=p.boxes[:1] * len(p.boxes)) for p in x.parts)),
    "overlap": lambda x: replace(x, parts=(*x.parts, x.parts[0])),
    "name": None,
    "no dtype": lambda x: replace(x, dtype="int4"),
    "shape": lambda x: replace(x, shapes=tuple((s[0] + 1, *s[1:]) for s in x.shapes)),
    "entries": lambda x: changed_part(x, boxes=(*x.parts[0].boxes, None)),
    "unknown": lambda x: changed_part(x, of=f"{x.parts[0].of}s"),
    "no scale": lambda x: replace(x, dtype="float8_e5m2"),
    "blocks": lambda x: replace(x, dtype="float8_e5m2", scale=Scale("scale", (1, 1, 1))),
    "dims": lambda x: changed_part(x, dims=(0, 0)),
    "box": lambda x: changed_part(x, boxes=(((1 << 20,) * len(x.shapes[0]), x.shapes[0]),)),
    "place": lambda x: changed_part(x, at=((1,) * len(x.shapes[0]),)),
}


def spoiled(layout: Layout, fault: str, n: int) -> Layout:
    """A wrong layout: a fault in the n-th tensor that can have it."""
    fits = {
        "order": lambda x: len({p.of for p in x.parts if p.of}) > 1,
        "rank twice": lambda x: any(p.of and len({*p.boxes}) > 1 for p in x.parts),
    }.get(fault, lambda x: True)
    names = [name for name, x in layout.tensors.items() if fits(x)]
    name, change, tensors = names[n * 7 % len(names)], FAULTS[fault], dict(layout.tensors)
    x = tensors.pop(name)
    if fault != "missing":
        tensors[f"{name}_" if fault == "name" else name] = change(x) if change is not None else x
    return replace(layout, tensors=tensors)


@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_wrong_layouts_are_refused_before_anything_is_sent(kind: str) -> None:
    model, program = compiled("tp")
    right: Layout = getattr(engines, kind)(model, 2)
    conventions.checked(right, sizes(program), ties(program))
    passed = []
    some = [fault for fault in FAULTS if kind == "vllm" or fault != "order"]  # transformers fuses nothing
    for fault, n in itertools.product(some, range(5 if kind == "vllm" else 1)):
        try:
            program.reshard(spoiled(right, fault, n))
            passed.append(f"{fault} {n}")
        except shardc.ShardcError as e:
            passed += [f"{fault} {n}: no place or fix" for error in e.errors if not (error.where and error.fix)]
    assert not passed
    for more, said in (({"unused": ("*.lost",)}, "the model has no tensor"), ({"ranks": 0}, "an engine of 0 ranks")):
        with pytest.raises(shardc.ShardcError, match=said):
            program.reshard(replace(right, origin={}, **more))
    with pytest.raises(shardc.ShardcError, match="an engine has no optimizer"):
        program.reshard(right, moments=2)


def test_what_an_engine_cannot_have_is_refused() -> None:
    other = nn.Module()
    other.config, other.strange = build().config, nn.Linear(4, 4)
    for make, said in (
        (lambda: engines.sglang(other, 2), "no rule of sglang is known for 'strange'"),
        (lambda: engines.vllm(build(), 0), "tp is 0"),
        (lambda: engines.transformers(other, 2), "the model has no tp_plan"),
        (lambda: engines.receive("nowhere", engines.vllm(build()), {"a": torch.ones(1)}), "'nowhere' is no address"),
    ):
        with pytest.raises(shardc.ShardcError, match=said):
            make()
    with pytest.raises(shardc.ShardcError, match="4 heads do not divide over 8 ranks"):
        engines.vllm(build(), 8)  # only heads of keys and values are repeated
    with pytest.raises(shardc.ShardcError, match="128 in dim 0 do not divide over 3 ranks"):
        engines.vllm(build(num_attention_heads=6, num_key_value_heads=3, moe_intermediate_size=18), 3)
    model, program = compiled("tp")
    for origin in ({"of": "tensorrt"}, {"of": "vllm", "tp": 2}):
        with pytest.raises(shardc.ShardcError, match="origin names") as e:
            program.reshard(replace(engines.vllm(model, 2), origin=origin))
        assert e.value.fix


def test_the_biases_of_divided_experts_are_divided() -> None:
    model, _ = hf.build(
        hf_more.FAMILIES["gpt_oss"]
    )  # transformers: MoEParamShard(Shard(0)), for all that the plan names
    layout = engines.transformers(model, 2, ep=True)
    for name, x in model.named_parameters():
        if ".experts." in name:
            shapes = {by_rank(layout.tensors[name].shapes, r) for r in range(2)}
            assert shapes == {(x.shape[0] // 2, *x.shape[1:])}, name


def test_layout_files_are_read_as_they_were_written(tmp_path: Path) -> None:
    model, program = compiled("tp")
    layout = engines.vllm(model, 2, dtype="float8_e4m3fn", block=(8, 4))
    layout.save(tmp_path / "layout.json")
    assert Layout.load(tmp_path / "layout.json") == layout
    assert str(program.reshard(tmp_path / "layout.json")) == str(program.reshard(layout))
    text = (tmp_path / "layout.json").read_text()
    (tmp_path / "bad.json").write_text(text.replace('"ranks": 2', '"ranks": "two"'))
    with pytest.raises(shardc.ShardcError, match="integer") as e:
        Layout.load(tmp_path / "bad.json")
    assert "ranks" in e.value.where
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(shardc.ShardcError, match="version 1"):
        Layout.load(tmp_path / "bad.json")
    with pytest.raises(shardc.ShardcError, match="it cannot be read"):
        Layout.load(tmp_path)


def test_what_an_engine_describes_is_a_layout() -> None:
    model, program = compiled("tp")
    w = dict(model.named_parameters())
    names = [n for n in w if n != "lm_head.weight"]

    def describe(rank: int) -> dict[str, Any]:
        parts = [{"of": "lm_head.weight", "box": ((rank * 50, 0), (50, 32)), "at": (0, 0), "dims": (1, 0)}]
        each = {"head_t": {"shape": (32, 50), "dtype": torch.float32, "parts": parts}}
        for n in names:
            box = ((0,) * w[n].dim(), tuple(w[n].shape))
            each[n] = {"shape": w[n].shape, "dtype": "float32", "parts": [{"of": n, "box": box, "at": box[0]}]}
        return each

    layout = engines.described(2, describe)
    check(layout, sizes(program))
    tensors, _ = moved(model, program, layout)
    for rank in range(2):
        assert torch.equal(tensors[rank]["head_t"], w["lm_head.weight"].detach()[rank * 50 : (rank + 1) * 50].t())


@pytest.mark.parametrize(
    ("tp", "has", "said"),
    [
        (2, torch.ones(32), r"has float32 \[32\], and the layout bfloat16 \[32\]"),
        (2, None, "the engine has no such tensor"),
        (8, None, "the engine has 8 ranks, and there are 4 processes for them"),
    ],
)
def test_the_engines_tensors_are_checked_before_anything_is_sent(tp: int, has: Tensor | None, said: str) -> None:
    model, program = compiled("tp")
    layout = engines.vllm(model, 2) if tp == 2 else engines.transformers(model, tp)

    def work(mesh: LoopbackMesh) -> None:
        tensors = engine_tensors(layout, program, mesh.rank) if mesh.rank < 2 else None
        if tensors is not None:
            tensors.pop("model.norm.weight")
            tensors |= {"model.norm.weight": has} if has is not None else {}
        program.engine(model, None, mesh=mesh).weights_to(engines.here(layout, tensors))

    with pytest.raises(shardc.ShardcError, match=said):
        loopback(program.mesh, work)


def test_two_worlds(tmp_path: Path) -> None:
    model = build()
    program = shardc.compile(model, batch(), {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 3}})
    program.save(tmp_path / "program")
    layout = engines.vllm(model, 2, dtype="float32")
    layout.save(tmp_path / "layout.json")
    shapes = [{n: by_rank(x.shapes, r) for n, x in layout.tensors.items()} for r in range(2)]
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    warm.ranks(
        _positional,
        functools.partial(_trains, ports=(launch.free_port(), launch.free_port()), folder=str(tmp_path)),
        world=4,
    )
    sent = sum(int((tmp_path / f"sent-{rank}").read_text()) for rank in range(2))
    assert sent == program.reshard(layout).bytes  # what the engine reads, and no more
    for rank in range(2):
        first, second, third = (torch.load(tmp_path / f"engine-{rank}-{turn}.pt") for turn in range(3))
        engine_slices.equal(third, second)
        engine_slices.equal(first, engine_slices.vllm(model, 2, rank))
        assert second["model.norm.weight"].eq(3).all()
