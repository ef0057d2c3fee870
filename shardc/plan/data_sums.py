"""What ZeRO and data parallelism send, as estimates see it: the seconds of sums and gathers that computing does not
hide, and the bytes of buckets that are whole for a moment.
"""

from __future__ import annotations

import numpy as np

from shardc.plan.columns import OF_EXPERTS, Columns
from shardc.plan.rank_loads import KIND, Each
from shardc.plan.stage_vectors import Vector

#: Of ZeRO's collectives, the share that nothing hides in any case: the first gather, or the last sum.
_SEEN = 0.05


def passing(t: Columns, x: Each, weights: Vector) -> Vector:
    """Bytes of buckets that are whole for a moment, in backward, beside what ZeRO shards: two of gradients, one
    that fills while the one before it is summed; and at ZeRO 3 two of weights, of which one is on its way.
    """
    gradients = x.resident[:, KIND["gradients"]]
    share = np.minimum(2 / np.maximum(t.buckets(x.buckets + x.experts_buckets, gradients), 1), 1)
    each = (t.zero > 1) & ~t.kept
    nbytes: Vector = np.where(each, share * (gradients + np.where(t.zero == 3, weights, 0)), 0)
    return nbytes


def exposed(
    t: Columns, x: Each, weights: Vector, again: Vector, f: Vector, b: Vector, slower: float
) -> tuple[Vector, ...]:
    """Seconds of collectives over the data axes that do not overlap, or of ZeRO's over the sequence's axis: what is
    not sharded there is summed in the dry run. Of a step, of each microbatch's forward, and of its backward.
    weights, again: bytes of weights as forward and backward gather them. f, b: seconds of a microbatch's forward and
    backward. slower: the share of its speed that a device loses beside a collective.
    """
    grads, experts = x.resident[:, KIND["gradients"]], x.experts
    dense = 1 - experts
    sharded = np.where(t.over_experts, dense, 1.0)
    # each bucket is a collective of its own, which takes a while to begin
    some = t.buckets(x.buckets, grads * dense), t.buckets(x.experts_buckets, grads * experts)
    # weights that are gathered as they are stored go in buckets of their own
    some[0][:] += t.per_rank * ((t.zero > 0) & (x.plain > 0) & (x.cast > 0))
    at_once = np.where(t.over_experts, some[0], some[0] + some[1])

    def taken(kind: str, nbytes: Vector) -> Vector:
        """Over the axis that ZeRO shards over, and over that of experts, where it is another one: layer by layer,
        one after the other.
        """
        return t.taken(kind, nbytes * sharded, at_once) + t.taken(OF_EXPERTS[kind], nbytes * experts, some[1])

    gather, regather = taken("all_gather", weights), taken("all_gather", again)
    scatter = taken("reduce_scatter", grads)
    # once a step what is left on a rank is summed over replicas; all of it leaves over the same links, those of dp
    left = np.where(t.zero == 0, 1.0, 1 / t.sharded)
    of_experts = t.taken("sum of experts", grads * experts * left, some[1])
    of_experts += t.taken("scatter of experts", grads * experts, some[1])
    summed = t.taken("sum of dense", grads * dense * left, some[0]) + of_experts

    # of each stage's the first gather and the last sum have nothing beside them
    ends = t.per_rank / np.maximum(at_once, t.per_rank)
    seen = np.maximum(ends, _SEEN)

    def beside(communicating: Vector, computing: Vector, seen: Vector) -> Vector:
        left = communicating - computing * (1 - seen)
        shown: Vector = np.maximum(left, (seen + slower * (1 - seen)) * communicating)
        return shown

    def in_turn(communicating: Vector, computing: Vector, seen: Vector) -> Vector:
        """One bucket at a time. Of those that are used together each hides behind no more than is computed from one
        bucket to the next; others take as long as the products with them, in proportion.
        """
        together = communicating * x.together
        apart = communicating - together
        return beside(apart, computing, seen) + beside(together, computing * x.together_buckets, seen)

    each = (t.zero == 3) & ~t.kept
    scattered = in_turn(scatter, b, ends)
    forward = np.where(each, in_turn(gather, f, seen), 0)
    backward = np.where(each, in_turn(regather + scatter, b, seen), np.where(t.zero == 2, scattered, 0))
    all_sums = np.where(each, regather + summed, summed)
    last = np.where(t.zero == 0, 0, np.where(each, backward, scattered))
    last = np.maximum(beside(all_sums, b, ends), last) - backward
    once = np.where((t.zero > 0) & ~each, beside(gather, f, seen), 0)
    # one stage of a pipeline after the other waits for them: but not for the last bucket, nor for the last
    # update's, nor for sums that are waited for after backward
    once *= np.where(t.kept, t.stages, 1)
    last *= np.where(t.zero > 1, 1 + (t.stages - 1) * (1 - 1 / np.maximum(at_once, 1)), 1)
    return once + last, forward, backward
