"""Models of two parts, and the meshes that they are tried on: tiny, built from configs, in float64.

python -m tests.features.parts.families [FAMILY ...]     tries all of them on all meshes, and prints a line for each
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import shardc
from shardc.api import Program
from tests import zoo
from tests.zoo import hf, hf_more


@dataclass(frozen=True)
class Family:
    """part: modules of the first part. second: the module before which the second stage of a pipeline begins.

    layers: recomputed modules. microbatches: in a pipeline; 1 where an op of the model takes all rows of a batch."""

    build: Callable[[], tuple[nn.Module, Any]]
    part: tuple[str, ...]
    second: str
    layers: str = "*.layers.*"
    microbatches: int = 2


class Distilled(nn.Module):
    """A teacher without gradients and a student of half its width: the divergence of their predictions."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher, self.student = zoo.llama()[0], zoo.gpt()[0]

    def forward(self, ids: Tensor, targets: Tensor) -> Any:
        with torch.no_grad():
            wanted = self.teacher(input_ids=ids).logits.softmax(-1)
        loss, logits = self.student(ids, targets)
        divergence: Tensor = (wanted * (wanted.log() - logits.log_softmax(-1))).sum(-1).mean()
        return divergence + loss


def distilled() -> tuple[nn.Module, Any]:
    model = zoo.ready(Distilled(), torch.float64)
    model.teacher.requires_grad_(False)
    return model, {"ids": zoo.tokens(), "targets": zoo.labels()}


class Looking(nn.Module):
    """Qwen2-VL with images of one size: sixteen patches of each row, four places of its text."""

    def __init__(self) -> None:
        super().__init__()
        rotated = {"type": "mrope", "mrope_section": [2, 3, 3]}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "rope_scaling": rotated}
        text = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **heads}
        vision = {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
        ids = {"image_token_id": 127, "vision_start_token_id": 126, "vision_end_token_id": 125}
        config = transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **ids)
        self.model = transformers.Qwen2VLForConditionalGeneration(config)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, labels: Tensor) -> Any:
        sizes, (rows, length) = torch.tensor([[1, 4, 4]] * len(input_ids)), input_ids.shape
        positions = torch.arange(length)[None, None].expand(3, rows, length)
        return self.model(
            input_ids=input_ids, pixel_values=pixel_values, image_grid_thw=sizes, position_ids=positions, labels=labels
        ).loss


def looking() -> tuple[nn.Module, Any]:
    ids = zoo.tokens(120)
    ids[:, 1:5] = 127
    return zoo.ready(Looking(), torch.float64), {
        "pixel_values": hf.random(zoo.BATCH * 16, 3 * 2 * 4 * 4).double(),
        "input_ids": ids,
        "labels": zoo.labels(120),
    }


def of_zoo(name: str, table: Any = hf) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: hf.build((hf_more.FAMILIES if table is hf_more else hf.FAMILIES)[name])


FAMILIES = {
    "llava": Family(
        of_zoo("llava", hf_more),
        ("*vision_tower", "*multi_modal_projector"),
        "*language_model.layers.0",
        microbatches=1,
    ),
    "qwen2_vl": Family(looking, ("*visual",), "*language_model.layers.0", microbatches=1),
    "whisper": Family(of_zoo("whisper"), ("*encoder",), "*decoder.layers.0"),
    "clip": Family(of_zoo("clip"), ("vision_model",), "text_model.embeddings", microbatches=1),
    "t5": Family(zoo.t5, ("encoder",), "decoder.block.0", "*.block.*"),
    "teacher": Family(distilled, ("teacher",), "student.h.0", "student.h.*"),
}

#: Of the ranks of a stage: (the mesh, the mesh of the first part, the mesh of the second).
PAIRS: list[tuple[dict[str, int], dict[str, int], dict[str, int]]] = [
    ({"dp": 1, "tp": 2}, {"dp": 2}, {"tp": 2}),
    ({"dp": 1, "tp": 2}, {"tp": 2}, {"dp": 2}),
    ({"dp": 2, "tp": 2}, {"dp": 4}, {"dp": 2, "tp": 2}),
    ({"dp": 2, "tp": 2}, {"dp": 2, "tp": 2}, {"dp": 4}),
    ({"dp": 1, "tp": 4}, {"dp": 4}, {"tp": 4}),
    ({"dp": 1, "tp": 4}, {"dp": 2, "tp": 2}, {"tp": 4}),
    ({"dp": 1, "tp": 4}, {"tp": 4}, {"dp": 2, "tp": 2}),
    ({"dp": 1, "tp": 4}, {"tp": 4}, {"dp": 4}),
    ({"dp": 2, "tp": 4}, {"dp": 8}, {"dp": 2, "tp": 4}),
    ({"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}),
    ({"dp": 1, "tp": 8}, {"dp": 8}, {"dp": 2, "tp": 4}),
    ({"dp": 1, "tp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}),
]
#: Further settings, dealt out over the pairs.
SETTINGS: list[dict[str, Any]] = [
    {"data": {"zero": 3}},
    {"data": {"zero": 2}, "checkpoint": [{"save": []}]},
    {},
    {"data": {"zero": 1}, "execution": {"compile": "layers"}},
]


def spec(family: Family, pair: int, *, apart: bool) -> dict[str, Any]:
    """The spec of a pair of meshes. apart: each part has its own ranks, as a stage of a pipeline."""
    mesh, first, second = PAIRS[pair]
    document: dict[str, Any] = {"shardc": 1, "mesh": mesh, "shard": {"use": "structure"}}
    document |= copy.deepcopy(SETTINGS[pair % len(SETTINGS)])
    for region in document.get("checkpoint", ()):
        region["match"] = family.layers
    if apart:
        meshes = {0: first, 1: second}
        rows = 8 // max(m.get("dp", 1) for m in meshes.values())
        document["mesh"] = {"pp": 2, **mesh}
        document["pipeline"] = {"axis": "pp", "cut": [family.second], "meshes": meshes}
        document["batch"] = {"microbatches": min(family.microbatches, rows)}
    else:
        document["parts"] = {"first": {"modules": list(family.part), "mesh": first}}
        if second != {a: n for a, n in mesh.items() if n > 1}:
            document["parts"]["second"] = {"modules": [family.second.rpartition(".")[0]], "mesh": second}
    return document


def compiled(family: Family, document: dict[str, Any]) -> Program:
    model, batch = family.build()
    with zoo.Wide():
        return shardc.compile(model, batch, document)


def main(names: list[str]) -> Iterator[str]:
    """Try families on all pairs; yield a line for each."""
    for name in names or FAMILIES:
        for apart in (False, True):
            for pair, meshes in enumerate(PAIRS):
                line = f"{name:8} {'apart' if apart else 'same'} {meshes}"
                try:
                    program = compiled(FAMILIES[name], spec(FAMILIES[name], pair, apart=apart))
                    report = program.verify(compiled="execution" in SETTINGS[pair % len(SETTINGS)])
                    if "worth compiling" in str(report):
                        report = program.verify()
                    yield f"{line}: {report}; {str(program.prove()).splitlines()[0]}"
                except shardc.ShardcError as e:
                    yield f"{line}: {type(e).__name__} {str(e)[:300]}"


if __name__ == "__main__":
    for text in main(sys.argv[1:]):
        print(text, flush=True)
