"""Autograd's nodes, numbers and hooks, mostly inside of a backward pass; and hooks of optimizers."""

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
    """Has anybody registered a hook of the optimizer's steps? shardc's own, which look and change nothing, do not
    count: they are marked so (`looks_only`).
    """
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    each = (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return any(not getattr(hook, "looks_only", False) for hooks in each for hook in hooks.values())


def foreach_for(cls: type[Tensor]) -> None:
    """Let torch's optimizers take their foreach and fused forms for parameters of a class, as DTensor does."""
    if cls not in _foreach_supported_types:
        _foreach_supported_types.append(cls)


def current_backward() -> int | None:
    """Inside of a backward pass: the number of the node that runs; else None. Anomaly mode knows it too, but keeps
    stacks of all ops.
    """
    node = torch._C._current_autograd_node()
    return int(node._sequence_nr()) if node is not None else None


def engine_executes(node: Any) -> bool | None:
    """Inside of a backward pass: does it run this node? None: it is a leaf whose gradient torch.autograd.grad was asked
    for. torch.autograd.graph.register_multi_grad_hook asks so; there is no public name.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def keeps_graph() -> bool:
    """Inside of a backward pass: may it be run again (`retain_graph=True`)? Then nothing that was saved for it may be
    written over. Checkpoints of torch.utils ask so; there is no public name.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def after_backward(callback: Callable[[], None]) -> None:
    """Inside of a backward pass: have `callback` called when all of it is done, before `.backward()` returns.

    DDP and FSDP end their reductions so; a public hook that runs at this point does not exist.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
