"""Drop kept values that a compiled backward recomputes for free (`execution: {compile: layers}`).

    forward, region 3     c = mul(t, a); d = add(c, 1); h = tanh(d); y = mul(a, h)       keeps t, a, h, d
    backward, region 9    ... mul(g, d) ...                                              reads d

    forward               keeps t, a, h                      d stays in a register: nobody else reads it
    backward, region 9    c = mul(t, a); d = add(c, 1); ... mul(g, d) ...                t and a are read anyway

A fused kernel is limited by the bytes that it moves, so a few additions and products cost nothing beside a value that
is neither written nor read. Only arithmetic is recomputed: tanh, exp and sums take longer than reading their result.
A value is dropped only if it follows from values that are kept anyway, so nothing is kept in its place. Torch's
min_cut_rematerialization_partition does the same for a whole joint graph, with weights in place of these rules.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import source_of
from shardc.ir.stage import Joint
from shardc.passes.joint.fused_regions import fuses, shares_memory
from shardc.passes.joint.memory import Sizes
from shardc.torch_private import OpOverload, add_node

aten = torch.ops.aten

#: Pointwise packets that take a few instructions for each element; views besides.
_ARITHMETIC = {
    *(aten.add, aten.sub, aten.rsub, aten.mul, aten.neg, aten.abs, aten.where, aten.relu, aten.clamp),
    *(aten.minimum, aten.maximum, aten.clamp_min, aten.clamp_max, aten._to_copy, aten.square, aten.cat),
    *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge, aten.logical_not, aten.logical_and, aten.logical_or),
}


def recompute_in_regions(joint: Joint, sizes: Sizes) -> None:
    """Drop kept values whose readers in backward are fused, and write their arithmetic into the readers' regions.

    A backward in two halves keeps all: the second half may run much later.
    """
    if joint.weights is None:
        _Dropping(joint, sizes).run()


class _Dropping:
    """Drops kept values of one joint graph."""

    def __init__(self, joint: Joint, sizes: Sizes) -> None:
        self._sizes = sizes
        self._forward, self._backward = joint.forward, joint.backward
        self._placeholders = {n.name: n for n in joint.backward.find_nodes(op="placeholder")}
        self._first: dict[int, fx.Node] = {}
        for n in joint.backward.nodes:
            if "fused" in n.meta:
                self._first.setdefault(n.meta["fused"], n)
        self._order = {n: i for i, n in enumerate(joint.forward.nodes)}
        self._written: dict[tuple[int, fx.Node], fx.Node] = {}

    def run(self) -> None:
        output = self._forward.output_node()
        results: Any = output.args[0]
        *returned, kept = results
        stays = set(self._forward.find_nodes(op="placeholder"))
        fx.map_arg(tuple(returned), stays.add)
        candidates = sorted(set(kept) - stays, key=self._order.__getitem__)
        dropped = {n for n in candidates if self._drops(n)}
        output.args = ((*returned, tuple(n for n in kept if n not in dropped)),)

    def _drops(self, n: fx.Node) -> bool:
        """Drop a kept value if backward recomputes it for free; return whether it did."""
        region, placeholder = n.meta.get("fused"), self._placeholders[n.name]
        if region is None or any(u.meta.get("fused") != region for u in n.users if u.op != "output"):
            return False
        lines = self._lines(n, region)
        if not lines or not _only_fused(placeholder):
            return False
        del self._placeholders[n.name]
        for reader in list(placeholder.users):
            reader.replace_input_with(placeholder, self._again(lines, reader.meta["fused"]))
        self._backward.erase_node(placeholder)
        return True

    def _lines(self, n: fx.Node, region: int) -> list[fx.Node]:
        """Return the arithmetic of a region that makes a value, in order; [] if it needs more than backward takes.

        No value that backward takes for it is larger: it may live longer now.
        """
        lines, todo = set(), [n]
        while todo:
            x = todo.pop()
            if x.op != "call_function" or x.meta.get("fused") != region or not _arithmetic(x):
                return []
            lines.add(x)
            for operand in x.all_input_nodes:
                if operand.name not in self._placeholders:
                    todo += [operand] if operand not in lines else []
                elif self._sizes.bytes_of(operand) > self._sizes.bytes_of(n):
                    return []
        return sorted(lines, key=self._order.__getitem__)

    def _again(self, lines: Sequence[fx.Node], region: int) -> fx.Node:
        """Return the value of the last line in a region of backward; write the lines at its beginning if need be."""
        for n in lines:
            if (region, n) in self._written:
                continue
            args, kwargs = fx.map_arg((n.args, n.kwargs), partial(self._in_backward, region))
            with self._backward.inserting_before(self._first[region]):
                node = add_node(self._backward, "call_function", n.target, args, kwargs, name=n.name)
            node.meta = {k: n.meta[k] for k in ("value", "like") if k in n.meta}
            node.meta |= {"source": source_of(n), "of": n.name, "repeats": True, "fused": region}
            self._written[region, n] = node
        return self._written[region, lines[-1]]

    def _in_backward(self, region: int, n: fx.Node) -> fx.Node:
        placeholder = self._placeholders.get(n.name)
        return self._written[region, n] if placeholder is None else placeholder


def _arithmetic(n: fx.Node) -> bool:
    return shares_memory(n) or (isinstance(n.target, OpOverload) and n.target.overloadpacket in _ARITHMETIC)


def _only_fused(value: fx.Node) -> bool:
    """Return whether all readers of a value, and of its views, are parts of fused kernels."""
    return all("fused" in u.meta and fuses(u) and (not shares_memory(u) or _only_fused(u)) for u in value.users)
