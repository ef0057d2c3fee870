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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardc.machine.flops import op_of
from shardc.machine.work import Op, Part, Storage
from shardc.torch_private import FakeTensor, TorchDispatchMode, fake_device, pytree


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
        storage = self.storages[key] = Storage(
            untyped.nbytes(), self.kind, self._op(), tuple(map(int, x.shape)), x.dtype
        )
        self.parts[-1].changes.append((1, storage))

        def freed(_: Any) -> None:
            if self.storages.get(key) is storage:
                del self.storages[key], self._refs[key]
                self.parts[-1].changes.append((-1, storage))

        self._refs[key] = weakref.ref(untyped, freed)

    def _op(self) -> str:
        return f"backward of {self.op}" if self.in_backward() else self.op

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
