"""What autograd keeps of a call for its backward: found out by running it on tensors without data, with hooks in
autograd's way.

    relu(x)                  its result
    linear(x, w)             x, w
    layer_norm(x, w, b)      x, w, b, and 2 numbers a row of its own
    transpose(x), add(x, y)  nothing

Shapes are those of one rank. Ops of shardc.runtime.ops, whose code looks at a running mesh, have their entry here.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from shardc.ir.conversions import CONVERSIONS
from shardc.ir.graph import operands_of, values_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.rules.op_call import Call, Operand, call_of
from shardc.runtime import ops
from shardc.runtime.ops.local_math import UNEQUAL
from shardc.torch_private import DATA_DEPENDENT, FakeTensorMode, OpOverload

Stride = tuple[int, ...] | None


@dataclass(frozen=True)
class Saved:
    """Of one call. operands, results: which of them are kept; own: bytes of what the op made for backward only.

    views: for every result the operand whose memory it is, or -1. strides: of the results, where they are known: an op
    may copy an operand whose strides it cannot use, and then it keeps the copy.
    """

    operands: tuple[int, ...] = ()
    results: tuple[int, ...] = ()
    own: int = 0
    views: tuple[int, ...] = (-1,)
    strides: tuple[Stride, ...] = ()


def _elements(v: Value) -> int:
    return math.prod(v.shape)


def _first(rows: int, x: Value, up: Value) -> int:
    """Bytes of the result of experts' first product."""
    return rows * math.prod(up.shape[1:]) // x.shape[-1] * up.dtype.itemsize


def _row(x: Value) -> int:
    """Bytes of a row."""
    return x.shape[-1] * x.dtype.itemsize


def _fp8_experts(rows: int, x: Value, up: Value, down: Value) -> int:
    """Bytes that experts of rounded rows keep of their own, without what the activation's ops do."""
    inner = math.prod(down.shape[1:]) // x.shape[-1]
    return _first(rows, x, up) + rows * inner * down.dtype.itemsize + up.nbytes() + down.nbytes()


#: What the ops of programs keep; those that are not here keep nothing.
_OURS: dict[Any, Callable[[Sequence[Value], Sequence[Value]], Saved]] = {
    # the weight and its scales; the bytes of the input, or the input
    ops.fp8_linear: lambda ins, outs: Saved((1, 2, 3) if len(ins) > 3 else (0, 1, 2)),
    ops.fp8_grad: lambda ins, outs: Saved(tuple(range(1, len(ins)))),
    ops.attention: lambda ins, outs: Saved(tuple(range(len(ins)))),
    ops.conv1d: lambda ins, outs: Saved((1,), own=ins[0].nbytes()),  # its operand with edges, or zeros, beside it
    ops.nll_parts: lambda ins, outs: Saved(own=ins[0].nbytes() + 9 * _elements(ins[1])),  # exponentials; indices; bools
    # operands, but for the target: of it indices and bools; normalisers
    ops.linear_nll: lambda ins, outs: Saved(
        tuple(range(len(ins) - 1)), own=9 * _elements(ins[-1]) + outs[0].nbytes() // 2
    ),
    ops.sum_exp: lambda ins, outs: Saved(own=_elements(ins[0]) * ins[1].dtype.itemsize),  # exponentials
    ops.extremum: lambda ins, outs: Saved((2,), own=_elements(ins[0])),  # bools
    ops.nll_exp: lambda ins, outs: Saved(own=outs[0].nbytes() // 2),
    ops.nll_alone: lambda ins, outs: Saved(own=_elements(outs[0])),
    ops.nll_join: lambda ins, outs: Saved((0,), own=_elements(outs[0])),
    ops.gather_partial: lambda ins, outs: Saved(own=9 * _elements(ins[1])),  # indices; bools
    ops.embedding_partial: lambda ins, outs: Saved(own=9 * _elements(ins[1])),  # indices; bools
    ops.experts_send: lambda ins, outs: Saved((1, 2)),
    ops.experts_apply: lambda ins, outs: Saved((0, 2, 3), own=_first(ins[0].shape[0], ins[0], ins[2])),
    # rows; the first product's result, what the activation makes of it, rounded, and the rounded weights
    ops.fp8_experts_apply: lambda ins, outs: Saved((0,), own=_fp8_experts(ins[0].shape[0], ins[0], ins[2], ins[3])),
    ops.fp8_experts: lambda ins, outs: Saved(
        (2,), own=_fp8_experts(_elements(ins[1]), ins[0], ins[3], ins[4]) + 2 * _elements(ins[1]) * _row(ins[0])
    ),
    ops.experts_return: lambda ins, outs: Saved((1,)),
    ops.experts_combine: lambda ins, outs: Saved((1, 2), own=ins[0].nbytes()),  # rows in the order of choices
    ops.experts: lambda ins, outs: Saved(
        (0, 2, 3, 4),
        own=8 * _elements(ins[1]) + _first(_elements(ins[1]), ins[0], ins[3]),  # the choices, sorted
    ),
}
#: Those whose result is their operand, seen differently, on some rank at least.
_VIEWS = {getattr(ops, row.op) for row in CONVERSIONS if row.forward in ("slice", "first", "identity")} | UNEQUAL
#: Those that are plain torch inside.
_PLAIN = (ops.nll, ops.batch_stat, ops.log_sum, ops.partial_mean)


class SavedOf:
    """Looks calls of a program's stages up, in their order, and runs every kind of call once."""

    def __init__(self, program: Program) -> None:
        self.mesh = program.mesh
        self._inputs = {x.name: x.local_shape(program.mesh, program.microbatches) for x in program.inputs}
        self._known: dict[Any, Saved] = {}
        self._mode = FakeTensorMode()  # one for all calls: to make one takes as long as a call
        self._strides: dict[fx.Node, tuple[Stride, ...]] = {}

    def types(self, node: fx.Node) -> tuple[Value, ...]:
        """The types of a node's results on one rank, in one microbatch."""
        types = tuple(
            Value(v.local_shape(self.mesh), v.dtype, v.requires_grad) for v in values_of(node) if v is not None
        )
        if node.op == "placeholder" and node.name in self._inputs:  # its type is that of the whole step's
            return (replace(types[0], shape=self._inputs[node.name]),)
        return types

    def call(self, node: fx.Node) -> Call:
        """A call with the types of one rank."""
        return replace(
            call_of(node), operands=tuple(self.types(x)[0] for x in operands_of(node)), results=self.types(node)
        )

    def __call__(self, node: fx.Node) -> Saved:
        saved = self._saved(node)
        self._strides[node] = saved.strides
        return saved

    def _stride(self, node: fx.Node) -> Stride:
        call: Any = node.args[0] if node.target is operator.getitem else node
        index: Any = node.args[1] if node.target is operator.getitem else 0
        known = self._strides.get(call, ())
        return known[index] if isinstance(index, int) and index < len(known) else None

    def _saved(self, node: fx.Node) -> Saved:
        call = self.call(node)
        operands, results = call.operands, call.results
        if node.target in _VIEWS:
            return Saved(
                views=(0,),
                strides=(self._stride(operands_of(node)[0]),) if operands[0].shape == results[0].shape else (),
            )
        if node.target in _OURS:
            return _OURS[node.target](operands, results) if any(v.requires_grad for v in operands) else Saved()
        if not isinstance(node.target, OpOverload) and node.target not in _PLAIN:
            return Saved()
        strides = tuple(map(self._stride, operands_of(node)))
        key = repr((str(node.target), call.args, call.kwargs, operands, strides))
        if key not in self._known:
            self._known[key] = _run(call, strides, self._mode)
        return self._known[key]


def _run(call: Call, strides: Sequence[Stride], mode: FakeTensorMode) -> Saved:
    packed: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        packed.append(x.detach())
        return x

    with mode:
        operands = [_empty(v, stride) for v, stride in zip(call.operands, strides, strict=True)]

        def put(a: Any) -> Any:
            if isinstance(a, Operand):
                return operands[a.index]
            if isinstance(a, (tuple, list)):
                return type(a)(put(x) for x in a)
            return None if a == "rng" else a

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, lambda x: x):
                result = call.target(*put(call.args), **{k: put(a) for k, a in call.kwargs})
        except DATA_DEPENDENT:  # an op that looks at its operands' values (istft): taken to keep them all
            return Saved(
                tuple(range(len(operands))) if any(v.requires_grad for v in call.operands) else (),
                views=(-1,) * len(call.results),
            )
        results = [x for x in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(x, Tensor)]
        ours, theirs = [_storage(x) for x in operands], [_storage(x) for x in results]
        kept = {_storage(x): x for x in packed}
        own = sum(x.untyped_storage().nbytes() for s, x in kept.items() if s not in ours and s not in theirs)
        return Saved(
            tuple(i for i, s in enumerate(ours) if s in kept),
            tuple(i for i, s in enumerate(theirs) if s in kept and s not in ours),
            own,
            tuple(ours.index(s) if s in ours else -1 for s in theirs),
            tuple(tuple(x.stride()) for x in results),
        )


def _empty(v: Value, stride: Stride) -> Tensor:
    x = torch.empty(v.shape, dtype=v.dtype) if stride is None else torch.empty_strided(v.shape, stride, dtype=v.dtype)
    return x.requires_grad_(v.requires_grad)


def _storage(x: Tensor) -> StorageWeakRef:
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
