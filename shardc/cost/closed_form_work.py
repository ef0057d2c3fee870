"""Closed forms of what a microbatch computes and sends, from the matrix products and collectives of a dry run.

A product's flops are twice the elements of its result times the size that is summed over; both are read back from the
sizes of the op that it belongs to. A collective's bytes are those of its node, or of the parameters of its bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import reduce

import sympy  # type: ignore[import-untyped]
from sympy import Expr, Integer
from torch import fx

from shardc.cost.recorded import DryRun
from shardc.cost.size_symbols import LayerSums, Symbols
from shardc.ir.buckets import Bucket
from shardc.ir.comm_record import CommRecord
from shardc.ir.graph import operands_of, source_of, values_of
from shardc.ir.layers import layer_of
from shardc.ir.offload import HOST_LINK
from shardc.ir.program import Program
from shardc.machine.work import Op, Sent


def flops_by_layer(r: DryRun, symbols: Symbols, nodes: Mapping[str, fx.Node]) -> LayerSums:
    """Floating-point operations of a microbatch: forward, backward and recomputed."""
    sums = LayerSums()
    for op in (w for w in _first(r) if isinstance(w, Op) and w.flops):
        node, elements = nodes.get(op.of), math.prod(op.shape)
        times = symbols.contracted(op.flops // (2 * elements), node) if elements else Integer(0)
        sums.add(_layer(node), 2 * symbols.elements(op.shape, node) * times)
    return sums


def bytes_by_collective(
    program: Program, r: DryRun, symbols: Symbols, nodes: Mapping[str, fx.Node]
) -> dict[tuple[str, str], LayerSums]:
    """{(axis, kind): bytes of whole tensors} of a step of one microbatch, with what is sent once a step."""
    by_kind: dict[tuple[str, str], LayerSums] = {}
    once = [w for part in (r.before, r.after, r.update) for w in part.work]
    for record in (w.record for w in (*_first(r), *once) if isinstance(w, Sent) and w.record.axes != HOST_LINK):
        sums = by_kind.setdefault((record.axis, record.kind), LayerSums())
        for layer, x in _bytes(program, record, symbols, nodes):
            sums.add(layer, x)
    return by_kind


def _first(r: DryRun) -> Iterable[object]:
    """The work of the first microbatch."""
    return (w for action, part in r.actions if action.microbatch == 0 for w in part.work)


def _layer(node: fx.Node | None) -> tuple[str, str] | None:
    return layer_of(source_of(node).module) if node is not None else None


def _bytes(
    program: Program, record: CommRecord, symbols: Symbols, nodes: Mapping[str, fx.Node]
) -> Iterable[tuple[tuple[str, str] | None, Expr]]:
    """Bytes of a collective, by layer."""
    bucket = next((b for i, b in enumerate(program.buckets) if f"bucket{i}" == record.tag), None)
    if bucket is not None:
        params = [p for p in program.params if p.name in bucket.params]
        whole = sum(math.prod(p.value.local_shape(program.mesh)) for p in params)
        each = _of_element(bucket, record.bytes / max(whole, 1), {p.dtype.itemsize for p in params}, symbols, program)
        for p in params:
            yield layer_of(p.fqn), symbols.value(p.value) * each
        return
    node = nodes.get(record.tag)
    for v in (
        v for x in ((node, *operands_of(node)) if node is not None else ()) for v in values_of(x) if v is not None
    ):
        if v.nbytes(program.mesh) == record.bytes:
            yield _layer(node), reduce(lambda a, b: a * b, symbols.dims(v), Integer(1)) * v.dtype.itemsize
            return
    yield _layer(node), sympy.Integer(record.bytes)


def _of_element(bucket: Bucket, ratio: float, widths: set[int], symbols: Symbols, program: Program) -> Expr:
    """Bytes for each of a bucket's elements: of one element, or of a rank's part of it with ZeRO. ratio: measured,
    which padding makes a little larger.
    """
    widths |= {bucket.dtype.itemsize, *([bucket.compute.itemsize] if bucket.compute is not None else [])}
    forms = [(float(w), Integer(w)) for w in widths]
    if bucket.zero and bucket.shard:
        forms += [(w / program.mesh.size(bucket.shard), w / symbols.axis(bucket.shard)) for w in widths]
    return min(forms, key=lambda f: abs(f[0] - ratio))[1]
