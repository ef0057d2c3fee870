"""Begin from pretrained weights: files of all kinds, on any mesh, each rank reading its slices; what is told."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn

import shardc
from shardc.api import Program
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.state import weight_files
from shardc.runtime.state.init import record
from shardc.runtime.state.parts import local_parts
from shardc.runtime.state.pretrained import lazily
from shardc.runtime.state.sources import weights, weights_for
from shardc.runtime.state.weight_files import open_weights

torch.set_num_threads(1)

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
FAMILIES: dict[str, Callable[[bool], nn.Module]] = {
    "llama": lambda tied: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    ),
    "qwen3": lambda tied: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=tied)
    ),
    "gpt2": lambda tied: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, tie_word_embeddings=tied,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    ),
    "gpt_neox": lambda tied: transformers.GPTNeoXForCausalLM(
        transformers.GPTNeoXConfig(
            **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}, tie_word_embeddings=tied
        )
    ),
    "mixtral": lambda tied: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=4, tie_word_embeddings=tied)
    ),
    "qwen2_moe": lambda tied: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **SIZES, num_experts=4, moe_intermediate_size=32, shared_expert_intermediate_size=32,
            tie_word_embeddings=tied,
        )
    ),
}  # fmt: skip
SPECS: dict[str, dict[str, Any]] = {
    "tp": {"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "pp": {"shardc": 1, "mesh": {"pp": 2}, "pipeline": {"axis": "pp", "stages": 2}},
    "zero3": {"shardc": 1, "mesh": {"dp": 2}, "data": {"zero": 3}},
}
EXPERTS: dict[str, Any] = {"shardc": 1, "mesh": {"ep": 2}, "experts": [{"match": "*.experts", "axis": "ep"}]}


def batch() -> dict[str, Tensor]:
    ids = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def family(name: str, tied: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = FAMILIES[name](tied)
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.01 * torch.randn_like(x))  # norms too: an initial value would not show that it was read
    return model.train()


def states(program: Program, *args: Any, **options: Any) -> list[tuple[dict[str, Tensor], tuple[str, ...]]]:
    """(whole state_dict, notes) of an engine on every rank."""

    def run(mesh: Any) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        engine = program.engine(*args, optimizer=None, mesh=mesh, **options)
        return engine.full_state_dict(), engine.weight_notes

    return loopback(program.mesh, run)


def assert_state(found: dict[str, Tensor], model: nn.Module) -> None:
    expected = model.state_dict()
    assert set(found) == set(expected)
    for name, x in expected.items():
        assert torch.equal(found[name], x.to(found[name].dtype)), name


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool, bool], tuple[Path, nn.Module]]:
    made: dict[tuple[str, bool, bool], tuple[Path, nn.Module]] = {}

    def folder(name: str, tied: bool, many: bool) -> tuple[Path, nn.Module]:
        key = name, tied, many
        if key not in made:
            path, model = tmp_path_factory.mktemp(name), family(name, tied)
            model.save_pretrained(path, max_shard_size="30KB" if many else "5GB")  # type: ignore[operator]
            assert (path / "model.safetensors").exists() != many
            made[key] = path, model
        return made[key]

    return folder


@pytest.mark.parametrize("name", FAMILIES)
def test_a_folder_gives_every_mesh_the_weights_of_from_pretrained(name: str, folders: Any) -> None:
    specs = {**SPECS, **({"ep": EXPERTS} if name in ("mixtral", "qwen2_moe") else {})}
    for spec, tied in itertools.product(specs.values(), (False, True)):
        program = shardc.compile(family(name, tied), batch(), spec, prove=False)
        for many in (False, True):
            path, model = folders(name, tied, many)
            for found, notes in states(program, path):
                assert_state(found, model)
                assert len(notes) == 1, notes


@pytest.mark.parametrize("axis", ["tp", "pp", "ep"])
def test_a_rank_reads_its_slices_and_nothing_else(axis: str, folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path, model = folders("mixtral", False, True)
    spec = EXPERTS if axis == "ep" else SPECS[axis]
    program = shardc.compile(model, batch(), spec, prove=False)
    read: list[int] = []
    original = weight_files._read_safetensors

    def counting(*args: Any) -> Tensor:
        x = original(*args)
        read.append(x.nbytes)
        return x

    monkeypatch.setattr(weight_files, "_read_safetensors", counting)
    for rank in range(2):
        read.clear()
        _, held = loopback(program.mesh, lambda mesh, r=rank: _held(program, path, mesh) if mesh.rank == r else None)[
            rank
        ]
        assert sum(read) == held


def _held(program: Program, path: Path, mesh: Any) -> tuple[int, int]:
    """A rank's parameters, made without the others."""
    params, _ = local_parts(program, weights_for(None, path, 0), mesh)
    return 0, sum(x.nbytes for _, x in params)


class Net(nn.Module):
    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.up(x).relu())).square().mean()


def net() -> Net:
    torch.manual_seed(3)
    return Net()


X = {"x": torch.linspace(-1, 1, 4 * 8).view(4, 8)}
TP: dict[str, Any] = {"shardc": 1, "mesh": {"tp": 2}, "shard": {"up": "column", "down": "row"}}


@pytest.mark.parametrize("form", ["bin", "pt", "index", "safetensors", "old", "nested", "checkpoint"])
def test_files_of_all_kinds(form: str, tmp_path: Path) -> None:
    model = net()
    program = shardc.compile(model, X, TP)
    state = model.state_dict()
    path = tmp_path
    if form == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    elif form == "pt":
        torch.save(state, path := tmp_path / "w.pt")
    elif form == "old":
        torch.save(state, path := tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    elif form == "nested":
        torch.save({"epoch": 3, "state_dict": {f"module.{k}": x for k, x in state.items()}}, path := tmp_path / "w.pt")
    elif form == "index":
        names = list(state)
        parts = {"a.bin": names[:3], "b.bin": names[3:]}
        for file, own in parts.items():
            torch.save({n: state[n] for n in own}, tmp_path / file)
        (tmp_path / "pytorch_model.bin.index.json").write_text(
            json.dumps({"weight_map": {n: file for file, own in parts.items() for n in own}})
        )
    elif form == "safetensors":
        save_file({f"net.{k}": x.to(torch.bfloat16) for k, x in state.items()}, path := tmp_path / "w.safetensors")
        model = model.to(torch.bfloat16)
    else:
        loopback(program.mesh, lambda mesh: program.engine(model, mesh=mesh).save(tmp_path / "checkpoint"))
    for source in (net().to("meta"), Net):
        for found, notes in states(program, source, weights=path):
            assert_state(found, model)
            assert notes[0].startswith("weights: 6 tensors of ")
            if form == "safetensors":
                assert notes[1] == "6 of them are stored as bfloat16 and held as float32"


def test_what_is_missing_is_initialised_as_on_one_device_and_told(tmp_path: Path) -> None:
    state = {k: x for k, x in net().state_dict().items() if not k.startswith("head")}
    save_file({**state, "old.0.w": torch.ones(2), "old.1.w": torch.ones(2)}, tmp_path / "model.safetensors")
    program = shardc.compile(net(), X, TP)
    torch.manual_seed(5)
    single = Net().state_dict()
    for found, notes in states(program, Net, seed=5, weights=tmp_path):
        assert notes[1] == "not in the files, and initialised by the model: head.weight, head.bias"
        assert notes[2] == "in the files, and not in the model: old.*.w (2)"
        for name, x in found.items():
            assert torch.equal(x, state.get(name, single[name])), name


def test_other_shapes_and_other_models_are_refused(tmp_path: Path) -> None:
    save_file(Net(classes=7).state_dict(), path := tmp_path / "w.safetensors")
    program = shardc.compile(net(), X, TP)
    mesh = loopback(program.mesh, lambda m: m)[0]

    def engine(source: Any, **options: Any) -> Any:
        return program.engine(source, None, mesh=mesh, check=False, **options)

    with pytest.raises(ShardcError, match=r"head.weight has the shape \[7, 8\] in .*w.safetensors, and \[4, 8\]"):
        engine(Net, weights=path)
    save_file({"a.b": torch.ones(2)}, other := tmp_path / "other.safetensors")
    with pytest.raises(ShardcError, match=r"none of the file's 1 tensors \(a.b\) is in the model, which has up.weight"):
        engine(Net, weights=other)
    with pytest.raises(ShardcError, match="there are no weights at this path"):
        engine(Net, weights=tmp_path / "nowhere")
    with pytest.raises(ShardcError, match="are put into a model, and this is a OrderedDict"):
        engine(net().state_dict(), weights=path)
    (tmp_path / "junk.bin").write_bytes(b"junk")
    with pytest.raises(ShardcError, match=r"junk.bin: the weights cannot be read"):
        engine(Net, weights=tmp_path / "junk.bin")
    index = tmp_path / "model.safetensors.index.json"
    for text, message in (
        ('{"weight_map": {"a": "../w.safetensors"}}', "names files elsewhere"),
        ('{"weight_map": {"a": "gone.safetensors"}}', "1 of them do not exist: gone.safetensors"),
        ("[]", "the index of the weights cannot be read"),
    ):
        index.write_text(text)
        with pytest.raises(ShardcError, match=message):
            open_weights(tmp_path)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5368709120\n"
SAFE = save({"up.weight": torch.ones(8, 8)})
#: What lies in the place of weights: the file, its bytes, the message, its fix.
IN_PLACE_OF_WEIGHTS = [
    ("model.safetensors", LFS, "the file cannot be read: it is a pointer of Git LFS", "git lfs pull"),
    ("pytorch_model.bin", LFS, "the weights cannot be read: it is a pointer of Git LFS", "git lfs pull"),
    ("model-00002-of-00002.safetensors", LFS, "it is a pointer of Git LFS", "git lfs pull"),  # the first one is there
    ("model.safetensors", b"<!DOCTYPE html>", "it is a web page", "hf auth login"),
    ("model.safetensors", SAFE[:-4], f"it is truncated, at byte {len(SAFE) - 4} of {len(SAFE)}", "download it again"),
    ("model.safetensors", SAFE[:40], "it is truncated, at byte 40 of 80", "download it again"),
    ("model.safetensors", b"", "it is empty", "download it again"),
    ("model.safetensors", save({}), "there are no tensors in the weights", "save them again"),
    ("pytorch_model.bin", b"", "it is empty", "download it again"),
    ("pytorch_model.bin", b"PK\x03\x04cut", "it is truncated or damaged", "download it again"),
    ("model.gguf", b"GGUF\x03", "it is a GGUF file", "download the model's .safetensors files"),
    (
        "pytorch_model_fsdp_0/__0_0.distcp",
        b"",
        "a checkpoint of torch.distributed",
        "name its folder, which has the file .metadata: ROOT/pytorch_model_fsdp_0",
    ),
    ("part/.metadata", b"", "of torch.distributed", "name its folder, which has the file .metadata: ROOT/part"),
    ("global_step5/zero_pp_rank_0_mp_rank_00_optim_states.pt", b"", "of DeepSpeed", "utils.zero_to_fp32 ROOT NEW"),
    ("global_step5/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", b"", "of DeepSpeed", "utils.zero_to_fp32 ROOT NEW"),
    ("global_step5/mp_rank_00_model_states.pt", b"", "of DeepSpeed", 'torch.load("ROOT/global_step5/mp_rank_00_model_'),
]


@pytest.mark.parametrize(("name", "content", "message", "fix"), IN_PLACE_OF_WEIGHTS)
def test_what_lies_in_the_place_of_weights_is_named(
    name: str, content: bytes, message: str, fix: str, tmp_path: Path
) -> None:
    (tmp_path / "optimizer_0").mkdir()
    (file := tmp_path / name).parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    if "-of-" in name:
        index = {"weight_map": {"up.weight": "model-00001-of-00002.safetensors", "b": name}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        (tmp_path / "model-00001-of-00002.safetensors").write_bytes(SAFE)
    for path in {tmp_path if file.suffix != ".gguf" else file, file if ".." not in name else tmp_path}:
        with pytest.raises(ShardcError) as error:
            open_weights(path)
        assert message in error.value.what
        assert fix.replace("ROOT", str(tmp_path)) in error.value.fix
        assert error.value.where in (str(path), str(file))


# --- inside model() ---------------------------------------------------------------------------------------------------


#: peft asks transformers for what it is about to rename.
PEFT_WARNS = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")


def builders(path: Path) -> dict[str, Callable[[], Any]]:
    auto = transformers.AutoModelForCausalLM

    def config() -> Any:
        return transformers.AutoConfig.from_pretrained(path)

    def load() -> nn.Module:
        model = auto.from_config(config())
        model.load_state_dict(torch.load(path / "w.pt"))
        return model

    def load_safetensors() -> nn.Module:
        model = auto.from_config(config())
        model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
        return model

    def with_lora() -> nn.Module:
        import peft

        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
        return peft.get_peft_model(auto.from_pretrained(path), lora)

    return {
        "from_pretrained": lambda: auto.from_pretrained(path),
        "bfloat16": lambda: auto.from_pretrained(path, dtype=torch.bfloat16),
        "torch.load": load,
        "load_file": load_safetensors,
        "new head": lambda: transformers.AutoModelForSequenceClassification.from_pretrained(path, num_labels=3),
        "lora": with_lora,
    }


@PEFT_WARNS
@pytest.mark.parametrize("kind", builders(Path()))
def test_weights_that_a_builder_reads_are_read_by_slice(kind: str, folders: Any) -> None:
    path, model = folders("llama", True, False)
    torch.save(model.state_dict(), path / "w.pt")
    build = builders(path)[kind]
    built, recipe = record(build)
    assert all(x.is_meta for x in built.parameters())
    torch.manual_seed(0)
    plain = dict(build().named_parameters())
    mine = {n: recipe.materialise(n, 0) for n in plain}
    new = {n for n in plain if "score" in n or "lora_A" in n}
    assert set(plain) <= set(recipe.names)
    assert all(torch.equal(mine[n], plain[n]) for n in plain)
    files = {n for n, x in weights(build, 0).tensors.items() if not x.computed}
    assert {n for n in plain if "lora_" not in n} - new <= files
    assert not new & files
    if kind not in ("torch.load", "load_file"):
        assert recipe.notes[0] == f"weights: 20 tensors of {path} (from_pretrained)"
        assert ("not in the files, and initialised by the model: score.weight" in recipe.notes) == (kind == "new head")
    with torch.device("meta"), lazily(None):
        assert all(x.is_meta for x in build().parameters())


@pytest.mark.parametrize("way", ["AutoModelForCausalLM of the file", "class of the builder"])
def test_from_pretrained_before_transformers_has_imported_its_models(way: str, folders: Any) -> None:
    """`from transformers import AutoModelForCausalLM` imports no model: that comes in the builder."""
    path, model = folders("llama", False, False)
    name = "AutoModelForCausalLM" if way.startswith("Auto") else type(model).__name__
    line = f"from transformers import {name}"
    script = f"""
import sys
{line if way.startswith("Auto") else ""}
from shardc.runtime.state.init import record
def model():
    {line}
    return {name}.from_pretrained({str(path)!r})
assert "transformers.modeling_utils" not in sys.modules
built, recipe = record(model)
print(recipe.notes)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "(from_pretrained)" in done.stdout, done.stderr


def test_what_a_builder_imports_reads_files_afterwards(tmp_path: Path) -> None:
    save_file({"w": torch.arange(4.0)}, tmp_path / "w.safetensors")
    torch.save({"w": torch.arange(4.0)}, tmp_path / "w.pt")
    with lazily(None):  # a module that is imported first in here keeps what it finds
        from safetensors import safe_open
        from torch import load

        assert safe_open(tmp_path / "w.safetensors", framework="pt").get_tensor("w").is_meta
        assert load(tmp_path / "w.pt")["w"].is_meta
    with safe_open(tmp_path / "w.safetensors", framework="pt") as file:
        assert file.get_tensor("w").tolist() == [0, 1, 2, 3]
    assert load(tmp_path / "w.pt")["w"].tolist() == [0, 1, 2, 3]


@PEFT_WARNS
def test_weights_of_a_folder_go_into_a_model_with_adapters(folders: Any) -> None:
    path, model = folders("llama", True, False)

    def build() -> nn.Module:
        import peft

        config = transformers.AutoConfig.from_pretrained(path)
        lora = peft.LoraConfig(target_modules=["q_proj"], r=4)
        return peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), lora)

    program = shardc.compile(build(), batch(), SPECS["tp"], prove=False)
    expected = model.state_dict()
    for found, notes in states(program, build, weights=path):
        base = {k.removeprefix("base_model.model.").replace(".base_layer", ""): x for k, x in found.items()}
        assert all(torch.equal(base[k], x) for k, x in expected.items())
        assert notes[1].startswith("not in the files, and initialised by the model: base_model.model.model.layers.*.")


def test_a_module_of_ones_own_loop_begins_from_a_folder(folders: Any) -> None:
    path, model = folders("gpt2", False, False)
    program = shardc.compile(model, batch(), SPECS["zero3"], prove=False)
    half = {k: x[:2] for k, x in batch().items()}
    losses = loopback(program.mesh, lambda mesh: float(program.module(path, mesh=mesh)(**half).detach()))
    assert losses[0] == losses[1]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.wte(ids)).square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["wte.weight", "head.weight"])
@pytest.mark.parametrize("source", ["model", "builder", "meta", "reading builder"])
def test_a_file_may_have_any_name_of_a_tied_weight(source: str, name: str, tmp_path: Path) -> None:
    """What the model would begin with under the other names does not win over what was read."""
    weight, ids = torch.randn(12, 8), torch.arange(12)
    save_file({name: weight}, tmp_path / "model.safetensors")
    program = shardc.compile(Tied(), ids, {"shardc": 1, "mesh": {"dp": 2}}, prove=False)
    with torch.device("meta" if source == "meta" else "cpu"):
        model = Tied()
    torch.save({"wte.weight": torch.zeros(12, 8), "head.weight": torch.zeros(12, 8)}, before := tmp_path / "before.pt")

    def reading() -> nn.Module:
        made = Tied()
        made.load_state_dict(torch.load(before))
        return made

    given = {"builder": Tied, "reading builder": reading}.get(source, model)

    def read(mesh: Any, broadcast: bool = False) -> Any:
        return program.engine(given, mesh=mesh, weights=tmp_path, broadcast=broadcast).full_state_dict()["wte.weight"]

    assert all(torch.equal(found, weight) for found in loopback(program.mesh, read))
    if source != "meta":
        assert all(torch.equal(found, weight) for found in loopback(program.mesh, lambda mesh: read(mesh, True)))


def test_a_tied_weight_that_differs_under_its_names_is_refused(tmp_path: Path) -> None:
    same = torch.randn(12, 8)
    program = shardc.compile(Tied(), torch.arange(12), {"shardc": 1, "mesh": {"dp": 1}}, prove=False)
    mesh = loopback(program.mesh, lambda m: m)[0]
    save_file({"wte.weight": same, "head.weight": same.clone()}, tmp_path / "model.safetensors")
    assert torch.equal(program.engine(Tied, mesh=mesh, weights=tmp_path).full_state_dict()["wte.weight"], same)
    save_file({"wte.weight": same, "head.weight": same + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ShardcError, match=r"wte.weight and head.weight as one tensor, but in the .* they differ"):
        program.engine(Tied, mesh=mesh, weights=tmp_path)


def test_one_name_in_common_is_another_model(folders: Any) -> None:
    """Every language model has an lm_head.weight: files of another one are refused, not read as that alone."""
    other = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=False))
    program = shardc.compile(FAMILIES["gpt2"](True), batch(), SPECS["zero3"], prove=False)
    with pytest.raises(ShardcError, match=r"1 \(lm_head.weight\) of the file's 25 tensors \(.*\) is in the model"):
        loopback(
            program.mesh, lambda mesh: program.engine(FAMILIES["gpt2"](True), mesh=mesh, weights=other.state_dict())
        )
