"""The notation of rules: what parses, how it binds to shapes, how it prints."""

from __future__ import annotations

import pytest

from shardc.rules import RULES
from shardc.rules.core.notation import parse

Shapes = list[tuple[int, ...]]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("a b", "exactly one '->'"),
        ("a -> a -> a", "exactly one '->'"),
        ("a * -> a", r"cannot read '\*'"),
        ("(3 a) -> 3 a", r"cannot read '\(3 a\)'"),
        ("a (b -> a", r"cannot read '\(b'"),
        ("a b) -> a", r"cannot read '\)'"),
        ("a ... -> a", "'...' must lead"),
        ("a b -> a", r"factor b is not in every result: mark it b\+ \(summed\) or b! \(whole\)"),
        ("a -> a, 1", "factor a is not in every result"),
    ],
)
def test_errors_show_the_rule_and_what_is_wrong_with_it(text: str, what: str) -> None:
    with pytest.raises(ValueError, match=what) as e:
        parse(text)
    assert text in str(e.value)


def test_linear_binds_to_any_leading_dims() -> None:
    linear = parse("... k+, n k+, n -> ... n")
    three = linear.bind([(2, 6, 12), (24, 12), (24,)], [(2, 6, 24)])
    assert str(three) == "e0 e1 k+, n k+, n -> e0 e1 n"
    assert three.sizes == {"e0": 2, "e1": 6, "k": 12, "n": 24}
    assert three.splittable() == ["e0", "e1", "k", "n"]
    assert str(linear.bind([(12,), (24, 12)], [(24,)])) == "k+, n k+ -> n"


def test_places_are_dims_and_the_factors_before_in_them() -> None:
    sig = parse("b (h d) -> b h d").bind([(2, 24)], [(2, 6, 4)])
    assert [sig.places(sig.inputs[0], f) for f in "bhd"] == [(0, 1), (1, 1), (1, 6)]
    assert sig.places(sig.outputs[0], "d") == (2, 1)
    assert sig.places(sig.outputs[0], "x") is None


def test_whole_factors_and_those_of_size_one_are_not_splittable() -> None:
    assert parse("v! d, i -> i d").bind([(12, 4), (6,)], [(6, 4)]).splittable() == ["d", "i"]
    assert parse("a b -> a b").bind([(1, 4)], [(1, 4)]).splittable() == ["b"]


def test_a_dim_of_size_one_has_no_factor() -> None:
    assert str(parse("a 1 -> a").bind([(4, 1)], [(4,)])) == "a 1 -> a"
    assert str(parse("(a 1) -> a").bind([(4,)], [(4,)])) == "a -> a"


def test_leading_dims_are_aligned_from_the_right() -> None:
    sig = parse("... d, ... d -> ... d").bind([(2, 6, 4), (6, 4)], [(2, 6, 4)])
    assert str(sig) == "e0 e1 d, e1 d -> e0 e1 d"


def test_a_result_may_have_no_dims() -> None:
    sig = parse("k+, k+ -> ").bind([(12,), (12,)], [()])
    assert sig.outputs == ((),)
    assert sig.splittable() == ["k"]


def test_marks_count_wherever_they_stand() -> None:
    assert str(parse("a b!, b -> a b").bind([(2, 3), (3,)], [(2, 3)])) == "a b!, b! -> a b!"


@pytest.mark.parametrize(
    ("rule", "inputs", "outputs", "what"),
    [
        ("a b -> a b", [(2, 3)], [(2, 4)], r"dim \('b',\) has size 4, not 3"),
        ("a b -> a b", [(2, 3, 4)], [(2, 3)], "2 dims in the rule, 3 in the tensor"),
        ("... a b -> ... a b", [(3,)], [(3,)], "2 dims in the rule, 1 in the tensor"),
        ("a -> a", [(2,), (2,)], [(2,)], "2 operands and 1 results, but the rule has 1 and 1"),
        ("(a b) -> (a b)", [(6,)], [(6,)], "are ambiguous"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(rule: str, inputs: Shapes, outputs: Shapes, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        parse(rule).bind(inputs, outputs)


def test_known_sizes_help() -> None:
    assert parse("(a b) -> a b").bind([(6,)], [(2, 3)], {"a": 2}).sizes["b"] == 3
    assert parse("(a b) -> (a b)").bind([(6,)], [(6,)], {"a": 2}).sizes["b"] == 3


@pytest.mark.parametrize("text", sorted({r.text for r in RULES.values() if not r.text.startswith("<")}))
def test_every_written_rule_parses(text: str) -> None:
    assert parse(text).outputs
