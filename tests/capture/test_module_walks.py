"""Walks over modules that are one generator give what torch's give."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn

from shardc.torch_private import quick_walks


class Own(nn.Sequential):
    """Has names of its own for what it holds."""

    def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Iterator[Any]:
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield f"{name}!", module


def model() -> nn.Module:
    shared = nn.Linear(2, 2)
    whole = nn.Sequential(nn.ModuleList([shared, nn.Sequential(nn.BatchNorm1d(2))]), shared, Own(nn.ReLU(), shared))
    whole.register_module("none", None)
    return whole


@pytest.mark.parametrize("once", [True, False])
def test_a_walk_is_torchs(once: bool) -> None:
    subject = model()

    def walked() -> list[Any]:
        named = (subject.named_parameters, subject.named_buffers)
        return [
            [(n, id(m)) for n, m in subject.named_modules(remove_duplicate=once)],
            *([n for n, _ in each(remove_duplicate=once)] for each in named),
            [id(m) for m in subject.modules()],
            [n for n, _ in subject.named_modules({subject[0]}, "under", once)],
        ]

    expected = walked()
    with quick_walks():
        assert walked() == expected
