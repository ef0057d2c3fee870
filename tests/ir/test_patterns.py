"""shardc/ir/patterns.py: globs, the nearest name, and which pattern wins."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardc.errors import Errors, ShardcError
from shardc.ir.patterns import expand, faults, match
from shardc.ir.similar_names import nearest
from shardc.layer_names import of_every_outer_layer
from shardc.spec.model_names import Selector, select_modules

NAMES = [f"model.layers.{i}.{m}" for i in range(2) for m in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")] + [
    "lm_head"
]


@pytest.mark.parametrize(
    ("pattern", "name", "matches"),
    [
        ("*", "", True),
        ("*", "a.b.c", True),
        ("a", "a", True),
        ("a", "ab", False),
        ("a", "ba", False),
        ("*.a", "x.y.a", True),
        ("*.a", "a", False),
        ("a.*", "a.", True),
        ("a.*.c", "a.b.b.c", True),
        ("a*c", "ac", True),
        ("{q,k,v}_proj", "k_proj", True),
        ("{q,k,v}_proj", "o_proj", False),
        ("*.{q,k}_{a,b}", "x.k_a", True),
        ("{a*,b}.c", "axyz.c", True),
        ("a.b", "axb", False),
        ("a[0]", "a[0]", True),
        ("a[0]", "a0", False),
        ("a?", "ab", False),
        ("(a|b)+", "(a|b)+", True),
        ("a\\d", "a1", False),
        ("**.w", "x.w", True),
        ("{a,}b", "b", True),
        ("{a", "{a", True),
    ],
)
def test_match(pattern: str, name: str, matches: bool) -> None:
    assert match(pattern, name) is matches


@given(st.lists(st.sampled_from(["a", "b", ".", "*", "{a,b.}"]), max_size=6), st.text("ab.", max_size=8))
def test_match_agrees_with_its_expansion(parts: list[str], name: str) -> None:
    """A pattern matches what one of its expansions matches; an expansion has only `*`,
    which a naive search can check.
    """

    def naive(p: str, n: str) -> bool:
        if not p:
            return not n
        if p[0] == "*":
            return any(naive(p[1:], n[i:]) for i in range(len(n) + 1))
        return n[:1] == p[0] and naive(p[1:], n[1:])

    pattern = "".join(parts)
    assert match(pattern, name) == any(naive(p, name) for p in expand(pattern))


def test_expand() -> None:
    assert expand("*.{q,k}_{a,b}") == ["*.q_a", "*.q_b", "*.k_a", "*.k_b"]
    assert expand("plain") == ["plain"]


@pytest.mark.parametrize(
    ("pattern", "fault"),
    [
        ("", "empty"),
        ("{a,b", "pair up"),
        ("a}", "pair up"),
        ("{a,{b,c}}", "pair up"),
        ("{a,}", ""),
        ("*.{q,k}_proj", ""),
    ],
)
def test_faults(pattern: str, fault: str) -> None:
    assert re.search(fault, faults(pattern)) if fault else faults(pattern) == ""


@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("lm_haed", "lm_head"),
        ("LM_HEAD", "lm_head"),
        ("zzz", ""),
        ("model.layers.0.self_attn.q_prj", "model.layers.0.self_attn.q_proj"),
        ("*.q_prj", "*.q_proj"),
        ("*.{q_prj,w}", "*.q_proj"),
        ("*q_prj", "*q_proj"),
        ("model.*.self_atn.o_proj", "model.*.self_attn.o_proj"),
        ("modle.*.q_proj", "model.*.q_proj"),
        ("*.lm_haed", "lm_head"),
        ("*.lm_head", "lm_head"),
        ("*.nothing_like_it", ""),
        ("*.xyz.*", ""),
    ],
)
def test_nearest(name: str, best: str) -> None:
    assert nearest(name, NAMES) == best
    if "*" in best:
        assert any(match(best, n) for n in NAMES)


def test_no_pattern_takes_long() -> None:
    """What a backtracking expression would try for ever, and what would be expanded for ever."""
    name = "a" * 300
    assert not match("*a" * 60 + "*b", name)
    assert match("*a" * 60 + "*", name)
    assert not match("{*,*}" * 8 + "b", name)
    assert match("*.{a*c,b*}.*d", "x.abbc.y.d")
    assert not match("*.{a*c,b*}.*d", "x.abb.y.d")
    assert "1,048,576 alternatives, more than 1,000" in faults("{a,b}" * 20)
    assert "more than 10,000 characters" in faults("a" * 10_001)
    with pytest.raises(ShardcError, match="alternatives"):
        match("{a,b}" * 20, name)


MODULES = ["h", "h.0", "h.0.mlp", "h.1", "h.1.mlp", "head"]


def _selected(*selectors: Selector) -> tuple[list[list[str]], list[str]]:
    errors = Errors()
    return select_modules(selectors, MODULES, {"head": ["head", "wte"]}, errors), [e.what for e in errors.found]


def test_a_pattern_selects_the_outermost_modules_that_earlier_ones_left() -> None:
    every_second = Selector("h.*", "a", every=2)
    assert _selected(every_second, Selector("h.{0,1}", "b")) == ([["h.0"], ["h.1"]], [])
    assert _selected(Selector("wte", "a")) == ([["head"]], [])  # any name of a shared module
    assert _selected(Selector("h.*", "a"), Selector("h.*", "b", group="input")) == ([["h.0", "h.1"]] * 2, [])


def test_patterns_that_select_nothing() -> None:
    selected, errors = _selected(Selector("h.*", "a"), Selector("h.1", "b"), Selector("hed", "c", shown="hed:in"))
    assert selected == [["h.0", "h.1"], [], []]
    assert "pattern 'h.1' never wins" in errors[0]
    assert "pattern 'hed:in' matches no module" in errors[1]


@pytest.mark.parametrize(
    ("name", "pattern"),
    [("l.3.0", "l.*.0"), ("m.1.b.2.c.w", "m.*.b.2.c.w"), ("layers.2.fc", "layers.2.fc"), ("up", "up"), ("0.w", "0.w")],
)
def test_a_name_of_every_outer_layer(name: str, pattern: str) -> None:
    assert of_every_outer_layer(name) == pattern
