"""Train adapters: matrices of low rank beside frozen weights (LoRA), and freeze weights that are not trained.

section     `adapters` and `freeze` of a spec
program     the adapters that a program has, and the names of their weights
passes      the pass that adds them, and removes gradients of frozen weights; low_rank: their ops
runtime     their weights: initial ones, from files, into files
"""
