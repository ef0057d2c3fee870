"""The contenders of the benchmark, and who is measured against whom. Each gives a
`step(global batch) -> global loss`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compiled_models
import llama
import mixtral
from torch import Tensor, nn

Step = Callable[[dict[str, Tensor]], float]


@dataclass(frozen=True)
class Ours:
    """A compiled program: a ready spec (or none), its mesh, and what of the spec is set otherwise."""

    spec: str
    mesh: dict[str, int]
    settings: tuple[str, ...] = ()
    options: tuple[tuple[str, int], ...] = ()  # of the engine


@dataclass(frozen=True)
class Group:
    """Contenders that take turns. target: the largest ratio of step times, ours to a peer's, that was promised."""

    ours: str
    peers: tuple[str, ...]
    target: float

    @property
    def names(self) -> tuple[str, ...]:
        return (self.ours, *self.peers)


#: of a pipeline's step
MICROBATCHES = 4

#: What is compiled by Inductor, ours and torch's.
COMPILED: dict[str, Callable[[], nn.Module]] = {
    "GPT": compiled_models.gpt,
    "Llama": llama.model,
    "Mixtral": mixtral.model,
    "element-wise": compiled_models.element_wise,
}

SHARDC = {
    "shardc tp=2": Ours("llama", {"dp": 1, "tp": 2}),
    "shardc tp=2 +sp": Ours("llama-sp", {"dp": 1, "tp": 2}),
    **{
        f"shardc {s}": Ours(
            "llama",
            {"dp": 1, "tp": 1, "pp": 2},
            (
                "pipeline.axis=pp",
                f"pipeline.schedule={s}",
                f"pipeline.balance={[llama.SIZE.layers // n] * n}",
                f"batch.microbatches={MICROBATCHES}",
            ),
        )
        for s, n in (("gpipe", 2), ("1f1b", 2), ("interleaved", 4))
    },
    "shardc checkpoint": Ours("llama", {"dp": 2, "tp": 1}, ('checkpoint=[{match: "model.layers.*"}]',)),
    "shardc selective": Ours(
        "llama", {"dp": 2, "tp": 1}, ('checkpoint=[{match: "model.layers.*", save: [linear, attention]}]',)
    ),
    "shardc experts": Ours("mixtral", {"dp": 1, "ep": 2}),
    "shardc unchecked": Ours("llama", {"dp": 2, "tp": 1}, (), (("check", 0),)),
    "shardc checked": Ours("llama", {"dp": 2, "tp": 1}),
    "shardc replicas compared every step": Ours("llama", {"dp": 2, "tp": 1}, (), (("check_every", 1),)),
    **{
        f"shardc compiled {model}, {where}": Ours("", {"dp": dp}, ("execution.compile=layers",))
        for model in COMPILED
        for where, dp in (("one device", 1), ("dp=2", 2))
    },
    **{f"shardc zero {z}": Ours("llama", {"dp": 2, "tp": 1}, (f"data.zero={z}",)) for z in range(4)},
}

#: `--only` takes a part's name; docs/measured/benchmarks.md keeps the others
PARTS = {
    "tensor": (
        Group("shardc tp=2", ("DTensor tp=2", "DTensor tp=2, loss parallel"), 0.85),
        Group("shardc tp=2 +sp", ("DTensor tp=2 +sp", "DTensor tp=2 +sp, loss parallel"), 0.95),
    ),
    "zero": (
        Group("shardc zero 0", ("DDP",), 1.00),
        Group("shardc zero 1", ("DDP, ZeroRedundancyOptimizer", "DeepSpeed 1"), 1.00),
        Group("shardc zero 2", ("DeepSpeed 2",), 1.00),
        Group("shardc zero 3", ("DeepSpeed 3", "FSDP2 by block", "FSDP2 whole"), 1.00),
    ),
    "checkpoint": (
        Group("shardc checkpoint", ("DDP, checkpoint",), 1.00),
        Group("shardc selective", ("DDP, selective checkpoint",), 1.00),
    ),
    "experts": (Group("shardc experts", ("DDP, replicated experts", "DeepSpeed MoE"), 1.00),),
    "checks": (
        Group("shardc checked", ("shardc unchecked",), 1.00),
        Group("shardc replicas compared every step", ("shardc unchecked",), 1.00),
    ),
    "pipeline": tuple(Group(f"shardc {s}", (f"pipelining {s}",), 1.00) for s in ("gpipe", "1f1b", "interleaved")),
    **{
        f"compiled-{model}": (
            Group(f"shardc compiled {model}, one device", (f"torch.compile {model}, one device",), 1.00),
            Group(f"shardc compiled {model}, dp=2", (f"torch.compile {model}, DDP",), 1.00),
        )
        for model in COMPILED
    },
}


def ranks(name: str) -> int:
    """Processes of a contender."""
    return 1 if name.endswith("one device") else 2


def of_experts(name: str) -> bool:
    return name.endswith(("experts", "MoE"))


def model(name: str) -> Any:
    """What a contender trains."""
    for word, make in COMPILED.items():
        if f" {word}," in name:
            return make()
    return mixtral.model() if of_experts(name) else llama.model()


def prepare(name: str, files: Path) -> Callable[[Any], Step]:
    """Import what a contender needs, which is not its memory; what this gives builds it from a model on the running
    world of its ranks.

    files: where the parent has put the compiled programs.
    """
    if name in SHARDC:
        import ours

        return lambda model: ours.Contender(files / name, model, dict(SHARDC[name].options))
    if name.startswith("DTensor"):
        import peers_tensor

        return peers_tensor.prepare(sequence="+sp" in name, loss="loss" in name)
    if name.startswith("pipelining"):
        import peers_pipeline

        return peers_pipeline.prepare(name)
    if of_experts(name):
        import peers_experts

        return peers_experts.prepare(name)
    if name.endswith("checkpoint"):
        import peers_checkpoint

        return peers_checkpoint.prepare(name)
    import peers_data

    return peers_data.prepare(name)
