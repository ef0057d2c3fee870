"""Models of other libraries, tiny and with random weights: what `make libraries` tries (tests/bench/libraries.py).

    for name, case in libraries.cases().items():
        model, batch = case.build()

A case is a row of a table, one file for each kind of model; it downloads nothing. Batches have 8 rows and are made in
float64, and sizes divide by 4 where the library allows it. Nothing is dropped at random: one device draws its own
numbers. The names of cases begin with their library.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from shardc.torch_private import pytree

ROWS = 8
KINDS = ("vision", "images", "text", "decoders", "graphs", "audio", "tables", "series", "diffusion")


def waves(output: Any, batch: Any) -> Tensor:
    """A loss of whatever a model gives: of all floating-point tensors, whose gradient is no constant behind a norm. Of
    their logarithms: a cosine of a large number would be that of its last digits.
    """
    tensors = [x for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()]
    small = [x.sign() * x.abs().log1p() for x in tensors if x.requires_grad]
    return torch.stack([(x.cos() + 0.1 * x).mean() for x in small]).sum()


def given(output: Any, batch: Any) -> Tensor:
    """The loss of a model that computes it."""
    return output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.loss


@dataclass(frozen=True)
class Case:
    """make: the model. batch: arguments by position, or by name. loss: of the output and the batch. bound: relative
    difference that counts as equal, of a model that rounds to fewer bits itself.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Any, ...] | dict[str, Any]]
    loss: Callable[[Any, Any], Tensor] = waves
    bound: float = 0.0

    def build(self) -> tuple[nn.Module, Any]:
        torch.manual_seed(0)
        return ready(self.make()), self.batch()


def row(
    path: str,
    batch: Callable[[], tuple[Any, ...] | dict[str, Any]],
    *args: Any,
    loss: Callable[[Any, Any], Tensor] = waves,
    **settings: Any,
) -> Case:
    """The case of what a function or class gives. path: "module:name"; a setting "@module:name" is imported too."""

    def make() -> nn.Module:
        given = pytree.tree_map(lambda x: imported(x[1:]) if isinstance(x, str) and x[:1] == "@" else x, settings)
        return imported(path)(*args, **given)  # type: ignore[no-any-return]

    return Case(make, batch, loss)


def imported(path: str) -> Any:
    """What stands at "module:name"; "module:name()": what it gives."""
    module, _, name = path.removesuffix("()").partition(":")
    found = getattr(importlib.import_module(module), name)
    return found() if path.endswith("()") else found


#: Attributes of modules that are rates of dropping something.
RATES = (
    "p",
    "drop_prob",
    "dropout",
    "dropout_prob",
    "dropout_p",
    "attn_dropout",
    "attention_dropout",
    "drop_path",
    "drop",
)


def ready(model: nn.Module) -> nn.Module:
    """In train mode, float64, without dropout, and with some noise on each weight: many begin as 0 or 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.copy_(p.nan_to_num(0, 0, 0).clamp(-100, 100))
                p.add_(0.05 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
    for module in model.modules():
        for name in RATES:
            if isinstance(getattr(module, name, None), float) and name in vars(module):
                setattr(module, name, 0.0)
    return model.double().train()


def reals(*shape: int, seed: int = 4) -> Tensor:
    """Random numbers, f64[8, *shape]."""
    return torch.randn((ROWS, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(high: int, *shape: int, seed: int = 1) -> Tensor:
    """Random whole numbers in 1 <= n < high, i64[8, *shape]."""
    return torch.randint(1, high, (ROWS, *shape), generator=torch.Generator().manual_seed(seed))


def image(size: int = 32, channels: int = 3) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (reals(channels, size, size),)


def tokens(high: int = 64, length: int = 16) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: (ids(high, length),)


def importable() -> None:
    """Have torchvision and torchaudio imported, without their compiled parts: those of the registry may be for a GPU,
    and no model here needs them.
    """
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
    with mock.patch.object(Path, "glob", return_value=[]):
        importlib.import_module("torchaudio")


def cases() -> dict[str, Case]:
    """All cases by name, in turn one of each kind: a run that is cut short has some of all."""
    importable()
    kinds = [list(importlib.import_module(f"tests.libraries.{kind}").CASES.items()) for kind in KINDS]
    rows = [row for turn in itertools.zip_longest(*kinds) for row in turn if row is not None]
    assert len(dict(rows)) == len(rows), "two cases have one name"
    return dict(rows)
