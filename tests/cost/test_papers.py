"""Figures and closed forms of papers come out of a program's dry run: what a layer keeps, computes, sends and holds."""

from __future__ import annotations

import ast
import functools
from typing import Any

import pytest
import torch

import shardc
from shardc.cost import Cost
from tests.cost import papers
from tests.gpt3 import gpt3

MEGATRON = {"shard": {"h.*.{q,k,v,fc}": "column", "h.*.{proj,out}": "row"}}
SPLIT = {**MEGATRON, "activations": {"h.*": {1: "tp"}}}
CORE, WHOLE = {"checkpoint": [{"match": "h.*.core"}]}, {"checkpoint": [{"match": "h.*"}]}

#: A closed form is one at several sizes: (batch, sequence, hidden, heads).
SIZES = (5, 40, 96, 6), (4, 56, 72, 12)


@functools.cache
def _cost(sizes: tuple[int, int, int, int], spec: str) -> Cost:
    b, s, h, a = sizes
    model, batch = gpt3(batch=b, sequence=s, hidden=h, heads=a)
    return shardc.compile(model, batch, {"shardc": 1, **ast.literal_eval(spec)}, prove=False).cost()


def cost(sizes: tuple[int, int, int, int], mesh: dict[str, int], **spec: Any) -> Cost:
    return _cost(sizes, repr({"mesh": mesh, **spec}))


# --- Korthikanti et al. 2022, table 2


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_layer_keeps_what_the_paper_says(sizes: tuple[int, int, int, int]) -> None:
    b, s, h, a = sizes
    found = cost(sizes, {"dp": 1})
    assert papers.kept_as_papers(found, 1) == pytest.approx(s * b * h * (34 + 5 * a * s / h))
    # without masks; mean and deviation of two norms in float16 are left out there
    assert papers.kept(found, 1) == pytest.approx(s * b * h * (32 + 4 * a * s / h) + 8 * s * b)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("t", [2, 3])
def test_a_split_layer_keeps_what_the_paper_says(sizes: tuple[int, int, int, int], t: int) -> None:
    b, s, h, a = sizes
    found = cost(sizes, {"tp": t}, **MEGATRON)
    assert papers.kept_as_papers(found, 1) == pytest.approx(s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
    if s % t:
        return
    found = cost(sizes, {"tp": t}, **SPLIT)
    assert papers.kept_as_papers(found, 1) == pytest.approx(s * b * h * (34 / t + 5 * a * s / (h * t)))
    # the program keeps the gathered inputs of q, k, v and of fc, which Megatron gathers again in backward: 4 instead of
    # 4 / t
    whole = s * b * h * (4 + 28 / t + 4 * a * s / (h * t)) + 8 * s * b / t
    assert papers.kept(found, 1) == pytest.approx(whole)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_recomputation_keeps_what_the_paper_says(sizes: tuple[int, int, int, int]) -> None:
    b, s, h, _ = sizes
    assert papers.kept_as_papers(cost(sizes, {"dp": 1}, **CORE), 1) == 34 * s * b * h
    assert papers.kept_as_papers(cost(sizes, {"tp": 2}, **SPLIT, **CORE), 1) == 34 * s * b * h / 2
    assert papers.kept(cost(sizes, {"dp": 1}, **WHOLE), 1) == 2 * s * b * h


@functools.cache
def gpt3_175b() -> Cost:
    model, batch = gpt3(layers=3, hidden=12288, heads=96, sequence=2048, vocab=51200, batch=5)
    return shardc.compile(model, batch, {"shardc": 1, "mesh": {"dp": 1}}, prove=False).cost()


def test_gpt3_175b() -> None:
    """Layers are alike: what three of them have and keep says what 96 do."""
    found = gpt3_175b()
    whole = found.memory.resident["parameters"]
    each = sum(p.value.nbytes() for p in found.program.params if p.fqn.startswith("h.1."))
    assert (whole + 93 * each) / 1e9 == pytest.approx(350, rel=0.005)
    for batch, published in ((1, 275e9), (64, 17.6e12), (128, 35.3e12)):
        assert 96 * papers.kept_as_papers(found, 1) * batch / 5 == pytest.approx(published, rel=0.005)


# --- Rajbhandari et al. 2020, "ZeRO", figure 1: 7.5 B parameters, 64 devices


@functools.cache
def zero_of(zero: int, layers: int = 3, devices: int = 64) -> Cost:
    """A small vocabulary: a table that is looked up in is kept in float32, and the paper knows of none. A wide layer:
    its biases and norms, of which no copy in 16 bits is kept, weigh little.
    """
    model, batch = gpt3(layers=layers, hidden=4096, heads=32, sequence=2, batch=devices, dtype=torch.float32)
    precision = {"params": "float32", "compute": "float16", "reduce": "float16"}
    spec = {"shardc": 1, "mesh": {"dp": devices}, "data": {"zero": zero}, "precision": precision}
    return shardc.compile(model, batch, spec, prove=False).cost()


@pytest.mark.parametrize(
    ("zero", "shared", "split", "published"), [(0, 16, 0, 120), (1, 4, 12, 31.4), (2, 2, 14, 16.6), (3, 0, 14, 1.88)]
)
def test_zero_of_seven_billion_parameters(zero: int, shared: int, split: int, published: float) -> None:
    """Bytes of an element on each of N devices, of a layer: shared + split / N. At ZeRO 3 the paper keeps a rank's part
    in 16 bits beside the float32 one: 16 / N. Here it is made from that when it is gathered: 14 / N.
    """
    elements = 12 * 4096**2
    each = (papers.state(zero_of(zero, 4)) - papers.state(zero_of(zero, 3))) / elements
    assert each == pytest.approx(shared + split / 64, rel=0.01)
    if zero < 3:
        assert each * 7.5 == pytest.approx(published, rel=0.01)


# --- operations and what is sent


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_operations_of_a_layer(sizes: tuple[int, int, int, int]) -> None:
    """24 b s h^2 (1 + s / 6h) forward (Narayanan et al. 2021), and twice that backward; forward but its last product
    again, if recomputed.
    """
    b, s, h, _ = sizes
    forward = 24 * b * s * h**2 + 4 * b * s**2 * h
    found = cost(sizes, {"dp": 1})
    assert papers.flops(found, 1) == 3 * forward
    assert papers.flops(cost(sizes, {"tp": 2}, **MEGATRON), 1) == 3 * forward / 2
    assert papers.flops(cost(sizes, {"dp": 1}, **WHOLE), 1) == 4 * forward - 8 * b * s * h**2
    assert found.flops == 3 * 3 * forward + 6 * b * s * h * 101


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_what_a_layer_sends(sizes: tuple[int, int, int, int]) -> None:
    """Megatron's two sums of an activation in forward and two in backward, of 2 bytes, or their halves."""
    b, s, h, _ = sizes
    each = 2 * b * s * h
    assert papers.sent(cost(sizes, {"tp": 2}, **MEGATRON), 1) == {("tp", "all_reduce"): 4 * each}
    found = papers.sent(cost(sizes, {"tp": 2}, **SPLIT), 1)
    assert found["tp", "all_gather"] == found["tp", "reduce_scatter"] == 4 * each


@pytest.mark.parametrize(("zero", "gathered"), [(1, 1), (2, 1), (3, 2)])
def test_zero_sends_2p_or_3p(zero: int, gathered: int) -> None:
    """P: the parameters, in 16 bits."""
    four, three = zero_of(zero, 4).comm, zero_of(zero, 3).comm
    for kind, times in (("reduce_scatter", 1), ("all_gather", gathered)):
        assert four["dp", kind] - three["dp", kind] == pytest.approx(2 * times * 12 * 4096**2, rel=0.01)
