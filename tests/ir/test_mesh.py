"""Ranks and coordinates."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.ir.mesh import Mesh

meshes = st.lists(st.integers(1, 4), max_size=4).map(
    lambda sizes: Mesh(tuple((f"a{i}", n) for i, n in enumerate(sizes)))
)


@given(meshes)
def test_rank_is_the_inverse_of_coords(mesh: Mesh) -> None:
    assert [mesh.rank(mesh.coords(r)) for r in range(mesh.world)] == list(range(mesh.world))


@given(meshes, st.data())
def test_groups_differ_in_their_axes_only_and_cover_the_world(mesh: Mesh, data: st.DataObject) -> None:
    axes = [n for n in mesh.names if data.draw(st.booleans())]
    seen = set()
    for rank in range(mesh.world):
        group = mesh.group(rank, data.draw(st.permutations(axes)))
        assert rank in group
        assert list(group) == sorted(group)
        mine = mesh.coords(rank)
        expected = [r for r in range(mesh.world) if all(c == mine[a] or a in axes for a, c in mesh.coords(r).items())]
        assert list(group) == expected
        seen |= set(group)
    assert seen == set(range(mesh.world))


def test_the_last_axis_holds_neighbours() -> None:
    mesh = Mesh.of({"dp": 2, "tp": 4})
    assert mesh.group(5, ["tp"]) == (4, 5, 6, 7)
    assert mesh.group(5, ["dp"]) == (1, 5)
    assert (mesh.world, mesh.size("tp"), mesh.stride("dp"), mesh.stride("tp")) == (8, 4, 4, 1)
    assert str(mesh) == "dp=2 × tp=4"
    assert str(Mesh(())) == "one device"


def test_groups_of_a_large_mesh_are_quick() -> None:
    mesh = Mesh.of({"pp": 16, "dp": 64, "tp": 8})
    start = time.perf_counter()
    assert all(len(mesh.group(r, ["dp"])) == 64 for r in range(0, mesh.world, 8))
    assert time.perf_counter() - start < 5


def test_unknown_axis_is_a_key_error() -> None:
    with pytest.raises(KeyError):
        Mesh.of({"dp": 2}).size("tp")
