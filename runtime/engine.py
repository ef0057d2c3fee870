"""One rank's training loop around a program: cut the batch, forward, backward, reduce, update. Every rank returns the global loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from shardc.errors import ShardcError
from shardc.interpret import on_device
from shardc.program import Input, Program
from shardc.runtime import state
from shardc.runtime.comm import TorchMesh
from shardc.runtime.rng import Rng
from shardc.runtime.zero import Buckets, global_norm

OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What trains where the user names no optimizer: AdamW(3e-4)."""
    return torch.optim.AdamW(params, lr=3e-4)


def groups_of(program: Program) -> list[tuple[str, ...]]:
    """The sets of axes over which the program communicates: a mesh makes its process groups for them."""
    found = [b.axes for b in program.buckets]
    found += [tuple(a for a, _ in p.layout.shards()) for p in program.params]
    for stage in program.stages:
        found += [n.meta["collective"].axes for n in stage.graph.nodes if "collective" in n.meta]
    return [axes for axes in dict.fromkeys(found) if axes]


class Engine:
    """Trains one rank's part of a model. Made by `program.engine(...)`, in each process of torchrun or as one of loopback's threads.

    model: nn.Module with the weights (any device but meta; it is not changed), or a function of no arguments that builds it
           (then only this rank's parts are made, from the counter generator and `seed`).
    optimizer: params -> torch optimizer, or None for evaluation and gradients only. seed: of dropout and initialisation.
    clip_norm: gradients are scaled down to this global 2-norm. mesh: a runtime mesh; default: torch.distributed's world.
    """

    def __init__(
        self, program: Program, model: Any, optimizer: OptimizerOf | None = adamw, seed: int = 0, *, clip_norm: float | None = None, mesh: Any = None
    ) -> None:  # fmt: skip
        self.program = program
        self.mesh = mesh if mesh is not None else TorchMesh(program.mesh, groups_of(program))
        self.rng = Rng(seed)
        self.clip_norm = clip_norm
        self.params, self.buffers = state.local_parameters(program, model, self.mesh, seed)
        self.optimizer = optimizer([p for p in self.params.values() if p.requires_grad]) if optimizer is not None else None
        self.grad_norm: Tensor | None = None
        self._buckets = Buckets(program, self.params, self.mesh)
        self._run = fx.GraphModule(nn.Module(), on_device(program.stages[0].graph, self.mesh.device))

    @property
    def step_count(self) -> int:
        """Optimizer steps done."""
        return self.rng.step

    # --- training

    def step(self, batch: Any, *, local: bool = False) -> Tensor:
        """One optimizer step on a global batch (local=True: on this rank's own part of it). Returns the global loss, 0-dim, detached."""
        loss = self.backward(batch, local=local)
        if self.clip_norm is not None or self.optimizer is not None:
            self.grad_norm = global_norm(self.program, self.params, self.mesh)
        if self.clip_norm is not None:
            self._clip(self.clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        self.rng.step += 1
        return loss

    def backward(self, batch: Any, *, local: bool = False) -> Tensor:
        """Forward and backward with all reductions: gradients stand in `.params[...].grad`. Returns the global loss."""
        self.rng.training = True
        self._buckets.start()
        loss, news = self._forward(batch, local)
        if loss.requires_grad:
            loss.backward()
        self._buckets.finish()
        for b, new in zip((b for b in self.program.buffers if b.updated), news, strict=True):
            self.buffers[b.name] = new.detach()
        return loss.detach()  # type: ignore[no-any-return]

    @torch.no_grad()
    def evaluate(self, batch: Any, *, local: bool = False) -> Tensor:
        """The global loss without dropout and with BatchNorm's running statistics; nothing changes."""
        self.rng.training = False
        loss, _ = self._forward(batch, local)
        self.rng.training = True
        return loss.detach()  # type: ignore[no-any-return]

    def _forward(self, batch: Any, local: bool) -> Any:
        inputs = take_inputs(self.program, batch, self.mesh, local=local)
        return self._run(self.mesh, self.rng, *self.params.values(), *self.buffers.values(), *inputs)

    def _clip(self, limit: float) -> None:
        assert self.grad_norm is not None
        scale = (limit / (self.grad_norm + 1e-6)).clamp(max=1.0)
        grads = [p.grad for p in self.params.values() if p.grad is not None]
        torch._foreach_mul_(grads, scale.to(grads[0].dtype)) if grads else None

    # --- state

    def save(self, folder: str | Path) -> None:
        """Write a checkpoint that any mesh can load: parameters, buffers, optimizer state, step, seed. Collective."""
        state.save(folder, self.program, self.mesh, self.params, self.buffers, self.optimizer, {"step": self.rng.step, "seed": self.rng.seed})

    def load(self, folder: str | Path) -> None:
        """Read a checkpoint that any mesh wrote. Collective."""
        extra = state.load(folder, self.program, self.mesh, self.params, self.buffers, self.optimizer)
        self.rng.step, self.rng.seed = int(extra["step"]), int(extra["seed"])

    def full_state_dict(self) -> dict[str, Tensor]:
        """{fqn: whole tensor on the CPU}, as the unsharded model's state_dict gives it, on every rank. Collective."""
        return state.full_state_dict(self.program, self.mesh, self.params, self.buffers)


def take_inputs(program: Program, batch: Any, mesh: Any, *, local: bool) -> list[Tensor]:
    """This rank's part of every input of a user's batch, on the mesh's device.

    Raises ShardcError that names the input, what came and what the program was compiled for.
    """
    found = []
    for x in program.inputs:
        leaf = _reach(batch, x)
        if not isinstance(leaf, Tensor):
            raise ShardcError(f"input {_name(x)!r} is a {type(leaf).__name__}, not a tensor", where=_name(x), fix="pass tensors, as at compile time")
        want = x.layout.local_shape(x.shape, program.mesh) if local else x.shape
        if tuple(leaf.shape) != tuple(want) or leaf.dtype != x.dtype:
            part = " (this rank's part)" if local else ""
            raise ShardcError(
                f"input {_name(x)!r} is {leaf.dtype} {list(leaf.shape)}, but the program was compiled for {x.dtype} {list(want)}{part}",
                where=_name(x), fix="pass a batch of that shape, or compile for the new one",
            )  # fmt: skip
        part_of = leaf if local else x.layout.local(leaf, program.mesh, program.mesh.coords(mesh.rank))
        found.append(part_of.to(mesh.device, non_blocking=True).contiguous())
    return found


def _name(x: Input) -> str:
    return ".".join(map(str, x.path)) or "batch"


def _reach(batch: Any, x: Input) -> Any:
    at = batch
    for key in x.path:
        try:
            at = at[key]
        except (KeyError, IndexError, TypeError):
            have = sorted(map(str, at)) if isinstance(at, Mapping) else type(at).__name__
            raise ShardcError(f"the batch has no {_name(x)!r}; it has {have}", where=_name(x), fix="pass the structure given at compile time") from None
    return at
