"""Count memory and work of ops on tensors without data, which compute and allocate nothing.

An op that has run before is not run again: its results and its record are known (shardc.cost.known_ops).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.cost.growth import Growth, Moved, places_moved
from shardc.cost.known_ops import Calls, KnownOps
from shardc.cost.ledger import Ledger, tensors_in
from shardc.cost.recorded import HOST
from shardc.machine.flops import op_of
from shardc.machine.work import Op, Part, Storage
from shardc.torch_private import NotCompiledMode, fake_device

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


class FakeLedger(NotCompiledMode, Ledger):
    """The ledger of a dry run. known: results of ops; growth: gets all calls, if the parts that grow are needed."""

    def __init__(self, known: KnownOps | None = None, growth: Growth | None = None) -> None:
        super().__init__()
        self._fusing: list[Op] | None = None
        self._known = known if known is not None else KnownOps()
        self._line: Calls | None = None  # what a line of a graph leads to, while it runs
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
        known = self._known.find(call[0]) if call is not None else None
        operands = call[1] if call is not None else tensors_in((args, kwargs))
        if known is not None:
            result, more = known.result(operands), known.more
        else:
            result = _LARGEST.get(func, func)(*args, **kwargs)
            more = op_of(func, args, kwargs, result), places_moved(func, args, kwargs, result, operands)
            if call is not None:
                known = self._known.remember(func, *call, result, more)
        results = self._note(*more, func.is_view, operands, result)
        if self._line is not None:
            self._line.note(known, operands, results)
        return result

    def run_line(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a line of a graph: as torch does the first time, then by the calls that it led to. Not for autograd."""
        call = self._known.key(func, args, kwargs)
        if call is None or torch.is_grad_enabled():
            return func(*args, **kwargs)
        key, tensors = call
        calls = self._known.lines.get(key)
        if calls is None:
            self._line = calls = Calls(tensors)
            result = func(*args, **kwargs)
            calls.end(result)
            self._known.lines[key], self._line = calls, None
            return result
        if calls.each is None:
            return func(*args, **kwargs)
        for known, places in calls.each:
            operands = [tensors[i] for i in places]
            tensors += self._note(*known.more, known.view, operands, known.result(operands))
        several, returned = calls.returned
        outputs = [None if i is None else tensors[i] for i in returned]
        return outputs[0] if several is None else several(outputs)

    def _note(self, op: Op | None, moved: Moved, view: bool, operands: Sequence[Tensor], result: Any) -> list[Tensor]:
        """Record a call; return the tensors in its result."""
        results, part = tensors_in(result), self.parts[-1]
        at = len(part.work)
        self.called(op, results)
        if self._growth is not None and self._fusing is None and not view:
            self._growth.called(at, op, moved, self._stored(operands), self._stored(results))
        return results

    def ran(self, op: Op) -> None:
        (self.parts[-1].work if self._fusing is None else self._fusing).append(op)

    def _stored(self, tensors: Iterable[Tensor]) -> list[tuple[Storage | None, int]]:
        """Return the storage of each tensor (None if it does not count) and its number of elements."""
        return [(self.storages.get(x.untyped_storage()._cdata), x.numel()) for x in tensors]
