"""Adapters of the spec: peft loads what is saved and gives the same logits, what peft saved is loaded, merged weights
are those that one device would have.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput as Output

import shardc
from shardc.errors import ShardcError
from shardc.runtime.mesh.loopback import loopback
from tests import zoo
from tests.runtime.state.test_pretrained import PEFT_WARNS
from tests.zoo import hf

peft = pytest.importorskip("peft")
LINEAR = "*.{q,v,o}_proj"
MESHES: dict[str, dict[str, Any]] = {
    "tp": {"mesh": {"tp": 2}, "shard": {"use": "structure"}},
    "tp zero3": {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}, "data": {"zero": 3}},
    "pp zero1": {
        "mesh": {"pp": 2, "dp": 2},
        "pipeline": {"axis": "pp", "stages": 2},
        "batch": {"microbatches": 2},
        "data": {"zero": 1},
    },
    "ep": {"mesh": {"dp": 2, "ep": 2}, "experts": [{"match": "*.mlp.experts", "axis": "ep"}]},
}


ROWS = {
    "mixtral": hf.row("MixtralForCausalLM", **hf.GQA, **hf.EXPERTS, num_local_experts=4, num_experts_per_tok=2),
    "tied llama": hf.row("LlamaForCausalLM", **hf.GQA, tie_word_embeddings=True),
    "tied gpt2": hf.row("GPT2LMHeadModel"),
    "t5": hf.row("T5ForConditionalGeneration", d_kv=8, d_ff=256, num_layers=2, decoder_start_token_id=0),
    **hf.FAMILIES,
}


class Names(nn.Module):
    """Names of which one ends like another, two layers of one weight, and a head that is an embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.first, self.second, self.score = nn.Embedding(8, 8), *(nn.Linear(8, 8) for _ in range(3))
        self.aux = nn.ModuleDict({"first": nn.Linear(8, 8), "score": nn.Linear(8, 8)})
        self.second.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Any:
        h = self.second(self.first(self.emb(x)).sin()) + self.aux["first"](self.emb(x))
        h = nn.functional.linear(self.score(h) + self.aux["score"](h), self.emb.weight)
        return Output(loss=nn.functional.cross_entropy(h.flatten(0, 1), y.flatten()), logits=h)


def family(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    with zoo.Wide():
        if name == "names":
            ids = torch.arange(32).view(4, 8) % 8
            return zoo.ready(Names(), torch.float64), {"x": ids, "y": ids.flip(0)}
        return zoo.ALL[name]() if name in zoo.ALL else hf.build(ROWS[name])  # type: ignore[return-value]


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


LM_HEAD, EMB = ([{"match": name, "rank": 2}] for name in ("lm_head", "emb"))
Q = [{"match": "*.{q,q_proj,c_attn}", "rank": 2}]
#: Models of tied weights, or of names that peft's patterns confuse, and what is adapted and trained there.
TIED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("tied llama", {"adapters": LM_HEAD}),
    "gpt2 dora": ("tied gpt2", {"adapters": [{"match": "{lm_head,*.c_attn}", "kind": "dora", "rank": 2, "alpha": 3}]}),
    "t5 rslora": ("t5", {"adapters": [{"match": "{lm_head,*.q}", "kind": "rslora", "rank": 2, "alpha": 3}]}),
    "bart": ("bart", {"adapters": LM_HEAD}),
    "llama, trained": ("tied llama", {"adapters": Q, "freeze": ["*", "!lm_head"]}),
    "gpt2, trained": ("tied gpt2", {"adapters": Q, "freeze": ["*", "!transformer.wte"]}),
    "t5, trained": ("t5", {"adapters": Q, "freeze": ["*", "!decoder.embed_tokens"]}),
    "two layers, one weight": ("names", {"adapters": [{"match": "first", "rank": 2}, {"match": "second", "rank": 3}]}),
    "the end of a name": (
        "names",
        {"adapters": [{"match": "first", "rank": 3}, {"match": "aux.first", "rank": 2}], "freeze": ["*", "!score"]},
    ),
}


@PEFT_WARNS
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning", "ignore:fan_in_fan_out is set")
@pytest.mark.parametrize("case", TIED)
def test_peft_loads_adapters_beside_tied_weights(case: str, tmp_path: Path) -> None:
    name, spec = TIED[case]
    model, batch = family(name)
    program = compiled(model, batch, "tp", **spec)

    def export(engine: Any) -> tuple[float, dict[str, Tensor]]:
        engine.export(tmp_path / "out")
        return float(engine.evaluate(batch)), engine.full_state_dict()

    loss, state = trained(program, model, batch, export)[0]
    with zoo.Wide():
        again = peft.PeftModel.from_pretrained(copy.deepcopy(model), tmp_path / "out", autocast_adapter_dtype=False)
        found = float(again.eval()(**batch).loss)
    assert found == pytest.approx(loss, rel=1e-12, abs=0)
    for loaded in trained(program, model, batch, lambda e: e.full_state_dict(), steps=0, weights=tmp_path / "out"):
        assert all(torch.equal(loaded[n], x) for n, x in state.items())


#: What cannot be written, and why: (model, spec, merged?, message, fix).
NOT_WRITTEN = {
    "of one use": ("tied llama", {"adapters": LM_HEAD}, True, "lm_head.weight is also model.embed", "without merge"),
    "in another module": ("names", {"adapters": EMB}, False, "by which another module multiplies", "leave it out"),
    "of one use alone": ("names", {"adapters": EMB}, True, "also used without its adapter", "leave it out"),
    "in what is trained": ("llama", {"adapters": Q, "freeze": ["*", "!*.self_attn"]}, False, "trained itself", "merge"),
}


@pytest.mark.parametrize("case", NOT_WRITTEN)
def test_adapters_that_have_no_form_in_files_are_refused(case: str, tmp_path: Path) -> None:
    name, spec, merge, message, fix = NOT_WRITTEN[case]
    model, batch = family(name)

    def export(engine: Any) -> None:
        with pytest.raises(ShardcError, match=rf"(?s){message}.*fix: .*{fix}"):
            engine.export(tmp_path / "out", merge=merge)

    trained(compiled(model, batch, "tp", **spec), model, batch, export, steps=0)


def test_an_adapter_of_a_tied_embedding_is_none_of_its_head() -> None:
    model, batch = family("tied llama")
    with pytest.raises(ShardcError, match=r"embed_tokens' names no weight of a product that supports an adapter"):
        compiled(model, batch, "tp", [{"match": "model.embed_tokens", "rank": 2}])


#: Adapters that peft saved, beside a spec of q_proj, rank 4, alpha 8: settings of peft, the message, its fix.
OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "rank": ({"r": 2}, r"q_proj.lora_A.weight has the shape \[2, 64\], and \[4, 64\]", "write rank: 2"),
    "alpha": ({"lora_alpha": 16}, "q_proj is lora of alpha 16, and lora of alpha 8", "write kind: lora, alpha: 16"),
    "kind": ({"use_dora": True}, "q_proj is dora of alpha 8, and lora", "write kind: dora, alpha: 8"),
    "more": (
        {"target_modules": ["q_proj", "k_proj"]},
        "the files have an adapter of model.layers.*k_proj, and the spec has none",
        r"add {match: 'model.layers.\*.self_attn.k_proj', rank: 4, alpha: 8} to `adapters`",
    ),
    "fewer": (
        {"target_modules": ["layers.0.self_attn.q_proj"]},
        "the spec has an adapter of model.layers.1.self_attn.q_proj, and the files have none",
        "leave it out of `match`",
    ),
    "embedding": ({"target_modules": ["q_proj", "embed_tokens"]}, "have an adapter of model.embed_tok", "merge them"),
    "weights that change": ({"init_lora_weights": "pissa"}, "and not init_lora_weights: pissa", "merge them with peft"),
    "empty": ({"empty": True}, r"q_proj.lora_A.weight has the shape \[0\]", "save them again, with all ranks' parts"),
    "no spec": ({"no spec": True}, "the model has no adapters for 4 tensors of the file", "write them in `adapters`"),
}


@PEFT_WARNS
@pytest.mark.parametrize("case", OTHERS)
def test_adapters_that_are_not_those_of_the_spec_are_refused_with_what_to_write(case: str, tmp_path: Path) -> None:
    settings, message, fix = OTHERS[case]
    model, batch = family("llama")
    lora = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], **settings}
    no_spec, empty = lora.pop("no spec", False), lora.pop("empty", False)
    adapted = peft.get_peft_model(copy.deepcopy(model).float(), peft.LoraConfig(**lora))
    adapted.save_pretrained(tmp_path, save_embedding_layers=False)
    if empty:
        file = tmp_path / "adapter_model.safetensors"
        save_file({n: torch.empty(0) for n in load_file(file)}, file)
    program = compiled(model, batch, "tp", [] if no_spec else [{"match": "*.q_proj", "rank": 4, "alpha": 8}])
    with pytest.raises(ShardcError, match=rf"(?s){message}.*fix: .*{fix}"):
        trained(program, model, batch, lambda engine: None, steps=0, weights=tmp_path)
