"""Write the chosen spec as a YAML file, with the reason for every section in a comment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.ir.units import seconds, size
from shardc.plan.table import distinct, limit, microbatches, named, needed, rate, recompute, schedule

if TYPE_CHECKING:
    from shardc.plan.result import Candidate, Plan


def annotated(c: Candidate, plan: Plan) -> str:
    """Return the text of the file. It loads to an equal spec."""
    a = plan.target
    kinds = [f"{k} {size(n)}" for k, n in sorted(c.memory.items(), key=lambda x: -x[1]) if n > 0.01 * c.peak]
    head = [
        f"{a.model} on {c.devices} × {a.device.name}, planned by `shardc plan`: a prediction, not a measurement",
        f"global batch of {c.priced.batch} rows" + (f" of {a.sequence} tokens" if a.sequence else ""),
        f"step {seconds(c.step_seconds)}, {rate(c)}, MFU {c.mfu:.1%}, limited by {limit(c)}",
        needed(c),
        f"{size(c.peak)} live at the peak: {', '.join(kinds)}",
        *a.assumed,
    ]
    why = {**reasons(c, plan), **c.why}
    out = [f"# {line}" for line in head]
    for line in str(c.spec).splitlines():
        section = line.partition(":")[0]
        if section in why:
            out.append(f"# {why.pop(section)}")
        out.append(line)
    return "\n".join(out) + "\n"


def reasons(c: Candidate, plan: Plan) -> dict[str, str]:
    """Return {section: its reason}, from the price of this candidate and of the others."""
    s, a = c.spec, plan.target
    sizes = dict(s.mesh.axes)
    others = [x for x in plan.candidates if x is not c]
    reasons: dict[str, str] = {}
    mesh = []
    if sizes.get("tp", 1) > 1:
        inside = f"in one node of {a.device.node}" if sizes["tp"] <= a.device.node else f"over nodes of {a.device.node}"
        mesh.append(f"tp={sizes['tp']} {inside}: {c.shares.get('tp', 0):.0%} of a step waits for it")
    if sizes.get("pp", 1) > 1:
        mesh.append(f"pp={sizes['pp']}: {c.shares.get('bubble', 0):.0%} of a step is bubble")
    if sizes.get("cp", 1) > 1:
        mesh.append(f"cp={sizes['cp']}: {c.shares.get('cp', 0):.0%} of a step waits for the rest of the sequence")
    if sizes.get("ep", 1) > 1:
        mesh.append(f"ep={sizes['ep']}: experts over ranks that split the batch too")
    if sizes.get("dp", 1) > 1:
        mesh.append(f"dp={sizes['dp']}: {c.shares.get('dp', 0):.0%} of a step waits for gradients and weights")
    if c.devices < a.devices:
        mesh.append(f"{c.devices} of {a.devices} devices: with more it is slower, so the others are idle")
    reasons["mesh"] = "; ".join(mesh) or "one device"
    twins = next((group for first, group in distinct(plan.candidates) if first is c), [])
    if fitting := [x for x in others if x.fits and x not in twins]:
        near = min(fitting, key=lambda x: x.step_seconds)
        reasons["mesh"] += f". Next best that fits: {named(near)}, in {seconds(near.step_seconds)}"
    elif others:
        reasons["mesh"] += ". Nothing else that was priced fits"
    reasons["batch"] = f"{microbatches(c)} rows on each data rank"
    if s.shard_use:
        structure = "derived from the graph: weights that can be split with nothing gathered between them"
        reasons["shard"] = "the plan that the model carries" if s.shard_use == "model" else structure
    if s.sequence:
        reasons["sequence"] = (
            "each rank has a part of the tokens of every row, in two stretches where attention is causal"
        )
    if s.activations:
        reasons["activations"] = "sequence parallel: what layers pass on is split over tp, for the same bytes sent"
    if s.pipeline:
        reasons["pipeline"] = (
            f"{schedule(c)}: layers of each stage such that the slowest is as fast as possible (the first and the"
            " last have more to do)"
        )
    if s.data.zero:
        state = sum(c.memory.get(k, 0) for k in ("parameters", "optimizer", "gradients"))
        reasons["data"] = (
            f"ZeRO {s.data.zero}: parameters, gradients and optimizer state are {size(state)} a rank at the peak"
        )
    if s.data.offload.optimizer != "none":
        reasons["data"] = "nothing fits without the machine's memory; copies to and from it have no price here"
    if s.checkpoint:
        less = [x for x in others if recompute(x) == "none" and not x.fits]
        tried = f"; without, {size(min(x.needs for x in less))} at least" if less else ""
        reasons["checkpoint"] = (
            f"recompute {recompute(c)}: activations are {size(c.memory.get('activations', 0))} at the peak{tried}"
        )
    plain = [x for x in others if x.spec.to_dict() == {k: v for k, v in s.to_dict().items() if k != "execution"}]
    without = f": {seconds(plain[0].step_seconds)} without" if plain else ""
    reasons["execution"] = f"element-wise work of layers is compiled{without}"
    reasons["experts"] = "experts over ranks: tokens are exchanged"
    reasons["precision"] = "products in the compute dtype, master weights and sums of gradients in the others"
    return reasons
