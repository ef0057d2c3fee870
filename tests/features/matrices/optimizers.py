"""Small reference optimizers whose step of a matrix needs all of it, and what one device does with them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardc.features.matrices.program import Matrix


class Shampoo(torch.optim.Optimizer):
    """Gupta et al. 2018: a matrix is multiplied from both sides by roots of its own second moments. State: a list of a
    tensor for each dim, of other shapes than the parameter.
    """

    def __init__(self, params: Any, lr: float = 1e-2, eps: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["moments"] = [group["eps"] * torch.eye(n, dtype=p.dtype) for n in p.shape]
                state["step"] += 1
                update = p.grad.clone()
                for d, moment in enumerate(state["moments"]):
                    rows = p.grad.movedim(d, 0).reshape(p.shape[d], -1)
                    moment += rows @ rows.T
                    values, vectors = torch.linalg.eigh(moment)
                    root = (vectors * values ** (-1 / (2 * p.dim()))) @ vectors.T
                    update = torch.tensordot(root, update, dims=([1], [d])).movedim(0, d)
                p -= group["lr"] * update


class SOAP(torch.optim.Optimizer):
    """Vyas et al. 2024: Adam in the eigenbasis of Shampoo's moments, found anew every second step."""

    def __init__(self, params: Any, lr: float = 1e-2, beta: float = 0.9, eps: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta = group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                    # unequal, so that directions without a gradient have one basis
                    state["moments"] = [torch.diag(torch.linspace(0.01, 0.1, n, dtype=p.dtype)) for n in p.shape]
                    state["basis"] = {}
                for d, moment in enumerate(state["moments"]):
                    rows = p.grad.movedim(d, 0).flatten(1)
                    moment.lerp_(rows @ rows.T, 1 - beta)
                    if state["step"] % 2 == 0:
                        state["basis"][str(d)] = signed(torch.linalg.eigh(moment)[1])
                state["step"] += 1
                left, right = state["basis"]["0"], state["basis"]["1"]
                state["mean"].lerp_(p.grad, 1 - beta)
                state["square"].lerp_((left.T @ p.grad @ right) ** 2, 1 - beta)
                turned = (left.T @ state["mean"] @ right) / (state["square"].sqrt() + group["eps"])
                p -= group["lr"] * (left @ turned @ right.T)


def signed(vectors: Tensor) -> Tensor:
    """Eigenvectors with one sign."""
    return vectors * vectors.sum(0).sign()


class Lamb(torch.optim.SGD):
    """As LAMB (You et al. 2020), every step is scaled by the matrix's own norm: smooth, and wrong by far on a part."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad * (1 + p.norm()) / (1 + p.grad.norm())


Make = Callable[[Any], list[torch.optim.Optimizer]]


def alone(
    model: nn.Module, batch: Mapping[str, Tensor], make: Make, matrices: list[Matrix], steps: int, clip: float | None
) -> dict[str, Tensor]:
    """One device's weights after some steps. matrices: the boxes of parameters that optimizers step apart."""
    plain = copy.deepcopy(model)
    params = dict(plain.named_parameters())
    boxes = {m.name: (m.param, tuple(slice(a, a + n) for a, n in zip(m.offset, m.size, strict=True))) for m in matrices}
    own = {m.name: nn.Parameter(params[m.param].detach()[boxes[m.name][1]].reshape(m.shape).clone()) for m in matrices}
    optimizers = make(own.items())
    for _ in range(steps):
        plain.zero_grad()
        plain(**batch).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(params.values(), clip)
        for name, (param, box) in boxes.items():
            grad = params[param].grad
            assert grad is not None
            own[name].grad = grad[box].reshape(own[name].shape).clone()
        for o in optimizers:
            o.step()
        with torch.no_grad():
            for name, (param, box) in boxes.items():
                params[param][box] = own[name].reshape(params[param][box].shape)
    return {n: x.detach() for n, x in plain.state_dict().items()}
