"""What the proof assumes: each op of the runtime, and each conversion, has a check, and each row's test is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from shardc.ir.conversions import BY_OP
from shardc.runtime import ops
from shardc.verify.static.assumptions import ASSUMPTIONS, Assumption, short
from tests.runtime.ops.checks import CHECKS
from tests.verify.test_static import TP, program

ROOT = Path(__file__).resolve().parents[2]


def test_every_op_of_the_runtime_and_every_conversion_is_checked() -> None:
    assert set(CHECKS) == set(ops.__all__) | ops.table("ops", "OPS").keys()
    assert set(BY_OP) <= set(CHECKS)


@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda a: a.name)
def test_the_test_of_an_assumption_is_there(assumption: Assumption) -> None:
    file, _, name = assumption.test.partition("::")
    tree = ast.parse((ROOT / file).read_text())
    assert name in {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}


def test_a_proof_says_what_it_assumes() -> None:
    proof = program("gpt", TP).prove()
    assert str(proof).splitlines()[1] == short()
    assert repr(proof).startswith("<Proof: proven equal to one device: ")
    assert "\n" not in repr(proof)
