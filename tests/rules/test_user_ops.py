"""`shardc.rule` and `shardc.check_rule`: one line registers a user's op, one line proves it; every mistake is told with
its place.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import shardc
from shardc import ShardcError
from shardc.rules import RULES
from shardc.rules.core.registry import find
from tests.rules.samples import SAMPLES


@torch.library.custom_op("shardc_tests::scaled", mutates_args=())
def scaled(x: Tensor, w: Tensor, by: float = 1.0) -> Tensor:
    return x * w * by


@scaled.register_fake
def _(x: Tensor, w: Tensor, by: float = 1.0) -> Tensor:
    return torch.empty_like(x)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    x, w = ctx.saved_tensors
    return grad * w * ctx.by, (grad * x * ctx.by).sum_to_size(w.shape), None


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.by = inputs[2]


scaled.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("shardc_tests::grown", mutates_args=("x",))
def grown(x: Tensor) -> None:
    x.add_(1)


def given() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 12), torch.randn(12)


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    """Rules that a test registers are gone after it."""
    yield
    for table in (RULES, SAMPLES):
        for op in [op for op in table if str(op).startswith(("shardc_tests", "mylib"))]:
            del table[op]
    find.cache_clear()


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sample",
    [given, given(), (given(), {"by": 3.0}), lambda: (given(), {"by": 3.0})],
)
def test_a_right_rule_is_proven_on_its_samples(sample: Any) -> None:
    shardc.rule(scaled, "... d, d -> ... d", linear="0 | 1", samples=[sample])
    assert shardc.check_rule(scaled) == []


def test_samples_leave_torchs_random_state_alone() -> None:
    shardc.rule(scaled, "... d, d -> ... d", linear="0 | 1", samples=[given])
    before = torch.get_rng_state()
    shardc.check_rule(scaled)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("op", [scaled, "packet", "overload"])
def test_ops_in_any_form(op: Any) -> None:
    packet = torch.ops.shardc_tests.scaled
    op = {"packet": packet, "overload": packet.default}.get(op, op) if isinstance(op, str) else op
    shardc.rule(op, "... d, d -> ... d", linear="0 | 1")
    assert shardc.check_rule(op, *given(), by=2.0) == []


def test_what_is_too_strict_is_returned() -> None:
    shardc.rule(scaled, "... d!, d! -> ... d!", linear="0", samples=[given])
    assert [f.strategy for f in shardc.check_rule(scaled)] == ["split d", "linear in 1"]


@pytest.mark.parametrize(
    ("notation", "linear", "sample", "what", "fix"),
    [
        (
            "... d, d -> ... d",
            "0 1",
            given,
            "partial, 2 ranks: result 0: rank 0 differs by",
            "take the operands out of `linear`",
        ),
        ("... d, e! -> ... d", "", given, "split d, 2 ranks: ", "mark d! (whole), or d+ if it is summed"),
        (
            "a d, d -> a d",
            "",
            lambda: (torch.randn(2, 4, 12), torch.randn(12)),
            "the rule does not fit the call",
            "make the notation fit this call",
        ),
        (
            "... d, d -> ... d",
            "",
            lambda: (torch.randn(4, 12), torch.randn(5)),
            "the sample is not a call of the op",
            "give the op's own arguments, one by one: check_rule(op, x, w)",
        ),
    ],
)
def test_a_wrong_rule_is_an_error_at_its_line(notation: str, linear: str, sample: Any, what: str, fix: str) -> None:
    shardc.rule(scaled, notation, linear=linear, samples=[sample])
    line = inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]
    with pytest.raises(ShardcError) as e:
        shardc.check_rule(scaled)
    assert f"{__file__}:{line}" in str(e.value)
    assert what in str(e.value)
    assert fix in str(e.value)


def test_an_op_that_draws_is_told_apart_from_a_wrong_rule() -> None:
    drawn = torch.library.custom_op(
        "shardc_tests::drawn", lambda x: torch.rand_like(x), mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    shardc.rule(drawn, "... -> ...", samples=[lambda: torch.randn(4, 12)])
    with pytest.raises(ShardcError, match="rules are of ops without randomness and without state"):
        shardc.check_rule(drawn)


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "what", "fix"),
    [
        (len, ("... -> ...",), {}, "len is not an op", "Python functions are traced through and need no rule"),
        (grown, ("... -> ",), {}, "changes its operands", "return what changed as a result"),
        (scaled, ("... d, d",), {}, "exactly one '->'", 'write it like "... k+, n k+, n -> ... n"'),
        (
            scaled,
            ("... -> ...",),
            {},
            "has 2 tensor operands (x, w), the rule '... -> ...' has 1",
            "one part per tensor operand",
        ),
        (
            scaled,
            ("a, a -> a, a",),
            {},
            "has 1 results, the rule 'a, a -> a, a' has 2",
            "one part per result after the arrow",
        ),
        (scaled, ("a, a -> a",), {"linear": "x"}, "linear='x' cannot be read", 'groups separated by "|"'),
        (scaled, ("a, a -> a",), {"linear": "2"}, "linear='2' names operand 2, there are 2", "operands count from 0"),
        (
            scaled,
            ("a k+, a k+ -> a",),
            {"added": (3,)},
            "added=(3,) names operand 3, there are 2",
            "operands count from 0",
        ),
        (
            scaled,
            ("a, a -> a",),
            {"added": (1,)},
            "no factor of 'a, a -> a' is summed",
            "mark the summed factor with +",
        ),
        (
            scaled,
            ("a, a -> a",),
            {"samples": ["x"]},
            "a sample is a str, not a tuple of arguments",
            "samples=[lambda: (",
        ),
    ],
)
def test_mistakes_in_a_rule(op: Any, args: tuple[Any, ...], kwargs: Any, what: str, fix: str) -> None:
    with pytest.raises(ShardcError) as e:
        shardc.rule(op, *args, **kwargs)
    line = e.tb.tb_lineno
    assert f"{__file__}:{line}" in str(e.value)
    assert what in str(e.value)
    assert fix in str(e.value)


def test_all_mistakes_at_once() -> None:
    with pytest.raises(ShardcError) as e:
        shardc.rule(scaled, "... -> ...", linear="x", added=(1,))
    assert len(e.value.errors) == 4


def test_a_second_rule_elsewhere_is_refused_the_same_line_again_is_not() -> None:
    for notation in ("... d, d -> ... d", "... d!, d! -> ... d!"):
        shardc.rule(scaled, notation)
    assert find(torch.ops.shardc_tests.scaled.default).text == "... d!, d! -> ... d!"  # type: ignore[union-attr]
    with pytest.raises(ShardcError, match=r"already has the rule '... d!, d! -> ... d!' \(.*test_user_ops.py:\d+\)"):
        shardc.rule(scaled, "... d, d -> ... d")


def test_what_cannot_be_checked() -> None:
    with pytest.raises(ShardcError, match=r"shardc_tests.scaled.default has no rule"):
        shardc.check_rule(scaled)
    shardc.rule(scaled, "... d, d -> ... d")
    with pytest.raises(ShardcError, match=r"there is no call of shardc_tests.scaled.default to check"):
        shardc.check_rule(scaled)
