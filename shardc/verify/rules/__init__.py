"""Prove rules against whole ops (docs/explanation/algebra.md): for tests, `shardc rules --check`, `shardc.check_rule`.

compare.py   tensors as ranks hold them      prove.py      every strategy that a rule allows: what is wrong
case.py      one call: whole, and on ranks   too_strict.py what a rule forbids though it is right
variants.py  other calls made from samples   check.py      all of it for an op: `shardc.check_rule`
"""
