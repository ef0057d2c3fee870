"""Adapters of the spec: peft loads what is saved and gives the same logits, what peft saved is loaded, merged weights
are those that one device would have.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import shardc
from shardc.runtime.mesh.loopback import loopback
from tests import zoo
from tests.runtime.state.test_pretrained import PEFT_WARNS
from tests.zoo import hf

peft = pytest.importorskip("peft")
LINEAR = "*.{q,v,o}_proj"
MESHES: dict[str, dict[str, Any]] = {
    "tp zero3": {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 3}},
    "pp zero1": {
        "mesh": {"pp": 2, "dp": 2},
        "pipeline": {"axis": "pp", "stages": 2},
        "batch": {"microbatches": 2},
        "data": {"zero": 1},
    },
    "ep": {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "*.mlp.experts", "axis": "ep"}]},
}


def family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with zoo.Wide():
        if name == "mixtral":
            row = hf.row("MixtralForCausalLM", **hf.GQA, **hf.EXPERTS, num_local_experts=4, num_experts_per_tok=2)
            return hf.build(row)  # type: ignore[return-value]
        return zoo.ALL[name]() if name in zoo.ALL else hf.build(hf.FAMILIES[name])  # type: ignore[return-value]


def compiled(model: nn.Module, batch: Any, mesh: str, adapters: Any, **more: Any) -> Any:
    with zoo.Wide():
        return shardc.compile(model, batch, {"shardc": 1, **MESHES[mesh], "adapters": adapters, **more})


def trained(program: Any, model: Any, batch: Any, then: Any, *, steps: int = 2, **options: Any) -> list[Any]:
    def work(mesh: Any) -> Any:
        engine = program.engine(model, lambda ps: torch.optim.AdamW(ps, lr=0.1), mesh=mesh, **options)
        for _ in range(steps):
            engine.step(batch)
        return then(engine)

    return loopback(program.mesh, work)


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad(), zoo.Wide():
        out: Tensor = model(**batch).logits
        return out


CASES = {
    "lora": ("llama", "tp zero3", [{"match": LINEAR, "rank": 4, "alpha": 12}]),
    "rslora": ("gpt2", "tp zero3", [{"match": "*.{c_attn,c_proj}", "kind": "rslora", "rank": 4, "alpha": 12}]),
    "dora": ("llama", "pp zero1", [{"match": LINEAR, "kind": "dora", "rank": 4, "alpha": 12}]),
    "ranks": ("llama", "pp zero1", [{"match": "*.q_proj", "rank": 4}, {"match": LINEAR, "rank": 2, "alpha": 3}]),
    "experts": ("mixtral", "ep", [{"match": "*.mlp.experts.*", "rank": 2, "alpha": 6}, {"match": LINEAR, "rank": 4}]),
}


@PEFT_WARNS
@pytest.mark.parametrize("case", CASES)
def test_peft_loads_what_is_saved(case: str, tmp_path: Path) -> None:
    name, mesh, adapters = CASES[case]
    model, batch = family(name)
    before = logits(model, batch)
    program = compiled(model, batch, mesh, adapters)

    def export(engine: Any) -> dict[str, Tensor]:
        engine.export(tmp_path / "out")
        engine.export(tmp_path / "merged", merge=True)
        return engine.full_state_dict()  # type: ignore[no-any-return]

    state = trained(program, model, batch, export)[0]
    assert {f.name for f in (tmp_path / "out").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with zoo.Wide():
        again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "out", autocast_adapter_dtype=False)
    assert len(load_file(tmp_path / "out" / "adapter_model.safetensors")) == sum("lora" in n for n in state)
    one = logits(again, batch)
    assert not torch.allclose(one, before)
    plain = copy.deepcopy(model)
    found = load_file(tmp_path / "merged" / "model.safetensors")
    with zoo.Wide():
        again = again.merge_and_unload()
    for n, x in again.state_dict().items():
        if n in found:
            torch.testing.assert_close(found[n], x, rtol=1e-12, atol=1e-12)
    assert set(found) <= set(model.state_dict()) or name == "mixtral"  # whose checkpoints have experts apart
    if name != "mixtral":
        plain.load_state_dict(found, strict=False)
        torch.testing.assert_close(logits(plain, batch), one, rtol=1e-12, atol=1e-12)

    other = compiled(model, batch, mesh, adapters)
    for loaded in trained(other, model, batch, lambda e: e.full_state_dict(), steps=0, weights=tmp_path / "out"):
        assert all(torch.equal(loaded[n], x) for n, x in state.items())
