"""What of a rank's memory experts take: their parameters and optimizer state, in bytes, as they are after a step. (Not
their gradients, which DeepSpeed lets go of by then.)"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

#: What is in the name of every parameter of an expert, transformers' and DeepSpeed's.
PART = ".experts."


def of_experts(named: Iterable[tuple[str, nn.Parameter]], optimizer: torch.optim.Optimizer) -> int:
    return sum(map(_bytes, (x for name, p in named if PART in name for x in (p, *_state(optimizer.state.get(p, {}))))))


def _state(state: Mapping[str, object]) -> list[Tensor]:
    return [x for x in state.values() if isinstance(x, Tensor) and x.dim()]  # numbers are not of interest


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
