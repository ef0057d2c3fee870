"""Equal layers are traced once: the captured program is that of a capture which traces every layer, to the letter, and
so is what the passes make of it; the numbers of a step are the same, to the bit.
"""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.artifact import emit
from shardc.capture import capture, equal_layers
from shardc.ir.program import Program
from tests import zoo
from tests.zoo import hf, hf_more

LAYERS = 5
SPLIT: dict[str, Any] = {"mesh": {"dp": 2, "tp": 2}, "shard": {"use": "structure"}}
PIPED: dict[str, Any] = {**SPLIT, "mesh": {"pp": 2, "tp": 2}, "batch": {"microbatches": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "sequence": {**SPLIT, "sequence": {"axis": "tp"}},
    "1f1b": {**PIPED, "pipeline": {"axis": "pp", "schedule": "1f1b"}},
    "zero 3": {**SPLIT, "data": {"zero": 3, "bucket_mb": 0.01}},
    "zero bubble": {**PIPED, "pipeline": {"axis": "pp", "schedule": "zb-h1"}},
    "recomputed": {**SPLIT, "checkpoint": "every layer"},
}
FAMILIES = [
    *("mistral", "qwen2", "qwen3", "gemma", "olmo2", "granite", "stablelm", "cohere", "starcoder2", "gpt_neox"),
    *("opt", "bloom", "roberta", "electra", "vit"),
]
#: One setting a family, each three times: the passes see all layers.
CASES = [(family, list(SETTINGS)[i % len(SETTINGS)]) for i, family in enumerate(FAMILIES)]


def built(family: str) -> tuple[nn.Module, Any]:
    with mock.patch.object(hf, "SIZES", {**hf.SIZES, "num_hidden_layers": LAYERS}):
        return hf.build((hf.FAMILIES | hf_more.FAMILIES)[family])


def spec_of(setting: str, model: nn.Module) -> dict[str, Any]:
    spec = dict(SETTINGS[setting])
    if "checkpoint" in spec:
        layers = next(name for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m) == LAYERS)
        spec["checkpoint"] = [{"match": f"{layers}.*", "recompute": "cheap"}]
    return spec


def step(program: Program, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    made = shardc.simulate(program, model, batch)
    return {"loss": made.loss, **made.grads}


@pytest.mark.parametrize(("family", "setting"), CASES)
@pytest.mark.filterwarnings("ignore")  # the model's own
def test_a_program_is_that_of_a_compile_that_folds_nothing(family: str, setting: str) -> None:
    with zoo.Wide(), warnings.catch_warnings():
        model, batch = built(family)
        once = capture(model, batch, prove=False)
        with mock.patch.object(equal_layers, "_layers", return_value=()):
            each = capture(model, batch, prove=False)
        assert emit.text(once, full=True) == emit.text(each, full=True)
        spec = {"shardc": 1, **spec_of(setting, model)}
        folded, whole = (shardc.compile(model, batch, spec, captured=c, prove=False) for c in (once, each))
        assert folded.text(full=True) == whole.text(full=True)
        assert folded.joint() == whole.joint()
        one, other = (step(p, model, batch) for p in (folded, whole))
        assert one.keys() == other.keys()
        assert [n for n, x in one.items() if not torch.equal(x, other[n])] == []
