"""Convert a graph or a program to float64 and complex128, so that rounding hides no difference."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir.fused_regions import without_fused_regions
from shardc.ir.graph import copy_graph
from shardc.ir.program import Program

#: What of a program has dtypes.
_PARTS = ("graph", "stages", "pairs", "prologue", "params", "buffers", "inputs", "outputs", "buckets")


def wide(x: Any) -> Any:
    """Return a dtype, or a value with dtypes anywhere in it, in float64 and complex128."""
    if isinstance(x, torch.dtype):
        return torch.float64 if x.is_floating_point else torch.complex128 if x.is_complex else x
    if isinstance(x, Tensor):
        return x.to(wide(x.dtype))
    if isinstance(x, fx.Graph):
        return graph_to_float64(x)
    if is_dataclass(x) and not isinstance(x, type):
        parts = {f.name: wide(getattr(x, f.name)) for f in fields(x) if f.init}
        return replace(x, **parts)
    return type(x)(map(wide, x)) if type(x) in (tuple, list) else x


def graph_to_float64(graph: fx.Graph) -> fx.Graph:
    """Return a copy of a graph in float64 and complex128: casts, factories and the nodes' types."""
    new = copy_graph(graph)
    for node in new.nodes:
        node.args, node.kwargs = fx.node.map_aggregate(node.args, wide), fx.node.map_aggregate(node.kwargs, wide)
        node.meta |= {"value": wide(node.meta["value"])} if "value" in node.meta else {}
    return new


def to_float64(program: Program, *, compiled: bool = False) -> Program:
    """Return the program in float64 and complex128. compiled: keep its compiled regions."""
    parts = {name: wide(getattr(program, name)) for name in _PARTS}
    parts["buckets"] = tuple(replace(b, compute=None) for b in parts["buckets"])
    double = replace(program, **parts)
    return double if compiled else without_fused_regions(double)
