"""Prove rules against whole ops (docs/explanation/algebra.md).

compare.py   tensors as ranks hold them      prove.py   tries what a rule allows, and what it forbids
case.py      one call: whole, and on ranks   check.py   `shardc rules --check`, `shardc.check_rule`
variants.py  other calls made from samples
"""
