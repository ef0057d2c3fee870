"""Steps an optimizer block by block, on the CPU: AdamW passes over a parameter and its state about ten times, and what does not fit into the
processor's cache comes from memory in each of them (34 M parameters, one thread: 126 ms; in blocks of 1 MiB: 60 ms).

    group["params"] = [wte, ln]    ->    [wte[: n], wte[n : 2 * n], ..., ln]    for the time of `step`; state likewise

Blocks are views. Only optimizers that update every element by itself are stepped so, which is proven, and only what a plain step of theirs
has left of a form that can be cut: tensors like the parameter, and numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shardc.errors import ShardcError
from shardc.runtime.zero_optimizer import prove_elementwise

BLOCK = 2**20  # bytes


class Blockwise:
    """Use: `Blockwise.of(optimizer)`, then `.step()` instead of the optimizer's own; between steps the optimizer is as ever.

    Hooks on the optimizer's step see blocks. nbytes: of a block.
    """

    def __init__(self, optimizer: Optimizer, nbytes: int = BLOCK) -> None:
        self.optimizer, self.nbytes = optimizer, nbytes

    @staticmethod
    def of(optimizer: Optimizer) -> Blockwise | None:
        """None: it needs whole parameters, or has fused or batched its passes, or works elsewhere than on the CPU."""
        groups = optimizer.param_groups
        if any(p.device.type != "cpu" for g in groups for p in g["params"]) or any(g.get("fused") or g.get("foreach") for g in groups):
            return None
        try:
            prove_elementwise(optimizer)
        except ShardcError:
            return None
        return Blockwise(optimizer)

    def step(self) -> None:
        """As the optimizer's own step."""
        cuts = {p: _Cut(p, n, self.optimizer) for g in self.optimizer.param_groups for p in g["params"] if (n := self._fit(p))}
        every = [list(group["params"]) for group in self.optimizer.param_groups]
        try:
            for group, params in zip(self.optimizer.param_groups, every, strict=True):
                group["params"][:] = [block for p in params for block in (cuts[p].blocks if p in cuts else [p])]
            self.optimizer.step()
        finally:
            for group, params in zip(self.optimizer.param_groups, every, strict=True):
                group["params"][:] = params
            for cut in cuts.values():
                cut.join()

    def _fit(self, p: nn.Parameter) -> int:
        """Elements of p's blocks; 0: it is stepped whole."""
        n = self.nbytes // p.element_size()
        state = self.optimizer.state.get(p)
        if p.numel() <= n or p.grad is None or not state or not _flat(p) or not _flat(p.grad) or p.grad.dtype != p.dtype:
            return 0
        return n if all(_number(x) or _like(x, p) for x in state.values()) else 0


class _Cut:
    """A parameter as blocks of n elements, with their gradients and state in the optimizer, until `join`."""

    def __init__(self, p: nn.Parameter, n: int, optimizer: Optimizer) -> None:
        assert p.grad is not None
        self._p, self._states = p, optimizer.state
        self.blocks = [nn.Parameter(part, requires_grad=p.requires_grad) for part in _blocks(p.detach(), n)]
        for block, grad in zip(self.blocks, _blocks(p.grad, n), strict=True):
            block.grad = grad
            self._states[block] = {}
        for key, x in self._states[p].items():
            parts = _blocks(x, n) if _like(x, p) else [x.clone() if isinstance(x, Tensor) else x for _ in self.blocks]
            for block, part in zip(self.blocks, parts, strict=True):
                self._states[block][key] = part

    def join(self) -> None:
        """The parameter's state is up to date, the blocks are gone. What stepped in place stands already where it belongs."""
        whole, found = self._states[self._p], [self._states.pop(block) for block in self.blocks]
        for key in [k for k in found[-1] if all(k in s for s in found)]:
            parts = [s[key] for s in found]
            if not _like(parts[-1], self.blocks[-1]):
                whole[key] = parts[-1]  # a count, the same in all
            elif key not in whole or [x.data_ptr() for x in parts] != [x.data_ptr() for x in _blocks(whole[key], self.blocks[0].numel())]:
                whole[key] = torch.cat(parts).view(self._p.shape)


def _blocks(x: Tensor, n: int) -> list[Tensor]:
    return [x.view(-1)[i : i + n] for i in range(0, x.numel(), n)]


def _flat(x: Tensor) -> bool:
    return x.layout is torch.strided and x.is_contiguous()


def _number(x: Any) -> bool:
    return isinstance(x, (bool, int, float)) or (isinstance(x, Tensor) and x.dim() == 0)


def _like(x: Any, p: Tensor) -> bool:
    return isinstance(x, Tensor) and x.shape == p.shape and _flat(x)
