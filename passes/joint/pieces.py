"""Which lines of a text become one piece, to be compiled as one (`execution: {compile: layers}`).

    gelu_grad = gelu_backward(g, up)         piece 7
    bias_grad = sum(gelu_grad, [0])          piece 7: moved up, as it only reads what the piece has just made
    g_in = mm(gelu_grad, w)                  a product is torch's own kernel, compiled or not: it stands by itself
    s = ops.transpose_start('sum_grad', g_in, ...)
    w_grad = mm(t(gelu_grad), x)
    ops.accumulate(w, w_grad)                       gradients go into buckets as early as before

Element-wise ops, reductions, and views between them that follow each other are a piece; what computes otherwise, what
communicates and what waits ends it. So what hides a collective, and when memory is freed, stays as the scheduler
(shardc.passes.joint.overlap) has left it. Lines move only within what that allows: a reduction up to the piece whose
values it reads, if its result is small beside them; a small gradient's `put` behind the piece that makes it. Equal
layers give equal pieces, as nothing but the lines around it decides about a piece.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from shardc.artifact.emit import EFFECTS
from shardc.ir.graph import values_of
from shardc.ir.pairs import role
from shardc.ir.pieces import moved, piece_of
from shardc.passes.joint.memory import Sizes
from shardc.passes.joint.record import is_view
from shardc.runtime import ops
from shardc.torch_private import OpOverload

aten = torch.ops.aten

#: Bytes of memory traffic that a piece has to save; below, calling it costs as much as it gains.
LEAST = 1 << 16
#: A value is small beside one of so many times its bytes.
SMALL = 16
#: Lines of the largest piece: compilers take long for more, and gain little.
LINES = 128

#: Ops of torch that are neither tagged element-wise nor reductions, and that fuse with those.
_FUSE = {
    *(aten.native_layer_norm.default, aten.native_layer_norm_backward.default),
    *(aten._softmax.default, aten._softmax_backward_data.default),
    *(aten._log_softmax.default, aten._log_softmax_backward_data.default),
    *(aten.mse_loss.default, aten.mse_loss_backward.default, aten.smooth_l1_loss.default),
    *(aten.hardtanh_backward.default, aten.elu_backward.default, aten.softplus_backward.default),
    *(aten.leaky_relu_backward.default, aten.hardswish_backward.default, aten.glu.default, aten.glu_backward.default),
    *(aten.select_backward.default, aten.slice_backward.default, aten.constant_pad_nd.default),
    *(aten.cat.default, aten.stack.default, aten.repeat.default, aten.flip.default),
    *(aten._to_copy.default, aten.full.default, aten.full_like.default, aten.zeros_like.default),
    *(aten.ones_like.default, aten.zeros.default, aten.ones.default, aten.arange.default, aten.arange.start),
    *(aten.arange.start_step, aten.scalar_tensor.default, ops.add_into, ops.dropout),
}
#: They begin something, or hand something on: nothing waits for a device.
_LIGHT = {*EFFECTS, ops.gather_start, ops.regather_start, ops.cast_once, ops.to_partial}
_DTYPES = {
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
}


def mark_pieces(graph: fx.Graph, sizes: Sizes, least: int | None = None) -> None:
    """Number the pieces of a text, and move their lines together. least: bytes that a piece has to save (LEAST)."""
    order = _Cut(graph, sizes, LEAST if least is None else least).order()
    output = graph.output_node()
    for n in order:
        output.prepend(n)


@dataclass(eq=False)
class _Open:
    """Lines that may become a piece. place: its place in the order, once it has one."""

    lines: list[fx.Node] = field(default_factory=list)
    place: int = -1


class _Cut:
    def __init__(self, graph: fx.Graph, sizes: Sizes, least: int) -> None:
        self._graph, self._sizes, self._least = graph, sizes, least
        self._was = {n: i for i, n in enumerate(graph.nodes)}
        self._order: list[fx.Node | _Open] = []
        self._place: dict[fx.Node, int] = {}  # of lines in no piece
        self._in: dict[fx.Node, _Open] = {}
        self._open = _Open()
        self._behind: list[fx.Node] = []  # lines that come behind the open piece

    def order(self) -> list[fx.Node]:
        for n in self._graph.nodes:
            if n.op == "call_function":
                self._take(n)
        self._close()
        self._pull_views()
        found: list[fx.Node] = []
        number = 0
        for x in self._order:
            if isinstance(x, fx.Node):
                found.append(x)
                continue
            loose: list[fx.Node] = []
            for lines in sorted(_connected(x.lines), key=self._first):
                before, piece, behind = _trimmed(lines)
                if self._gains(piece):
                    for n in piece:
                        n.meta["piece"] = number
                    number += 1
                found += [*before, *piece]
                loose += behind
            found += loose
        return found

    def _first(self, lines: Sequence[fx.Node]) -> int:
        """Where the text has the first line that computes: parts of a piece keep their order."""
        return min((self._was[n] for n in lines if not _is_view(n)), default=self._was[lines[0]])

    def _take(self, n: fx.Node) -> None:
        if self._open.lines and bool(self._open.lines[0].meta.get("back")) != bool(n.meta.get("back")):
            self._close()  # of an overlapped pair, a piece is of one microbatch
        inside = [x for x in n.all_input_nodes if self._in.get(x) is self._open]
        later = any(x in self._behind for x in n.all_input_nodes)
        if _fuses(n) or (_is_view(n) and any(x in self._in for x in n.all_input_nodes)):
            home = self._earlier(n)
            if home is None:
                if later or len(self._open.lines) >= LINES:
                    self._close()
                if _is_view(n) and not inside:  # of a piece that it cannot join
                    self._outside(n)
                    return
                home = self._open
            home.lines.append(n)
            self._in[n] = home
        elif _is_view(n):
            if later:
                self._behind.append(n)
            else:
                self._outside(n)
        elif n.target in _LIGHT:
            if not self._open.lines or not self._small([n, *n.all_input_nodes], self._open.lines):
                self._close()  # it makes or frees memory that counts: not earlier, and not later
                self._outside(n)
            elif inside or later or n.target in EFFECTS:
                self._behind.append(n)
            else:
                self._outside(n)
        elif n.target in (ops.offload_start, ops.offload_wait) and (inside or later):
            self._behind.append(n)  # what leaves for the host is a result of the piece
        else:
            self._close()
            self._outside(n)

    def _outside(self, n: fx.Node) -> None:
        self._place[n] = len(self._order)
        self._order.append(n)

    def _close(self) -> None:
        """What comes now comes behind the open piece."""
        if self._open.lines:
            self._open.place = len(self._order)
            self._order.append(self._open)
            self._open = _Open()
        for n in self._behind:
            self._outside(n)
        self._behind = []

    def _earlier(self, n: fx.Node) -> _Open | None:
        """A piece that has its place already, and that a line may join: one that only looks at what the piece makes, a
        view, or a reduction to something small.
        """
        homes = [self._in[x] for x in n.all_input_nodes if x in self._in and self._in[x] is not self._open]
        if not homes:
            return None
        home = max(homes, key=lambda p: p.place)
        if len(home.lines) >= LINES or not all(self._there(x, home) for x in n.all_input_nodes):
            return None
        return home if _is_view(n) or self._small([n], n.all_input_nodes) else None

    def _there(self, x: fx.Node, piece: _Open) -> bool:
        """Is a value there when a piece runs?"""
        if x.op == "placeholder" or self._in.get(x) is piece:
            return True
        if x in self._in:
            return -1 < self._in[x].place < piece.place
        return self._place.get(x, len(self._order)) < piece.place

    def _small(self, these: Iterable[fx.Node], beside: Iterable[fx.Node]) -> bool:
        largest = max(map(self._sizes.bytes_of, beside), default=0)
        sizes = (self._sizes.bytes_of(x) for x in these if x.op == "call_function" and x.target not in EFFECTS)
        return sum(sizes) * SMALL <= largest

    def _pull_views(self) -> None:
        """A view that a piece alone looks at belongs to it: there it costs nothing."""
        for i in range(len(self._order) - 1, -1, -1):
            n = self._order[i]
            if not isinstance(n, fx.Node) or not _is_view(n):
                continue
            homes = {self._in.get(u) for u in n.users}
            home = homes.pop() if len(homes) == 1 else None
            if home is not None:
                home.lines.insert(0, n)
                self._in[n] = home
                del self._order[i]

    def _gains(self, lines: Sequence[fx.Node]) -> bool:
        if sum(map(_fuses, lines)) < 2:
            return False
        piece = piece_of(0, lines)
        one_by_one, together = moved(piece, self._sizes.bytes_of, shares_memory)
        reads = any(not role(x) for x in piece.takes)
        return reads and one_by_one - together >= self._least


def _connected(lines: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Lines that have nothing to do with each other, apart; each in order."""
    group: dict[fx.Node, fx.Node] = {}  # a forest: lines, and what they take

    def root(n: fx.Node) -> fx.Node:
        while group.setdefault(n, n) is not n:
            n = group[n]
        return n

    for n in lines:
        for x in n.all_input_nodes:
            if not role(x):
                group[root(x)] = root(n)
    parts: dict[fx.Node, list[fx.Node]] = {}
    for n in lines:
        parts.setdefault(root(n), []).append(n)
    return list(parts.values())


def _trimmed(lines: Sequence[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """(views that come before, the piece, views that come behind): at its edges they save nothing."""
    kept, inside = list(lines), set(lines)
    before: list[fx.Node] = []
    for n in lines:  # a view of what others made, which others look at too, or one of an op's several results
        alone = n.target is not operator.getitem and all(u in inside for u in n.users)
        if _is_view(n) and not any(x in inside for x in n.all_input_nodes) and not alone:
            before.append(n)
            inside.discard(n)
            kept.remove(n)
    behind: list[fx.Node] = []
    for n in reversed(kept.copy()):
        if _is_view(n) and n.target is not operator.getitem and not any(u in inside for u in n.users):
            behind.insert(0, n)
            inside.discard(n)
            kept.remove(n)
    return before, kept, behind


def shares_memory(n: fx.Node) -> bool:
    """Does a line's result lie in the memory of its first operand?"""
    return _is_view(n) or n.target is ops.add_into


def _is_view(n: fx.Node) -> bool:
    return is_view(n.target)


def _fuses(n: fx.Node) -> bool:
    """Can it be one kernel with element-wise ops around it?"""
    if n.op != "call_function" or _is_view(n) or any(v is None or v.dtype not in _DTYPES for v in values_of(n)):
        return False
    if "value" not in n.meta or n.meta["value"] is None or any(_odd(x) for x in n.all_input_nodes):
        return False
    if n.target in _FUSE:
        return True
    if not isinstance(n.target, OpOverload) or n.target.namespace != "aten" or n.target._schema.is_mutable:
        return False
    tags = n.target.tags
    fusing = torch.Tag.pointwise in tags or torch.Tag.reduction in tags
    return fusing and torch.Tag.nondeterministic_seeded not in tags


def _odd(x: fx.Node) -> bool:
    """A value of a dtype that compilers do not take."""
    return any(v is not None and v.dtype not in _DTYPES for v in values_of(x))
