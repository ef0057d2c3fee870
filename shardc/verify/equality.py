"""Compare the compiled program on all loopback ranks with the single-device graph, in float64.

Weights and inputs are random. Compared are the loss, every gradient, every updated buffer and every output.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from shardc.ir.fused_regions import fused_regions, without_fused_regions
from shardc.ir.graph import values_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.types import OUTSIDE_DOMAIN
from shardc.ir.units import plural, size
from shardc.runtime.checks.engine_options import check_trains
from shardc.runtime.rng import Rng
from shardc.runtime.stage.outputs import divided
from shardc.verify.not_finite import op_on_ranks
from shardc.verify.random_batch import random_inputs, random_state
from shardc.verify.reference import interpret, reach
from shardc.verify.simulate import ReplicasDifferError, simulate
from shardc.verify.to_float64 import to_float64

#: Relative. The noise of float64 is 5e-16 per operation, and sums over ranks have another order.
TOLERANCE = 1e-12
#: How far a compiled step may be from the same step op by op, relative, in the program's own dtypes: a fused reduction
#: adds in another order, and fused 16-bit ops round once where single ops round each time.
OF_COMPILED = {torch.float64: TOLERANCE, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Finding:
    """One value that differs. where: parameter or value; what: how far off; fix: what to do about it."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}\n  fix: {self.fix}"


@dataclass(frozen=True)
class Report:
    """Result of `verify`.

    checked: number of values compared; worst: largest relative difference; seconds: duration; compiled: with
    `compiled=True`, the largest difference between the compiled step and the same step line by line.
    """

    findings: tuple[Finding, ...]
    checked: int
    worst: float
    seconds: float
    compiled: float | None = None

    @property
    def ok(self) -> bool:
        return not self.findings

    def __repr__(self) -> str:
        return f"<Report: {str(self).partition(chr(10))[0]}>"

    def __str__(self) -> str:
        if not self.ok and not self.checked:
            return "\n".join(["not compared with one device", *map(str, self.findings)])
        head = "equal to one device" if self.ok else f"{plural(len(self.findings), 'difference')} from one device"
        lines = [f"{head}: {self.checked} values, worst relative difference {self.worst:.1e}, {self.seconds:.1f} s"]
        if self.compiled is not None:
            lines.append(f"compiled, against the same step line by line: worst relative difference {self.compiled:.1e}")
        return "\n".join([*lines, *map(str, self.findings)])


def verify(program: Program, *, seed: int = 0, compiled: bool = False) -> Report:
    """Run one training step on the ranks and on one device; compare loss, gradients and buffers.

    Dropout stays on: its masks are the same on every mesh. Of a forward-only program, the outputs of one forward are
    compared. Needs memory for the model in float64 on every rank of the mesh; with too little, the report has a finding
    that says so. Nothing is read from or written to disk. Every dtype is widened, also in the casts of `precision:`:
    this checks the algebra of the splits, not the rounding of 16 bits.

    compiled: run compiled regions as compiled code against one device, and compare the compiled step with the same step
    line by line, in the program's own dtypes, within OF_COMPILED.
    Raises ShardcError for a program that trains no parameter.
    """
    start = time.perf_counter()

    def not_compared(where: str, fault: str, fix: str) -> Report:
        return Report((Finding(where, fault, fix),), 0, float("nan"), time.perf_counter() - start)

    if not program.forward_only:
        check_trains(program)
    need, free = _memory(program), _available()
    if need > free:
        fault = f"the check needs about {size(need)}, this machine has {size(free)} free"
        fix = "verify a smaller batch or fewer layers of the same model: rules and spec are the same"
        return not_compared(program.meta.get("model", "program"), fault, fix)
    double = to_float64(program, compiled=compiled)
    why = ""
    filled = any(b.constant is None and not b.dtype.is_floating_point for b in double.buffers)
    for integers, fractions in product((0, 1) if filled else (0,), (False, True)):
        weights = random_state(double, seed, integers=integers)
        params = {p.name: p.whole(weights).clone().requires_grad_(p.requires_grad) for p in double.params}
        buffers = {b.name: weights[b.fqn] for b in double.buffers if b.constant is None}
        batch = random_inputs(double, seed, fractions=fractions)
        try:
            loss, updated, outputs = interpret(
                double, params, buffers, {i.name: reach(batch, i.path) for i in double.inputs}, Rng(seed)
            )
        except OUTSIDE_DOMAIN as e:  # such as targets outside 0..1, a matrix that is not positive definite
            why = f"the model fails on one device ({type(e).__name__}: {str(e).splitlines()[0]})"
            continue
        if program.forward_only or bool(torch.isfinite(loss)):
            break
        why = f"the model's loss is {float(loss.detach())} on one device"
    else:
        fault = f"on random weights and inputs {why}: nothing can be compared"
        return not_compared("loss", fault, "compare with real weights: shardc.simulate(program, model, batch)")
    try:
        sim = simulate(double, weights, batch, seed=seed)
    except ReplicasDifferError as e:
        return not_compared(e.where, e.what, e.fix)
    #: (name, what it is, on one device, on the ranks)
    pairs: list[tuple[str, str, Tensor | None, Tensor | None]] = []
    if not program.forward_only:
        loss.backward()  # type: ignore[no-untyped-call]
        pairs = [("loss", "the loss", loss.detach(), sim.loss)]
    for p in (p for p in double.params if p.requires_grad):
        gradient = params[p.name].grad
        one_by_one = {} if gradient is None else p.by_name(gradient)
        pairs += [(n, "its gradient", one_by_one.get(n), sim.grads.get(n)) for n in (p.members or (p.fqn,))]
    for b in (b for b in double.buffers if b.updated):
        pairs.append((b.fqn, "its new value", updated[b.name].detach(), sim.state[b.fqn]))
    findings, of_compiled = _compiled(program, seed) if compiled else ([], None)
    # a gradient that is zero in exact arithmetic (a key's bias: softmax ignores it) is only rounding on both sides:
    # compare it relative to the norm of all gradients
    norms = [_wide(one).norm().square() for n, _, one, _ in pairs if n != "loss" and one is not None]
    floor = 1e-3 * float(sum(norms, torch.zeros(())).sqrt())
    off_by = [difference(one, many, 0.0 if name == "loss" else floor) for name, _, one, many in pairs]
    for name, x in divided(double, {name: x.detach() for name, x in outputs.items()}).items():
        pairs.append((f"output {name!r}", "the output", x, sim.outputs[name]))
        off_by.append(_of_output(x, sim.outputs[name]))
    op: str | None = None
    for (name, kind, one, many), off in zip(pairs, off_by, strict=True):
        if off <= TOLERANCE:
            continue
        message = f"{kind} differs from one device by {off:.1e} relative"
        if one is not None and many is not None and bool(one.isfinite().all()) and not bool(many.isfinite().all()):
            op = op_on_ranks(double, weights, batch, seed) if op is None else op
            message = f"{kind} is {many[~many.isfinite()][0].item()} on the ranks, and finite on one device"
            message += f"; {op}" if op else ""
        findings.append(Finding(name, message, "a bug in shardc or in a rule of your own: please report it"))
    worst = max(off_by, key=lambda x: math.inf if math.isnan(x) else x, default=0.0)
    return Report(tuple(findings), len(off_by), worst, time.perf_counter() - start, of_compiled)


def _compiled(program: Program, seed: int) -> tuple[list[Finding], float | None]:
    """Compare the compiled step with the same step line by line. Return findings and the worst difference."""
    if not any(fused_regions(g) for s in program.stages if s.joint is not None for g in s.joint.graphs.values()):
        fault, fix = "nothing of this program is compiled", "write `execution: {compile: layers}` in the spec"
        if program.spec.execution.compile == "layers":
            fault = "no lines of this program are worth compiling: calling them as one costs what it saves"
            fix = "compile it for a larger batch"
        return [Finding("execution.compile", fault, fix)], None
    weights, batch = random_state(program, seed), random_inputs(program, seed)
    plain, compiled = (simulate(p, weights, batch, seed=seed) for p in (without_fused_regions(program), program))
    values = (v for s in program.stages for n in s.graph.nodes for v in values_of(n))
    limit = max(OF_COMPILED.get(d, TOLERANCE) for d in {v.dtype for v in values if v.dtype.is_floating_point})
    floor = 1e-3 * max((float(_wide(g).norm()) for g in plain.grads.values()), default=0.0)
    named = {f"the gradient of {n}": (plain.grads.get(n), compiled.grads.get(n)) for n in plain.grads | compiled.grads}
    named |= {n: (x, compiled.state[n]) for n, x in plain.state.items()}
    off_by = {"loss": difference(plain.loss, compiled.loss)}
    off_by |= {n: difference(*pair, floor) for n, pair in named.items()}
    fault = "compiled, differs from the step line by line by {:.1e} relative"
    fix = "a bug in shardc: please report it, and leave `compile` out"
    return [Finding(n, fault.format(off), fix) for n, off in off_by.items() if not off <= limit], max(off_by.values())


def difference(one: Tensor | None, many: Tensor | None, floor: float = 0.0) -> float:
    """Return ‖many - one‖ / max(‖one‖, floor); inf if only one of the two exists.

    A missing gradient is not a gradient of zeros: an optimizer decays the weights in the second case.
    """
    if one is None or many is None:
        return 0.0 if one is many else float("inf")
    one, many = _wide(one), _wide(many)
    scale = max(float(one.norm()), floor)
    return float((many - one).norm()) / scale if scale else float(many.norm())


def _wide(x: Tensor) -> Tensor:
    """Return x in float64, or in complex128 if it is complex."""
    return x.to(torch.promote_types(x.dtype, torch.float64))


def _of_output(one: Tensor, many: Tensor) -> float:
    """Return the difference of an output, where equal elements (also nan and inf) do not count."""
    wide, other = _wide(one), _wide(many)
    same = (wide == other) | (wide.isnan() & other.isnan())
    return difference(wide.masked_fill(same, 0), other.masked_fill(same, 0), float(wide[wide.isfinite()].norm()))


def _memory(program: Program) -> float:
    """Estimate the bytes that the check needs in float64: weights, gradients and activations."""
    weights = sum(Value(p.shape, torch.float64).nbytes() for p in program.params)
    local = sum(Value(p.shape, torch.float64, False, p.layout).nbytes(program.mesh) for p in program.params)
    computed = (v for n in program.graph.nodes if n.op == "call_function" for v in values_of(n))
    acts = sum(replace(v, dtype=torch.float64).nbytes() for v in computed)
    return 3 * weights + program.mesh.world * 2 * local + 3 * acts


def _available() -> float:
    return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")) * 0.8
