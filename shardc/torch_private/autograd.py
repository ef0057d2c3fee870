"""Read autograd's nodes, numbers and hooks, mostly within a backward pass, and hooks of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _foreach_supported_types,  # classes of parameters
    _global_optimizer_post_hooks,  # of all optimizers
    _global_optimizer_pre_hooks,
)


def step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's steps have hooks, other than shardc's, which are marked `looks_only`."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    each = (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return any(not getattr(hook, "looks_only", False) for hooks in each for hook in hooks.values())


def foreach_for(cls: type[Tensor]) -> None:
    """Let torch's optimizers use foreach and fused steps for a class of parameters, as DTensor does."""
    if cls not in _foreach_supported_types:
        _foreach_supported_types.append(cls)


def current_backward() -> int | None:
    """Return the number of the node that runs in a backward pass; None outside of one.

    Anomaly mode knows it too, but keeps stacks of all ops.
    """
    node = torch._C._current_autograd_node()
    return int(node._sequence_nr()) if node is not None else None


def engine_executes(node: Any) -> bool | None:
    """Return whether the running backward pass executes a node; None for a leaf input of autograd.grad.

    torch.autograd.graph.register_multi_grad_hook uses this call; there is no public name.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def keeps_graph() -> bool:
    """Return whether the running backward pass may run again (`retain_graph=True`).

    If so, nothing that was saved for it may be overwritten. torch.utils.checkpoint uses this call; there is no public
    name.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def after_backward(callback: Callable[[], None]) -> None:
    """Call `callback` when the running backward pass is complete, before `.backward()` returns.

    DDP and FSDP end their reductions so; a public hook that runs at this point does not exist.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
