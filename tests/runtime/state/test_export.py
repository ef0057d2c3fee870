"""Weights for others: what all ranks write together is what transformers and peft load, with equal logits."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.state.export import skeleton
from tests.runtime.state.test_pretrained import EXPERTS, FAMILIES, PEFT_WARNS, SPECS, TP, Net, X, batch, family, net
from tests.zoo import hf

torch.set_num_threads(1)


def trained(program: Any, *args: Any, steps: int = 1, then: Callable[[Any], Any], **options: Any) -> list[Any]:
    """What `then(engine)` gives on every rank, after some steps on the example batch."""

    def run(mesh: Any) -> Any:
        engine = program.engine(*args, mesh=mesh, **options)
        for _ in range(steps):
            engine.step(batch() if "input_ids" in {x.path[0] for x in program.inputs} else X)
        return then(engine)

    return loopback(program.mesh, run)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.eval()(**{"input_ids": batch()["input_ids"]}).logits  # type: ignore[no-any-return]


#: Families whose folders accelerate cannot load, transformers' own neither: it knows nothing of weights that are
#: renamed when they are loaded.
ACCELERATE_CANNOT = ("mixtral", "qwen2_moe", "gpt_neox")


def by_accelerate(like: Any, folder: Path) -> nn.Module | None:
    """The model of a folder, as accelerate loads it; None where it cannot."""
    with accelerate.init_empty_weights():
        empty = type(like)(like.config)
    empty.tie_weights()
    try:
        return accelerate.load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"})  # type: ignore[no-any-return]
    except NotImplementedError:  # what it did not find has no values
        return None


@pytest.mark.parametrize("name", FAMILIES)
def test_in_trained_out_and_back_to_from_pretrained(name: str, tmp_path: Path) -> None:
    specs = {**SPECS, **({"ep": EXPERTS} if name == "mixtral" else {})}
    for axis, spec in specs.items():
        model = family(name, tied=axis == "pp")
        into, out = tmp_path / f"{axis}-in", tmp_path / f"{axis}-out"
        model.save_pretrained(into)  # type: ignore[operator]
        (into / "tokenizer.json").write_text("{}")
        program = shardc.compile(model, batch(), spec, prove=False)
        size = 5_000_000_000 if axis == "tp" else 30_000

        def export(engine: Any, out: Path = out, size: int = size) -> dict[str, Tensor]:
            engine.export(out, max_file_bytes=size)
            return engine.full_state_dict()  # type: ignore[no-any-return]

        state = trained(program, into, then=export)[0]
        again = transformers.AutoModelForCausalLM.from_pretrained(out)
        single = family(name, tied=axis == "pp")
        single.load_state_dict(state)
        assert type(again) is type(single)
        assert torch.equal(logits(again), logits(single))
        assert not torch.equal(logits(again), logits(model))
        if (dispatched := by_accelerate(single, into)) is not None:  # transformers' own folder
            assert torch.equal(logits(dispatched), logits(model))
            found = by_accelerate(single, out)
            assert found is not None
            assert torch.equal(logits(found), logits(single))
        else:
            assert name in ACCELERATE_CANNOT
        files = sorted(f.name for f in out.glob("*.safetensors*"))
        assert (files == ["model.safetensors"]) == (axis == "tp")
        if axis == "tp":
            names = set(safe_open(out / files[0], "pt").keys())
            assert names == set(safe_open(into / "model.safetensors", "pt").keys())
        assert {"config.json", "generation_config.json", "tokenizer.json"} <= {f.name for f in out.iterdir()}
        assert not [f.name for f in out.iterdir() if f.name.startswith(".")]


def test_a_model_keeps_its_shape_for_an_export_but_no_values() -> None:
    """Whatever it holds besides: states of the last call, what cannot be copied, weights by a second name."""
    model = family("gpt2", tied=True)
    held: Any = model
    held.lock, held.last = threading.Lock(), [logits(model), model.get_input_embeddings().weight]  # type: ignore[operator]
    bare: Any = skeleton(model)
    assert type(bare) is type(model)
    assert {n: (x.shape, x.device.type) for n, x in bare.state_dict().items()} == {
        n: (x.shape, "meta") for n, x in model.state_dict().items()
    }
    assert bare.last[0].is_meta
    assert bare.last[1] is bare.get_input_embeddings().weight is bare.lm_head.weight
    assert bare.lock is held.lock
    assert not any(x.is_meta for x in model.parameters())


def test_another_dtype_and_an_earlier_export_of_more_files(tmp_path: Path) -> None:
    model = family("qwen3")
    program = shardc.compile(model, batch(), SPECS["tp"], prove=False)

    def export(engine: Any) -> None:
        engine.export(tmp_path, max_file_bytes=20_000)
        engine.export(tmp_path, dtype=torch.bfloat16)

    trained(program, model, steps=0, then=export)
    assert [f.name for f in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, x in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], x.to(torch.bfloat16)), name


#: What config.json says of the dtype of an export: the model's, the program's, the export's, and what is said.
DTYPES = [
    (torch.bfloat16, {"params": "float32", "compute": "bfloat16"}, None, "float32"),
    (torch.bfloat16, {"params": "float32", "compute": "bfloat16"}, torch.bfloat16, "bfloat16"),
    (torch.bfloat16, {}, None, "bfloat16"),
    (torch.float32, {}, torch.float16, "float16"),
]


@pytest.mark.parametrize(("dtype", "precision", "written", "said"), DTYPES)
@pytest.mark.parametrize("name", ["llama", "clip"])
def test_a_config_names_the_dtype_of_its_file(
    name: str, dtype: torch.dtype, precision: dict[str, str], written: torch.dtype | None, said: str, tmp_path: Path
) -> None:
    """clip: also the configs inside of it, which are read when one of the two models is loaded alone."""
    (_, example) = built = hf.build(hf.FAMILIES["clip"], dtype) if name == "clip" else (family(name).to(dtype), batch())
    built[0].save_pretrained(tmp_path / "in")
    if name == "clip":  # as earlier releases of transformers wrote it
        config = json.loads((tmp_path / "in" / "config.json").read_text())
        config["text_config"]["torch_dtype"] = config["torch_dtype"] = config.pop("dtype")
        (tmp_path / "in" / "config.json").write_text(json.dumps(config))
    model = type(built[0]).from_pretrained(tmp_path / "in")
    program = shardc.compile(model, example, {"shardc": 1, "mesh": {"dp": 1}, "precision": precision}, prove=False)

    def export(engine: Any) -> dict[str, Tensor]:
        engine.step(example)
        engine.export(tmp_path / "out", dtype=written)
        return engine.full_state_dict()  # type: ignore[no-any-return]

    (state,) = loopback(program.mesh, lambda mesh: export(program.engine(tmp_path / "in", mesh=mesh)))
    file = load_file(tmp_path / "out" / "model.safetensors")
    assert {str(x.dtype) for x in file.values() if x.is_floating_point()} == {f"torch.{said}"}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    inside = [config[n] for n in ("text_config", "vision_config") if n in config]
    assert all(c.get("dtype", said) == said and "torch_dtype" not in c for c in [config, *inside])
    again = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(x, state[n].to(getattr(torch, said))) for n, x in again.items() if x.is_floating_point())


@pytest.mark.parametrize("config_says_tied", [True, False])
def test_a_tie_that_the_config_denies_is_in_the_files(config_says_tied: bool, tmp_path: Path) -> None:
    """transformers#45127: weights that the config ties, and the model has apart; and the other way round."""
    model: Any = family("llama", tied=config_says_tied)
    weight = model.model.embed_tokens.weight
    model.lm_head.weight = nn.Parameter(weight.detach().clone()) if config_says_tied else weight
    program = shardc.compile(model, batch(), SPECS["tp"], prove=False)

    def export(engine: Any) -> dict[str, Tensor]:
        engine.export(tmp_path)
        return engine.full_state_dict()  # type: ignore[no-any-return]

    state = trained(program, model, then=export)[0]
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not again.config.tie_word_embeddings
    assert all(torch.equal(x, state[n]) for n, x in again.state_dict().items())


def test_weights_of_somebody_else_are_replaced_only_on_request(tmp_path: Path) -> None:
    model = family("gpt2")
    model.save_pretrained(tmp_path / "pre")  # type: ignore[operator]
    save_file({"a": torch.ones(1)}, tmp_path / "one.safetensors")
    before = (tmp_path / "pre" / "model.safetensors").read_bytes()
    program = shardc.compile(model, batch(), SPECS["tp"], prove=False)

    def export(engine: Any) -> None:
        for out in (tmp_path / "pre", tmp_path / "one.safetensors"):
            with pytest.raises(ShardcError, match="were not written by shardc, and would be replaced"):
                engine.export(out)
        assert (tmp_path / "pre" / "model.safetensors").read_bytes() == before
        engine.mesh.barrier()
        engine.export(tmp_path / "pre", overwrite=True)
        engine.export(tmp_path / "pre")  # an earlier export's

    trained(program, model, steps=1, then=export)
    assert (tmp_path / "pre" / "model.safetensors").read_bytes() != before


def test_a_computed_tensor_is_gathered_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardc.runtime.state import export

    model = family("llama")
    program = shardc.compile(model, batch(), SPECS["zero3"], prove=False)

    def doubled(module: Any, found: dict[str, Tensor], recorder: Any) -> dict[str, Tensor]:
        with recorder.recording():
            return {**found, "twice": found["model.embed_tokens.weight"] * 2}

    monkeypatch.setattr(export, "_reverted", doubled)
    trained(program, model, steps=0, then=lambda engine: engine.export(tmp_path))
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["twice"], model.state_dict()["model.embed_tokens.weight"] * 2)
    assert torch.equal(found["lm_head.weight"], model.state_dict()["lm_head.weight"])


def test_a_rank_that_cannot_write_still_gathers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shardc.runtime.state import export

    model = family("mixtral")
    program = shardc.compile(model, batch(), EXPERTS, prove=False)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(export, "_write_slice", full)
    with pytest.raises(ShardcError, match="the weights cannot be written: No space left on device"):
        trained(program, model, steps=0, then=lambda engine: engine.export(tmp_path))
    assert not [*tmp_path.glob("*.safetensors")]


@PEFT_WARNS
@pytest.mark.parametrize("axis", ["tp", "zero3"])
def test_adapters_are_loaded_by_peft(axis: str, tmp_path: Path) -> None:
    import peft

    base = family("llama")
    base.save_pretrained(tmp_path / "base")  # type: ignore[operator]

    def build() -> nn.Module:
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        lora = peft.LoraConfig(target_modules=["q_proj", "v_proj"], r=4, modules_to_save=["lm_head"])
        return peft.get_peft_model(model, lora)

    program = shardc.compile(build(), batch(), SPECS[axis], prove=False)

    def export(engine: Any) -> dict[str, Tensor]:
        engine.export(tmp_path / "out")
        return engine.full_state_dict()  # type: ignore[no-any-return]

    state = trained(program, build, then=export, steps=3)[0]
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    again = peft.PeftModel.from_pretrained(
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "out"
    )
    assert set(again.state_dict()) == set(state)
    for name, x in again.state_dict().items():
        assert torch.equal(x, state[name]), name
    one = peft.PeftModel.from_pretrained(family("llama"), tmp_path / "out", is_trainable=True)
    for found in trained(program, build, weights=tmp_path / "out", steps=0, then=lambda e: e.full_state_dict()):
        assert all(torch.equal(found[n], x) for n, x in one.state_dict().items() if "lora" in n)


def test_a_folder_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    program = shardc.compile(net(), X, TP)
    (tmp_path / "file").write_text("")

    def export(engine: Any) -> str:
        with pytest.raises(ShardcError, match="the weights cannot be written") as found:
            engine.export(tmp_path / "file" / "out")
        engine.export(tmp_path / "out")
        return str(found.value)

    assert len(trained(program, Net, then=export)) == 2
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == set(net().state_dict())
