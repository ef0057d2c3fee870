"""transformers' models on meshes: loss and every gradient equal one device's, with no collective that a good engineer
would not accept.

Every listed family is tried with data and tensor parallelism, and its activations split by sequence; its weights are
split as its own plan says, or, where it brings none, as its structure says. Many others (zoo/hf_more.py) are tried with
data parallelism."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import transformers

import shardc
from shardc.passes.annotate import model_plan
from tests import equality
from tests.zoo import hf, hf_more

MESHES: dict[str, dict[str, int]] = {
    "dp=2": {"dp": 2, "tp": 1},
    "dp=2 tp=2": {"dp": 2, "tp": 2},
    "tp=4": {"dp": 1, "tp": 4},
    "dp=2 tp=2 sp": {"dp": 2, "tp": 2},
}


@dataclass(frozen=True)
class Megatron:
    """What tensor parallelism sends. forward, backward: all_reduces over tp of a step, without sequence parallelism.

    first: activations whose sequence dim is split, the rest follows; gathers, scatters, sums: what forward then sends
    over tp.
    batch: gathers over dp, which the model's own loss needs. pooled: the head picks one token of a split sequence,
    which is gathered."""

    forward: int
    backward: int
    first: dict[str, dict[int, str]]
    gathers: int = 0
    scatters: int = 0
    sums: int = 2
    batch: int = 0
    pooled: bool = False


def at(pattern: str, dim: int = 1) -> dict[str, dict[int, str]]:
    return {pattern: {dim: "tp"}}


# Two layers. Forward: two sums a layer (attention, MLP; one for both in blocks where they are parallel; three in
# decoders with cross-attention), one per vocabulary that is split, two for the loss over split classes. Backward: one
# for each input of column-parallel weights: two a layer, the head's, one for all that read an encoder's output.
#: GPT-NeoX's own plan splits the embedding since transformers 5.24.
NEOX_EMBEDDING = int("embed_in" in (transformers.GPTNeoXConfig.base_model_tp_plan or {}))
DECODER = Megatron(forward=4 + 1 + 2, backward=4 + 1, first=at("model.embed_tokens"), gathers=5, scatters=5)
LISTED: dict[str, Megatron] = {
    "mistral": DECODER,
    "qwen2": DECODER,
    "qwen3": DECODER,
    "gemma2": DECODER,
    "phi3": DECODER,
    "persimmon": DECODER,
    "gpt_neox": Megatron(
        2 + NEOX_EMBEDDING + 2, 4 + 1, at("gpt_neox.embed_in"), 5, 2 + NEOX_EMBEDDING
    ),  # parallel blocks with two norms
    "opt": Megatron(4 + 1 + 2, 4 + 1, at("model.decoder.embed_tokens"), 5, 5),
    "bloom": Megatron(4 + 1 + 2, 4 + 1, at("transformer.word_embeddings_layernorm"), 5, 5),
    "falcon": Megatron(2 + 1 + 2, 4 + 1, at("transformer.word_embeddings"), 5, 3),
    "falcon_7b": Megatron(
        2 + 1 + 2, 2 + 1, at("transformer.word_embeddings"), 7, 3
    ),  # the one key and value are gathered, not all heads
    "falcon_alibi": Megatron(2 + 1 + 2, 2 + 1, at("transformer.word_embeddings"), 3, 3),
    "mpt": Megatron(4 + 1 + 2, 4 + 1, at("transformer.wte"), 5, 5),
    "bart": Megatron(10 + 2 + 2, 10 + 2, at("model.{encoder,decoder}.layernorm_embedding"), 12, 12),
    "roberta": Megatron(4 + 1 + 2, 4 + 1, at("roberta.embeddings"), 5, 5),
    "distilbert": Megatron(4 + 1 + 2, 4 + 1, at("distilbert.embeddings"), 5, 5),
    "electra": Megatron(4 + 1 + 2, 4 + 1, at("electra.embeddings"), 5, 5),
    "deberta_v2": Megatron(4 + 1 + 2, 4 + 1, at("deberta.embeddings"), 5, 5),
    "vit": Megatron(4, 4, at("vit.embeddings"), 4, 4, sums=1),
    "deit": Megatron(4, 4, at("deit.embeddings"), 4, 4, sums=1),
    "swin": Megatron(8, 8, {}),
    "convnext": Megatron(2, 2, {}),
    "clip": Megatron(12, 12, {}, batch=1),  # text and images of the whole batch are compared with one another
    "wav2vec2": Megatron(
        4 + 2, 4 + 1, at("wav2vec2.encoder.layer_norm"), 5, 4
    ),  # + a pair of convolutions, a pair of linears in the head
    "whisper": Megatron(10 + 2 + 2, 10 + 2, at("model.decoder.embed_tokens") | at("model.encoder.conv2", 2), 12, 12),
}
CASES = [(name, mesh) for name, m in LISTED.items() for mesh in MESHES if m.first or not mesh.endswith("sp")]


@functools.lru_cache(maxsize=2)  # cases stand in the order of models
def reference(name: str) -> equality.Reference:
    family = hf.FAMILIES.get(name) or hf_more.FAMILIES[name]
    return equality.reference(lambda: hf.build(family))


def spec_of(one: equality.Reference, mesh: str, first: dict[str, dict[int, str]]) -> dict[str, Any]:
    use = "model" if model_plan.read(one.model) else "structure"
    spec: dict[str, Any] = {"shardc": 1, "mesh": MESHES[mesh], "shard": {"use": use}}
    return spec | ({"activations": first} if mesh.endswith("sp") else {})


@pytest.mark.every_case  # a part of them already
def test_equals_one_device(name: str, mesh: str, record_property: equality.Property) -> None:
    one, megatron = reference(name), LISTED[name]
    program = one.compile(spec_of(one, mesh, megatron.first))
    sim = shardc.verify.simulate(program, one.model, one.batch)
    equality.record(record_property, name, mesh, one, program, sim)
    equality.assert_equal(sim, one.loss, one.grads)
    assert equality.unnoticed(program) == []

    forward, backward = equality.collectives(sim, "forward"), equality.collectives(sim, "backward")
    sequence = mesh.endswith("sp")
    if sequence:
        sent = {"all_gather": megatron.gathers, "reduce_scatter": megatron.scatters, "all_reduce": megatron.sums}
        assert forward == {kind: n for kind, n in sent.items() if n}
        assert "all_to_all" not in backward
    elif "tp" in mesh:
        assert forward == {"all_reduce": megatron.forward}
        assert backward == {"all_reduce": megatron.backward}
    if "dp" in mesh:
        assert equality.collectives(sim, "forward", "dp").get("all_gather", 0) == megatron.batch
        assert "all_to_all" not in equality.collectives(sim, "forward", "dp") | equality.collectives(
            sim, "backward", "dp"
        )
    assert len(equality.gathered(program)) <= (megatron.pooled and sequence) + megatron.batch


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Of the many others every second one; of the listed what splits weights, with which the batch is split, too:
    `--all-families`, as in `make table`, tries all.
    """
    every = metafunc.config.getoption("--all-families")
    if "other" in metafunc.fixturenames:
        metafunc.parametrize("other", list(hf_more.FAMILIES)[:: 1 if every else 2])
    if "mesh" in metafunc.fixturenames:
        metafunc.parametrize(("name", "mesh"), [c for c in CASES if every or MESHES[c[1]]["tp"] > 1])


def test_data_parallel_of_many_others(other: str, record_property: equality.Property) -> None:
    one = reference(other)
    program = one.compile({"shardc": 1, "mesh": {"dp": 2}})
    sim = shardc.verify.simulate(program, one.model, one.batch)
    equality.record(record_property, other, "dp=2", one, program, sim)
    equality.assert_equal(sim, one.loss, one.grads)
    assert equality.unnoticed(program) == []


def test_images_in_text_leave_the_batch_split() -> None:
    """Whose features go where depends on all rows: those are gathered, of where images stand only how many are before
    a rank's rows; the text model runs on these.
    """
    one = reference("llava")
    sim = one.on({"shardc": 1, "mesh": {"dp": 2, "tp": 2}, "shard": {"use": "model"}})
    equality.assert_equal(sim, one.loss, one.grads)
    gathered = [c for c in sim.comms if c.kind == "all_gather"]
    features = (one.batch["input_ids"] == 127).sum() * 64 * 8
    assert [(c.axis, c.direction, c.bytes) for c in gathered] == [("dp", "forward", int(features))]
    assert equality.collectives(sim, "backward", "dp") == {"reduce_scatter": 1}
