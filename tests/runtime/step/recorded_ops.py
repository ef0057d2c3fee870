"""CUDA graphs without a GPU: ops of torch are noted as they run, and run again on the same tensors.

Like a graph, what is noted reads and writes the tensors that were there then; and until it runs, what it is to make is
not there (NaN).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardc.torch_private import pytree


class _Noting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {x.untyped_storage()._cdata for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host waits for the device"
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        self.calls.append((func, args, kwargs, [x for x in made if x.untyped_storage()._cdata not in before]))
        return result


class RecordedOps:
    """A shardc.runtime.step.step_graph.CudaGraph."""

    made: list[RecordedOps]

    def __init__(self) -> None:
        self._noted = _Noting()
        self.replays = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        with self._noted:
            yield
        for *_, made in self._noted.calls:
            for x in made:
                if x.is_floating_point():
                    x.fill_(torch.nan)

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, made in self._noted.calls:
            result = func(*args, **kwargs)
            fresh = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
            if made:
                for x, new in zip(made, fresh, strict=True):
                    x.copy_(new)
