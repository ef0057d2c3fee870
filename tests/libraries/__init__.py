"""Models of other libraries, tiny and with random weights: what `make libraries` tries (tests/bench/libraries.py).

    for name, case in libraries.cases().items():
        model, batch = case.build()

A case is a row of a table, KIND.yaml for each kind of model; it downloads nothing. Batches have 8 rows and are made in
float64, and sizes divide by 4 where the library allows it. Nothing is dropped at random: one device draws its own
numbers. The names of cases begin with their library.

In a table, a mapping with `call: module:name` is what that gives, called with `args` and all other entries; of a case,
but for `batch` (arguments of forward by position, or by name), `loss` (of LOSSES) and `bound`. "@module:name" is what
has this name, "reals 3 8 seed=5" a tensor (TENSORS). Lists are tuples, but for those that are tagged `!list`.
"""

from __future__ import annotations

import importlib
import itertools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from torch import Tensor, nn

from shardc.torch_private import pytree

ROWS = 8
NODES = 12  # of a graph
FIELDS = (12, 16, 20, 24)  # classes of a table's categories
KINDS = ("vision", "images", "text", "decoders", "graphs", "audio", "tables", "series", "diffusion")


# --- losses


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


LOSSES: dict[str, Callable[[Any, Any], Tensor]] = {
    "waves": waves,
    "given": given,
    "sum": lambda output, _: output.sum(),
    "squares of the first": lambda output, _: output[0].square().mean(),
}


# --- tensors of a batch, with a row for each of 8 samples


def reals(*shape: int, seed: int = 4) -> Tensor:
    """Random numbers, f64[8, *shape]."""
    return torch.randn((ROWS, *shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def ids(high: int, *shape: int, seed: int = 1) -> Tensor:
    """Random whole numbers in 1 <= n < high, i64[8, *shape]."""
    return torch.randint(1, high, (ROWS, *shape), generator=torch.Generator().manual_seed(seed))


def places(n: int) -> Tensor:
    """Ids of a grid, the same of all rows."""
    return torch.arange(3 * n, dtype=torch.float64).view(n, 3) % 4


def lengths(n: int) -> Tensor:
    """Lengths of rows, the longest first: torchaudio makes its masks as long as that."""
    return torch.tensor([n - i % 3 for i in range(ROWS)])


def fields() -> Tensor:
    """Categories of a table, i64[8, 4]."""
    return torch.stack([ids(n, seed=i) for i, n in enumerate(FIELDS)], -1)


TENSORS: dict[str, Callable[..., Tensor]] = {
    "reals": reals,
    "positive": lambda *shape, seed: reals(*shape, seed=seed).abs(),
    "ids": ids,
    "ones": lambda *shape: torch.ones(ROWS, *shape, dtype=torch.float64),
    "whole_ones": lambda *shape: torch.ones(ROWS, *shape, dtype=torch.long),
    "trues": lambda *shape: torch.ones(ROWS, *shape, dtype=torch.bool),
    "filled": lambda n: torch.full((ROWS,), n),
    "shares": lambda: torch.linspace(0, 1, ROWS, dtype=torch.float64),
    "places": places,
    "lengths": lengths,
    "fields": fields,
    "clicks": lambda numbers: torch.cat([fields().double(), reals(numbers)], -1),
    "nodes": lambda: torch.cat([reals(8), reals(8, seed=5)])[:NODES],
    "adjacent": lambda: (reals(NODES, NODES, seed=5) > 0.5).double(),
}


# --- cases


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


def case(batch: Any, loss: str = "waves", bound: float = 0.0, **row: Any) -> Case:
    """A row of a table."""

    def arguments() -> Any:
        found = made(batch)
        return found if isinstance(found, tuple | dict) else (found,)

    return Case(lambda: made(row), arguments, LOSSES[loss], bound)


def made(x: Any) -> Any:
    """What an entry of a table stands for."""
    if isinstance(x, dict):
        entries = {name: made(value) for name, value in x.items() if name not in ("call", "args")}
        return imported(x["call"])(*made(x.get("args", ())), **entries) if "call" in x else entries
    if isinstance(x, tuple | list):
        return type(x)(map(made, x))
    if not isinstance(x, str) or not x:
        return x
    word, *rest = x.split()
    if word in TENSORS:
        named = {name: int(n) for name, _, n in (r.partition("=") for r in rest if "=" in r)}
        return TENSORS[word](*(int(n) for n in rest if "=" not in n), **named)
    return imported(x[1:]) if x[0] == "@" else x


def imported(path: str) -> Any:
    """What is at "module:name"."""
    module, _, name = path.partition(":")
    return operator.attrgetter(name)(importlib.import_module(module))


class _Loader(yaml.SafeLoader):
    """Reads lists as tuples, so that the entries of a table are what functions have as defaults."""


_Loader.add_constructor("tag:yaml.org,2002:seq", lambda loader, node: tuple(loader.construct_sequence(node, deep=True)))
_Loader.add_constructor("!list", lambda loader, node: loader.construct_sequence(node, deep=True))


def table(kind: str) -> dict[str, Case]:
    text = Path(__file__).with_name(f"{kind}.yaml").read_text(encoding="utf-8")
    return {name: case(**row) for name, row in yaml.load(text, _Loader)["cases"].items()}


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
    kinds = [list(table(kind).items()) for kind in KINDS]
    rows = [row for turn in itertools.zip_longest(*kinds) for row in turn if row is not None]
    assert len(dict(rows)) == len(rows), "two cases have one name"
    return dict(rows)
