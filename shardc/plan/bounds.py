"""The best that a way to split could come to, from dry runs of others: what cannot be among the best is not run.

    twice as many ranks split a row's work       at best half the time and half the activations, nothing sent for it
    something is computed again                  at best the time of nothing, and the memory of everything

Latencies and the start of small ops become no less by splitting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from shardc.cost.ledger import KINDS
from shardc.plan.dry_runs import Stages
from shardc.plan.space import Core
from shardc.plan.stage_vectors import CAUSES, FIXED, FLOPS, HIGH, NET, SENT, Stage, Vector

#: Kinds that grow with the rows of a microbatch, and are split with them.
GROW = np.array([k in ("activations", "communication", "temporaries", "gathered", "inputs") for k in KINDS])


def relatives(core: Core, known: Mapping[Core, Stages]) -> tuple[Core, Core | None] | None:
    """What a bound of a core follows from: the nearest core that is known and is split no finer, without recomputation,
    and the same with everything recomputed, if that is known; None if there is none.
    """
    plain = [k for k in known if k.checkpoint == "none" and not (core.tp % k.tp or core.ep % k.ep or core.cp % k.cp)]
    if not plain:
        return None
    nearest = max(plain, key=lambda k: k.tp * k.ep * k.cp)
    full = nearest._replace(checkpoint="full")
    return nearest, full if full in known else None


def optimistic(core: Core, known: Mapping[Core, Stages]) -> Stages | None:
    """A lower bound of every number of a core's stages; None if nothing that is known says anything."""
    if (found := relatives(core, known)) is None:
        return None
    near, full = found
    stages = known[near]
    if core.checkpoint != "none":
        stages = _least(stages, known[full] if full is not None else None)
    work = near.tp * near.cp / (core.tp * core.cp)
    weights = near.tp * near.ep / (core.tp * core.ep)
    if work == weights == 1:
        return stages
    return _map(stages, lambda s: _scaled(s, work, weights), min(work, weights), weights)


def _map(stages: Stages, f: Callable[[Stage], Stage], casts: float, experts: float) -> Stages:
    a, b, c = stages.casts
    x, y, z = stages.experts
    return replace(
        stages,
        whole=None if stages.whole is None else f(stages.whole),
        first=f(stages.first),
        one=f(stages.one),
        two=f(stages.two),
        last=f(stages.last),
        casts=(a * casts, b * casts, c * casts),
        experts=(x * experts, y * experts, z * experts),
    )


def _scaled(s: Stage, work: float, weights: float) -> Stage:
    share = np.where(GROW, work, min(weights, 1.0))
    scaled: Stage = {}
    for key, v in s.items():
        x = v.copy()
        x[NET] *= share
        x[HIGH] *= share
        x[FLOPS] *= work
        x[SENT] *= work
        part = min(work, weights) if key[0] in ("before", "after", "update") else work
        x[CAUSES] = v[FIXED] + (v[CAUSES] - v[FIXED]) * part
        scaled[key] = x
    return scaled


def _least(plain: Stages, full: Stages | None) -> Stages:
    """The time of nothing computed again, the memory of everything."""

    def both(a: Stage, b: Stage | None) -> Stage:
        return {key: _lower(key, v, None if b is None else b.get(key)) for key, v in a.items()}

    def of(stage: str) -> Stage | None:
        return None if full is None else getattr(full, stage)

    if plain.whole is not None:
        return replace(plain, whole=both(plain.whole, of("whole")))
    return replace(
        plain,
        first=both(plain.first, of("first")),
        one=both(plain.one, of("one")),
        two=both(plain.two, of("two")),
        last=both(plain.last, of("last")),
    )


def _lower(key: tuple[str, str], plain: Vector, full: Vector | None) -> Vector:
    x = plain.copy()
    if key[0] in ("F", "B", "I", "W"):
        kept = np.zeros(len(KINDS)) if full is None else full[NET]
        x[NET] = np.where(GROW, kept, plain[NET])
        if key[0] == "F":
            x[HIGH] = np.where(GROW, np.minimum(plain[HIGH], kept), plain[HIGH])
        else:
            high = plain[HIGH] if full is None else np.minimum(plain[HIGH], full[HIGH])
            x[HIGH] = np.where(GROW, high, plain[HIGH])
    return x
