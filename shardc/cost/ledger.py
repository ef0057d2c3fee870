"""Count memory and work: each storage while a tensor uses it, each op by what it computes and moves.

    with Ledger() as ledger:
        ledger.begin("F 0")      all that follows belongs to this part of a step
        ...
    ledger.parts                 of each part: changes of live bytes in order, flops and memory traffic by dtype

A storage's *kind* is its purpose. Ops make "temporaries"; other code sets the kind by `mark`: shardc.cost.dry_run for
parameters, gradients and the optimizer's state.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.cost.growth import Growth, Moved, places_moved
from shardc.cost.known_ops import KnownOps
from shardc.cost.recorded import HOST
from shardc.machine.flops import op_of
from shardc.machine.work import Op, Part, Storage
from shardc.torch_private import FakeTensor, NotCompiledMode, TorchDispatchMode, fake_device, pytree


class Ledger(TorchDispatchMode):
    """See the module's docstring. op: the forward op that runs now, or that a line of backward belongs to.

    again: whether it is recomputed in backward; in_backward: whether a backward graph runs.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.parts: list[Part] = [Part("")]
        self.storages: dict[int, Storage] = {}  # by address of the storage
        self.kind = "temporaries"
        self.op = ""
        self.again: Callable[[], bool] = lambda: False
        self.in_backward: Callable[[], bool] = lambda: False
        self._refs: dict[int, Any] = {}

    def begin(self, name: str) -> Part:
        """Start another part of the step; all that follows belongs to it."""
        self.parts.append(Part(name))
        return self.parts[-1]

    def live(self) -> list[Storage]:
        return list(self.storages.values())

    def mark(self, tensors: Iterable[Tensor | None], kind: str, *, over: Iterable[str] = ("temporaries",)) -> None:
        """Set the kind of tensors whose kind so far is one of `over`."""
        for x in tensors:
            if x is not None:
                self.observe(x)
                storage = self.storages[x.untyped_storage()._cdata]
                if storage.kind in over:
                    storage.kind = kind

    def observe(self, x: Tensor) -> None:
        """Count the storage of a tensor, if it is a new one, until it is freed."""
        if x.layout is not torch.strided:
            return
        untyped = x.untyped_storage()
        key = untyped._cdata
        if key in self.storages:
            return
        if (fake_device(x) if isinstance(x, FakeTensor) else x.device).type == "meta":  # it takes no memory
            return
        op, shape = f"backward of {self.op}" if self.in_backward() else self.op, tuple(map(int, x.shape))
        storage = self.storages[key] = Storage(untyped.nbytes(), self.kind, op, shape, x.dtype)
        self.parts[-1].changes.append((1, storage))

        def freed(_: Any) -> None:
            if self.storages.get(key) is storage:
                del self.storages[key], self._refs[key]
                self.parts[-1].changes.append((-1, storage))

        self._refs[key] = weakref.ref(untyped, freed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.call(func, args, kwargs)
        self.called(op_of(func, args, kwargs, result), tensors_in(result))
        return result

    def called(self, op: Op | None, results: Iterable[Tensor]) -> None:
        """Record a call: its results, and the op if it takes time."""
        for x in results:
            self.observe(x)
        if op is not None:
            if op.flops:
                op = op._replace(of=self.op)
            self.ran(op._replace(again=True) if self.again() else op)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op."""
        return func(*args, **kwargs)

    def ran(self, op: Op) -> None:
        """Record that an op has run and takes time."""
        self.parts[-1].work.append(op)


def tensors_in(result: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of a call."""
    return [result] if isinstance(result, Tensor) else [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]


# --- tensors without data

aten = torch.ops.aten
#: For ops that read a tensor's value: the result for a tensor without data.
_VALUE_READS: dict[Any, Callable[[Tensor], Any]] = {
    aten._local_scalar_dense.default: lambda x: (
        False if x.dtype == torch.bool else 1.0 if x.dtype.is_floating_point else 1
    ),
    aten.equal.default: lambda *_: True,
    aten.allclose.default: lambda *_, **__: True,
}
#: The fake mode returns the same in ten times the time: it is read more often than all ops are run.
_DEVICE = torch.ops.prim.device.default


def _ctc(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Return empty losses f[n] and alignments f[n, t, 2 · longest target + 1]."""
    t, n = log_probs.shape[0], log_probs.shape[1] if log_probs.dim() == 3 else 1
    longest = targets.shape[1] if targets.dim() == 2 else -(-targets.shape[0] // n)
    return log_probs.new_empty(n), log_probs.new_empty(n, t, 2 * longest + 1)


#: For ops whose result sizes depend on values: the largest possible results.
_LARGEST: dict[Any, Callable[..., Any]] = {
    aten._ctc_loss.default: _ctc,
    aten._ctc_loss.Tensor: _ctc,
    **dict.fromkeys(
        (aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor),
        lambda grad, log_probs, *_: torch.empty_like(log_probs),
    ),
}


class FakeLedger(NotCompiledMode, Ledger):  # type: ignore[no-untyped-call]
    """The ledger of a dry run, which computes and allocates nothing. known: results of ops, which are not run again.

    growth: gets all calls, if the parts that grow with rows are needed.
    """

    def __init__(self, known: KnownOps | None = None, growth: Growth | None = None) -> None:
        super().__init__()
        self._fusing: list[Op] | None = None
        self._known = known if known is not None else KnownOps()
        self._growth = growth

    def begin(self, name: str) -> Part:
        if self._growth is not None:
            self._growth.settle(self.parts[-1])
        return super().begin(name)

    def fuse(self) -> None:
        """Count the following ops without products as one, until `fused`."""
        self._fusing = []

    def fused(self, traffic: int) -> None:
        """End the fused ops. traffic: bytes that they move as one. Memory counts their results as before."""
        ops, self._fusing = self._fusing or [], None
        work = self.parts[-1].work
        work += [x for x in ops if x.flops]
        if rest := [x for x in ops if not x.flops]:
            dtype = next((x.dtype for x in rest if "float" in x.dtype), rest[0].dtype)
            work.append(Op(0, traffic, dtype, name="fused", again=all(x.again for x in rest)))

    def host(self, make: Callable[[], Tensor]) -> Tensor:
        """Make a tensor that is stored outside of the device."""
        before, self.kind = self.kind, HOST
        try:
            return make()
        finally:
            self.kind = before

    def mark_fixed_size(self, tensors: Iterable[Tensor | None]) -> None:
        """Mark tensors whose size does not grow with a batch's rows, such as gradients of parameters."""
        for x in tensors:
            if x is not None:
                self.storages[x.untyped_storage()._cdata].still = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:
            return fake_device(*args)
        if func in _VALUE_READS:
            return _VALUE_READS[func](*args)
        kwargs = kwargs or {}
        call = self._known.key(func, args, kwargs)
        known = self._known.known.get(call[0]) if call is not None else None
        operands = call[1] if call is not None else tensors_in((args, kwargs))
        if known is not None:
            result, more = known.result(operands), known.more
        else:
            result = _LARGEST.get(func, func)(*args, **kwargs)
            more = op_of(func, args, kwargs, result), places_moved(func, args, kwargs, result, operands)
            if call is not None:
                self._known.remember(func, *call, result, more)
        self._note(more, func.is_view, operands, result)
        return result

    def run_line(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op of a graph; a known one without torch's dispatcher, and so without autograd."""
        call = None if torch.is_grad_enabled() else self._known.key(func, args, kwargs)
        if call is None or (known := self._known.known.get(call[0])) is None:
            return func(*args, **kwargs)
        result = known.result(call[1])
        self._note(known.more, known.view, call[1], result)
        return result

    def _note(self, more: tuple[Op | None, Moved], view: bool, operands: Sequence[Tensor], result: Any) -> None:
        """Record a call. more: its op, if it takes time, and what it moves; view: it only makes views."""
        op, moved = more
        results, part = tensors_in(result), self.parts[-1]
        at = len(part.work)
        self.called(op, results)
        if self._growth is not None and self._fusing is None and not view:
            self._growth.called(at, op, moved, self._stored(operands), self._stored(results))

    def ran(self, op: Op) -> None:
        (self.parts[-1].work if self._fusing is None else self._fusing).append(op)

    def _stored(self, tensors: Iterable[Tensor]) -> list[tuple[Storage | None, int]]:
        """Return the storage of each tensor (None if it does not count) and its number of elements."""
        return [(self.storages.get(x.untyped_storage()._cdata), x.numel()) for x in tensors]
