"""Ordinary PyTorch models: equal to one device in float64 on every mesh, and the batch stays split from the input to
the loss.

The reference is the user's own model in eager mode: loss, every gradient, every buffer that the step updates.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.capture import capture
from shardc.ir.metadata import Collective
from shardc.ir.program import Program
from shardc.verify.simulate import Simulation
from tests import equality
from tests.zoo import plain, plain_gradients, plain_losses, plain_more  # noqa: F401 (they fill the zoo)

#: Models whose loss relates samples of the batch to each other: the part of a rank needs those of the others.
MEET = {
    "clip": 1,
    "self_supervised": 1,  # in-batch negatives
    "contrastive": 2,  # the same, and their labels
    "vae": 1,  # distances of all pairs of the batch
    "clicks": 1,  # a bag's words are rows of other ranks
}
#: What is gathered over the batch, and noted: a maximum over all edges of a graph; self-attention of learned queries,
#: which every rank runs on the queries of all samples, though they are the same; where bags begin.
NOTED = {"messages": 2, "detector": 1, "clicks": 1}


@dataclass(frozen=True)
class Reference:
    """A model on one device: its loss, gradients and buffers after the step, and its captured graph."""

    model: nn.Module
    batch: Any
    loss: Tensor
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]
    captured: Program

    def check(
        self, spec: dict[str, Any], record: Callable[[Any, Program, Simulation], None] = lambda *_: None
    ) -> Program:
        """Compile under a spec, run on all ranks, record and compare everything. Returns the program."""
        program = shardc.compile(self.model, self.batch, {"shardc": 1, **spec}, captured=self.captured)
        sim = shardc.verify.simulate(program, self.model, self.batch)
        record(self, program, sim)
        equality.assert_equal(sim, self.loss, self.grads)
        for name, value in self.buffers.items():
            torch.testing.assert_close(sim.state[name], value, rtol=1e-11, atol=1e-12)
        assert equality.unnoticed(program) == []
        return program


@functools.cache
def reference(name: str) -> Reference:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of old-style weight norm and nested tensors
        one, batch = plain.ALL[name]()
        output = one(**batch) if isinstance(batch, dict) else one(*batch)
        loss = output["loss"] if isinstance(output, dict) else output
        loss.backward()
        model, _ = plain.ALL[name]()  # the first has updated its buffers
        captured = capture(model, batch)
    grads = {n: p.grad.to_dense() for n, p in one.named_parameters() if p.grad is not None}
    return Reference(model, batch, loss.detach(), grads, dict(one.named_buffers()), captured)


def collectives(program: Program, axis: str) -> list[Collective]:
    found = (n.meta.get("collective") for s in program.stages for n in s.graph.nodes)
    return [c for c in found if c is not None and axis in c.axes]


@pytest.mark.parametrize("name", plain.ALL)
def test_data_parallel(name: str, record_property: equality.Property) -> None:
    """Nothing of the size of an activation is sent: sums of what the loss, norms and
    statistics need, and no gathers.
    """
    program = reference(name).check(
        {"mesh": {"dp": 2}}, functools.partial(equality.record, record_property, name, "dp=2")
    )
    # images: running statistics of InstanceNorm; classification: torch's advice on a mean
    notes = [n for n in equality.notes(program) if "in eval mode" not in n and "torch warns" not in n]
    assert len(notes) == NOTED.get(name, 0), notes
    gathered = [c for c in collectives(program, "dp") if c.kind not in ("all_reduce", "none")]
    assert len(gathered) == MEET.get(name, 0) + NOTED.get(name, 0), [c.cause for c in gathered]


THIRDS = {"axis": "tp", "split": 3}
PACKED = {"*.in_proj_{weight,bias}": {0: THIRDS}, "*.out_proj": "row"}
STYLES: dict[str, dict[str, Any]] = {
    "encoder": {"embed": "vocab", **PACKED, "*.linear1": "column", "*.linear2": "row", "head": "column"},
    "encoder_norm_first": {**PACKED, "*.linear1": "column", "*.linear2": "row"},
    "decoder": {**PACKED, "*.linear1": "column", "*.linear2": "row", "head": "column"},
    "seq2seq": {**PACKED, "*.linear1": "column", "*.linear2": "row", "generator": "column"},
    "vit": {"qkv.weight": {0: THIRDS}, "proj": "row", "mlp.0": "column", "mlp.3": "row", "head": "column"},
    "mixer": {"{tokens,channels}.0": "column", "{tokens,channels}.2": "row"},
    "dit": {"*.qkv.{weight,bias}": {0: THIRDS}, "*.proj": "row", "*.fc1": "column", "*.fc2": "row"},
    "llama_like": {
        "embed": "vocab",
        "{wq,wk,wv}": "column",
        "wo": "row",
        "{w1,w3}": "column",
        "w2": "row",
        "output": "column",
    },
    "state_space": {"dt": "column", "log_a": {0: "tp"}},
    "gan": {
        "generator.0": "column",
        "generator.1.{weight,bias}": {0: "tp"},
        "generator.3": "row",
        "critic.0": "column",
    },
    "parametrised": {"up": "column"},
    "resnet50": {
        "*.conv1": "column",
        "*.bn{1,2}.{weight,bias}": {0: "tp"},
        "*.conv2.weight": {0: "tp"},
        "*.conv3": "row",
        "fc": "column",
    },
    "nested": {"text": "column", "heads.a": "row"},
    "dlrm": {"tables.0": "vocab", "tables.1": "column", "cross": "column"},
    "clip": {"image": "column", "text": "column"},
    "images": {"conv": "column", "norm.{weight,bias}": {0: "tp"}, "out": "row"},
    "clicks": {"up": "column", "out": "row"},
    "burgers": {"net.0": "column", "net.2": "row"},
    "critic": {
        "critic.0": "column",
        "critic.2.weight": {0: "tp"},
        "critic.2.bias": {0: "tp"},
        "critic.3.{weight,bias}": {0: "tp"},
    },
    "forces": {"filter.0": "column", "filter.2": "row", "out.0": "column", "out.2": "row"},
}
#: Where the heads, groups or classes divide by four as well.
FOUR = ("encoder", "decoder", "vit", "mixer", "dit", "gan", "clip")


@pytest.mark.parametrize("name", STYLES)
def test_data_and_tensor_parallel(name: str, record_property: equality.Property) -> None:
    record = functools.partial(equality.record, record_property, name, "dp=2 tp=2")
    reference(name).check({"mesh": {"dp": 2, "tp": 2}, "shard": STYLES[name]}, record)


@pytest.mark.parametrize("name", FOUR)
def test_tensor_parallel(name: str, record_property: equality.Property) -> None:
    reference(name).check(
        {"mesh": {"tp": 4}, "shard": STYLES[name]}, functools.partial(equality.record, record_property, name, "tp=4")
    )


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_complex_numbers_of_parameters_in_buckets(zero: int) -> None:
    """A bucket's entry begins anywhere; torch.view_as_complex takes even places only."""
    reference("fourier_operator").check({"mesh": {"dp": 2}, "data": {"zero": zero}})


def test_finds_ops_that_fell_back_unnoticed() -> None:
    """What the tests above assert of every program can fail: without its notes a program has such ops."""
    program = replace(reference("messages").check({"mesh": {"dp": 2}}), notes=())
    assert [found.partition(" ")[0] for found in equality.unnoticed(program)] == [
        "aten.expand.default",
        "aten.scatter_reduce.two",
    ]
