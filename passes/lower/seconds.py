"""How long a line of a lowered text takes on the assumed machine (shardc.ir.assumed_machine).

A call's floating-point operations and bytes of memory are counted once for every distinct one, by running it on tensors
without data. That is rough, and enough to say what fits beside a collective; what a step takes on a given device, with
what hides which collective, says shardc.cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from shardc.artifact.emit import target_text
from shardc.ir import assumed_machine as machine
from shardc.ir.conversions import SENT
from shardc.ir.flops import flops_of
from shardc.ir.graph import is_call, map_value, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.program import Collective, Program
from shardc.runtime import ops
from shardc.runtime.mesh.shapes import ShapeMesh
from shardc.runtime.rng import Rng
from shardc.torch_private import FakeTensorMode, TorchDispatchMode, pytree


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """seconds: of the ops that run while it is open."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in pytree.tree_leaves((args, kwargs, result)) if isinstance(x, Tensor)]
        if tensors and not func.is_view:
            flops = flops_of(func, args, kwargs or {}, result)
            self.seconds += seconds(flops, sum(x.numel() * x.element_size() for x in tensors))
        return result


def seconds(flops: float, traffic: float) -> float:
    """Of one op: flops, or bytes read and written, whichever takes longer."""
    return max(flops / machine.USUAL_FLOPS, traffic / (machine.MEMORY * machine.REACHED), machine.LAUNCH)


def collective_seconds(kind: str, nbytes: float, ranks: Sequence[int]) -> float:
    """Of one collective among these ranks of the world. nbytes: as in shardc.ir.program.Collective."""
    n = len(ranks)
    if n == 1 or kind not in SENT:
        return 0.0
    together = len({r // machine.NODE for r in ranks}) == 1
    link, latency = (machine.NVLINK, machine.NVLINK_LATENCY) if together else (machine.NETWORK, machine.NETWORK_LATENCY)
    return SENT[kind] * (latency * math.ceil(math.log2(n)) + nbytes * (n - 1) / n / (link * machine.REACHED))


class Seconds:
    """Of the lines of one program's texts."""

    def __init__(self, program: Program) -> None:
        self._layout: Mesh = program.mesh
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._mesh = ShapeMesh(program.mesh, 0)
        self._mesh.step.set_microbatch(0, program.microbatches)
        self._rng = Rng(0)
        self._found: dict[str, float] = {}
        self._of_tapes: dict[str, float] = {}  # by the tape's name: what the op itself took

    def of(self, n: fx.Node) -> float:
        """Computing alone."""
        if not is_call(n) or n.target in _NOTHING:
            return 0.0
        if n.target is ops.untaped:  # two products for each of forward's
            tape: Any = n.args[0]
            return 2 * self._of_tapes.get(tape.name, machine.LAUNCH / 2)
        key = repr((target_text(n.target), _with_types(n.args), _with_types(n.kwargs, leave=("tag",))))
        if key not in self._found:
            self._found[key] = self._run(n)
        if n.target is ops.taped:
            self._of_tapes.update((u.name, self._found[key]) for u in n.users)
        return self._found[key]

    def sent(self, c: Collective) -> float:
        """Of the collective of a line."""
        return collective_seconds(c.kind, c.bytes, self._layout.group(0, c.axes))

    def _run(self, n: fx.Node) -> float:
        target: Any = n.target
        with self._mode, torch.no_grad():
            args, kwargs = fx.map_arg(n.args, self._operand), fx.map_arg(dict(n.kwargs), self._operand)
            try:
                with _Count() as count:
                    target(*args, **kwargs)
            except Exception:  # code that was not written for tensors without data: it moves what it takes and gives
                return seconds(0, sum(self.bytes_of(x) for x in (*n.all_input_nodes, n)))
        return float(count.seconds)

    def bytes_of(self, n: fx.Node) -> int:
        """Of its result, or of all results, on one rank."""
        return sum(v.nbytes(self._layout) for v in values_of(n) if v is not None)

    def _operand(self, x: fx.Node) -> Any:
        if x.name in ("mesh", "rng"):
            return self._mesh if x.name == "mesh" else self._rng
        return map_value(lambda v: torch.empty(v.local_shape(self._layout), dtype=v.dtype), x.meta["value"])


#: They start, wait, hand on: what they take time for is a collective, or not theirs.
_NOTHING = {
    *(ops.gather_start, ops.gather_wait, ops.regather_start, ops.regather_wait, ops.updated),
    *(ops.launch, ops.put, ops.scatter, ops.wait),
}


def _with_types(a: Any, leave: tuple[str, ...] = ()) -> Any:
    """Arguments, values by their types."""
    if isinstance(a, fx.Node):
        return str(a.meta.get("value")) if "value" in a.meta else a.name
    if isinstance(a, (tuple, list)):
        return tuple(map(_with_types, a))
    if isinstance(a, dict):
        return tuple((k, _with_types(v)) for k, v in a.items() if k not in leave)
    return a
