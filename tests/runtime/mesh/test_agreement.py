"""What ranks share is compared: hashes see every change, sums tell whether all are alike, errors name who differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import Fact, check, fingerprint, hashed
from shardc.runtime.mesh.loopback import loopback

MESH = Mesh((("dp", 2), ("tp", 3)))


@pytest.mark.parametrize("n", [1, 7, 4096, 200_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_a_fingerprint_sees_every_element_and_its_place(n: int, dtype: torch.dtype) -> None:
    x = torch.arange(n).remainder(251).to(dtype)
    same = fingerprint([x])
    assert same == fingerprint([x.clone()]) < 2**24
    for i in {0, n // 2, n - 1}:
        y = x.clone()
        y[i] = 1 - y[i] if dtype != torch.bool else ~y[i]
        assert fingerprint([y]) != same
    if n > 1:
        assert fingerprint([x.roll(1)]) != same
        assert fingerprint([x.view(1, -1)]) != same


@pytest.mark.parametrize("texts", [["ä" * 5000, "", "", "b" * 14, "c" * 15, "ä" * 5000], [""] * 6, ["same"] * 6])
def test_texts_of_any_length(texts: list[str]) -> None:
    assert loopback(MESH, lambda mesh: agreement.texts(mesh, texts[mesh.rank])) == [texts] * 6


def test_elements_that_changed_places_in_a_large_tensor() -> None:
    x = torch.randn(600_000)
    y = x.clone()
    y[[5, 400_000]] = y[[400_000, 5]]
    z = x.view(-1, 2).flip(1).reshape(-1)
    assert len({fingerprint([t]) for t in (x, y, z)}) == 3


def test_equal_facts_pass_whatever_splits_them() -> None:
    def work(mesh: Any) -> None:
        facts = [Fact("seed", hashed(1)), Fact("part", hashed(mesh.coordinate("dp")), ("dp",))]
        facts.append(Fact("slice", hashed(mesh.rank), ("dp", "tp")))
        check(mesh, facts)

    loopback(MESH, work)


@pytest.mark.parametrize(
    ("fact", "text"),
    [
        (lambda m: Fact("the seed", 3 + (m.rank == 4)), r"the seed differs on rank 4 \(dp=1, tp=1\)"),
        (
            lambda m: Fact("the part", m.coordinate("dp") * 9 + (m.rank == 2), ("dp",)),
            r"differs on rank 2 \(dp=0, tp=2\)",
        ),
        (lambda m: Fact("lr", m.rank), r"lr differs between ranks 0 .*, 1 .*, 2 .*, 3 .* and 2 more"),
    ],
)
def test_a_difference_is_an_error_on_every_rank(fact: Any, text: str) -> None:
    def work(mesh: Any) -> str:
        with pytest.raises(ShardcError, match=text) as e:
            check(mesh, [Fact("steps", 7), fact(mesh)])
        check(mesh, [Fact("steps", 7)])  # the mesh can be used again
        return str(e.value)

    assert len(set(loopback(MESH, work))) == 1
