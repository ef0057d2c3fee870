"""How ops of a step are broken whose operands or results are no tensors: buckets, tapes, values on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from shardc.runtime.stage.activation_offload import OffloadedTensors

Op = Callable[..., Any]
#: Those that give no tensor, and those that do.
WITHOUT_TENSORS = {
    *("gather_start", "regather_start", "scatter", "accumulate", "launch"),
    *("offload_start", "offload_wait", "reload_start"),
}
OPS = WITHOUT_TENSORS | {"gather_wait", "regather_wait", "updated", "opaque", "opaque_backward", "reload_wait"}


def nothing(*_: Any, **__: Any) -> None:
    """What does nothing."""


class _Still:
    """A mesh on which nothing moves to the host."""

    def __init__(self, mesh: Any) -> None:
        self.step, self.host_copies = self, OffloadedTensors(mesh.device)


def ways(name: str, op: Op) -> Iterator[tuple[str, Op]]:
    """(how, the broken op) for an op."""
    if name == "gather_start":
        yield "not begun", lambda params, **_: params[0]
    if name == "regather_start":
        yield "not begun", lambda params, **_: lambda: params[0].regather()()
    if name in {"gather_wait", "regather_wait", "updated"}:
        yield "turned round", lambda x: op(x)[::-1]
    if name == "scatter":
        yield "nothing", nothing
        yield "twice the gradients", lambda params, grads, **_: op(params, [g + g for g in grads])
        yield "a conjugate too many", lambda params, grads, **_: op(params, [g.conj() for g in grads])
        yield "the first gradient alone", lambda params, grads, **_: op(params, [grads[0], *[None] * (len(grads) - 1)])
    if name == "launch":
        yield "nothing", nothing
    if name == "accumulate":
        yield "nothing", nothing
        yield "twice the gradient", lambda p, g, **how: op(p, g + g, **how)
        yield "a conjugate too many", lambda p, g, **how: op(p, g.conj().resolve_conj(), **how)
        yield "written over what is there", lambda p, g, **_: setattr(p, "grad", g)
        yield "never copied", lambda p, g, **_: op(p, g, own=True)
        yield "always copied", lambda p, g, **_: op(p, g)
    if name == "opaque":
        yield "no gradient", lambda op_name, _, *rest: op(op_name, (), *rest)
    if name == "opaque_backward":
        yield (
            "a conjugate too many",
            lambda t, g, *rest, **how: op(t, [x if x is None else x.conj() for x in g], *rest, **how),
        )
        yield (
            "what was there before is forgotten",
            lambda t, g, b, *rest, **how: op(t, g, [None] * len(b), *rest, **how),
        )
        yield "no zeros", lambda *a, zeros=False, **how: op(*a, **how)
        yield "all of them", lambda *a, only=(), **how: op(*a, **how)
        yield "the tape does not stay", lambda *a, keep=False, **how: op(*a, **how)
        yield (
            "the gradients of the first result alone",
            lambda t, g, *a, **h: op(t, [g[0], *[None] * len(g[1:])], *a, **h),
        )
    if name == "offload_start":
        yield (
            "twice the value",
            lambda x, *a, **how: op(
                x if not isinstance(x, Tensor) else ~x if x.dtype == torch.bool else x + x, *a, **how
            ),
        )
        yield "nothing moves", lambda x, mesh, **how: op(x, _Still(mesh), **how)
    if name == "offload_wait":
        yield "the device keeps it", lambda handle: handle
    if name == "reload_start":
        known: dict[Any, Any] = {}
        yield "one copy for all", lambda handle, **how: known.setdefault(handle, op(handle, **how))
        yield "no copy", lambda handle, **how: _zeroed(op(handle, **how))


def _zeroed(coming: Any) -> Any:
    for x, _ in coming.copies:
        x.zero_()
    return coming
