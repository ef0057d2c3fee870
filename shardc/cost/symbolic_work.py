"""Closed forms of what a microbatch computes and sends: of the rehearsal's products of matrices and collectives, by
layer.

A product's flops are twice its result's elements times what is summed over; both are read back from the sizes of the op
that it belongs to. A collective's bytes are those of the node that it belongs to, or of the parameters of its bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce

import sympy  # type: ignore[import-untyped]
from sympy import Expr, Integer
from torch import fx

from shardc.cost.dry_run import Rehearsal
from shardc.cost.ledger import Op, Sent
from shardc.cost.symbols import Names, Sums
from shardc.ir.graph import operands_of, values_of
from shardc.ir.layers import layer_of
from shardc.ir.program import Bucket, Program, Source
from shardc.runtime.mesh import CommRecord


def computed(r: Rehearsal, names: Names, nodes: Mapping[str, fx.Node]) -> Sums:
    """Floating-point operations of a microbatch: forward, backward and what is computed again."""
    sums = Sums()
    for op in (w for w in _first(r) if isinstance(w, Op) and w.flops):
        node, elements = nodes.get(op.of), math.prod(op.shape)
        times = names.summed(op.flops // (2 * elements), node) if elements else Integer(0)
        sums.add(_layer(node), 2 * names.elements(op.shape, node) * times)
    return sums


def sent(program: Program, r: Rehearsal, names: Names, nodes: Mapping[str, fx.Node]) -> dict[tuple[str, str], Sums]:
    """{(axis, kind): bytes of whole tensors} of a step whose microbatches all are as the first: what is sent once a
    step is among it.
    """
    found: dict[tuple[str, str], Sums] = {}
    once = [w for part in (r.before, r.after, r.update) for w in part.work]
    for record in (w.record for w in (*_first(r), *once) if isinstance(w, Sent)):
        sums = found.setdefault((record.axis, record.kind), Sums())
        for layer, x in _bytes(program, record, names, nodes):
            sums.add(layer, x)
    return found


def _first(r: Rehearsal) -> Iterable[object]:
    """What the first microbatch takes."""
    return (w for action, part in r.actions if action.microbatch == 0 for w in part.work)


def _layer(node: fx.Node | None) -> tuple[str, str] | None:
    return layer_of(node.meta.get("source", Source()).module) if node is not None else None


def _bytes(
    program: Program, record: CommRecord, names: Names, nodes: Mapping[str, fx.Node]
) -> Iterable[tuple[tuple[str, str] | None, Expr]]:
    """By layer."""
    bucket = next((b for i, b in enumerate(program.buckets) if f"bucket{i}" == record.tag), None)
    if bucket is not None:
        params = [p for p in program.params if p.name in bucket.params]
        whole = sum(math.prod(p.value.local_shape(program.mesh)) for p in params)
        each = _of_element(bucket, record.bytes / max(whole, 1), {p.dtype.itemsize for p in params}, names, program)
        for p in params:
            yield layer_of(p.fqn), names.value(p.value) * each
        return
    node = nodes.get(record.tag)
    for v in (
        v for x in ((node, *operands_of(node)) if node is not None else ()) for v in values_of(x) if v is not None
    ):
        if v.nbytes(program.mesh) == record.bytes:
            yield _layer(node), reduce(lambda a, b: a * b, names.dims(v), Integer(1)) * v.dtype.itemsize
            return
    yield _layer(node), sympy.Integer(record.bytes)


def _of_element(bucket: Bucket, ratio: float, widths: set[int], names: Names, program: Program) -> Expr:
    """Bytes for each of a bucket's elements: all of one, or the part of it that ZeRO leaves a rank. Padding makes it a
    little more.
    """
    widths |= {bucket.dtype.itemsize, *([bucket.compute.itemsize] if bucket.compute is not None else [])}
    forms = [(float(w), Integer(w)) for w in widths]
    if bucket.zero and bucket.shard:
        forms += [(w / program.mesh.size(bucket.shard), w / names.axis(bucket.shard)) for w in widths]
    return min(forms, key=lambda f: abs(f[0] - ratio))[1]
