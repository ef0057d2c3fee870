"""`p.ndim` of a rank's part is the whole parameter's: the groups of every GPT script are those of one device."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import pytest
import torch
from torch import nn

from shardc.runtime.mesh.loopback import LoopbackMesh
from shardc.runtime.step.module import ShardedModule
from tests.runtime.step.small import BATCH, NORMED, SPECS, backward, compiled, on_modules


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.SGD:
    ps = list(params)
    decayed = {"params": [p for p in ps if p.ndim >= 2], "weight_decay": 0.5}
    return torch.optim.SGD([decayed, {"params": [p for p in ps if p.dim() < 2], "weight_decay": 0.0}], lr=0.1)


@pytest.mark.parametrize("spec", SPECS)
def test_groups_by_dims_step_as_on_one_device(spec: str) -> None:
    plain = copy.deepcopy(NORMED)
    optimizer = sgd(plain.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        plain(**BATCH).backward()
        optimizer.step()

    @on_modules(compiled(spec))
    def _(module: ShardedModule, mesh: LoopbackMesh) -> None:
        assert {n: p.ndim for n, p in module.named_parameters()} == {n: p.ndim for n, p in plain.named_parameters()}
        optimizer = sgd(module.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            backward(module)
            optimizer.step()
        for name, p in module.full_state_dict().items():
            torch.testing.assert_close(
                p, plain.state_dict()[name], rtol=1e-5, atol=1e-6
            )  # decay of the wrong group is 5 % a step
