"""Run one call on tensors without data, under autograd, and record the ops of forward and backward.

    silu(x)     forward     y = aten.silu(x)
                backward    dx = aten.silu_backward(g, x)

A *line* is one call of a rule: an op of torch or of shardc, with `Ref`s in place of tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from shardc.ir.metadata import Value
from shardc.torch_private import NotCompiledMode, OpOverload

aten = torch.ops.aten

#: Ops that return the tensor itself.
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default}
#: Views that may have to copy on a rank where the tensor has other strides.
_RESHAPES = {aten.view.default, aten._unsafe_view.default}


RefKind = Literal["x", "y", "g", "p", "t", "n", "mesh", "rng", "none"]


class UnrecordableError(Exception):
    """A call that cannot be recorded: it writes to memory that others see, or depends on outside values."""


@dataclass(frozen=True)
class Type:
    """A tensor's type on a rank. grad: it needs a gradient. ragged: its size depends on a step's data."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool = False
    ragged: bool = False

    @classmethod
    def of(cls, x: Tensor) -> Type:
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.requires_grad)

    @classmethod
    def contiguous(cls, shape: Sequence[int], dtype: torch.dtype, grad: bool = False) -> Type:
        strides = [1]
        for n in reversed(shape[1:]):
            strides.append(strides[-1] * max(n, 1))
        return cls(tuple(shape), tuple(reversed(strides)) if shape else (), dtype, grad)

    def __hash__(self) -> int:  # cached, because types are parts of many keys
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.stride, self.dtype, self.grad, self.ragged))

    @cached_property
    def value(self) -> Value:
        """The Value of a node of this type; the same object for every node."""
        return Value(self.shape, self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype).requires_grad_(self.grad)


@dataclass(frozen=True)
class Ref:
    """A reference to a value that a line or a call takes. index: which one.

    x, y     an operand of the call, a result of it
    g, p     the gradient of a result; the gradient that an operand has from ops after this one
    t        the result of an earlier line
    n        a name of the call (shardc.passes.joint.derivatives.template)
    mesh, rng
    none     a result that is not a tensor
    """

    kind: RefKind
    index: int = 0


@dataclass(frozen=True)
class Line:
    """t{number} = target(*args, **kwargs). types: of the result, or of each of several; None: no tensor.

    fresh: a result of an op that stays whole, in memory that nothing else has.
    """

    number: int
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()
    types: Type | tuple[Type | None, ...] | None = None
    fresh: bool = False

    @cached_property
    def refs(self) -> tuple[Ref, ...]:
        result: list[Ref] = []
        map_refs((self.args, tuple(v for _, v in self.kwargs)), result.append)
        return tuple(result)

    @cached_property
    def value(self) -> Any:
        """The type of its nodes' result or results; the same object for every node."""
        several = isinstance(self.types, tuple)
        return tuple(t and t.value for t in self.types) if several else self.types and self.types.value  # type: ignore

    @cached_property
    def views(self) -> bool:
        return is_view(self.target)


def map_refs(a: Any, function: Callable[[Ref], Any]) -> Any:
    """Return the arguments with each Ref replaced by the function's result."""
    if isinstance(a, (tuple, list)):
        return type(a)([function(x) if type(x) is Ref else map_refs(x, function) for x in a])
    return function(a) if type(a) is Ref else a


class Recorder(NotCompiledMode):  # type: ignore[no-untyped-call]
    """Collects lines while it is open. `name` sets the Ref of a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.lines: list[Line] = []
        self._refs: dict[int, Ref] = {}
        self._alive: list[Tensor] = []  # so that no two tensors have one id

    def name(self, x: Tensor, ref: Ref) -> None:
        self._refs[id(x)] = ref
        self._alive.append(x)

    def ref(self, x: Tensor) -> Ref:
        if id(x) not in self._refs:
            raise UnrecordableError("a tensor from elsewhere")
        return self._refs[id(x)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAME:
            out = func(*args, **kwargs)
            self.name(out, self.ref(args[0]))
            return out
        if func._schema.is_mutable:
            return self._changed(func, args, kwargs)
        put = self._put
        taken = tuple(map(put, args)), tuple((k, put(v)) for k, v in kwargs.items())
        out = func(*args, **kwargs)
        if isinstance(out, Tensor):
            self._add(aten.reshape.default if func in _RESHAPES else func, *taken, out)
        elif isinstance(out, (tuple, list)) and any(isinstance(x, Tensor) for x in out):
            self._add_several(func, *taken, out)
        return out

    def _put(self, a: Any) -> Any:
        if isinstance(a, Tensor):
            return self.ref(a)
        if isinstance(a, (tuple, list)):
            return [self._put(x) for x in a] if isinstance(a, list) else tuple(map(self._put, a))
        if isinstance(a, torch.Generator):
            raise UnrecordableError("draws from a torch.Generator")
        return a

    def _add(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        number = len(self.lines)
        self.lines.append(Line(number, func, args, kwargs, Type.of(out)))
        self.name(out, Ref("t", number))

    def _add_several(self, func: Any, args: Any, kwargs: Any, out: Sequence[Any]) -> None:
        number = len(self.lines)
        types = tuple(Type.of(x) if isinstance(x, Tensor) else None for x in out)
        self.lines.append(Line(number, func, args, kwargs, types))
        for k, x in enumerate(out):
            if isinstance(x, Tensor):
                self._add(operator.getitem, (Ref("t", number), k), (), x)

    def _changed(self, func: OpOverload, args: Any, kwargs: Any) -> Any:
        """Record an in-place op on memory that nobody else sees as the same op that makes a new tensor."""
        elsewhere = _out_of_place(func)
        (x, *_) = args
        seen = [y for y in self._alive if y is not x and memory_of(y) == memory_of(x)]
        if elsewhere is None or seen or self.ref(x).kind != "t":
            raise UnrecordableError(f"{func} writes to its operand")
        taken = tuple(map(self._put, args)), tuple((k, self._put(v)) for k, v in kwargs.items())
        out = func(*args, **kwargs)
        self._add(elsewhere, *taken, x)
        return out


def _out_of_place(func: OpOverload) -> OpOverload | None:
    """Return the counterpart of an in-place op that does not write; None if there is none."""
    name = func._schema.name.removeprefix("aten::")
    packet = getattr(aten, name.removesuffix("_"), None) if name.endswith("_") else None
    arguments = [(a.name, str(a.type)) for a in func._schema.arguments]
    for overload in packet.overloads() if packet is not None else ():
        candidate: OpOverload = getattr(packet, overload)
        if [(a.name, str(a.type)) for a in candidate._schema.arguments] == arguments:
            return candidate
    return None


def is_view(target: Any) -> bool:
    """Return whether a call's result is, or may be (a reshape may copy), in its first operand's memory."""
    reshapes = target in (operator.getitem, aten.reshape.default)
    return reshapes or (isinstance(target, OpOverload) and bool(target.is_view))


def memory_of(x: Tensor) -> StorageWeakRef:
    """Return a key that is equal exactly for tensors that share memory."""
    return StorageWeakRef(x.untyped_storage())  # type: ignore[no-untyped-call]
