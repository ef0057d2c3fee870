"""What tests of equality share: one device's loss and gradients in eager mode, what a mesh's differ by, and what it
sent.

    one = equality.reference(model, batch)
    sim = one.on({"shardc": 1, "mesh": {"tp": 2}, "shard": {"use": "structure"}})
    equality.assert_equal(sim, one.loss, one.grads)

A reference is captured once; every spec is compiled from that.
"""

from __future__ import annotations

import collections
import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import shardc
from shardc.api import Program
from shardc.capture import capture
from shardc.capture.loss import Loss
from shardc.capture.rewrite import flex_attention
from shardc.ir import program as ir
from shardc.ir.graph import operands_of, producer_of
from shardc.ir.placement import Placement, Shard
from shardc.verify.simulate import Simulation
from tests import zoo

Property = Callable[[str, object], None]  # what pytest's `record_property` is
RTOL = 1e-12
#: Causes of the collectives of gradient buckets.
OF_BUCKETS = ("gradients, in buckets", "updated parameters")
SHORT = {"all_reduce": "AR", "all_gather": "AG", "reduce_scatter": "RS", "all_to_all": "A2A", "send_recv": "SR"}


@dataclass(frozen=True)
class Reference:
    """A model and batch on one device in float64: loss, gradients by FQN, and the captured graph."""

    model: nn.Module
    batch: Any
    loss: Tensor
    grads: dict[str, Tensor]
    captured: ir.Program

    def compile(self, spec: dict[str, Any]) -> Program:
        with zoo.Wide():
            return shardc.compile(self.model, self.batch, spec, captured=self.captured)

    def on(self, spec: dict[str, Any]) -> Simulation:
        return shardc.verify.simulate(self.compile(spec), self.model, self.batch)


def reference(build: Callable[[], tuple[nn.Module, Any]], loss_of: Loss | None = None) -> Reference:
    """Build a model and run it in eager mode. Its loss: `loss_of(output, batch)`; without one the output itself,
    `.loss`, or the first element."""
    with zoo.Wide(), warnings.catch_warnings(), flex_attention.in_eager():
        warnings.simplefilter("ignore")  # the model's own
        model, batch = build()
        output = model(**batch) if isinstance(batch, dict) else model(*batch)
        if loss_of is not None:
            loss = loss_of(output, batch)
        else:
            loss = output if isinstance(output, Tensor) else output[0] if isinstance(output, tuple) else output.loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad(set_to_none=True)
    with zoo.Wide():
        return Reference(model, batch, loss.detach(), grads, capture(model, batch, loss=loss_of))


def differences(sim: Simulation, loss: Tensor, grads: dict[str, Tensor]) -> tuple[float, dict[str, float]]:
    """Relative differences of the loss and of every gradient.

    A gradient that is zero in exact arithmetic (a key's bias) is rounding on both sides: measured against 1e-3 of the
    whole."""
    floor = 1e-3 * float(torch.stack([g.norm() for g in grads.values()]).norm())
    some = {n: g for n, g in grads.items() if g.numel()}  # of a parameter without elements a rank may have none
    off = {n: float((sim.grads[n] - g).norm()) / max(float(g.norm()), floor) for n, g in some.items()}
    return abs(float(sim.loss - loss)) / (abs(float(loss)) or 1.0), off


def assert_equal(sim: Simulation, loss: Tensor, grads: dict[str, Tensor], rtol: float = RTOL) -> None:
    of_loss, of_grads = differences(sim, loss, grads)
    assert of_loss <= rtol
    assert not {n: e for n, e in of_grads.items() if not e <= rtol}


def collectives(sim: Simulation, direction: str, axis: str = "tp") -> dict[str, int]:
    """Kind -> count on one axis, without gradient buckets."""
    found = [c.kind for c in sim.comms if c.direction == direction and c.axis == axis and c.cause not in OF_BUCKETS]
    return dict(collections.Counter(found))


def gathered(program: Program) -> list[str]:
    """What the program gathers though no annotation implies it."""
    return [n for n in program.notes if "gathered" in n]


def notes(program: Program) -> list[str]:
    """Its notes, but for that on a model of float64 that computes in fewer bits."""
    return [n for n in program.notes if "the weights are float64" not in n]


def unnoticed(program: Program) -> list[str]:
    """Ops that run whole over an axis though an operand comes split there, and no note says so.

    Read off the placement, not off the collectives: what fell back, whatever was then sent. A value is gathered, and
    noted, once for all its users.
    """
    found = []
    for node in program.graph.nodes:
        for axis, n in program.mesh.axes if node.op == "call_function" and "strategies" in node.meta else ():
            strategy = node.meta["strategies"].get(axis)
            if (
                n == 1
                or strategy is None
                or strategy.kind not in ("replicate", "partial_grad")
                or node.meta.get("spec_line")
            ):
                continue
            split = [x for x in operands_of(node) if isinstance(_lies(x, axis), Shard)]
            places = {str(user.meta.get("source") or user.name) for x in split for user in x.users}
            told = any(f"is gathered over {axis}" in note and note.startswith(tuple(places)) for note in program.notes)
            found += [f"{node.target} over {axis}: {node.meta.get('source')}"] if split and not told else []
    return found


def _lies(node: fx.Node, axis: str) -> Placement | None:
    """How a value lies on an axis where it is made."""
    source, i = producer_of(node)
    strategy = source.meta.get("strategies", {}).get(axis)
    return (
        strategy.outputs[i]
        if strategy is not None
        else node.meta["value"].layout[axis]
        if source.op == "placeholder"
        else None
    )


def record(record_property: Property, model: str, mesh: str, one: Reference, program: Program, sim: Simulation) -> None:
    """Leave a row for docs/measured/models.md in the test's report (tests/bench/models.py reads it)."""
    of_loss, of_grads = differences(sim, one.loss, one.grads)
    sent = collections.Counter((c.axis, c.direction, SHORT[c.kind]) for c in sim.comms if c.cause not in OF_BUCKETS)
    row = {
        "model": model,
        "mesh": mesh,
        "loss": of_loss,
        "gradients": max(of_grads.values()),
        "collectives": [[*key, n] for key, n in sorted(sent.items())],
        "export": one.captured.meta["capture_seconds"],
        "compile": program.meta["compile_seconds"],
    }
    record_property("row", json.dumps(row))
