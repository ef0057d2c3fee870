"""PyTorch's operator database: every op is equal to one device on every mesh, or refused by name with a fix.

`make test` runs the ops that are named here and a share of the others, `--all-cases` all on their first sample; `make
ops` all samples, ops in place, and DTensor beside them (tests/op_db/board.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from tests.op_db.cases import Skip, database, references
from tests.op_db.runs import Outcome, by_shardc

SHARES = 112
#: (op, mode): of each kind that was once wrong, raw or refused.
EQUAL = [
    *(("pow", "inplace"), ("float_power", "inplace"), ("ldexp", "inplace"), ("logical_and", "inplace")),
    *(("transpose", "inplace"), ("fft.ihfft", "first"), ("index_fill", "first")),
    *(("_batch_norm_with_update", "first"), ("_native_batch_norm_legit", "first"), ("combinations", "first")),
    ("native_batch_norm", "second"),
]
#: Ops that no mesh can hold, and what the message says.
REFUSED = {
    "narrow": "a part of a tensor begins at a place, or has a size, that depends on a tensor's value",
    "masked_select": "a tensor's size depends on a tensor's value",
    "argwhere": "argwhere has a result whose size depends on a tensor's value",
}
#: (op, spec): what comes split stays split.
KEPT = [
    *(("linalg.vector_norm", "tp2 p0.1"), ("nn.functional.cosine_similarity", "tp2 p0.2"), ("norm [inf]", "tp2 p0.1")),
    *(("max [reduction_no_dim]", "tp2 p0.2"), ("min [reduction_no_dim]", "dp2"), ("prod", "dp2")),
    *(("stack", "tp2 p0.1"), ("vstack", "tp2 p0.1"), ("dstack", "tp2 p0.0"), ("dot", "tp2 p0.0"), ("bmm", "tp2 p0.2")),
    *(("nn.functional.linear_cross_entropy", "tp2 p0.1"), ("masked.amax", "tp2 p0.3"), ("histc", "dp2")),
    *(("nn.functional.max_unpool2d", "dp2"), ("linalg.matrix_norm", "tp2 p0.2")),
]


def outcomes(name: str, mode: str) -> Iterator[Outcome]:
    op = database()[name]
    seeded = "wrapper_set_seed" in getattr(getattr(op.op, "__code__", None), "co_names", ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of the database's calls
        for case in references(op, mode):
            if not isinstance(case, Skip):
                yield from by_shardc(case, mode, seeded)


def assert_right(name: str, mode: str) -> None:
    for o in outcomes(name, mode):
        assert o.how in ("equal", "refused", "skip"), f"{name}, {mode}: {o}"
        assert o.how != "refused" or o.fix, f"{name}, {mode}: refused without a fix: {o}"


@pytest.mark.parametrize(("name", "mode"), EQUAL)
def test_equal(name: str, mode: str) -> None:
    found = list(outcomes(name, mode))
    assert found
    assert all(o.how == "equal" for o in found), found


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    (outcome,) = outcomes(name, "first")
    assert outcome.how == "refused"
    assert outcome.what.startswith(REFUSED[name])
    assert outcome.fix


@pytest.mark.parametrize("share", range(SHARES))
def test_share(share: int) -> None:
    for name in list(database())[share::SHARES]:
        assert_right(name, "first")


@pytest.mark.parametrize(("name", "spec"), KEPT)
def test_what_comes_split_stays_split(name: str, spec: str) -> None:
    (outcome,) = (o for o in outcomes(name, "first") if o.spec == spec)
    assert outcome.how == "equal"
    assert outcome.gathers == 0
