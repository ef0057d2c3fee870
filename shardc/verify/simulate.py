"""Run all ranks of a program's mesh in this process, for tests, verification and learning."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardc import torch_modes
from shardc.call_arguments import checked
from shardc.errors import ShardcError
from shardc.ir.metadata import HOST_LINK, CommRecord
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.ir.types import continuous
from shardc.ir.units import plural
from shardc.optional import registered
from shardc.runtime.checks import user_changes
from shardc.runtime.checks.engine_options import check_trains
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback

if TYPE_CHECKING:
    from shardc.runtime.step.engine_optimizer import OptimizerOf

#: How far replicas of a value may differ, relative to its largest element: ranks may add in different orders, so
#: rounding differs.
SLACK = {torch.float64: 1e-9, torch.float32: 1e-4}


@dataclass(frozen=True)
class Comm:
    """A collective that rank 0 ran.

    bytes: of the whole local tensor; direction: "forward", "backward" or "update".
    """

    kind: str
    axis: str
    bytes: int
    direction: str
    cause: str


@dataclass(frozen=True)
class Simulation:
    """The global result of all ranks.

    loss: 0-dim, global, of the last step; nan of a forward-only program. outputs: other results, of all rows.
    grads: {fqn: global tensor}, of the last step, before the optimizer; without parameters that no gradient reaches.
    state: {fqn: global tensor}, parameters and buffers after the last step; tied ones under every name.
    comms: the collectives of the last step, in order.
    """

    loss: Tensor
    grads: dict[str, Tensor]
    state: dict[str, Tensor]
    comms: list[Comm]
    outputs: dict[str, Tensor] = field(default_factory=dict)

    def __repr__(self) -> str:
        counts = plural(len(self.grads), "gradient"), plural(len(self.comms), "collective")
        loss = f"loss {float(self.loss):.6g}" if not self.loss.isnan() or not self.outputs else "outputs"
        return f"<Simulation: {loss}, {', '.join(counts)}; .loss .grads .state .comms .outputs>"


@dataclass
class _Rank:
    """One rank's part of a Simulation, by placeholder name."""

    loss: Tensor
    grads: dict[str, Tensor | None]  # as the rank stores them: at ZeRO >= 1 a stretch of each
    params: dict[str, Tensor]  # stored in the same way
    wholes: dict[str, Tensor]  # whole local parts, as ops see them
    buffers: dict[str, Tensor]
    records: list[CommRecord]
    outputs: dict[str, Tensor]


@checked("shardc.simulate", elsewhere={})
def simulate(
    program: Program, model: Any, batch: Any, *, steps: int = 1, optimizer: OptimizerOf | None = None, seed: int = 0
) -> Simulation:
    """Run training steps of a program on every rank of its mesh, in lockstep, without a process group.

    model: holds the weights and is not changed; or a state_dict, or a function that builds the model (see Engine).
    batch: one global batch, used in every step. steps: how many. seed: of dropout.
    optimizer: params -> torch optimizer. None: one step leaves the weights as they are, several use the spec's
    optimizer, else AdamW(3e-4).
    A forward-only program runs one forward.
    Raises ShardcError for a batch or weights that do not fit, and ReplicasDifferError if replicas differ, which is a
    bug of shardc or of a rule: it names the op if one of them is not finite.
    """
    from shardc.runtime.step.engine import Engine  # here: `compile` imports this file, and runs nothing
    from shardc.runtime.step.engine_optimizer import of_spec
    from shardc.verify.not_finite import op_on_ranks

    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ShardcError(
            f"steps must be a number, not {steps!r}", where="shardc.simulate", fix="give a whole number, 1 or more"
        )
    torch_modes.check("shardc.simulate", training=not program.forward_only)
    if not program.forward_only:
        check_trains(program)
    # check once, not in every rank's engine: they share one model
    for name, note in user_changes.check_as_compiled(program, model, built=False).items():
        print(f"note: {name}: {note}", file=sys.stderr, flush=True)
    make = optimizer if optimizer is not None or steps == 1 else of_spec(program)

    def work(mesh: LoopbackMesh) -> _Rank:
        engine = Engine(program, model, make, seed, mesh=mesh, check=False)  # one process: nothing can differ
        grads: dict[str, Tensor | None] = {}
        result: Any = None
        if program.forward_only:
            result = torch.tensor(float("nan")), engine.evaluate(batch, gather=True)
        for _ in range(steps if not program.forward_only else 0):
            mesh.records.clear()
            result = engine.backward(batch, gather=True)
            raw = {n: p.grad for n, p in engine.owned.items()}
            grads = {n: g.as_subclass(Tensor).clone() if g is not None else None for n, g in raw.items()}
            engine.update()
        records = list(mesh.records)
        wholes = {n: x.clone() for n, x in engine.wholes().items()}
        loss, outputs = result if program.outputs else (result, {})
        params = {n: p.detach() for n, p in engine.owned.items()}
        return _Rank(loss, grads, params, wholes, engine.buffers, records, outputs)

    ranks = loopback(program.mesh, work)
    try:
        return _joined(program, ranks)
    except ReplicasDifferError as e:
        op = op_on_ranks(program, model, batch, seed) if e.not_finite else ""
        raise ReplicasDifferError(f"{e.what}; {op}" if op else e.what, e.where, not_finite=e.not_finite) from None


class ReplicasDifferError(ShardcError):
    """Ranks hold different numbers of one value. not_finite: one has nan or inf where another has not."""

    def __init__(self, what: str, where: str, *, not_finite: bool = False) -> None:
        super().__init__(what, where=where, fix="a bug in shardc or in a rule of your own: please report it")
        self.not_finite = not_finite


def _joined(program: Program, ranks: list[_Rank]) -> Simulation:
    """Join the parts of all ranks to global tensors, and compare replicas."""
    grads: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for p in program.params:
        owned = {i: r.params[p.name] for i, r in enumerate(ranks) if p.name in r.params}
        given = {i: g for i in owned if (g := ranks[i].grads.get(p.name)) is not None}
        if not given:
            continue
        if lacking := [i for i, x in owned.items() if i not in given and x.numel()]:
            raise ReplicasDifferError(f"rank {lacking[0]} has no gradient of it, and others have", p.fqn)
        # a rank without elements has no gradient
        grads |= p.by_name(_join(program, p, _local(program, p, owned | given), "the gradient of "))
    for p in program.params:
        owned = {i: r.params[p.name] for i, r in enumerate(ranks) if p.name in r.params}
        whole = _join(program, p, _local(program, p, owned), "")
        for rank, r in enumerate(ranks):  # ops must see the updated parameters
            if p.name in r.wholes:
                seen = p.layout.local(whole, program.mesh, program.mesh.coords(rank))
                _check_replica(seen, r.wholes[p.name], f"{p.fqn} on rank {rank}")
        state |= p.by_name(whole)
    for x in (b for b in program.buffers if b.fqn):
        copies = {i: r.buffers[x.name] for i, r in enumerate(ranks) if x.name in r.buffers}
        state |= dict.fromkeys((x.fqn, *x.aliases), _join(program, x, copies, ""))
    for rank, r in enumerate(ranks):
        _check_replica(ranks[0].loss, r.loss, f"the loss of rank {rank}")
        for name, value in r.outputs.items():
            _check_replica(ranks[0].outputs[name], value, f"the output {name!r} on rank {rank}")
    cause = causes(program)
    comms = [Comm(c.kind, c.axis, c.bytes, c.direction, cause(c)) for c in ranks[0].records]
    return Simulation(ranks[0].loss, grads, state, comms, ranks[0].outputs)


def _local(program: Program, p: Param, kept: dict[int, Tensor]) -> dict[int, Tensor]:
    """Return every rank's whole local part of a parameter or gradient from the pieces that ranks store."""
    bucket = program.bucket(p)
    if bucket is None or not bucket.zero:
        return kept
    shape, mesh = p.layout.local_shape(p.shape, program.mesh), program.mesh
    return {rank: torch.cat([kept[r] for r in mesh.group(rank, (bucket.shard,))]).view(shape) for rank in kept}


def _join(program: Program, x: Param | Buffer, parts: dict[int, Tensor], kind: str) -> Tensor:
    """Join {rank: its part} to the global tensor. Raises ReplicasDifferError if a rank holds another part."""
    mesh = program.mesh
    stage = {program.axis: program.holders(x)[0]} if program.axis else {}
    whole = x.layout.join(lambda coords: parts[mesh.rank({**coords, **stage})], mesh)
    for rank, part in parts.items():
        _check_replica(x.layout.local(whole, mesh, mesh.coords(rank)), part, f"{kind}{x.fqn} on rank {rank}")
    return whole


def _check_replica(expected: Tensor, got: Tensor, name: str) -> None:
    if torch.equal(expected, got):
        return
    wide = torch.promote_types(expected.dtype, torch.float64)
    one, other = expected.to(wide), got.to(wide)
    # rounding of a value that should be zero is as large as the value: hence the floor; nan on both sides comes from
    # the user's model
    size = max(float(one.abs().nan_to_num(0.0).max()), 1e-6)
    slack = SLACK.get(expected.dtype.to_real(), 1e-1) * size if continuous(expected) else 0.0
    if torch.allclose(one, other, rtol=0.0, atol=slack, equal_nan=True):
        return
    differ = one.isfinite() != other.isfinite()
    if bool(differ.any()):
        value, replica = other[differ][0].item(), one[differ][0].item()
        raise ReplicasDifferError(f"it is {value:.6g}, and {replica:.6g} on a replica", name, not_finite=True)
    fault = f"it differs from its replica by {float((one - other).abs().max()):.1e}"
    raise ReplicasDifferError(fault, name)


#: The cause of a collective that no annotation of the spec implies.
IMPLICIT = "no annotation implies it"
#: The tag of a record (the name of a node or of a bucket), with "send_recv" between stages, or the kind of a host copy.
Tag = tuple[str, str]


def tag(r: CommRecord) -> Tag:
    return r.tag, r.kind if r.kind == "send_recv" or r.axes == HOST_LINK else ""


def causes(program: Program) -> Callable[[CommRecord], str]:
    """Return a function that finds the cause of a collective that ran, or of a copy to the host."""
    stages = [n for s in program.stages for n in s.graph.nodes if "collective" in n.meta]
    # a placeholder of a later stage may have the name of the collective whose result it receives
    nodes = {(n.name, "send_recv" if n.op == "placeholder" else ""): n.meta["collective"] for n in stages}
    buckets = {f"bucket{i}": b for i, b in enumerate(program.buckets)}
    regions = {r.name: r.cause for r in program.regions}
    others = {"loss": "the loss, to every rank", "outputs": "outputs beside the loss"}
    others |= {"grad_norm": "norm of the gradients"}
    others |= {b.name: "new values of buffers" for b in program.buffers}
    others |= {o.name: f"output {o.name!r}, to every stage" for o in program.outputs}
    for of_feature in registered("runtime", "CAUSES", program.features):
        others |= of_feature

    def cause(r: CommRecord) -> str:
        if r.axes == HOST_LINK:
            return regions.get(r.tag) or r.tag
        b = buckets.get(r.tag)
        scales = b is not None and r.kind == "all_reduce" and b.shard in r.axes  # of a gather in 8 bits
        if b is not None and r.direction == "update":
            return "updated parameters"
        if b is not None and r.kind != "all_gather" and not scales:
            return "gradients, in buckets"
        if (c := nodes.get(tag(r))) is not None:
            return (c.cause or IMPLICIT) + (": scales" if scales else "")
        return others.get(r.tag) or others.get(r.tag.rstrip("0123456789"), r.tag)

    return cause
