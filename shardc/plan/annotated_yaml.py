"""Write the chosen spec as a YAML file, with the reason for every section in a comment."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardc.ir.units import seconds, size
from shardc.plan.table import limit, microbatches, named, needed, rate, recompute, schedule

if TYPE_CHECKING:
    from shardc.plan.result import Candidate, Plan


def annotated(c: Candidate, plan: Plan) -> str:
    """Return the text of the file. It loads to an equal spec."""
    a = plan.target
    kinds = [f"{k} {size(n)}" for k, n in sorted(c.memory.items(), key=lambda x: -x[1]) if n > 0.01 * c.peak]
    head = [
        f"{a.model} on {c.devices} × {a.device.name}, planned by `shardc plan`: a prediction, not a measurement",
        f"global batch of {c.batch} rows" + (f" of {a.sequence} tokens" if a.sequence else ""),
        f"step {seconds(c.step_seconds)}, {rate(c)}, MFU {c.mfu:.1%}, limited by {limit(c)}",
        needed(c),
        f"{size(c.peak)} live at the peak: {', '.join(kinds)}",
        *a.assumed,
    ]
    why = reasons(c, plan)
    out = [f"# {line}" for line in head]
    for line in str(c.spec).splitlines():
        section = line.partition(":")[0]
        if section in why:
            out.append(f"# {why.pop(section)}")
        out.append(line)
    return "\n".join(out) + "\n"


#: Reasons that do not depend on prices.
WHY = {
    "sequence": "each rank has a part of the tokens of every row, in two stretches where attention is causal",
    "activations": "sequence parallel: what layers pass on is split over tp, for the same bytes sent",
    "parts": "an encoder's rows are split over all ranks of a stage, and its weights over none",
    "experts": "experts over ranks: tokens are exchanged",
    "precision": "products in the compute dtype, master weights and sums of gradients in the others",
}


def reasons(c: Candidate, plan: Plan) -> dict[str, str]:
    """Return {section: its reason}, from the price of this candidate and of the others."""
    s, a = c.spec, plan.target
    sizes, others = dict(s.mesh.axes), [x for x in plan.candidates if x is not c]
    share = {cause: f"{c.shares.get(cause, 0):.0%} of a step" for cause in ("tp", "bubble", "cp", "dp")}
    inside = "in one node" if sizes.get("tp", 1) <= a.device.node else "over nodes"
    mesh = {
        "tp": f" {inside} of {a.device.node}: {share['tp']} waits for it",
        "pp": f": {share['bubble']} is bubble",
        "cp": f": {share['cp']} waits for the rest of the sequence",
        "ep": ": experts over ranks that split the batch too",
        "dp": f": {share['dp']} waits for gradients and weights",
    }
    words = [f"{axis}={sizes[axis]}{text}" for axis, text in mesh.items() if sizes.get(axis, 1) > 1]
    if c.devices < a.devices:
        words.append(f"{c.devices} of {a.devices} devices: with more it is slower, so the others are idle")
    near = min((x for x in others if x.fits), key=lambda x: x.step_seconds, default=None)
    following = f"Next best that fits: {named(near)}, in {seconds(near.step_seconds)}" if near else ""
    following = following or ("Nothing else that was priced fits" if others else "")
    state = sum(c.memory.get(k, 0) for k in ("parameters", "optimizer", "gradients"))
    data = f"ZeRO {s.data.zero}: parameters, gradients and optimizer state are {size(state)} a rank at the peak"
    if s.data.offload.optimizer != "none":
        data = "nothing fits without the machine's memory; copies to and from it have no price here"
    structure = "derived from the graph: weights that can be split with nothing gathered between them"
    less = [x.needs for x in others if recompute(x) == "none" and not x.fits]
    tried = f"; without, {size(min(less))} at least" if less else ""
    plain = {k: v for k, v in s.to_dict().items() if k != "execution"}
    without = next((f": {seconds(x.step_seconds)} without" for x in others if x.spec.to_dict() == plain), "")
    return {
        **WHY,
        "mesh": ". ".join(filter(None, ("; ".join(words) or "one device", following))),
        "batch": f"{microbatches(c)} rows on each data rank",
        "shard": "the plan that the model carries" if s.shard_use == "model" else structure,
        "pipeline": f"{schedule(c)}: layers of each stage such that the slowest is as fast as possible (the first and"
        " the last have more to do)",
        "data": data,
        "checkpoint": f"recompute {recompute(c)}: activations are {size(c.memory.get('activations', 0))} at the peak"
        f"{tried}",
        "execution": f"element-wise work of layers is compiled{without}",
    }
