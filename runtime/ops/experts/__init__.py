"""Compute mixtures of experts.

op            the op in a captured graph
parallel      sends tokens to experts and back
products      what experts compute, by grouped_mm and activation
"""
