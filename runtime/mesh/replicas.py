"""Compare the copies of each weight, when an engine is made and again while it trains.

If a weight, a buffer or an optimizer's state is on several ranks, all of them compute the same update, and nothing is
sent to make them equal. So a difference, such as a bit that flips in one machine's memory, stays, and spreads into
gradients: the check must look for it. A shard that only one rank has (a slice of tensor parallelism, a stretch of ZeRO)
has no copy to compare with, and is not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import DisagreementError, Fact, check, fingerprint, fingerprints, hashed

#: Steps between two checks of all replicas.
CHECK_EVERY = 256
SAME_WEIGHTS = (
    "use the same weights on every rank: make the model inside its function (model() of a model file"
    " runs with one seed everywhere), or call torch.manual_seed before; in Python, program.engine(..., broadcast=True)"
    " sends those of rank 0"
)
REPAIR = (
    "continue from the last checkpoint, and test the memory of that machine; if it happens on another machine, some "
    "kernel adds in no fixed order: torch.use_deterministic_algorithms(True)"
)


class ReplicasDifferError(DisagreementError):
    """Copies of a weight, a buffer or an optimizer's state differ, which were equal at the start."""


class InitialFingerprints:
    """Fingerprints of the weights and buffers of a new engine or module: of parts and of whole tensors.

    Parts alone cannot show that ranks received different models: each rank may have another slice of a weight, without
    a copy.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._parts: dict[str, int] = {}
        self._wholes: dict[str, int] = {}
        self._split = {x.name for x, _ in _parts(program) if x.layout.shards()}

    def whole(self, x: Param | Buffer, whole: Tensor) -> None:
        """Record the fingerprint of a whole tensor before it is cut."""
        if x.name in self._split:
            self._wholes[x.name] = fingerprint([whole])

    def passing(self, parts: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the same (name, tensor) pairs, and record their fingerprints."""
        for name, x in parts:
            self._parts[name] = fingerprint([x])
            yield name, x

    def check(self, mesh: Any, buffers: Mapping[str, Tensor]) -> None:
        """Compare them over ranks. Collective. Raises ShardcError, on all ranks, that names what differs."""
        program, parts = self._program, self._parts | {name: fingerprint([b]) for name, b in buffers.items()}
        facts = [Fact(_named(x), parts.get(x.name, 0), axes, fix=SAME_WEIGHTS) for x, axes in _parts(program)]
        _check(mesh, facts, "making an engine")
        # ranks that read only their part from a file, or initialized only it, have no whole tensor
        whole = not (self._split & parts.keys()) - self._wholes.keys()
        if self._split and mesh.sum_on_host([whole])[0] == mesh.layout.world:
            stage = (program.axis,) if program.axis else ()
            tensors = [x for x, _ in _parts(program) if x.name in self._split]
            facts = [Fact(_named(x), self._wholes.get(x.name, 0), stage, fix=SAME_WEIGHTS) for x in tensors]
            _check(mesh, facts, "making an engine")


def check_replicas(model: Any, optimizer: torch.optim.Optimizer | None, call: str) -> None:
    """Compare the copies that ranks hold, after some training. Collective.

    model: shardc.runtime.checks.hooks.Model. The optimizer updates its `.owned`: at ZeRO >= 1 a stretch of each. Raises
    ReplicasDifferError, on all ranks: what, on which ranks.
    """
    mesh = model.mesh
    copies: list[tuple[str, tuple[str, ...], list[Tensor]]] = []
    for x, axes in _parts(model.program, owned=True):
        if all(mesh.layout.size(a) == 1 for a in mesh.layout.names if a not in axes):
            continue  # no other rank has it
        tensor = (model.buffers if isinstance(x, Buffer) else model.owned).get(x.name)
        copies.append((_named(x), axes, [] if tensor is None else [tensor]))
        if isinstance(x, Param):
            state = optimizer.state.get(tensor, {}) if optimizer is not None and tensor is not None else {}
            values = [v for _, v in sorted(state.items()) if isinstance(v, Tensor)]
            copies.append((f"the optimizer's state of {x.fqn}", axes, values))
    where = f"after step {model.rng.step}"
    prints = fingerprints(tensors for _, _, tensors in copies)
    facts = [Fact(name, n, axes, where, REPAIR) for (name, axes, _), n in zip(copies, prints, strict=True)]
    _check(mesh, facts, call, ReplicasDifferError)


def _named(x: Param | Buffer) -> str:
    return f"the {'weight' if isinstance(x, Param) else 'buffer'} {x.fqn or x.name}"


def _parts(program: Program, *, owned: bool = False) -> Iterator[tuple[Param | Buffer, tuple[str, ...]]]:
    """Yield each weight and buffer with the axes that split it; ranks along other axes have copies.

    owned: as the optimizer has it, with what ZeRO shards.
    """
    for x in program.params_and_buffers:
        split = {part for axis, _ in x.layout.shards() for part in program.mesh.digits(axis)}
        bucket = program.bucket(x) if owned and isinstance(x, Param) else None
        if bucket is not None and bucket.zero:
            split |= set(program.mesh.digits(bucket.shard))
        # a stage's weights are only on its own ranks, so only these compare them
        yield x, tuple(a for a in program.mesh.names if a in split or a == program.axis)


def _check(mesh: Any, facts: Iterable[Fact], call: str, kind: type[DisagreementError] = DisagreementError) -> None:
    """Compare many facts: first one hash for all with the same axes, then each separately if one differs."""
    by_axes: dict[tuple[str, ...], list[Fact]] = {}
    for f in facts:
        by_axes.setdefault(f.axes, []).append(f)
    together = [Fact("the weights", hashed(*(f.value for f in same_axes)), axes) for axes, same_axes in by_axes.items()]
    try:
        check(mesh, together, call, kind)
    except kind as e:
        if not isinstance(e, agreement.CallsDifferError):
            check(mesh, [f for same_axes in by_axes.values() for f in same_axes], call, kind)
        raise  # ranks do different things; or only the combined hashes differ, so that no weight can be named
