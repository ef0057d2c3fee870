"""transformers' experts as one op: while a model is captured, its layers of experts call `shardc.nn.experts`.

The library lets implementations be chosen by name (`config.experts_implementation`); this one stands for all of them
that compute every expert's products at once ("grouped_mm", "batched_mm", kernels of GPUs). "eager" is a Python loop
over experts, and stays one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest import mock

from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.nn import experts


@contextmanager
def as_one_op() -> Iterator[None]:
    """Does nothing if transformers is not imported, or is older than its interface of experts."""
    moe: ModuleType | None = sys.modules.get("transformers.integrations.moe")
    interface = getattr(moe, "ExpertsInterface", None)
    if interface is None:
        yield
        return
    original = interface.get_interface

    def get_interface(self: Any, experts_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        chosen = original(self, experts_implementation, default)
        return (
            chosen if chosen is default else lambda module, *args, **kwargs: _forward(chosen, module, *args, **kwargs)
        )

    with mock.patch.object(interface, "get_interface", get_interface):
        yield


def _forward(chosen: Callable[..., Any], module: nn.Module, x: Tensor, index: Tensor, weights: Tensor) -> Any:
    """What transformers' implementations compute, as one op; by the one that was chosen where there is no such op."""
    has: Any = module
    up, act = ("gate_up_proj", has._apply_gate) if has.has_gate else ("up_proj", has.act_fn)
    bias = (getattr(has, f"{up}_bias"), has.down_proj_bias) if has.has_bias else (None, None)
    if has.has_post_expert_norm:
        return chosen(module, x, index, weights)
    try:
        return experts(
            x,
            index,
            weights,
            getattr(has, up),
            has.down_proj,
            activation=act,
            up_bias=bias[0],
            down_bias=bias[1],
            transposed=has.is_transposed,
        )
    except ShardcError:  # an activation with parameters of its own, or matrices of another form
        return chosen(module, x, index, weights)
