"""Activations on the host come back ahead of their use (runtime/step/activation_offload.py)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardc.cost import host_memory
from shardc.runtime.step.activation_offload import OffloadedTensor, OffloadedTensors
from tests.passes.recompute.test_recompute import MESHES, assert_same, compiled, plain, two_steps


def kept() -> tuple[OffloadedTensors, list[OffloadedTensor]]:
    """Three tensors, offloaded as on a GPU."""
    some = host_memory.offloaded_tensors(lambda make: make())(torch.device("cpu"), {})
    return some, [some.keep(torch.full((2,), float(i))) for i in range(3)]


def test_what_was_kept_before_comes_with_what_is_asked_for() -> None:
    _, (first, second, third) = kept()
    assert torch.equal(third.fetch(), torch.full((2,), 2.0))
    assert second._coming is not None
    assert first._coming is None
    x = second.fetch()
    assert x is second.fetch(), "those who ask at a time share a copy"
    assert second._coming is None
    assert first._coming is not None
    assert torch.equal(first.fetch(), torch.zeros(2))


def test_the_order_of_the_last_backward() -> None:
    after: dict[tuple[int, int], int] = {}
    for _ in range(2):
        some = host_memory.offloaded_tensors(lambda make: make())(torch.device("cpu"), after)
        first, second, third = (some.keep(torch.full((2,), float(i))) for i in range(3))
        first.fetch()
        came = third._coming is not None
        third.fetch()
        second.fetch()
    assert came
    assert after == {(0, 1): 2, (2, 1): 1}


def test_what_nobody_waits_for_does_not_come() -> None:
    _, tensors = kept()
    third = tensors.pop()
    tensors.clear()
    assert torch.equal(third.fetch(), torch.full((2,), 2.0))


def test_elsewhere_than_on_a_gpu_nothing_comes_ahead() -> None:
    some, tensors = kept()
    some.ahead = False
    tensors[2].fetch()
    assert tensors[1]._coming is None


@pytest.mark.parametrize("mesh", ["dp=2 tp=2", "1f1b"])
def test_a_step_waits_for_few(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first backward, what is fetched is on its way, but for the first one of each backward; and the step is
    the one without offload.
    """
    late: dict[OffloadedTensors, list[bool]] = {}  # by backward
    begin, fetch = OffloadedTensors.__init__, OffloadedTensor.fetch

    def ahead(self: OffloadedTensors, device: torch.device, after: dict[tuple[int, int], int]) -> None:
        begin(self, device, after)
        self.ahead = True

    def noted(self: OffloadedTensor) -> Tensor:
        there = self._coming is not None or (self._shared is not None and self._shared() is not None)
        late.setdefault(self._among, []).append(not there)
        return fetch(self)

    monkeypatch.setattr(OffloadedTensors, "__init__", ahead)
    monkeypatch.setattr(OffloadedTensors, "useful", staticmethod(lambda x: True))
    monkeypatch.setattr(OffloadedTensor, "fetch", noted)
    program = compiled("gpt", MESHES[mesh], [{"match": "h.*", "save": ["linear"], "offload": "cpu"}])
    assert_same(two_steps("gpt", program), plain("gpt", mesh))
    *first, last = late.values()
    assert len(first) >= program.mesh.world
    assert len(last) > 8
    assert last == [True] + [False] * (len(last) - 1)


def test_a_forward_that_keeps_fewer_than_the_last_one() -> None:
    some = host_memory.offloaded_tensors(lambda make: make())(torch.device("cpu"), {(0, 1): 5})
    only = some.keep(torch.ones(2))
    assert torch.equal(only.fetch(), torch.ones(2))
    assert only._coming is None


def test_the_first_that_was_kept_is_not_held_when_it_was_fetched() -> None:
    _, (first, *_) = kept()
    first.fetch()
    assert first._coming is None
