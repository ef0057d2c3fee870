"""Check that each gradient is summed once over exactly the right axes, and each element has one owner.

The right axes are those on which ranks have summands of the gradient. The owner updates and publishes the element.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shardc.ir.placement import PartialGrad, Shard
from shardc.ir.program import Program
from shardc.ir.stored import Param
from shardc.runtime.zero.flat_partition import Flat

#: The parameter or bucket, and what is wrong with it.
Wrong = tuple[str, str]


def wrong(program: Program) -> Iterator[Wrong]:
    """Yield what is wrong with the sums of gradients and with the owners of parameters.

    shardc.verify.static.proof checks how texts use parameters against `Param.reduce`; here sums are checked against it.
    Parameters and buckets name each other (shardc.artifact.tables).
    """
    for p in program.params:
        yield from _of_param(program, p)
    for i, b in enumerate(program.buckets):
        yield from _owners(program, i)
        late = any("[" in a for a in b.axes)
        if late and not b.late:
            yield f"bucket{i}", "ranks of other stages sum it too, and it begins before they have all got there"
        if b.late and not late:
            yield f"bucket{i}", "it waits for other stages, and sums over none"


def _of_param(program: Program, p: Param) -> Iterator[Wrong]:
    summed, trained = set(program.mesh.digits(*p.reduce)), p.requires_grad
    declared = {a for a, x in p.layout.items if isinstance(x, PartialGrad)} if trained else set()
    shared = {program.replica_axis(p)} - {""} if trained else set()
    if missing := sorted((declared | shared) - summed):
        yield p.fqn, f"ranks of {', '.join(missing)} have summands of its gradient, and nothing sums them"
    if extra := sorted(summed - declared - shared):
        yield p.fqn, f"its gradient is summed over {', '.join(extra)}, where ranks have the whole of it"
    b, bucket = program.bucket(p), f"bucket{p.bucket}"
    if b is None:
        if p.reduce:
            yield p.fqn, f"its gradient is summed over {', '.join(p.reduce)}, and no bucket has it"
        return
    if trained and sorted(program.mesh.digits(*b.axes)) != sorted(program.mesh.digits(*p.reduce)):
        yield p.fqn, f"{bucket} sums over ({', '.join(b.axes)}), its gradient wants ({', '.join(p.reduce)})"
    if p.dtype.is_floating_point and any(x.dtype != p.dtype for x in map(program.param, b.params)):
        yield p.fqn, f"{bucket} has parameters of other dtypes"
    if p.stages and set(p.stages) != set(b.stages):
        yield p.fqn, f"stages {list(p.stages)} use it, and {bucket} is of stages {list(b.stages)}"


def _owners(program: Program, i: int) -> Iterator[Wrong]:
    """Check a bucket that is cut (ZeRO): its axis holds copies, and the ranks' parts are all of it, once."""
    b = program.buckets[i]
    if not b.zero:
        if b.shard:
            yield f"bucket{i}", f"it is cut over {b.shard}, at zero 0"
        return
    parts = program.mesh.digits(b.shard)
    for p in map(program.param, b.params):
        if any(isinstance(p.layout[part], Shard) for part in parts):
            yield p.fqn, f"it is split over {b.shard}, and bucket{i} cuts it there again"
    flat = Flat.of(program, b)
    ends = sorted(zip(flat.starts, flat.sizes, strict=True))
    if any(start + size > after for (start, size), (after, _) in pairwise(ends)):
        yield f"bucket{i}", "two of its parameters lie in the same place"
    if any(start + size > flat.part * flat.ranks for start, size in ends):
        yield f"bucket{i}", "no rank keeps its end"
    if flat.ranks != program.mesh.size(b.shard):
        yield f"bucket{i}", f"{flat.ranks} ranks keep a part, and {b.shard} has {program.mesh.size(b.shard)}"
