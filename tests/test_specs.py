"""Every ready-made spec, end to end: it loads, compiles its model and is equal to one device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardc
from examples import gpt as example
from shardc import specs
from tests import zoo
from tests.zoo import hf

SMALL = {
    "llama": zoo.llama,
    "gpt2": zoo.gpt2,
    "bert": zoo.bert,
    "t5": zoo.t5,
    "mixtral": lambda: hf.build(
        hf.row("MixtralForCausalLM", num_local_experts=8, num_key_value_heads=4, **hf.EXPERTS), intermediate_size=32
    ),
}


def gpt() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, 256, (4, 16))
    return example.GPT(example.Config(seq=16, layers=2, hidden=32)).double(), {
        "input_ids": ids,
        "labels": ids.roll(-1, 1),
    }


@pytest.mark.parametrize("name", specs.names())
def test_ready_specs(name: str) -> None:
    family = name.removesuffix("-sp").removesuffix("-cp").removesuffix("-lora").removesuffix("-fp8")
    with zoo.Wide():
        model, batch = gpt() if family == "gpt" else SMALL[family]()
        program = shardc.compile(model, batch, specs.path(name), prove=False)
    assert program.mesh.world == 4
    assert ("reduce_scatter" in str(program)) == name.endswith("-sp")
    # nothing is gathered that no annotation implies, but for labels, which a model shifts over the border of two ranks
    assert [n for n in program.notes if "i64[" not in n] == []
    assert len(program.notes) == name.endswith("-cp")
    report = program.verify()
    assert report.ok, report


def test_every_family_has_both_kinds() -> None:
    assert specs.names() == sorted(
        [
            "mixtral",
            "llama-cp",
            "llama-fp8-sp",
            "llama-lora",
            *(f"{f}{s}" for f in ("gpt", "llama", "gpt2", "bert", "t5") for s in ("", "-sp")),
        ]
    )
    assert str(specs.path("llama")).endswith("llama.yaml")


def test_a_wrong_name() -> None:
    with pytest.raises(shardc.ShardcError, match="there is no ready spec 'lama'") as caught:
        specs.path("lama")
    assert "llama" in caught.value.fix
