"""Prove rules against whole ops (docs/explanation/algebra.md): for tests, `shardc rules --check`, `shardc.check_rule`.

compare.py   tensors as ranks hold them      prove.py     every strategy that a rule allows: what is wrong
case.py      one call: whole, and on ranks   too_strict.py what a rule forbids though it is right
variants.py  other calls made from samples   survey.py    all of it, for many ops, with progress
user_op.py   one op of a user's: `shardc.check_rule`
"""

from shardc.verify.rules.case import Case, Finding, NoCallError, UnfitError, name_of
from shardc.verify.rules.compare import differs, dual, spread
from shardc.verify.rules.prove import PARTS, prove, prove_pairs
from shardc.verify.rules.survey import OpReport, check_op, check_ops
from shardc.verify.rules.too_strict import KNOWN, too_strict

__all__ = [
    "KNOWN",
    "PARTS",
    "Case",
    "Finding",
    "NoCallError",
    "OpReport",
    "UnfitError",
    "check_op",
    "check_ops",
    "differs",
    "dual",
    "name_of",
    "prove",
    "prove_pairs",
    "spread",
    "too_strict",
]
