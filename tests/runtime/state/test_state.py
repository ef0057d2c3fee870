"""State by name and global slice: cutting weights, checkpoints across meshes, plain state_dicts and files."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, fx, nn

from shardc.errors import Errors, ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.placement import Layout, Placement, Shard
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state import export, loading, parts, saving, sources
from shardc.runtime.state.checkpoint_folder import checkpoints_in, read_index
from shardc.runtime.state.fitting import check_tensors
from shardc.runtime.state.init import named_tensors, record
from shardc.runtime.state.owners import RankState
from shardc.runtime.state.torch_conversion import export_checkpoint
from shardc.runtime.state.weight_files import open_weights

torch.set_num_threads(1)

Sizes = dict[str, int]
Rank = tuple[dict[str, nn.Parameter], dict[str, Tensor]]


class Net(nn.Module):
    """Tied weights, a fused q|k|v, grouped sections, buffers of every kind."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, width)
        self.qkv = nn.Linear(width, 3 * 8)
        self.gqa = nn.Linear(width, 16 + 8 + 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(width, 16, bias=False)
        self.head.weight = self.emb.weight
        self.scale = nn.Parameter(torch.randn(()))
        self.register_buffer("inv_freq", 1 / 10000 ** (torch.arange(0, 8, 2).float() / 8), persistent=False)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)


#: Layouts by name for every axis that a test's mesh has: split digits, sections, two axes on one dim, inner dims.
PLANS: dict[str, dict[str, dict[str, Placement]]] = {
    "emb.weight": {"tp": {"tp": Shard(0)}},
    "qkv.weight": {"tp": {"tp": Shard(0, 3)}, "dp": {"dp": Shard(1)}},
    "qkv.bias": {"tp": {"tp": Shard(0, 3)}},
    "gqa.weight": {"tp": {"tp": Shard(0, 1, (16, 8, 8))}},
    "gqa.bias": {"tp": {"tp": Shard(0, 1, (16, 8, 8))}},
    "norm.running_mean": {"tp": {"tp": Shard(0)}},
}


def _node(fqn: str) -> str:
    return fqn.replace(".", "_")


def program_of(model: nn.Module, sizes: Sizes, zero: bool = False) -> Program:
    """A program of the model with the layouts of PLANS; zero: parameters are stored split over dp as well (inner
    digits).
    """
    mesh = Mesh.of(sizes)

    def layout(name: str, shape: tuple[int, ...]) -> Layout:
        found: dict[str, Placement] = {}
        for axis, placements in PLANS.get(name, {}).items():
            found |= placements if axis in sizes and sizes[axis] > 1 else {}
        if zero and "dp" in sizes and shape and not found.get("dp") and not getattr(found.get("tp"), "sections", ()):
            own = found.get("tp")
            outer = own.split * sizes["tp"] if isinstance(own, Shard) and own.dim == 0 else 1
            found["dp"] = Shard(0, outer)
        made = Layout.of(found, mesh)
        assert not made.problem(shape, mesh), (name, made.problem(shape, mesh))
        return made

    def grouped(named: Any) -> list[tuple[list[str], Any]]:
        groups: dict[int, tuple[list[str], Any]] = {}
        for n, x in named:
            groups.setdefault(id(x), ([], x))[0].append(n)
        return list(groups.values())

    params = tuple(
        Param(_node(n[0]), n[0], tuple(p.shape), p.dtype, p.requires_grad, tuple(n[1:]), layout(n[0], tuple(p.shape)))
        for n, p in grouped(model.named_parameters(remove_duplicate=False))
    )
    kept = set(model.state_dict())
    buffers = [
        Buffer(
            _node(n[0]),
            n[0],
            tuple(b.shape),
            b.dtype,
            tuple(n[1:]),
            layout(n[0], tuple(b.shape)),
            persistent=n[0] in kept,
        )
        for n, b in grouped(model.named_buffers(remove_duplicate=False))
    ]
    constant = torch.arange(6.0).view(2, 3)
    buffers.append(Buffer("lifted", "", (2, 3), torch.float32, persistent=False, constant=constant))
    return Program(mesh, fx.Graph(), params, tuple(buffers), (), meta={"model": type(model).__name__})


def joined(program: Program, ranks: list[Rank], name: str) -> Tensor:
    x: Any = next(x for x in (*program.params, *program.buffers) if x.name == name)
    parts = [{**p, **b}[name].detach() for p, b in ranks]
    for r, part in enumerate(parts):
        assert part.shape == x.layout.local_shape(x.shape, program.mesh), f"{name} on rank {r}"
    whole: Tensor = x.layout.join(lambda c: parts[program.mesh.rank(c)], program.mesh)
    for r, part in enumerate(parts):
        assert torch.equal(part, x.layout.local(whole, program.mesh, program.mesh.coords(r))), (
            f"replicas of {name} differ"
        )
    return whole


def local_parameters(program: Program, source: Any, mesh: Any, seed: int = 0, base: Any = None) -> Rank:
    """All of a rank's parameters and buffers. base: the model, for what a state_dict or files lack."""
    given = sources.weights(source, seed) if base is None else sources.weights_for(base, source, seed)
    params, buffers = parts.local_parts(program, given, mesh)
    return dict(params), buffers


def cut(program: Program, source: Any, seed: int = 0, base: Any = None) -> list[Rank]:
    return loopback(program.mesh, lambda mesh: local_parameters(program, source, mesh, seed, base))


MESHES: list[Sizes] = [{"dp": 1}, {"dp": 2, "tp": 2}, {"tp": 4}, {"dp": 4}]


# --- local_parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("zero", [False, True])
def test_real_model_is_cut_and_left_alone(sizes: Sizes, zero: bool) -> None:
    model = Net()
    before = {n: x.clone() for n, x in named_tensors(model)}
    program = program_of(model, sizes, zero)
    ranks = cut(program, model)
    for x in (*program.params, *program.buffers):
        whole = x.constant if isinstance(x, Buffer) and x.constant is not None else before[x.fqn]
        assert torch.equal(joined(program, ranks, x.name), whole), x.name
    for p in program.params:
        local = ranks[0][0][p.name]
        assert local.requires_grad == p.requires_grad
        assert local.is_contiguous()
    with torch.no_grad():
        for params, buffers in ranks:
            for t in (*params.values(), *buffers.values()):
                t.zero_()
    assert all(torch.equal(x, before[n]) for n, x in named_tensors(model)), "memory is shared with the model"
    assert torch.equal(program.buffers[-1].constant, torch.arange(6.0).view(2, 3))  # type: ignore[arg-type]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_builder_gives_the_single_device_weights_on_every_mesh(sizes: Sizes) -> None:
    program = program_of(record(Net)[0], sizes)
    torch.manual_seed(5)
    whole = dict(named_tensors(Net()))
    ranks = cut(program, Net, seed=5)
    for x in (*program.params, *program.buffers):
        if x.fqn:
            assert torch.equal(joined(program, ranks, x.name), whole[x.fqn]), x.name


def test_meta_model_is_reset_alike_on_every_mesh() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 24), nn.BatchNorm1d(24))
    one = cut(program_of(model, {"dp": 1}), model, seed=3)
    two = program_of(model, {"tp": 2})
    ranks = cut(two, model, seed=3)
    for x in (*two.params, *two.buffers[:-1]):
        assert torch.equal(joined(two, ranks, x.name), {**one[0][0], **one[0][1]}[x.name])
    assert all(x.is_meta for _, x in named_tensors(model))


@pytest.mark.parametrize("form", ["dict", "file", "folder", "sharded"])
def test_state_dict_and_files_are_cut(form: str, tmp_path: Path) -> None:
    model = Net()
    program = program_of(model, {"dp": 2, "tp": 2})
    whole = dict(named_tensors(model))
    source: Any = {n: x for n, x in model.state_dict().items() if n != "head.weight"}  # one of the tied names is enough
    if form == "file":
        save_file(source, tmp_path / "weights.safetensors")
        source = tmp_path / "weights.safetensors"
    elif form == "folder":
        save_file(source, tmp_path / "model.safetensors")
        source = str(tmp_path)
    elif form == "sharded":
        halves = [dict(list(source.items())[:3]), dict(list(source.items())[3:])]
        for i, half in enumerate(halves):
            save_file(half, tmp_path / f"part{i}.safetensors")
        index = {n: f"part{i}.safetensors" for i, half in enumerate(halves) for n in half}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
        source = tmp_path
    ranks = cut(program, source, base=model)
    for x in (*program.params, *program.buffers[:-1]):
        assert torch.equal(joined(program, ranks, x.name), whole[x.fqn]), x.name


def test_program_dtype_wins() -> None:
    program = program_of(Net().double(), {"dp": 1})
    params, buffers = cut(program, Net)[0]
    assert {p.dtype for p in params.values()} == {torch.float64}
    assert buffers["norm_num_batches_tracked"].dtype == torch.int64


def _all_of(model: nn.Module) -> dict[str, Tensor]:
    """Its state_dict, and the buffers that are not persistent."""
    return {**dict(model.named_buffers()), **model.state_dict()}


def _fails(source: Any, program: Program) -> ShardcError:
    with pytest.raises(ShardcError) as e:
        local_parameters(program, source, loopback(Mesh.of({"dp": 1}), lambda m: m)[0])
    return e.value


def test_missing_and_unexpected_names_are_all_told_with_the_nearest() -> None:
    model = Net()
    found = _all_of(model)
    found["qkv.wieght"] = found.pop("qkv.weight")
    found["gqa.bias"] = torch.zeros(5)
    error = _fails(found, program_of(model, {"dp": 1}))
    assert [e.what for e in error.errors] == [
        "qkv.weight is missing in the state_dict",
        "gqa.bias has the shape [5] in the state_dict, and [32] in the program",
        "qkv.wieght in the state_dict is unknown to the program",
    ]
    assert error.errors[0].fix == "did you mean qkv.wieght, which it has?"
    assert error.errors[2].fix == "did you mean qkv.weight?"
    error = _fails({n: x for n, x in _all_of(model).items() if n != "gqa.bias"}, program_of(model, {"dp": 1}))
    assert error.fix.startswith("if it is new")  # no other tensor is its: each has a place


def test_model_of_another_shape_is_refused() -> None:
    error = _fails(Net(width=4), program_of(Net(), {"dp": 1}))
    assert "emb.weight has the shape [16, 4] in the model, and [16, 8] in the program" in str(error)


def test_ties_that_the_source_lacks_are_refused() -> None:
    untied = Net()
    untied.head.weight = nn.Parameter(untied.emb.weight.detach() + 1)
    error = _fails(untied, program_of(Net(), {"dp": 1}))
    assert "compiled with emb.weight and head.weight as one tensor, but in the model they differ" in str(error)
    error = _fails(_all_of(untied), program_of(Net(), {"dp": 1}))
    assert "in the state_dict they differ" in str(error)


def test_buffer_that_no_state_dict_has_needs_the_model() -> None:
    error = _fails(Net().state_dict(), program_of(Net(), {"dp": 1}))
    assert error.where == "inv_freq"
    assert "not persistent" in error.what
    assert "program.engine(model, weights=...)" in error.fix


def test_sources_that_are_none_are_refused(tmp_path: Path) -> None:
    program = program_of(Net(), {"dp": 1})
    assert "weights cannot come from a int" in str(_fails(3, program))
    assert "there are no weights at this path" in str(_fails(tmp_path / "nowhere", program))
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    assert "the file cannot be read" in str(_fails(tmp_path, program))


# --- checkpoints ------------------------------------------------------------------------------------------------------

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: torch.optim.AdamW(
        [{"params": ps[:2], "weight_decay": 0.5}, {"params": ps[2:]}], lr=0.1, betas=(0.8, 0.9)
    ),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "rprop": lambda ps: torch.optim.Rprop(ps, lr=0.1),
    "tensor_lr": lambda ps: torch.optim.Adam(ps, lr=torch.tensor(0.1)),
}


def _train(
    program: Program, mesh: Any, params: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: range
) -> None:
    """Steps on gradients that are a function of the global element, so that every mesh takes the same ones."""
    for step in steps:
        for p in program.params:
            if p.requires_grad:
                whole = torch.sin(torch.arange(float(torch.Size(p.shape).numel())) + step).view(p.shape)
                params[p.name].grad = p.layout.local(whole, mesh.layout, mesh.layout.coords(mesh.rank)).clone()
        optimizer.step()


def _trained(sizes: Sizes, make: Make, folder: Path | None, steps: int, resume: Path | None = None) -> Any:
    """Cut, perhaps resume, train, perhaps save; returns (program, ranks, optimizer state by rank, extra)."""
    program = program_of(record(Net)[0], sizes, zero=True)

    def work(mesh: LoopbackMesh) -> Any:
        params, buffers = local_parameters(program, Net, mesh, 7)
        optimizer = make([params[p.name] for p in program.params if p.requires_grad])
        held = RankState(program, mesh, params, buffers, optimizer)
        extra = loading.load(resume, held) if resume else None
        begin = extra["step"] if extra else 0
        _train(program, mesh, params, optimizer, range(begin, begin + steps))
        if folder:
            facts = {"step": steps, "seed": 7, "scheduler": {"last": 0.1}}
            saving.Saves(mesh).save(folder, lambda: saving.planned(held, facts))
        moments = {p.name: optimizer.state.get(params[p.name], {}) for p in program.params}
        return (params, buffers), moments, extra, optimizer.param_groups

    done = loopback(program.mesh, work)
    return program, [d[0] for d in done], [d[1] for d in done], done[0][2], done[0][3]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_any_mesh_resumes_any_meshs_checkpoint_bit_for_bit(name: str, sizes: Sizes, tmp_path: Path) -> None:
    folder, make = tmp_path / "checkpoint", OPTIMIZERS[name]
    program, ranks, moments, _, groups = _trained({"dp": 2, "tp": 2}, make, folder, steps=2)
    other, loaded, found, extra, settings = _trained(sizes, make, None, steps=0, resume=folder)
    assert extra == {"step": 2, "seed": 7, "scheduler": {"last": 0.1}}
    assert [{**g, "params": 0} for g in settings] == [{**g, "params": 0} for g in groups]
    for p, q in zip(program.params, other.params, strict=True):
        whole = joined(program, ranks, p.name)
        assert torch.equal(joined(other, loaded, q.name), whole), p.name
        assert set(moments[0][p.name]) == set(found[0][q.name])
        for key, x in moments[0][p.name].items():
            if isinstance(x, Tensor) and x.dim():
                a = joined(program, [({p.name: nn.Parameter(m[p.name][key])}, {}) for m in moments], p.name)
                b = joined(other, [({q.name: nn.Parameter(m[q.name][key])}, {}) for m in found], q.name)
                assert torch.equal(a, b), (p.name, key)
                assert a.abs().sum() > 0
            else:
                assert all(m[q.name][key] == x for m in found), (p.name, key)
    # and training goes on as if it had never stopped
    straight = _trained({"dp": 2, "tp": 2}, make, None, steps=4)
    resumed = _trained(sizes, make, None, steps=2, resume=folder)
    for p in program.params:
        assert torch.equal(joined(straight[0], straight[1], p.name), joined(resumed[0], resumed[1], p.name)), p.name


def _save(folder: Path, model: nn.Module, sizes: Sizes, extra: Any = None, make: Make | None = None) -> None:
    program = program_of(model, sizes)

    def work(mesh: LoopbackMesh) -> None:
        params, buffers = local_parameters(program, model, mesh, 0)
        held = RankState(program, mesh, params, buffers, make(list(params.values())) if make else None)
        saving.Saves(mesh).save(folder, lambda: saving.planned(held, extra))

    loopback(program.mesh, work)


def _load(folder: Path, model: nn.Module, make: Make | None = None) -> Rank:
    program = program_of(model, {"dp": 1})
    mesh: LoopbackMesh = loopback(program.mesh, lambda m: m)[0]
    params, buffers = local_parameters(program, model, mesh, 0)
    loading.load(folder, RankState(program, mesh, params, buffers, make(list(params.values())) if make else None))
    return params, buffers


def test_replicas_write_once_and_files_hold_only_parts(tmp_path: Path) -> None:
    model = nn.Linear(64, 64, bias=False)
    program = program_of(model, {"dp": 4})
    assert not program.params[0].layout.items
    _save(tmp_path / "c", model, {"dp": 4})
    assert sorted(os.listdir(tmp_path / "c")) == [".lock", "step-000000"]
    sizes = {f.name: f.stat().st_size for f in (tmp_path / "c" / "step-000000").iterdir()}
    assert sorted(sizes) == ["index.json", "model-00000.safetensors"]
    assert 64 * 64 * 4 < sizes["model-00000.safetensors"] < 64 * 64 * 4 + 512


def test_safetensors_reads_the_files_of_a_checkpoint(tmp_path: Path) -> None:
    model = Net()
    _save(tmp_path / "c", model, {"tp": 4})
    folder = tmp_path / "c" / "step-000000"
    parts = {name: x for f in folder.glob("*.safetensors") for name, x in load_file(f).items()}
    found = model.state_dict()
    assert torch.equal(parts["gqa.weight[0:4,0:8]"], found["gqa.weight"][:4])
    whole = {n: x for n, x in parts.items() if "[" not in n}
    assert "norm.weight" in whole
    assert all(torch.equal(found[n], x) for n, x in whole.items())


def test_torchs_own_tools_read_what_is_exported_and_it_comes_back(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    model = Net()
    _save(tmp_path / "c", model, {"tp": 4}, {"step": 3, "seed": 5}, OPTIMIZERS["adamw"])
    export_checkpoint(checkpoints_in(tmp_path / "c")[0].path, tmp_path / "torch")
    dcp_to_torch_save(tmp_path / "torch", tmp_path / "plain.pt")
    plain = torch.load(tmp_path / "plain.pt")
    for n, x in model.state_dict().items():
        if n != "head.weight":
            assert torch.equal(plain[f"model.{n}"], x), n
    here, _ = _load(tmp_path / "torch", Net(), OPTIMIZERS["adamw"])
    assert torch.equal(here["qkv_weight"], model.qkv.weight)
    ours, theirs = (read_index(checkpoints_in(tmp_path / n)[0].path) for n in ("c", "torch"))
    assert (ours.extra, ours.optimizer, ours.step) == (theirs.extra, theirs.optimizer, theirs.step)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("key", ["model", ""])
def test_a_checkpoint_of_fsdp_is_begun_from(key: str, tmp_path: Path) -> None:
    """With the state_dict under a key, as accelerate writes it, or not: a name may begin with model itself."""
    from torch.distributed.checkpoint.state_dict_saver import save

    model = nn.ModuleDict({"model": nn.ModuleDict({"up": nn.Linear(4, 4)}), "lm_head": nn.Linear(4, 4)})
    state = model.state_dict()
    save({key: state} if key else {**state}, checkpoint_id=tmp_path / "fsdp", no_dist=True)
    found = open_weights(tmp_path / "fsdp").tensors
    assert {n: x.tensor().tolist() for n, x in found.items()} == {n: x.tolist() for n, x in state.items()}


def test_pickles_that_torch_would_not_write_are_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / "old").mkdir()
    (tmp_path / "old" / ".metadata").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ShardcError, match=r"it is not a file of torch: it needs posix\.mkdir"):
        read_index(tmp_path / "old")
    assert not (tmp_path / "ran").exists()


def test_zero_sized_and_scalar_parameters_are_kept(tmp_path: Path) -> None:
    def build(one: float, flag: bool) -> nn.Module:
        frozen = nn.Parameter(torch.tensor(flag), False)
        return nn.ParameterDict({"none": torch.empty(0, 3), "one": torch.tensor(one), "flag": frozen})

    _save(tmp_path / "c", build(3.0, True), {"tp": 2})
    params, _ = _load(tmp_path / "c", build(0.0, False))
    assert params["one"] == 3
    assert params["flag"]


def test_checkpoint_of_another_model_is_named_and_changes_nothing(tmp_path: Path) -> None:
    _save(tmp_path / "c", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"dp": 1})
    with pytest.raises(ShardcError) as e:
        _load(tmp_path / "c", nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(3, 3)))
    text = str(e.value)
    assert "1.weight has the shape [2, 4] in the checkpoint step-000000, and [3, 4] in the program" in text
    assert "2.bias is missing in the checkpoint step-000000" in text
    with pytest.raises(ShardcError, match=r"1.weight in the checkpoint step-000000 is unknown to the program") as e:
        _load(tmp_path / "c", nn.Sequential(nn.Linear(4, 4)))
    assert "add the tensor to the model again" in str(e.value)  # no like name that it has anyway


def test_no_checkpoint_and_no_optimizer_state_are_told(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    for name in ("nowhere", "step-000001"):
        with pytest.raises(ShardcError, match="there is no checkpoint in this folder"):
            _load(tmp_path / name, model)
    _save(tmp_path / "c", model, {"dp": 1})
    with pytest.raises(ShardcError, match="the checkpoint has no optimizer state"):
        _load(tmp_path / "c", model, OPTIMIZERS["sgd"])
    _save(tmp_path / "c", model, {"dp": 1}, make=OPTIMIZERS["adamw"])
    with pytest.raises(ShardcError, match="the checkpoint is of the optimizer AdamW, not SGD"):
        _load(tmp_path / "c", model, OPTIMIZERS["sgd"])
    _save(tmp_path / "d", model, {"dp": 1}, make=lambda ps: torch.optim.SGD(ps[:1]))
    with pytest.raises(ShardcError, match=r"bias is missing in the checkpoint's optimizer"):
        _load(tmp_path / "d", model, OPTIMIZERS["sgd"])


def test_tensors_inside_of_values_of_the_optimizer_are_kept(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    program = program_of(model, {"dp": 1})
    made = [torch.arange(3.0), ({"a": torch.ones(2, 2)}, 5)]

    def work(mesh: LoopbackMesh) -> Any:
        params, buffers = local_parameters(program, model, mesh)
        optimizer, p = torch.optim.SGD(params.values()), params["weight"]
        held = RankState(program, mesh, params, buffers, optimizer)
        optimizer.state[p] = {"rows": made, "a/b": torch.full((2, 2), 3.0)}
        saving.Saves(mesh).save(tmp_path, lambda: saving.planned(held))
        optimizer.state[p] = {}
        loading.load(tmp_path, held)
        assert optimizer.state[p]["a/b"].eq(3).all()
        return optimizer.state[p]["rows"]

    torch.testing.assert_close(loopback(program.mesh, work), [made], rtol=0, atol=0)


def test_state_that_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    model = Net()
    with pytest.raises(ShardcError, match="extra state or the optimizer's settings contain more than plain values"):
        _save(tmp_path / "c", model, {"dp": 1}, {"model": model})
    with pytest.raises(ShardcError, match=r"holds a tensor of shape .* that is not a parameter of the program"):
        _save(tmp_path / "c", model, {"dp": 1}, make=lambda _: torch.optim.SGD(model.parameters()))

    def odd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(params)
        for p in params:
            optimizer.state[p]["rows"] = torch.zeros(p.shape[:1])
        return optimizer

    with pytest.raises(ShardcError, match=r"state 'rows' of shape .* does not have its parameter's shape"):
        _save(tmp_path / "c", model, {"tp": 2}, make=lambda ps: odd([p for p in ps if p.dim() == 2]))
    assert not list((tmp_path / "c").glob("*"))


# --- plain state_dicts and files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_full_state_dict_is_the_models_own(sizes: Sizes) -> None:
    model = Net()
    program = program_of(model, sizes, zero=True)

    def work(mesh: LoopbackMesh) -> Any:
        held = local_parameters(program, model, mesh, 0)
        return (
            parts.full_state_dict(program, mesh, *held),
            parts.full_state_dict(program, mesh, *held, rank0_only=True),
            held,
        )

    for rank, (full, first, held) in enumerate(loopback(program.mesh, work)):
        expected = model.state_dict()
        assert set(full) == set(expected)
        assert all(torch.equal(full[n], x) and not full[n].requires_grad for n, x in expected.items())
        assert set(first) == (set(expected) if rank == 0 else set())
        assert full["emb.weight"] is full["head.weight"]
        assert full["norm.weight"].data_ptr() != held[0]["norm_weight"].data_ptr()
        Net().load_state_dict(full, strict=True)


@pytest.mark.parametrize("sizes", [{"dp": 1}, {"dp": 2, "tp": 2}], ids=str)
@pytest.mark.parametrize("form", ["file", "folder", "sharded"])
def test_exported_safetensors_load_anywhere(sizes: Sizes, form: str, tmp_path: Path) -> None:
    model = Net()
    program = program_of(model, sizes)
    path = tmp_path / ("out.safetensors" if form == "file" else "out")

    def work(mesh: LoopbackMesh) -> None:
        held = local_parameters(program, model, mesh, 0)
        export.export_safetensors(
            path, RankState(program, mesh, *held), max_file_bytes=1000 if form == "sharded" else 10**9
        )

    loopback(program.mesh, work)
    if form == "sharded":
        index = json.loads((path / "model.safetensors.index.json").read_text())
        files = {n: load_file(path / f) for n, f in index["weight_map"].items()}
        stored = {n: f[n] for n, f in files.items()}
        assert len(set(index["weight_map"].values())) > 2
        assert index["metadata"]["total_size"] == sum(x.nbytes for x in stored.values())
    else:
        file = path if form == "file" else path / "model.safetensors"
        other = Net()
        assert load_model(other, file, strict=True) == (set(), [])
        assert all(torch.equal(x, other.state_dict()[n]) for n, x in model.state_dict().items())
        stored = load_file(file)
    assert "head.weight" not in stored
    assert Net().load_state_dict(stored, strict=False).missing_keys == ["head.weight"]
    again = cut(program, path, base=Net)
    assert all(
        torch.equal(joined(program, again, p.name), dict(model.named_parameters())[p.fqn]) for p in program.params
    )


def test_weights_of_another_model_are_told_in_one_line() -> None:
    """Not one error for each of hundreds."""
    wanted = {f"h.{i}.weight": (4, 4) for i in range(20)}
    present = {f"h.{i}.weight": (4, 4) if i < 5 else (8, 8) for i in range(12)} | {"head.weight": (8, 4)}
    errors = Errors()
    check_tensors(errors, wanted, present, wanted, "the checkpoint c")
    (error,) = errors.found
    assert (
        error.what
        == "the checkpoint c is of another model: of 20 tensors 7 with another shape (h.5.weight, ...), 8 missing"
        " (h.12.weight, ...), 1 unknown to the program (head.weight); h.5.weight has the shape [8, 8] in the"
        " checkpoint c, and [4, 4] in the program"
    )
    assert error.fix == "compile the model that was saved, with its config"
