"""Counts what tensors hold: every storage once, from the op that makes it to the moment the last tensor on it is gone;
and
what ops do.

    with Ledger() as ledger:              tensors may be fake: then nothing is computed, and nothing is held
        ledger.turn("F 0")                what happens from here on belongs to this part of a step
        ...
    ledger.parts                          of each part: changes of live bytes in order, flops and memory traffic by dtype

A storage's *kind* is what it is for. Ops make "temporaries"; who knows better says so (`mark`), before or after.
"""  # noqa: E501 (a table)

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardc.cost.flops import flops_of
from shardc.runtime.mesh import CommRecord
from shardc.torch_private import TorchDispatchMode, current_backward, fake_device, pytree

aten = torch.ops.aten
#: Kinds in the order in which they are shown.
KINDS = (
    "parameters",
    "optimizer",
    "gradients",
    "buffers",
    "inputs",
    "activations",
    "gathered",
    "communication",
    "temporaries",
)
#: What is kept in the machine's memory or in files: no part of a device's memory.
HOST = "host"
#: Ops that look at tensors: what they are told where there are no values.
_LOOKS: dict[Any, Callable[[Tensor], Any]] = {
    aten._local_scalar_dense.default: lambda x: (
        False if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1
    ),
    aten.equal.default: lambda *_: True,
    aten.allclose.default: lambda *_, **__: True,
    torch.ops.prim.device.default: (
        fake_device
    ),  # what the fake mode says too, in ten times the time: asked more often than all ops are run
}


def _ctc(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Losses f[n] and alignments f[n, t, 2 · longest target + 1]."""
    t, n = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // n)
    return log_probs.new_empty(n), log_probs.new_empty(n, t, 2 * longest + 1)


#: Ops the sizes of whose results hang on values: with the largest that these may be.
_LARGEST: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc,
    aten._ctc_loss.Tensor: _ctc,
    **dict.fromkeys(
        (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor),
        lambda grad, log_probs, *_: torch.empty_like(log_probs),
    ),
}


class Held:
    """One storage. op: what made it; shape, dtype: of the first tensor in it."""

    __slots__ = ("dtype", "kind", "nbytes", "op", "shape")

    def __init__(self, x: Tensor, kind: str, op: str) -> None:
        self.nbytes, self.kind, self.op = x.untyped_storage().nbytes(), kind, op
        self.shape, self.dtype = tuple(map(int, x.shape)), x.dtype


class Op(NamedTuple):
    """traffic: bytes of memory that it reads and writes. dtype: of its (widest known) floating operands. of, shape: of
    what multiplies matrices, the program's op that it belongs to, and its result's shape."""

    flops: int
    traffic: int
    dtype: torch.dtype
    of: str = ""
    shape: tuple[int, ...] = ()


class Sent(NamedTuple):
    """A collective. key: of one that runs beside what comes next, until it is waited for; None: the next op waits for
    it.
    """

    record: CommRecord
    key: int | None = None


class Waited(NamedTuple):
    key: int


@dataclass
class Part:
    """A part of a step. changes: (+1 made or -1 freed, storage) in order. work: what takes time, in order. sent: what
    ran over ranks.
    """

    name: str
    changes: list[tuple[int, Held]] = field(default_factory=list)
    work: list[Op | Sent | Waited] = field(default_factory=list)
    sent: tuple[CommRecord, ...] = ()

    @property
    def flops(self) -> int:
        return sum(w.flops for w in self.work if isinstance(w, Op))


class Ledger(TorchDispatchMode):
    """See the module's docstring. at: the forward op that runs now, by name; op_of: the forward op that an autograd
    node belongs to.
    """

    def __init__(self, *, fake: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fake = fake
        self.parts: list[Part] = [Part("")]
        self.held: dict[int, Held] = {}  # by address of the storage
        self.kind = "temporaries"
        self.at = ""
        self.op_of: Callable[[int], str] = lambda number: ""
        self._refs: dict[int, Any] = {}

    def turn(self, name: str) -> Part:
        """From here on it is another part of the step."""
        self.parts.append(Part(name))
        return self.parts[-1]

    def live(self) -> list[Held]:
        return list(self.held.values())

    def host(self, make: Callable[[], Tensor]) -> Tensor:
        """What `make` makes lies outside of the device."""
        before, self.kind = self.kind, HOST
        try:
            return make()
        finally:
            self.kind = before

    def mark(self, tensors: Iterable[Tensor | None], kind: str, *, over: Iterable[str] = ("temporaries",)) -> None:
        """Say what tensors are for, where their kind so far is one of `over`."""
        for x in tensors:
            if x is not None:
                self.see(x)
                held = self.held[x.untyped_storage()._cdata]
                if held.kind in over:
                    held.kind = kind

    def see(self, x: Tensor) -> None:
        """A tensor is there."""
        if x.layout is not torch.strided:
            return
        storage = x.untyped_storage()
        key = storage._cdata
        if key in self.held:
            return
        held = self.held[key] = Held(x, self.kind, self._op())
        self.parts[-1].changes.append((1, held))

        def freed(_: Any) -> None:
            if self.held.get(key) is held:
                del self.held[key], self._refs[key]
                self.parts[-1].changes.append((-1, held))

        self._refs[key] = weakref.ref(storage, freed)

    def _op(self) -> str:
        return self._of() if current_backward() is None else f"backward of {self._of()}"

    def _of(self) -> str:
        number = current_backward()
        return self.at if number is None else self.op_of(number)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.fake and func in _LOOKS:
            return _LOOKS[func](*args)
        result = (_LARGEST.get(func, func) if self.fake else func)(*args, **(kwargs or {}))
        made = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
        for x in made:
            self.see(x)
        if made and not func.is_view:
            given = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            wide = [x.dtype for x in (*given, *made) if x.dtype.is_floating_point]
            traffic = sum(x.numel() * x.element_size() for x in (*given, *made))
            op = Op(flops_of(func, args, kwargs or {}, result), traffic, wide[0] if wide else made[0].dtype)
            self.parts[-1].work.append(
                op._replace(of=self._of(), shape=tuple(map(int, made[0].shape))) if op.flops else op
            )
        return result
