"""The loss that an engine's step returns: a number, whose backward is done.

Loops are written `loss = engine.step(batch); (loss / n).backward()`, of which torch says only that a tensor "does not
require grad". So what is computed of the loss knows it, too.
"""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from shardc.errors import ShardcError


class SteppedLoss(Tensor):
    """As a plain tensor, which it is in a file and in a copy."""

    def backward(self, *_: Any, **__: Any) -> NoReturn:
        fix = "leave .backward() out; or write the loop around program.module(model), whose loss has one"
        raise ShardcError("the engine has run backward: this is a detached number", where="loss.backward()", fix=fix)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return repr(self.as_subclass(Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(Tensor), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]
