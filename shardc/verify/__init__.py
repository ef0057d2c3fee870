"""The numeric check: the compiled program on all ranks of the loopback mesh against the single-device graph, in
float64.

Weights and inputs are random. What is compared is what a user would never notice: the loss, every gradient, every
buffer."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, fx

from shardc.artifact.emit import plural
from shardc.ir.program import Buffer, Param, Program, Stage, Value
from shardc.ir.types import OUTSIDE_DOMAIN
from shardc.runtime.rng import Rng
from shardc.verify.reference import interpret
from shardc.verify.simulate import simulate

TOLERANCE = 1e-12  # DESIGN section 6; float64 noise is 5e-16 per operation


@dataclass(frozen=True)
class Finding:
    """One thing that is not equal. where: parameter or value; what: how far off; fix: what to do about it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  fix: {self.fix}"


@dataclass(frozen=True)
class Report:
    """Result of `verify`. checked: number of values compared; worst: largest relative difference seen; seconds:
    duration.
    """

    findings: tuple[Finding, ...]
    checked: int
    worst: float
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if not self.ok and not self.checked:
            return "\n".join(["not compared with one device", *map(str, self.findings)])
        head = "equal to one device" if self.ok else f"{plural(len(self.findings), 'difference')} from one device"
        lines = [f"{head}: {self.checked} values, worst relative difference {self.worst:.1e}, {self.seconds:.1f} s"]
        return "\n".join([*lines, *map(str, self.findings)])


def verify(program: Program, *, seed: int = 0) -> Report:
    """Run one training step both ways and compare loss, gradients and buffers. Dropout stays on: its masks do not know
    the
    mesh.

    Needs memory for the model in float64 on every rank of the mesh; a program too large for this machine gives a
    finding that says so. Nothing is read from or written to disk.

    Every dtype is widened, the casts of `precision:` too: what is checked is the algebra of the splits, not the
    rounding of 16 bits."""
    start = time.perf_counter()
    need, there = _memory(program), _available()
    if need > there:
        finding = Finding(
            program.meta.get("model", "program"),
            f"the check needs about {need / 2**30:.1f} GiB, this machine has {there / 2**30:.1f} free",
            "verify a smaller batch or fewer layers of the same model: rules and spec are the same",
        )
        return Report((finding,), 0, float("nan"), time.perf_counter() - start)
    double = _in_float64(program)
    why = ""
    filled = any(b.constant is None and not b.dtype.is_floating_point for b in double.buffers)
    for integers, fractions in product((0, 1) if filled else (0,), (False, True)):
        weights = random_state(double, seed, integers=integers)
        params = {p.name: weights[p.fqn].clone().requires_grad_(p.requires_grad) for p in double.params}
        buffers = {b.name: weights[b.fqn] for b in double.buffers if b.constant is None}
        batch = random_inputs(double, seed, fractions=fractions)
        try:
            loss, news = interpret(
                double, params, buffers, {i.name: _leaf(batch, i.path) for i in double.inputs}, Rng(seed)
            )
        except OUTSIDE_DOMAIN as e:  # a target that is no probability, a matrix that is not positive definite
            why = f"the model fails on one device ({type(e).__name__}: {str(e).splitlines()[0]})"
            continue
        if bool(torch.isfinite(loss)):
            break
        why = f"the model's loss is {float(loss.detach())} on one device"
    else:
        what = f"on random weights and inputs {why}: nothing can be compared"
        finding = Finding("loss", what, "compare with real weights: shardc.verify.simulate(program, model, batch)")
        return Report((finding,), 0, float("nan"), time.perf_counter() - start)
    loss.backward()  # type: ignore[no-untyped-call]
    sim = simulate(double, weights, batch, seed=seed)

    pairs: list[tuple[str, Tensor | None, Tensor | None]] = [("loss", loss.detach(), sim.loss)]
    pairs += [(p.fqn, params[p.name].grad, sim.grads.get(p.fqn)) for p in double.params if p.requires_grad]
    pairs += [(b.fqn, news[b.name].detach(), sim.state[b.fqn]) for b in double.buffers if b.updated]
    findings, worst = [], 0.0
    # a gradient that is zero in exact arithmetic (a key's bias: softmax does not see it) is rounding on both sides:
    # measure it against the whole gradient's size
    floor = 1e-3 * float(
        sum((g.double().norm().square() for n, g, _ in pairs[1:] if g is not None), torch.zeros(())).sqrt()
    )
    for name, one, many in pairs:
        off = difference(one, many, 0.0 if name == "loss" else floor)
        worst = max(worst, off)
        if not off <= TOLERANCE:
            what = (
                "the loss"
                if name == "loss"
                else "its gradient"
                if name in {p.fqn for p in double.params}
                else "its new value"
            )
            findings.append(
                Finding(
                    name,
                    f"{what} differs from one device by {off:.1e} relative",
                    "a bug in shardc or in a rule of your own: please report it",
                )
            )
    return Report(tuple(findings), len(pairs), worst, time.perf_counter() - start)


def difference(one: Tensor | None, many: Tensor | None, floor: float = 0.0) -> float:
    """‖many - one‖ / max(‖one‖, floor); a gradient that is missing counts as zeros."""
    if one is None and many is None:
        return 0.0
    if one is None or many is None:
        there = one if one is not None else many
        assert there is not None
        return 0.0 if not there.any() else float("inf")
    scale = max(float(one.double().norm()), floor)
    return float((many.double() - one.double()).norm()) / scale if scale else float(many.double().norm())


def _float64(x: Any) -> Any:
    return torch.float64 if isinstance(x, torch.dtype) and x.is_floating_point else x


def _in_float64(program: Program) -> Program:
    """The same program with every floating dtype float64, so that a difference cannot hide in rounding."""

    def convert(graph: fx.Graph) -> fx.Graph:
        copy = fx.Graph()
        copy.output(copy.graph_copy(graph, {}))
        for node in copy.nodes:
            node.args = fx.node.map_aggregate(node.args, _float64)
            node.kwargs = fx.node.map_aggregate(node.kwargs, _float64)
            value = node.meta.get("value")
            if value is not None:
                node.meta["value"] = tuple(map(double, value)) if isinstance(value, tuple) else double(value)
        return copy

    def double(v: Value) -> Value:
        return replace(v, dtype=_float64(v.dtype))

    def constant(b: Any) -> Any:
        c = b.constant.double() if b.constant is not None and b.constant.is_floating_point() else b.constant
        return replace(b, dtype=_float64(b.dtype), constant=c)

    return replace(
        program,
        graph=convert(program.graph),
        stages=tuple(replace(s, graph=convert(s.graph)) for s in program.stages),
        prologue=Stage(convert(program.prologue.graph), program.prologue.name)
        if program.prologue is not None
        else None,
        params=tuple(replace(p, dtype=_float64(p.dtype)) for p in program.params),
        buffers=tuple(map(constant, program.buffers)),
        inputs=tuple(replace(i, dtype=_float64(i.dtype)) for i in program.inputs),
        buckets=tuple(replace(b, dtype=_float64(b.dtype), compute=None) for b in program.buckets),
    )


def random_state(program: Program, seed: int, *, integers: int = 0) -> dict[str, Tensor]:
    """Random parameters (scaled as an initialisation would) and buffers, by every FQN they have.

    integers: what buffers of integers and truth values are filled with. Of a causal mask, one of 0 and 1 hides nothing,
    the other all."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    stored: list[Param | Buffer] = [*program.params, *(b for b in program.buffers if b.constant is None)]
    for x in stored:
        if not x.dtype.is_floating_point:
            value = torch.full(x.shape, integers, dtype=x.dtype)
        else:
            noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
            middle = (
                1 if isinstance(x, Param) else 0.5
            )  # gains; variances, and tables of rates whose complement has a root
            value = (noise * x.shape[-1] ** -0.5 if len(x.shape) > 1 else middle + 0.1 * noise).to(x.dtype)
        state |= dict.fromkeys((x.fqn, *x.aliases), value)
    return state


def random_inputs(program: Program, seed: int, *, fractions: bool = False) -> Any:
    """A random batch in the user's own structure. Integers stay in the range that the graph looks them up in.

    fractions: numbers between 0 and 1, as probabilities are, instead of normal ones.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    nodes = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    leaves: dict[tuple[str | int, ...], Tensor] = {}
    for x in program.inputs:
        if x.dtype.is_floating_point:
            draw = torch.rand if fractions else torch.randn
            leaves[x.path] = draw(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)
        else:
            bound = min(_bounds(nodes[x.name]), default=2)
            leaves[x.path] = torch.randint(0, max(bound, 1), x.shape, generator=generator).to(x.dtype)
    return _nest(leaves)


def _bounds(node: fx.Node, seen: set[fx.Node] | None = None) -> Iterator[int]:
    """Sizes of what an integer value is used to look up: rows of an embedding, classes of a loss."""
    seen = seen if seen is not None else set()
    for user in node.users:
        if user in seen or user.op != "call_function":
            continue
        seen.add(user)
        name = getattr(user.target, "__name__", str(user.target))
        first = user.args[0] if user.args else None
        shape: tuple[int, ...] = (
            first.meta["value"].shape
            if isinstance(first, fx.Node) and isinstance(first.meta.get("value"), Value)
            else ()
        )
        if name.startswith("embedding") and node is not first:
            yield shape[0]
        elif name == "nll" and node is not first:
            yield shape[1 if len(shape) > 1 else 0]
        elif name.startswith("one_hot"):
            yield user.meta["value"].shape[-1]
        elif isinstance(user.meta.get("value"), Value) and not user.meta["value"].dtype.is_floating_point:
            yield from _bounds(user, seen)


def _nest(leaves: dict[tuple[str | int, ...], Tensor]) -> Any:
    if set(leaves) == {()}:
        return leaves[()]
    heads: dict[str | int, dict[tuple[str | int, ...], Tensor]] = {}
    for path, leaf in leaves.items():
        heads.setdefault(path[0], {})[path[1:]] = leaf
    if all(isinstance(k, int) for k in heads):
        return tuple(_nest(heads[k]) for k in sorted(heads, key=int))
    return {k: _nest(v) for k, v in heads.items()}


def _leaf(batch: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        batch = batch[key]
    return batch


def _memory(program: Program) -> float:
    """Bytes in float64: weights and gradients, twice on the reference, once a rank; activations of one device and of
    the ranks.
    """
    weights = sum(8 * Value(p.shape, torch.float64).nbytes() // 8 for p in program.params)
    local = sum(Value(p.shape, torch.float64, False, p.layout).nbytes(program.mesh) for p in program.params)
    acts = 0
    for node in program.graph.nodes:
        v = node.meta.get("value")
        for one in v if isinstance(v, tuple) else (v,) if v is not None and node.op == "call_function" else ():
            acts += replace(one, dtype=torch.float64).nbytes()
    return 3 * weights + program.mesh.world * 2 * local + 3 * acts


def _available() -> float:
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) * 0.8
