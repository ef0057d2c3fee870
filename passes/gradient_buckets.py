"""Group the gradients that ranks sum into buckets, in the order of backward; with ZeRO, shard the buckets (ZeRO)."""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.errors import ShardcError
from shardc.ir.graph import copy_graph, source_of
from shardc.ir.mesh import JOIN, Mesh, is_data_axis
from shardc.ir.metadata import Collective, Value
from shardc.ir.placement import PartialGrad, Shard
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.stored import Bucket, Param, Rounded
from shardc.ir.types import full_op_name
from shardc.optional import registered
from shardc.passes.base import Pass
from shardc.passes.precision import dtype_of
from shardc.runtime import ops
from shardc.runtime.zero.flat_partition import Flat
from shardc.torch_private import add_node

_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class GradientBuckets(Pass):
    """Moves the reductions of parameters' gradients into buckets, and shards the buckets over a data axis.

    `Data.bucket_bytes` is the size of a bucket.

    With several data axes, a bucket is sharded over the innermost axis that does not already split its parameters, and
    replicated over the others. So with `axis: [dp, ep]` experts are sharded over dp, and all else over ep. Without
    `data.axis`, the axes are dp and dp_*, or, without those, the axes of `sequence`.
    """

    def _shard_axes(self) -> tuple[str, ...]:
        """Return the axes over which buckets may be sharded, innermost first."""
        named_dp = tuple(n for n in self.spec.mesh.names if is_data_axis(n))
        return tuple(reversed(self.spec.data.axis or named_dp or self.spec.token_axes))

    def run(self, program: Program) -> Program:
        uses, mesh, zero = _Uses(program), program.mesh, self.spec.data.zero
        if program.buckets:  # they are another program's (shardc.passes.match_recompiled)
            return self._with_gathers(program, uses)
        finish = sorted(program.params, key=lambda p: -uses.first.get(p.name, -uses.end))
        order = {p.name: i for i, p in enumerate(finish)}
        axes = self._shard_axes()
        notes = program.notes
        if zero and not uses.rows and not any(self._shards(a, mesh) for a in axes):
            notes = (*notes, f"zero: {zero} shards nothing: the mesh {mesh} has no data axis of more than one rank")

        merged: dict[int, tuple[str, ...]] = {}  # by the identity of a layout, which equal layers share

        def reduced(p: Param) -> tuple[str, ...]:
            if not p.requires_grad:
                return ()
            if id(p.layout) not in merged:
                summed = tuple(a for a, placement in p.layout.items if isinstance(placement, PartialGrad))
                merged[id(p.layout)] = mesh.merge(summed)
            shared = program.replica_axis(p)
            return merged[id(p.layout)] + ((shared,) if shared else ())

        reduce = {p.name: reduced(p) for p in program.params}
        buckets = self._buckets(finish, reduce, uses, axes, mesh)
        # the engine starts buckets in the same order on all ranks: by when their last gradient finishes
        buckets.sort(key=lambda b: (b.late, max(order[n] for n in b.params)))
        index = {name: i for i, b in enumerate(buckets) for name in b.params}
        params = tuple(
            p.changed({"reduce": reduce[p.name], "order": order[p.name], "bucket": index.get(p.name, -1)})
            for p in program.params
        )
        return self._with_gathers(replace(program, params=params, buckets=tuple(buckets), notes=notes), uses)

    def _with_gathers(self, program: Program, uses: _Uses) -> Program:
        if any(b.zero for b in program.buckets):
            stages = tuple(replace(s, graph=self._whole(i, program, uses)) for i, s in enumerate(program.stages))
            program = replace(program, stages=stages)
        return program

    def _buckets(
        self, params: list[Param], reduce: Mapping[str, tuple[str, ...]], uses: _Uses, axes: tuple[str, ...], mesh: Mesh
    ) -> list[Bucket]:
        """Fill buckets with parameters in the order in which gradients finish. reduce: the axes of each sum."""
        section, summed_in = self.spec.data, dtype_of(self.spec.precision.reduce)
        buckets: list[Bucket] = []
        filling: list[tuple[list[str], list[Rounded]]] = []  # for each bucket: its parameters, and how they are rounded
        open_at: dict[Hashable, tuple[int, int]] = {}
        sizes: dict[tuple[Any, ...], int] = {}  # by layouts' identity, too
        for p in params:
            over = reduce[p.name]
            axis = self._cut(p, over, axes, mesh)
            if section.zero and (rows := uses.rows.get(p.name)):
                over, axis = self._joined(over, axis, rows, mesh)
            zero = self._zero(p, uses) if axis else 0
            if not over and not zero:
                continue
            dtype = summed_in if summed_in is not None and p.dtype.is_floating_point else p.dtype
            if (of := (p.shape, p.dtype, id(p.layout))) not in sizes:
                value = p.value
                sizes[of] = max(replace(value, dtype=dtype).nbytes(mesh), value.nbytes(mesh))
            size = sizes[of]
            compute = uses.dtype(p) if zero else None
            rounded = uses.rounded(p.name) if zero == 3 else None
            # parameters of one dtype together; gathered ones only with those that are needed at the same time
            key = (
                over,
                p.dtype,
                zero,
                axis,
                compute,
                rounded is not None,
                p.stages,
                zero == 3 and (p.requires_grad, p.name in uses.first, uses.far(p.name)),
            )
            last, filled = open_at.get(key, (-1, 0))
            ranks = math.prod(mesh.size(a) for a in {*over, *((axis,) if zero else ())})
            if last < 0 or filled + size > section.bucket_bytes(ranks):
                last, filled = len(buckets), 0
                late = any("[" in a for a in over)
                keep = zero == 3 and section.keep
                cut = axis if zero else ""
                buckets.append(Bucket(over, dtype, (), cut, zero, compute, p.stages or (0,), late, keep))
                filling.append(([], []))
            filling[last][0].append(p.name)
            filling[last][1].extend([] if rounded is None else [rounded])
            open_at[key] = (last, filled + size)
        return [
            replace(b, params=tuple(names), rounded=tuple(rounded))
            for b, (names, rounded) in zip(buckets, filling, strict=True)
        ]

    def _cut(self, p: Param, reduce: tuple[str, ...], axes: tuple[str, ...], mesh: Mesh) -> str:
        """Return the first of these axes that does not split a parameter yet; "" if there is none."""

        def whole(axis: str) -> bool:
            parts = mesh.digits(axis)
            split = any(isinstance(p.layout[part], Shard) for part in parts)
            return not split and (axis in reduce or not set(reduce) & set(parts))

        axis = next((a for a in axes if whole(a)), "")
        return axis if axis and self._shards(axis, mesh) else ""

    def _joined(
        self, reduce: tuple[str, ...], axis: str, rows: tuple[str, ...], mesh: Mesh
    ) -> tuple[tuple[str, ...], str]:
        """Return the axes of a sum with the data axis and a part's row digits as one, and that one.

        They stay as they are if the sum is not over all of these.
        """
        joined = JOIN.join(mesh.merge((*rows, *((axis,) if axis else ()))))
        together = set(mesh.digits(joined))
        if not together <= set(mesh.digits(*reduce)):
            return reduce, axis
        others = [a for a in mesh.digits(*reduce) if a not in together and "[" not in a]
        return (joined, *mesh.merge(others), *(a for a in reduce if "[" in a)), joined

    def _shards(self, axis: str, mesh: Mesh) -> bool:
        """Return whether a data axis shards: it has several ranks, or parameters are offloaded."""
        return mesh.size(axis) > 1 or self.spec.data.offload.parameters != "none"

    def _zero(self, p: Param, uses: _Uses) -> int:
        """Return the ZeRO level of a parameter that can be cut."""
        zero = self.spec.data.zero
        return zero if zero == 3 or (p.requires_grad and p.name in uses.first) else 0

    # --- where parameters are whole

    def _whole(self, stage: int, program: Program, uses: _Uses) -> fx.Graph:
        """Return a copy of a stage's graph whose ops read cut buckets through `gather_wait` and `updated`."""
        copy = copy_graph(program.stages[stage].graph)
        nodes = {n.name: n for n in copy.nodes}
        position = {n: i for i, n in enumerate(copy.nodes)}.__getitem__
        used: list[tuple[fx.Node, int]] = []
        for i, b in enumerate(program.buckets):
            first_users = [nodes[name] for name in uses.first_users(stage, b.params)]
            if b.zero and first_users:
                used.append((min(first_users, key=position), i))
        used.sort(key=lambda u: position(u[0]))
        started: dict[int, fx.Node] = {}

        def start(at: int) -> None:
            if at < len(used) and used[at][1] not in started:
                started[used[at][1]] = self._start(copy, nodes, used[at][1], program)

        for at, (user, i) in enumerate(used):
            b = program.buckets[i]
            before = copy.create_node(
                "call_function", operator.pos, (), {}
            )  # keeps the place, because users that are casts are erased
            user.prepend(before)
            with copy.inserting_before(before):
                if b.zero == 3:
                    for ahead in range(min(at + max(self.spec.data.prefetch, 1), len(used))):
                        start(ahead)
                    whole = _node(copy, ops.gather_wait, (started[i],), f"bucket{i}_whole", _types(program, b))
                    start(at + self.spec.data.prefetch)
                else:
                    whole = self._start(copy, nodes, i, program)
                for k, (name, value) in enumerate(zip(b.params, _types(program, b), strict=True)):
                    users = [u for u in nodes[name].users if u.target not in (ops.gather_start, ops.updated)]
                    if users:
                        item = _node(copy, operator.getitem, (whole, k), f"{name}_whole", value)
                        for u in users:
                            if b.compute is not None and (u.target, u.kwargs) != (_CAST, {"dtype": b.compute}):
                                raise _read_otherwise(program.param(name), b.compute, u)
                            u.replace_input_with(nodes[name], item)
                            if b.compute is not None:  # its only users are casts to this dtype
                                u.replace_all_uses_with(item)
                                copy.erase_node(u)
            copy.erase_node(before)
        return copy

    def _start(self, graph: fx.Graph, nodes: dict[str, fx.Node], i: int, program: Program) -> fx.Node:
        b = program.buckets[i]
        params = tuple(nodes[n] for n in b.params)
        name = f"bucket{i}" if b.zero == 3 else f"bucket{i}_whole"
        node = _node(
            graph, ops.gather_start if b.zero == 3 else ops.updated, (params, f"bucket{i}"), name, _types(program, b)
        )
        if b.zero == 3:
            cause = f"{self.spec.where(('data', 'zero'))} zero: {self.spec.data.zero}"
            nbytes = Flat.of(program, b).padded * _types(program, b)[0].dtype.itemsize
            back = "reduce_scatter" if b.shard in b.axes else "all_reduce" if b.axes else "none"
            packed = Flat.of(program, b).padded if b.rounded else 0
            node.meta["collective"] = Collective("all_gather", back, (b.shard,), nbytes, cause, packed=packed)
        return node


def _node(
    graph: fx.Graph, target: object, args: tuple[object, ...], name: str, value: Value | tuple[Value, ...]
) -> fx.Node:
    meta = {"value": value, "source": Source()}
    return add_node(graph, "call_function", target, args, name=name, meta=meta)


def _read_otherwise(p: Param, compute: torch.dtype, user: fx.Node) -> ShardcError:
    """Return the error that a parameter is read in another dtype than the bucket of the other program has."""
    reader = full_op_name(user.target)
    fault = f"{p.fqn} is gathered in {compute}, as the running program reads it, and here {reader} reads all of it"
    fix = "read it in the same dtype in training and elsewhere; or data: {zero: 2}, which gathers nothing"
    return ShardcError(fault, where=source_of(user).line, fix=fix)


def _types(program: Program, b: Bucket) -> tuple[Value, ...]:
    """Return the types in which ops read a bucket's parameters."""
    params = (program.params_by_name[n] for n in b.params)
    return tuple(replace(p.value, dtype=b.compute or p.dtype) for p in params)


def _rounding(param: Sequence[fx.Node]) -> Rounded | None:
    """Return how all readers of a parameter, or of its casts, round it; None if they do not agree."""
    how_rounded = next(registered("passes", "how_rounded"), None)
    if how_rounded is None:
        return None
    roundings: set[Rounded | None] = set()
    dtypes: set[Any] = set()
    for node in param:
        readers = list(node.users)
        casts = [r for r in readers if r.target is _CAST]
        dtypes |= {r.kwargs.get("dtype") if r in casts else None for r in readers}
        pairs = [(r, node) for r in readers if r.target is not _CAST] + [(u, c) for c in casts for u in c.users]
        roundings |= {how_rounded(r, x) for r, x in pairs}
    return next(iter(roundings)) if len(roundings) == 1 == len(dtypes) else None


def _cast_to(user: fx.Node) -> torch.dtype | None:
    """Return the dtype of a cast; None for anything else."""
    dtype = user.kwargs.get("dtype") if user.target is _CAST and len(user.kwargs) == 1 else None
    return dtype if isinstance(dtype, torch.dtype) else None


class _Uses:
    """Where parameters are used in the stages' graphs, one after the other.

    first: position of a parameter's first user. end: position after all stages.
    """

    def __init__(self, program: Program) -> None:
        self.first: dict[str, int] = {}
        self.end = 0
        self._last: dict[str, int] = {}
        self._first_user: dict[tuple[int, str], str] = {}
        self._casts: dict[str, set[torch.dtype | None]] = {}
        names = {p.name for p in program.params}
        #: Digits that split the rows of a parameter's part beside the batch's (shardc.passes.annotate.mesh_parts).
        self.rows: dict[str, tuple[str, ...]] = {}
        nodes: dict[str, list[fx.Node]] = {p: [] for p in names}
        for i, stage in enumerate(program.stages):
            position = {n: at for at, n in enumerate(stage.graph.nodes, start=self.end)}
            self.end += len(position)
            for node in stage.graph.find_nodes(op="placeholder"):
                if node.name not in names:
                    continue
                nodes[node.name].append(node)
                if "rows" in node.meta:
                    self.rows[node.name] = node.meta["rows"]
                if users := sorted(node.users, key=position.__getitem__):
                    self.first.setdefault(node.name, position[users[0]])
                    self._last[node.name] = position[users[-1]]
                    self._first_user[i, node.name] = users[0].name
                    self._casts.setdefault(node.name, set()).update(map(_cast_to, users))
        self._rounded = {p: how for p in self.first if (how := _rounding(nodes[p])) is not None}

    def first_users(self, stage: int, params: tuple[str, ...]) -> list[str]:
        return [self._first_user[stage, p] for p in params if (stage, p) in self._first_user]

    def dtype(self, p: Param) -> torch.dtype | None:
        """Return the dtype in which all ops read a parameter, if it is not wider than the parameter's.

        Then the gather sends this dtype.
        """
        dtypes = self._casts.get(p.name, {None})
        common = next(iter(dtypes)) if len(dtypes) == 1 else None
        return common if common is not None and common.itemsize <= p.dtype.itemsize else None

    def rounded(self, param: str) -> Rounded | None:
        """Return how a parameter, or its cast, is rounded to float8, if nothing else reads it."""
        return self._rounded.get(param)

    def far(self, param: str) -> bool:
        """Return whether it is used again much later, as a tied embedding: its bucket would stay gathered."""
        return self._last.get(param, 0) - self.first.get(param, 0) > self.end // 4
