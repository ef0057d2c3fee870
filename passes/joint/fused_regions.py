"""Mark the lines of a graph that are compiled together as a region (`execution: {compile: layers}`).

    gelu_grad = gelu_backward(g, up)         region 7
    bias_grad = sum(gelu_grad, [0])          region 7: moved up
    g_in = mm(gelu_grad, w)                  region 7: the compiler calls torch's kernel
    s = ops.transpose_start('sum_grad', g_in, ...)
    w_grad = mm(t(gelu_grad), x)             region 8
    n_grad = mul(g_out, scale)               region 8
    ops.accumulate(w, w_grad)                after the region that makes it
    ops.launch(mesh, 'bucket0')

A fused region has all lines between two that communicate, wait, copy to the host, or are opaque to a compiler
(attention, experts). So the scheduler (shardc.passes.joint.overlap) still decides what hides a collective, and when
sums of gradients begin. Within a region the compiler orders lines, and frees what they make. Two kinds of lines move: a
gradient's `accumulate` after its region, and a small line that only reads results of the last region, such as the sum
of a bias's gradient, up into it.

A region also ends before the first product of another layer. So a norm stays with the sum of the layer before it, and
equal layers have equal regions, each of which is compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from shardc.ir.fused_regions import moved, region_of
from shardc.ir.graph import reorder, source_of, values_of
from shardc.ir.stage import mesh_or_rng
from shardc.layer_names import layer_of
from shardc.passes.joint.derivatives.record import is_view
from shardc.passes.joint.memory import Sizes, shares_operand
from shardc.runtime import ops
from shardc.runtime.compiled.region_calls import IDENTITIES
from shardc.runtime.ops.factors import PRODUCTS
from shardc.torch_private import OpOverload

aten = torch.ops.aten

#: Bytes of memory traffic that a region has to save; below that, compiling and calling it costs more.
LEAST_SAVED = 1 << 16
#: Lines of the smallest region, without those that share memory.
LEAST_LINES = 2
#: A value is small compared to one with this many times its bytes.
SMALL = 16
#: Lines of the largest region: compilers take long for more lines, and gain little.
LINES = 512

#: A region ends when more bytes of gradients than this wait for it.
WAITING = 1 << 24

#: Products and convolutions: separate kernels, compiled or not.
_KERNELS = {
    *PRODUCTS,
    *(aten.bmm.default, aten.baddbmm.default, aten.convolution.default, aten.convolution_backward.default),
}
#: Lines that may come before an open region: copies of weights that later microbatches use too; the `getitem` that
#: picks a result of an op outside of the region.
_BEFORE = {ops.cast_once, operator.getitem}
#: When compiled, these ops add with atomic instructions, in an unknown order: ranks that compute the same would
#: drift apart.
_ATOMIC = {
    *(aten.embedding_dense_backward.default, aten.index_put.default, aten._unsafe_index_put.default),
    *(aten.scatter_add.default, aten.scatter_reduce.two, aten.index_add.default, aten.index_reduce.default),
}
_ODD_TAGS = {torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def mark_fused_regions(graph: fx.Graph, sizes: Sizes) -> None:
    """Mark a graph's fused regions and move `accumulate`s after them."""
    reorder(graph, _Cut(graph, sizes).order)


class _Cut:
    """Cuts a graph into regions. order: all lines in their new order."""

    def __init__(self, graph: fx.Graph, sizes: Sizes) -> None:
        self._sizes = sizes
        #: Lines that may become a region, with `accumulate`s; the last such region; all regions and single lines.
        self._open: dict[fx.Node, None] = {}
        self._last: dict[fx.Node, None] = {}
        self._windows: list[dict[fx.Node, None]] = []
        self._pulled: set[fx.Node] = set()  # results of an op that has several; they come with it
        self._layer: tuple[str, str] | None = None  # the layer of the last product
        self._number = self._waiting = 0  # of regions; bytes of gradients that wait for the end of the open one
        for n in graph.nodes:
            if n.op == "call_function" and n not in self._pulled:
                self._take(n)
        self._close()
        self.order = [n for window in self._windows for n in self._marked(window)]

    def _take(self, n: fx.Node) -> None:
        if n.target in _BEFORE and self._open.keys().isdisjoint(n.all_input_nodes):
            self._windows.append({n: None})
        elif n.target is ops.accumulate and self._open:
            self._open[n] = None
            self._waiting += self._sizes.bytes_of(n.args[1]) if self._sizes.bucket_of(n) else 0  # type: ignore[arg-type]
            if self._waiting > WAITING:
                self._close()
        elif _compiles(n):
            if self._ends(n):
                self._close()
            if lines := self._earlier(n):
                self._last |= dict.fromkeys(lines)
                self._open = {x: None for x in self._open if x not in lines}
            else:
                results = [u for u in n.users if u.target is operator.getitem]
                self._pulled.update(results)
                self._open |= dict.fromkeys((n, *results))
        else:
            self._close()
            self._windows.append({n: None})

    def _ends(self, n: fx.Node) -> bool:
        """Return whether a line begins another region."""
        last = next(reversed(self._open), n)
        before = self._layer
        if n.target in _KERNELS:
            self._layer = layer_of(source_of(n).module)
        of_others = bool(last.meta.get("back")) != bool(n.meta.get("back"))  # a region is of one microbatch
        return of_others or before != self._layer or len(self._open) >= LINES

    def _earlier(self, n: fx.Node) -> list[fx.Node]:
        """Return a small line that reads only the last region, after the views it needs; [] for others."""
        size = self._sizes.bytes_of
        if shares_memory(n) or len(values_of(n)) > 1 or SMALL * size(n) > max(map(size, n.all_input_nodes), default=0):
            return []
        lines, rest = [n], n.all_input_nodes
        while rest:
            x = rest.pop()
            if x in self._open and is_view(x.target) and x not in lines:
                lines.append(x)
                rest += x.all_input_nodes
            elif x not in self._last and x not in lines:
                return []
        return lines[::-1]

    def _close(self) -> None:
        """Close the open region: later lines come after it."""
        if self._open:
            self._windows.append(self._open)
            self._last, self._open, self._waiting = self._open, {}, 0

    def _marked(self, window: Iterable[fx.Node]) -> list[fx.Node]:
        """Return the lines in order, numbered as a region if that gains. `accumulate`s come after it."""
        lines = [n for n in window if n.target is not ops.accumulate]
        if not self._gains(lines):
            return list(window)
        for n in lines:
            n.meta["fused"] = self._number
        self._number += 1
        return [*lines, *(n for n in window if n.target is ops.accumulate)]

    def _gains(self, lines: Sequence[fx.Node]) -> bool:
        if sum(not shares_memory(n) for n in lines) < LEAST_LINES:
            return False
        region = region_of(0, lines)
        one_by_one, together = moved(region, fuses, self._sizes.bytes_of, shares_memory)
        return any(not mesh_or_rng(x) for x in region.takes) and one_by_one - together >= LEAST_SAVED


def shares_memory(n: fx.Node) -> bool:
    """Return whether a line's result is in the memory of its first operand."""
    return shares_operand(n.target)


def fuses(n: fx.Node) -> bool:
    """Return whether a line can be part of a kernel with the lines around it."""
    return n.target not in _KERNELS


def _compiles(n: fx.Node) -> bool:
    """Return whether the compiler takes a line."""
    values = [v for x in (n, *n.all_input_nodes) if not mesh_or_rng(x) for v in values_of(x) or (None,)]
    if any(v is None or v.dtype not in _DTYPES for v in values):
        return False
    if not isinstance(n.target, OpOverload):
        return n.target in (operator.getitem, ops.add_into, ops.dropout) or n.target in IDENTITIES
    op = n.target
    return op.namespace == "aten" and not op._schema.is_mutable and op not in _ATOMIC and _ODD_TAGS.isdisjoint(op.tags)
