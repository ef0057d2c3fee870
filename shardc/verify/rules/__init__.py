"""Prove rules against whole ops (docs/explanation/algebra.md).

compare.py   tensors as ranks hold them      prove.py      tries every strategy that a rule allows
case.py      one call: whole, and on ranks   too_strict.py finds what a rule forbids although it is right
variants.py  other calls made from samples   check.py      `shardc rules --check`, `shardc.check_rule`
"""
