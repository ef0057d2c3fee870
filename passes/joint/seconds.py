"""Find the time and bytes of lines of a step's graphs on the assumed machine (shardc.machine.assumed).

Every distinct call runs once, on tensors without data, and counts as in a dry run (shardc.cost).
"""

from __future__ import annotations

import operator
import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardc.artifact.emit import target_text
from shardc.ir.graph import is_call, map_value, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import HOST_LINK, CommRecord, Value
from shardc.ir.program import Program
from shardc.ir.stage import mesh_or_rng
from shardc.machine.assumed import ASSUMED
from shardc.machine.clock import Clock
from shardc.machine.flops import op_of
from shardc.machine.work import Op
from shardc.passes.joint.derivatives import BY_DEVICE
from shardc.passes.joint.derivatives.rank import Rank
from shardc.runtime import ops
from shardc.runtime.ops.opaque import tensors_in
from shardc.torch_private import NotCompiledMode, OpOverload


@dataclass(frozen=True)
class Work:
    """The time (seconds) and bytes of one line. tape: what it keeps for its backward (ops.opaque).

    inside: most bytes beside operands and results while it runs. moved: bytes of a copy of the tape to the host.
    """

    seconds: float = 0.0
    inside: int = 0
    tape: int = 0
    moved: int = 0


class _Count(NotCompiledMode):  # type: ignore[no-untyped-call]
    """Counts ops while it is open. seconds: their time. live, most: bytes of results, now and at most."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds, self.live, self.most = 0.0, 0, 0
        self._alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (op := op_of(func, args, kwargs or {}, result)) is not None:
            self.seconds += ASSUMED.op_seconds(op)
        if not func.is_view:
            taken = {x.untyped_storage()._cdata for x in tensors_in((args, kwargs or {}))}
            for x in tensors_in(result):
                self._add_storage(x.untyped_storage(), taken)
        return result

    def _add_storage(self, storage: torch.UntypedStorage, taken: set[int]) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or key in taken:
            return

        def freed(_: Any) -> None:
            self._alive.pop(key)
            self.live -= size

        self._alive[key] = weakref.ref(storage, freed)
        self.live += size
        self.most = max(self.most, self.live)


class Seconds:
    """The time of the lines of one program's graphs. rank: the rank on which they run."""

    def __init__(self, program: Program, rank: Rank) -> None:
        self._mesh: Mesh = program.mesh
        self._rank = rank
        #: Shapes of inputs in one microbatch, by name: an input's type is that of the whole step.
        self._inputs = {x.name: x.local_shape(program.mesh, program.microbatches) for x in program.inputs}
        #: A clock on which nothing runs: lines run on fresh ones.
        self.clock = Clock(ASSUMED, program.mesh, 0)
        self._found: dict[str, Work] = {}
        self._back: dict[str, Work] = {}  # the backward of opaque calls
        self._tapes: dict[str, str] = {}  # by the tape's name: the call's key
        #: (what equal lines share, key) of known lines, by the identities of the former and the target.
        self._keys: dict[tuple[int, int], tuple[Any, str]] = {}

    def of(self, n: fx.Node) -> Work:
        """Return the work of a line, without its communication."""
        if "tape" in n.meta:  # it comes back from the host
            return Work(tape=self._of_tape(n).moved)
        if n.op == "placeholder" and _name(n) in self._tapes:
            return self._found[self._tapes[_name(n)]]
        if not is_call(n) or (not isinstance(n.target, OpOverload) and n.target in _NOTHING):
            return _NO_WORK
        if n.target is ops.opaque_backward:
            tape: Any = n.args[0]
            return self._back[self._tapes[tape.meta.get("tape", _name(tape))]]
        like = n.meta.get("like", n)
        _, key = self._keys.get((id(like), id(n.target)), (None, ""))
        if not key:
            key = repr((target_text(n.target), self._with_types(n.args), self._with_types(n.kwargs, leave=("tag",))))
            self._keys[id(like), id(n.target)] = like, key
        anywhere = isinstance(n.target, OpOverload) and "@" not in key  # it depends on no mesh
        works = _OF_TORCH if anywhere else self._found
        if key not in works:
            works[key] = self._run(n, key)
        if n.target is ops.opaque:
            self._tapes.update((u.name, key) for u in n.users if u.meta.get("value") is None)
        return works[key]

    def tape_bytes(self, n: fx.Node) -> int:
        """Return the bytes that a tape holds, in an unfinished graph; 0 for other values."""
        source: Any = n.args[0] if n.target is operator.getitem else None
        is_result = source is not None and source.target is ops.opaque and n.meta.get("value") is None
        return self.of(source if is_result else n).tape

    def _of_tape(self, n: fx.Node) -> Work:
        return self._found[self._tapes[n.meta.get("tape", _name(n))]]

    def moved(self, n: fx.Node) -> int:
        """Return the bytes that a copy to or from the host moves. n: the line that begins the copy."""
        x: Any = n.args[0] if n.target is ops.offload_start else n
        if "tape" in n.meta or _name(x) in self._tapes:
            return self._of_tape(x).moved
        return sum(v.nbytes(self._mesh) for v in values_of(x) if v is not None)

    def sent(self, n: fx.Node) -> tuple[CommRecord | None, float]:
        """Return (the collective or copy of a line, its seconds alone)."""
        copy, c = n.meta.get("copy"), n.meta.get("collective")
        if copy is not None:
            record = CommRecord("copy", HOST_LINK, copy.bytes, "")
        elif c is not None and c.kind != "none":
            record = CommRecord(c.kind, c.axes, c.forward_bytes, "")
        else:
            return None, 0.0
        return record, self.clock.alone(record)[0]

    def _on_meta(self, n: fx.Node) -> Work | None:
        """Return a torch op's work from a run on the meta device, which is faster; None if that fails."""
        target: Any = n.target
        if not isinstance(target, OpOverload) or target in BY_DEVICE:
            return None
        if not n.all_input_nodes or "device" in n.kwargs:
            return None
        operand = partial(self._operand, device="meta")
        args, kwargs = fx.map_arg(n.args, operand), fx.map_arg(dict(n.kwargs), operand)
        try:
            with _Count() as count, torch.no_grad():
                result = target(*args, **kwargs)
        except Exception:  # it has no kernel for that device: fake tensors may know more
            return None
        inside = count.most - count.live
        del result  # it was alive until here
        return Work(count.seconds, inside)

    def _run(self, n: fx.Node, key: str) -> Work:
        if (work := self._on_meta(n)) is not None:
            return work
        target: Any = n.target
        with self._rank.mode, torch.no_grad():
            args, kwargs = fx.map_arg(n.args, self._operand), fx.map_arg(dict(n.kwargs), self._operand)
            try:
                if any(map(mesh_or_rng, n.all_input_nodes)):  # values that a rank makes once are no line's work
                    target(*args, **kwargs)
                with _Count() as count:
                    outputs = target(*args, **kwargs)
            except Exception:  # code not written for tensors without data: guess that it moves operands and results
                values = [v for x in (*n.all_input_nodes, n) for v in values_of(x) if v is not None]
                guess = ASSUMED.op_seconds(Op(0, sum(v.nbytes(self._mesh) for v in values), ""))
                self._back[key] = Work(2 * guess)
                return Work(guess)
            inside = count.most - count.live
            if target is not ops.opaque:
                return Work(count.seconds, inside)
            results = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in tensors_in(outputs)}
            saved = {x.untyped_storage()._cdata: x for p in outputs[-1].own() if (x := p.tensor) is not None}
            moved = sum(x.numel() * x.element_size() for x in saved.values())
            work = Work(count.seconds, inside, max(count.live - sum(results.values()), 0), moved)
            self._back[key] = self._run_back(args, kwargs, outputs, work)
            return work

    def _run_back(self, args: Any, kwargs: Any, made: Any, forward: Work) -> Work:
        """Return the work of `ops.opaque_backward` for the results of `ops.opaque`."""
        *results, tape = made
        operands = list(tensors_in((args[3:], kwargs)))
        grads = [torch.empty_like(y) if isinstance(y, Tensor) else None for y in results]
        tangents = [g if begin is not None else None for g, begin in zip(grads, tape.begins, strict=True)]
        try:
            with _Count() as count:
                ops.opaque_backward(tape, tangents, [None] * len(args[1]), [operands[i] for i in args[2]])
        except Exception:  # as above: two products for each of forward's
            return Work(2 * forward.seconds, forward.inside)
        return Work(count.seconds, count.most - count.live)

    def _operand(self, x: fx.Node, device: str = "cpu") -> Any:
        if which := mesh_or_rng(x):
            return self._rank.named(which)
        part = self._part(x)

        def empty(v: Value) -> Tensor:
            return torch.empty(v.local_shape(self._mesh) if part is None else part, dtype=v.dtype, device=device)

        return map_value(empty, x.meta["value"])

    def _part(self, x: fx.Node) -> tuple[int, ...] | None:
        """Return an input's shape in one microbatch; None for other values."""
        return self._inputs.get(_name(x)) if x.op == "placeholder" else None

    def _with_types(self, a: Any, leave: tuple[str, ...] = ()) -> Any:
        """Return arguments with types in place of values, as a part of a key."""
        if isinstance(a, fx.Node):
            return mesh_or_rng(a) or ((str(a.meta["value"]), self._part(a)) if "value" in a.meta else a.name)
        if isinstance(a, (tuple, list)):
            return tuple(map(self._with_types, a))
        if isinstance(a, dict):
            return tuple((k, self._with_types(v)) for k, v in a.items() if k not in leave)
        return a


_NO_WORK = Work()
#: The work of torch ops, for all programs of this process.
_OF_TORCH: dict[str, Work] = {}
#: Ops that start, wait, or pass values on: their time is a collective's, or another op's.
_NOTHING = {
    *(ops.gather_start, ops.gather_wait, ops.regather_start, ops.regather_wait, ops.updated),
    *(ops.launch, ops.accumulate, ops.scatter, ops.wait),
    *(ops.offload_start, ops.offload_wait, ops.reload_start, ops.reload_wait),
}


def _name(n: fx.Node) -> str:
    """Return the name in the stage's graph; in an overlapped pair the node may have another name."""
    return str(n.meta.get("named", n.name))
