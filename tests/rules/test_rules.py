"""Prove every rule (docs/explanation/algebra.md): outputs and gradients, on 2, 3 and 4 ranks, at every digit."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardc.ir.mesh import Mesh
from shardc.ir.placement import PARTIAL, PARTIAL_GRAD, REPLICATE, Layout, Shard
from shardc.ir.shard_chunks import chunks
from shardc.ir.types import full_op_name
from shardc.rules import RULES, Rule, Strategy, find, rule
from shardc.rules.views import walk
from shardc.verify.rules.case import Case
from shardc.verify.rules.compare import differs, dual, spread
from shardc.verify.rules.prove import too_strict
from tests.rules.making import prove
from tests.rules.samples import SAMPLES, Tensors, call, made
from tests.rules.torch_ops import KNOWN, checked

aten = torch.ops.aten


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny tensors: threads inside ops only cost."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- the proof --------------------------------------------------------------------------------------------------------


def test_every_rule_has_a_sample() -> None:
    assert [full_op_name(op) for op in RULES if op not in SAMPLES] == []


#: On a CPU torch's own is no exponential in so few bits: 1e30 for a matrix of 0.1 (2.11, 2.13), and nan.
UNFIT = (aten.matrix_exp.default, ", bfloat16")


@pytest.mark.every_case
@pytest.mark.parametrize("op", SAMPLES, ids=full_op_name)
def test_rule_equals_the_whole_op_and_is_not_too_strict(op: Any) -> None:
    report, strict = checked(op, SAMPLES[op])
    wrong = [f for f in report.wrong if not (op == UNFIT[0] and f.strategy.endswith(UNFIT[1]))]
    assert not wrong, "\n".join(map(str, wrong))
    assert report.forward_only == "", "results that require gradients have them"
    known = {what for name, what in KNOWN if name == report.op}
    assert [str(f) for f in strict if f.strategy not in known] == []
    assert known <= {f.strategy for f in strict}, "no longer too strict: drop the reason"


# --- the proof finds what is wrong ------------------------------------------------------------------------------------


def test_finds_a_dim_that_may_not_be_split() -> None:
    loose = Rule(aten.layer_norm.default, "... d, d, d -> ... d")
    found = prove(aten.layer_norm.default, lambda t: call(t.real(4, 12), [12], t.real(12), t.real(12)), 2, rule=loose)
    assert {f.strategy.partition("/")[0] for f in found} >= {"split d"}
    assert not [f for f in found if f.strategy.startswith("split e0")]


def test_finds_a_bias_that_is_added_on_every_rank() -> None:
    op, notation = aten.linear.default, "... k+, n k+, n -> ... n"
    found = prove(op, SAMPLES[op][0], 3, rule=Rule(op, notation))
    assert {f.strategy.split("/")[0].split(" by")[0] for f in found} == {"split k"}
    assert all("result 0: rank 0 differs" in f.what for f in found)
    assert prove(op, SAMPLES[op][0], 3, rule=Rule(op, notation, added=(2,))) == []


def test_finds_a_gradient_that_is_not_reduced() -> None:
    """The output is right, but every rank has only its part of the whole operand's
    gradient, and calls it replicated.
    """
    forgets = Strategy("forgets sum_grad", (Shard(0), REPLICATE), (Shard(0),))
    bad = Rule(aten.mul.Tensor, "a b, b -> a b", extra=lambda call, n, available: [forgets])
    (found,) = prove(aten.mul.Tensor, lambda t: call(t.real(4, 12), t.real(12)), 2, rule=bad)
    assert str(found).startswith("aten.mul.Tensor, forgets sum_grad, 2 ranks: gradient of operand 1: rank 0 differs by")


def test_finds_an_extra_strategy_that_is_wrong() -> None:
    """`extra` is given splits to choose from."""

    def kept(_: Any, n: int, available: Any) -> list[Strategy]:
        return [Strategy("kept", (p,), (REPLICATE,)) for p in sorted(available[0], key=repr)]

    bad = Rule(aten.neg.default, "a! b! -> a! b!", extra=kept)
    found = prove(aten.neg.default, lambda t: call(t.real(4, 12)), 2, rule=bad)
    assert {f.strategy for f in found} == {"kept"}
    assert len(found) > 8, "each dim at each digit, in sections, mirrored"


def test_finds_partial_sums_through_what_is_not_linear() -> None:
    bad = Rule(aten.exp.default, "... -> ...", linear="0")
    (found,) = prove(aten.exp.default, lambda t: call(t.real(4, 12)), 2, rule=bad)
    assert (found.strategy, found.what[:9]) == ("partial", "result 0:")


def test_finds_a_result_of_another_shape() -> None:
    bad = Rule(aten.one_hot.default, "a -> a c")
    found = prove(aten.one_hot.default, lambda t: call(t.index(12, 4), 12), 2, rule=bad)
    splits = ["split c", "split c/2", "split c/3", "split c/6", "split c by sections"]
    assert [f.strategy for f in found] == [*splits, "split c/2 mirrored"]
    assert found[0].what == "result 0: rank 0 has torch.int64[4, 12], not torch.int64[4, 6]"


def test_finds_what_an_op_raises_on_parts_that_do_not_fit() -> None:
    bad = Rule(aten.mm.default, "m k+, j! n -> m n")
    found = prove(aten.mm.default, lambda t: call(t.real(4, 6), t.real(6, 4)), 2, rule=bad)
    assert {f.strategy for f in found} == {"split k", "split k/3", "split k by sections", "split k/2 mirrored"}
    assert all(f.what.startswith("RuntimeError: mat1 and mat2 shapes cannot be multiplied") for f in found)


@pytest.mark.parametrize(
    ("op", "args", "notation", "linear", "looser"),
    [
        (aten.relu.default, (), "a! b -> a! b", "", "split a"),
        (aten.neg.default, (), "a b -> a b", "", "linear in 0"),
        (aten.flip.default, ([0],), "a! b! -> a! c!", "0", "split b = c"),
        (aten.sum.dim_IntList, ([1],), "a b! -> a", "0", "split b, sum"),
    ],
)
def test_finds_a_rule_that_is_too_strict(
    op: Any, args: tuple[Any, ...], notation: str, linear: str, looser: str
) -> None:
    found = too_strict(op, [made(lambda t: call(t.real(4, 12), *args))], rule=Rule(op, notation, linear))
    assert [f.strategy for f in found] == [looser]
    assert str(found[0]).endswith(
        "comes out right, but the rule forbids it (f64[4, 12]" + "".join(f", {a}" for a in args) + ")"
    )


# --- registering ------------------------------------------------------------------------------------------------------


def test_a_second_rule_of_an_op_is_refused() -> None:
    with pytest.raises(ValueError, match=r"aten.mm.default already has the rule 'm k\+, k\+ n -> m n'"):
        rule(aten.mm.default, "m k+, k+ n -> m n")


def test_a_rule_that_does_not_parse_is_refused() -> None:
    with pytest.raises(ValueError, match="exactly one '->'"):
        rule(aten.cross.default, "a b")
    assert aten.cross.default not in RULES


def test_pointwise_ops_are_found_by_tag_and_others_are_not() -> None:
    assert find(aten.asinh.default) is not None
    assert find(aten.asinh_.default) is None, "in place"
    assert find(aten.cross.default) is None


# --- laying out and comparing -----------------------------------------------------------------------------------------

MESH = Mesh((("a", 2), ("b", 3)))


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout((("a", Shard(0)),)),
        Layout((("a", PARTIAL), ("b", Shard(1)))),
        Layout((("a", Shard(1, 2)), ("b", PARTIAL))),
        Layout((("a", PARTIAL), ("b", PARTIAL))),
        Layout((("b", Shard(1, 1, (3, 9))),)),
    ],
)
def test_what_is_spread_compares_equal_until_it_is_changed(layout: Layout) -> None:
    generator = torch.Generator().manual_seed(0)
    x = Tensors(0).real(4, 12)
    parts = spread(x, layout, MESH, generator)
    assert differs(parts, layout, MESH, x, 1e-10) == ""
    parts[5] = parts[5] + 1e-6
    assert "differs by 1.0e-06" in differs(parts, layout, MESH, x, 1e-10)
    assert "torch.float32" in differs([p.float() for p in parts], layout, MESH, x, 1e-10)


def test_partial_parts_differ_from_each_other() -> None:
    parts = spread(Tensors(0).real(12), Layout((("a", PARTIAL),)), MESH, torch.Generator().manual_seed(0))
    assert not torch.allclose(parts[0], parts[3])
    assert torch.equal(parts[0], parts[1])


def test_duals() -> None:
    layout = Layout((("a", PARTIAL_GRAD), ("b", PARTIAL), ("c", Shard(0))))
    assert dual(layout) == Layout((("a", PARTIAL), ("c", Shard(0))))


def test_an_op_without_a_rule_has_no_case() -> None:
    with pytest.raises(AssertionError, match=r"aten.cross.default has no rule"):
        Case.of(aten.cross.default, made(lambda t: call(t.real(4, 3), t.real(4, 3))))


# --- reshapes ---------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.sampled_from([1, 2, 2, 3, 4, 5, 6]), min_size=1, max_size=5).filter(lambda s: math.prod(s) <= 2000)


@st.composite
def regrouped(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes that group one sequence of sizes differently: every common cut survives a reshape."""
    sizes = draw(SIZES)

    def grouped() -> list[int]:
        cuts = sorted(draw(st.sets(st.integers(1, len(sizes)))) | {len(sizes)})
        return [math.prod(sizes[a:b]) for a, b in zip([0, *cuts], cuts, strict=False)]

    return grouped(), grouped()


@st.composite
def shuffled(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """Two shapes of as many elements, from the same sizes in two orders."""
    sizes = draw(SIZES)
    new = draw(st.permutations(sizes))
    return sizes, [*new[:-2], math.prod(new[-2:])]


def survives(old: list[int], new: list[int]) -> set[str]:
    """Check that factors make up both shapes and that any digit can be cut on either side. Returns the factors that are
    whole.
    """
    left, right, sizes, whole = walk(old, new)
    assert [math.prod(sizes[f] for f in dim) for dim in left] == old
    assert [math.prod(sizes[f] for f in dim) for dim in right] == new
    x = torch.arange(math.prod(old)).reshape(old)
    y = x.reshape(new)
    for f in sizes.keys() - whole:
        (d, a), (e, b) = ((i, dim) for dims in (left, right) for i, dim in enumerate(dims) if f in dim)
        outer = [math.prod(sizes[g] for g in dim[: dim.index(f)]) for dim in (a, b)]
        for n in (2, 3, 4):
            for digit in (k for k in range(1, sizes[f] + 1) if sizes[f] % (k * n) == 0):
                pairs = zip(
                    chunks(x, Shard(d, outer[0] * digit), n), chunks(y, Shard(e, outer[1] * digit), n), strict=True
                )
                assert all(torch.equal(p.reshape(q.shape), q) for p, q in pairs)
    return whole


@given(regrouped())
@settings(max_examples=150, deadline=None)
def test_regrouped_dims_keep_every_factor(shapes: tuple[list[int], list[int]]) -> None:
    assert survives(*shapes) == set()


@given(shuffled())
@settings(max_examples=150, deadline=None)
def test_any_reshape_keeps_what_it_says(shapes: tuple[list[int], list[int]]) -> None:
    survives(*shapes)


@pytest.mark.parametrize(
    ("old", "new", "whole"),
    [
        ([4, 6], [24], set()),
        ([24], [2, 3, 4], set()),
        ([2, 3], [3, 2], {2, 3}),
        ([4, 9], [6, 6], {2, 3}),
        ([1, 4, 1], [4], set()),
        ([2, 15], [3, 10], {2, 3}),
        ([1], [], set()),
        ([], [1, 1], set()),
    ],
)
def test_what_of_a_reshape_is_whole(old: list[int], new: list[int], whole: set[int]) -> None:
    names = survives(old, new)
    assert {walk(old, new)[2][f] for f in names} == whole


def test_a_reshape_of_nothing_is_whole() -> None:
    _, _, sizes, whole = walk([0, 4], [2, 0])
    assert whole == set(sizes)
