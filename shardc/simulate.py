"""All ranks of a program's mesh in this one process, for tests, verification and learning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardc.program import Collective, Param, Program
from shardc.runtime.comm import CommRecord
from shardc.runtime.engine import Engine, OptimizerOf, adamw
from shardc.runtime.loopback import LoopbackMesh, loopback


@dataclass(frozen=True)
class Comm:
    """One collective that rank 0 ran. bytes: of the whole local tensor; direction: "forward", "backward" or "update"."""

    kind: str
    axis: str
    bytes: int
    direction: str
    cause: str


@dataclass(frozen=True)
class Simulation:
    """What all ranks together computed, put together again.

    loss: 0-dim, global, of the last step. grads: {fqn: global tensor}, last step, before the optimizer (after clipping: none here).
    state: {fqn: global tensor}, parameters and buffers after the last step. comms: collectives of the last step, in order.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    state: dict[str, Tensor]
    comms: list[Comm]


def simulate(
    program: Program, model: nn.Module | Mapping[str, Tensor], batch: Any, *, steps: int = 1, optimizer: OptimizerOf | None = None, seed: int = 0
) -> Simulation:
    """Run `steps` training steps of a program on every rank of its mesh, in lockstep, without a process group.

    model: holds the weights and is not changed (or a dict of its tensors). batch: one global batch, used for every step.
    optimizer: params -> torch optimizer. None: with steps=1 weights stay as they are, with more AdamW(3e-4) trains.
    Replicas that come out different are an error of shardc: AssertionError names the value.
    """
    make = optimizer if optimizer is not None or steps == 1 else adamw

    def work(mesh: LoopbackMesh) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor], list[CommRecord]]:
        engine = Engine(program, model, make, seed, mesh=mesh)
        loss = torch.zeros(())
        grads: dict[str, Tensor | None] = {}
        for _ in range(steps):
            mesh.records.clear()
            loss = engine.backward(batch)
            grads = {n: p.grad.clone() if p.grad is not None else None for n, p in engine.params.items()}
            if engine.optimizer is not None:
                engine.optimizer.step()
            engine.rng.step += 1
        return loss, grads, {**{n: p.detach() for n, p in engine.params.items()}, **engine.buffers}, mesh.records

    ranks = loopback(program.mesh, work)
    grads: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for p in program.params:
        if p.requires_grad and any(r[1][p.name] is not None for r in ranks):
            parts = [g if (g := r[1][p.name]) is not None else torch.zeros_like(r[2][p.name]) for r in ranks]
            grads |= dict.fromkeys((p.fqn, *p.aliases), _join(program, p, parts, "gradient of "))
    for x in (*program.params, *(b for b in program.buffers if b.constant is None)):
        state |= dict.fromkeys((x.fqn, *x.aliases), _join(program, x, [r[2][x.name] for r in ranks], ""))
    losses = torch.stack([r[0] for r in ranks])
    assert torch.equal(losses, losses[:1].expand_as(losses)) or torch.allclose(losses, losses[0], rtol=1e-6), f"ranks return different losses: {losses.tolist()}"
    return Simulation(ranks[0][0], grads, state, [_explain(program, r) for r in ranks[0][3]])


def _join(program: Program, x: Any, parts: list[Tensor], what: str) -> Tensor:
    """The global tensor; every rank must hold its part of it."""
    mesh = program.mesh
    whole: Tensor = x.layout.join(lambda coords: parts[mesh.rank(coords)], mesh)
    if whole.is_floating_point():
        slack = 1e-9 if whole.dtype == torch.float64 else 1e-4 if whole.dtype == torch.float32 else 1e-1
        scale = float(whole.double().abs().max()) if whole.numel() else 0.0
        for rank, part in enumerate(parts):
            mine = x.layout.local(whole, mesh, mesh.coords(rank))
            off = float((part.double() - mine.double()).abs().max()) if part.numel() else 0.0
            assert not off > slack * max(scale, 1e-6), f"{what}{x.fqn}: rank {rank} holds another value than rank 0's part, by {off:.1e}"
    return whole


def _explain(program: Program, record: CommRecord) -> Comm:
    """Join what ran with why the program has it."""
    if record.tag.startswith("bucket"):
        bucket = program.buckets[int(record.tag.removeprefix("bucket"))]
        cause = f"gradients of {len(bucket.params)} parameters"
    else:
        found: dict[str, Collective] = {
            n.name: n.meta["collective"] for s in program.stages for n in s.graph.nodes if "collective" in n.meta
        }
        cause = found[record.tag].cause if record.tag in found else record.tag
    return Comm(record.kind, record.axis, record.bytes, record.direction, cause)


__all__ = ["Comm", "Param", "Simulation", "simulate"]
