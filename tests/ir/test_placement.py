"""Layouts: cutting and joining are inverse, boxes say the same as cutting, printing and parsing are inverse."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardc.ir.mesh import Mesh
from shardc.ir.placement import PARTIAL_GRAD, REPLICATE, Layout, Partial, Placement, Replicate, Shard
from shardc.ir.shard_chunks import chunks, trim, unchunk, widen
from shardc.ir.type_text import DTYPES, parse, show

torch.set_num_threads(1)

Case = tuple[Mesh, tuple[int, ...], Layout]


@st.composite
def cases(draw: st.DrawFn, marks: bool = False) -> Case:
    """A mesh of up to three axes, a shape, and a layout that fits: split digits, sections, several axes on one dim, any
    order.
    """
    names = draw(st.permutations(["dp", "tp", "cp"]))[: draw(st.integers(1, 3))]
    mesh = Mesh(tuple((n, draw(st.integers(1, 3))) for n in names))
    dims = draw(st.integers(1, 3))
    placements: dict[str, Placement] = {}
    where = {n: draw(st.integers(-1, dims - 1)) for n in names}  # -1: not sharded
    shape = []
    for d in range(dims):
        axes = draw(st.permutations([n for n in names if where[n] == d]))
        if len(axes) == 1 and draw(st.booleans()):
            sections = tuple(mesh.size(axes[0]) * k for k in draw(st.lists(st.integers(1, 3), min_size=2, max_size=3)))
            placements[axes[0]] = Shard(d, 1, sections)
            shape.append(sum(sections))
            continue
        split, blocks, digits = 1, 0, {}
        for a in axes:  # digits from the major one down, with free digits between them
            split *= draw(st.integers(1, 3))
            blocks = blocks or split
            digits[a] = split
            split *= mesh.size(a)
        size = split * draw(st.integers(1, 3))
        padding = (
            draw(st.integers(0, size // blocks - 1))
            if any(mesh.size(a) > 1 for a in axes) and draw(st.booleans())
            else 0
        )
        placements |= {a: Shard(d, at, (), padding, blocks if padding else 1) for a, at in digits.items()}
        shape.append(size - blocks * padding)
    if marks:
        for n in names:
            if where[n] < 0:
                placements[n] = draw(st.sampled_from([REPLICATE, PARTIAL_GRAD, Partial(), Partial("max")]))
    return mesh, tuple(shape), Layout.of(placements, mesh)


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@given(cases())
def test_a_layout_that_is_built_from_digits_fits(case: Case) -> None:
    mesh, shape, layout = case
    assert layout.problem(shape, mesh) == ""


@given(cases())
def test_join_is_the_inverse_of_local(case: Case) -> None:
    mesh, shape, layout = case
    whole = numbered(shape)
    parts = [layout.local(whole, mesh, mesh.coords(r)) for r in range(mesh.world)]
    assert {tuple(p.shape) for p in parts} == {layout.local_shape(shape, mesh)}
    assert torch.equal(layout.join(lambda c: parts[mesh.rank(c)], mesh), whole)


@given(cases())
def test_every_element_lies_on_as_many_ranks_as_replicate_it(case: Case) -> None:
    mesh, shape, layout = case
    seen = torch.zeros(1 + math.prod(shape), dtype=torch.int64)
    for r in range(mesh.world):
        seen += torch.bincount(layout.local(1 + numbered(shape), mesh, mesh.coords(r)).flatten(), minlength=len(seen))
    assert seen[1:].eq(mesh.world // math.prod(mesh.size(a) for a, _ in layout.shards())).all()


@given(cases())
def test_boxes_are_what_local_cuts(case: Case) -> None:
    mesh, shape, layout = case
    whole = 1 + numbered(shape)
    for r in range(mesh.world):
        local = layout.local(whole, mesh, mesh.coords(r))
        found = torch.zeros(layout.local_shape(shape, mesh), dtype=torch.int64)  # as padding is
        for box in layout.boxes(shape, mesh, mesh.coords(r)):
            here = tuple(slice(a, a + n) for a, _, n in box)
            assert (found[here] == 0).all(), "boxes overlap"
            found[here] = whole[tuple(slice(g, g + n) for _, g, n in box)]
        assert torch.equal(found, local)


@given(cases())
def test_boxes_are_as_few_as_can_be(case: Case) -> None:
    mesh, shape, layout = case
    for r in range(mesh.world):
        for d in range(len(shape)):
            runs = sorted({box[d] for box in layout.boxes(shape, mesh, mesh.coords(r))})
            assert all((a[1] + a[2], a[0] + a[2]) != (b[1], b[0]) for a, b in itertools.pairwise(runs)), (
                "neighbours are not merged"
            )


@given(cases(marks=True), st.sampled_from(list(DTYPES)))
def test_parse_is_the_inverse_of_show(case: Case, dtype: torch.dtype) -> None:
    mesh, shape, layout = case
    text = show(shape, dtype, layout)
    back, kind, placements = parse(text)
    assert (back, kind, Layout.of(placements, mesh)) == (shape, dtype, layout), text


@given(cases())
def test_an_axis_cut_by_another_first_is_found_at_its_local_split(case: Case) -> None:
    mesh, shape, layout = case
    whole, coords = numbered(shape), mesh.coords(mesh.world - 1)
    for axis, shard in layout.shards():
        others = Layout.of({a: p for a, p in layout.items if a != axis}, mesh)
        cut = Shard(shard.dim, layout.local_split(axis, mesh), shard.sections)
        rest = others.local(whole, mesh, coords)
        rest = rest if others.shards(shard.dim) else widen(rest, shard)
        parts = chunks(rest, cut, mesh.size(axis))
        assert torch.equal(parts[coords[axis]], layout.local(whole, mesh, coords))
        assert torch.equal(unchunk(parts, cut), rest)


@pytest.mark.parametrize("s", [Shard(0, 1, (), 2), Shard(1, 3, (), 1, 3), Shard(1, 2, (), 3, 2)], ids=str)
def test_trim_is_the_inverse_of_widen(s: Shard) -> None:
    x = 1 + numbered((4, 6, 5))
    wide = widen(x, s)
    assert wide.shape[s.dim] == s.padded(x.shape[s.dim]) == x.shape[s.dim] + s.blocks * s.padding
    assert torch.equal(trim(wide, s), x)
    assert int((wide == 0).sum()) == wide.numel() - x.numel()


def test_inputs_are_padded_by_copies() -> None:
    assert widen(torch.tensor([5, 6]), Shard(0, 1, (), 3), copies=True).tolist() == [5, 6, 5, 6, 5]


def test_a_layout_says_what_padding_does_not_fit() -> None:
    mesh = Mesh((("dp", 2), ("tp", 2)))
    assert Layout.of({"tp": Shard(0, 1, (), 1)}, mesh).problem((7,), mesh) == ""
    assert "is not divisible" in Layout.of({"tp": Shard(0, 1, (), 2)}, mesh).problem((7,), mesh)
    assert "differently" in Layout.of({"dp": Shard(0, 1), "tp": Shard(0, 2, (), 1)}, mesh).problem((8,), mesh)
    assert "blocks" in Layout.of({"tp": Shard(0, 1, (), 1, 2)}, mesh).problem((8,), mesh)


def test_chunks_are_views_where_nothing_has_to_move() -> None:
    x = numbered((6, 8))
    assert all(p.data_ptr() == x[:, 4 * i :].data_ptr() for i, p in enumerate(chunks(x, Shard(1), 2)))
    assert [p.tolist() for p in chunks(torch.arange(12), Shard(0, 3), 2)] == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    assert [p.tolist() for p in chunks(torch.arange(8), Shard(0, 1, (4, 2, 2)), 2)] == [[0, 1, 4, 6], [2, 3, 5, 7]]


def test_boxes_of_a_huge_dim_need_no_list_of_its_elements() -> None:
    mesh = Mesh.of({"tp": 4})
    boxes = list(Layout((("tp", Shard(0, 3)),)).boxes((3 << 40, 2), mesh, {"tp": 1}))
    assert boxes == [((i << 38, (i << 40) + (1 << 38), 1 << 38), (0, 0, 2)) for i in range(3)]


MESH = Mesh.of({"dp": 2, "tp": 4})


@pytest.mark.parametrize(
    ("placements", "shape", "what"),
    [
        ({"tp": Shard(0)}, (6, 8), "6 is not divisible by tp=4"),
        ({"tp": Shard(0, 3)}, (8,), "8 is not divisible by tp=4 in 3 parts"),
        ({"tp": Shard(2)}, (8, 8), "dim 2 does not exist in a tensor of 2 dims"),
        ({"tp": Shard(0, 1, (8, 4, 4))}, (12,), "sections [8, 4, 4] do not sum to the dim's size 12"),
        ({"tp": Shard(0, 1, (8, 6, 2))}, (16,), "6 is not divisible by tp=4"),
        ({"dp": Shard(0), "tp": Shard(0, 1, (8, 8))}, (16,), "dp and tp both split dim 0, and one of them by sections"),
        ({"dp": Shard(0), "tp": Shard(0)}, (16,), "dp and tp take the same part of dim 0"),
        ({"dp": Shard(0), "tp": Shard(0, 3)}, (48,), "tp and dp take the same part of dim 0"),
        ({"dp": Shard(0, 2), "tp": Shard(0)}, (16,), "dp and tp take the same part of dim 0"),
    ],
)
def test_what_does_not_fit_is_told(placements: Mapping[str, Placement], shape: tuple[int, ...], what: str) -> None:
    assert Layout.of(placements, MESH).problem(shape, MESH) == what


@given(cases(), st.data())
def test_fits_accepts_only_what_can_be_joined(case: Case, data: st.DataObject) -> None:
    """Any change to a fitting layout either is refused or still cuts without loss."""
    mesh, shape, layout = case
    if not layout.shards():
        return
    axis, _ = data.draw(st.sampled_from(layout.shards()))
    moved = layout.replace(axis, Shard(data.draw(st.integers(0, len(shape) - 1)), data.draw(st.integers(1, 9))), mesh)
    if moved.problem(shape, mesh):
        return
    whole = numbered(shape)
    parts = [moved.local(whole, mesh, mesh.coords(r)) for r in range(mesh.world)]
    assert {tuple(p.shape) for p in parts} == {moved.local_shape(shape, mesh)}
    assert torch.equal(moved.join(lambda c: parts[mesh.rank(c)], mesh), whole)


def test_layout_keeps_the_meshs_order_and_drops_replicas() -> None:
    layout = Layout.of({"tp": Shard(1), "dp": Shard(0)}, MESH)
    assert [a for a, _ in layout.items] == ["dp", "tp"]
    assert layout.replace("dp", Replicate(), MESH) == Layout((("tp", Shard(1)),))
    assert layout["cp"] == REPLICATE
    assert layout.shards(1) == [("tp", Shard(1))]


@pytest.mark.parametrize(
    ("text", "shape", "placements"),
    [
        ("f32[8, 512]", (8, 512), {}),
        ("f32[8, 512@tp]", (8, 512), {"tp": Shard(1)}),
        ("bf16[3·512@tp]", (1536,), {"tp": Shard(0, 3)}),
        ("f32[16|8|8@tp, 4]", (32, 4), {"tp": Shard(0, 1, (16, 8, 8))}),
        ("f32[16@dp@tp/2]", (16,), {"dp": Shard(0), "tp": Shard(0, 2)}),
        ("f64[] +tp ~dp", (), {"tp": Partial(), "dp": PARTIAL_GRAD}),
        ("f32[2] +max:tp", (2,), {"tp": Partial("max")}),
    ],
)
def test_types_print_as_documented(text: str, shape: tuple[int, ...], placements: Mapping[str, Placement]) -> None:
    back, dtype, found = parse(text)
    assert (back, found) == (shape, placements)
    assert show(shape, dtype, Layout.of(placements, MESH)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f32",
        "f31[8]",
        "f32[8",
        "f32[8] tp",
        "f32[a]",
        "f32[8,4]",
        "f32[8@]",
        "f32[8, ]",
        "f32[-8]",
        "f32[8@tp/0]",
        "f32[8@tp, 4@tp]",
        "f32[8@tp] +tp",
    ],
)
def test_what_is_no_type_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a type"):
        parse(text)


def test_printing_names_every_dtype_that_models_hold() -> None:
    assert show((2,), torch.float8_e4m3fn, Layout()) == "f8e4m3fn[2]"
    assert len(set(DTYPES.values())) == len(DTYPES)
