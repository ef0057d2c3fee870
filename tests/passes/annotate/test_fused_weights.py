"""Fused weights that a spec splits as one: what is said of the gathers, and that what it says to write needs none."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import shardc
from shardc.errors import ShardcError
from shardc.passes.annotate import to_spec
from shardc.report.comm import comm_table


class Attention(nn.Module):
    """x [2, 4, 24] -> loss; 6 heads of 4, q, k and v from one weight, which `how` takes apart."""

    def __init__(self, how: str, kv: int) -> None:
        super().__init__()
        self.how, self.kv = how, kv
        self.qkv, self.o = nn.Linear(24, 24 + 8 * kv), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        y, n = self.qkv(x), 4 * self.kv
        if self.how == "split":
            q, k, v = y.split([24, n, n], -1)
        elif self.how == "slice":
            q, k, v = y[..., :24], y[..., 24 : 24 + n], y[..., 24 + n :]
        elif self.how == "view":
            q, k, v = y.view(2, 4, 3, 6, 4).unbind(2)
        else:
            z = y.view(2, 4, self.kv, 6 // self.kv + 2, 4)
            q, k, v = z[..., :-2, :], z[..., -2, :], z[..., -1, :]
        q, k, v = (a.reshape(2, 4, -1, 4).transpose(1, 2) for a in (q, k, v))
        out: Tensor = self.o(
            F.scaled_dot_product_attention(q, k, v, enable_gqa=self.kv < 6).transpose(1, 2).reshape(2, 4, 24)
        )
        return out.square().mean()


def compiled(how: str, kv: int, tp: int, qkv: dict[str, Any]) -> shardc.Program:
    spec = {"shardc": 1, "mesh": {"tp": tp}, "shard": {**qkv, "o": "row"}}
    return shardc.compile(Attention(how, kv), {"x": torch.randn(2, 4, 24)}, spec, prove=False)


@pytest.mark.parametrize(
    ("how", "kv", "tp", "written"),
    [
        ("split", 6, 2, {0: {"axis": "tp", "split": 3}}),
        ("slice", 6, 3, {0: {"axis": "tp", "split": 3}}),
        ("view", 6, 3, {0: {"axis": "tp", "split": 3}}),
        ("split", 2, 2, {0: {"axis": "tp", "sections": [24, 8, 8]}}),
    ],
)
@pytest.mark.parametrize("asked", [{"qkv": "column"}, {"qkv.{weight,bias}": {0: "tp"}}])
def test_implicit_gathers_name_what_to_write(how: str, kv: int, tp: int, written: Any, asked: dict[str, Any]) -> None:
    program = compiled(how, kv, tp, asked)
    assert "needs it whole there, but no annotation implies this" in program.notes[0]
    found = re.fullmatch(
        "fused weights can be split by their parts: write (.*) before the entries that split them in another way",
        program.notes[1],
    )
    assert found is not None
    entry = yaml.safe_load("{" + found[1] + "}")
    assert entry == {"qkv.{weight,bias}": written}
    assert f"note: {found[0]}" in comm_table(program.cost())
    better = compiled(how, kv, tp, entry)
    assert not better.notes
    assert "note" not in comm_table(better.cost())
    assert "no annotation implies it" not in comm_table(better.cost())


def test_parts_that_the_ranks_do_not_divide_name_it_too() -> None:
    with pytest.raises(
        ShardcError, match=r"3 \(of \[2, 4, 72\] seen as \[2, 4, 3, 6, 4\]\) is not divisible by tp=2"
    ) as e:
        compiled("view", 6, 2, {"qkv": "column"})
    assert (
        e.value.fix
        == 'tp=1 or 3; or split the fused weight by its parts: write "qkv.{weight,bias}": {0: {axis: tp, split: 3}}'
        " before its entry"
    )


def test_groups_are_split_as_they_lie() -> None:
    """Each key-value head with its queries: `column` is right, and on more ranks than groups too."""
    for tp in (2, 6):
        program = compiled("grouped", 2, tp, {"qkv": "column"})
        assert len(program.notes) == (tp == 6)  # ranks that share a group compute its queries too
        assert not to_spec.suggest_split(program, "tp")
