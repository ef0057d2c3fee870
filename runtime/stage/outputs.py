"""Combine the values of a step beside its loss, over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.ir import outputs
from shardc.ir.graph import operands_of
from shardc.ir.outputs import Output
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.shard_chunks import trim, unchunk
from shardc.ir.stage import Stage

Values = dict[str, Tensor]
#: {output: {microbatch: its value there}}, of the stages of this rank
Parts = Mapping[str, Mapping[int, Tensor]]


def views(stage: Stage) -> frozenset[str]:
    """Return the outputs of a stage that may alias the batch or a parameter, and must be copied."""
    returned: Any = stage.graph.output_node().args[0]
    nodes = returned[1][len(returned[1]) - len(stage.outputs) :]
    return frozenset(name for name, n in zip(stage.outputs, nodes, strict=True) if _root(n).op == "placeholder")


def _root(node: fx.Node) -> fx.Node:
    while node.op == "call_function" and len(operands := operands_of(node)) == 1:
        node = operands[0]
    return node


@torch.no_grad()
def combined(program: Program, mesh: Any, parts: Parts) -> Values:
    """Return a step's outputs: sums over all ranks; of rows, this rank's, with padding. Collective."""
    local = {o.name: joined(o, parts[o.name]) for o in program.outputs if o.name in parts}
    values = local | _summed(program, mesh, local)
    if program.schedule is not None:
        values |= _send_rows(program, mesh, local)
    return {o.name: values[o.name] for o in program.outputs}


def joined(o: Output, parts: Mapping[int, Tensor]) -> Tensor:
    """Combine the values of all microbatches into one."""
    values = [parts[m] for m in sorted(parts)]
    if o.adds:
        return torch.stack(values).sum(0) if len(values) > 1 else values[0]
    if o.microbatch is None:
        return values[-1]
    whole = unchunk(values, o.microbatch)
    return trim(whole, o.microbatch) if not o.layout.shards(o.microbatch.dim) else whole


def _summed(program: Program, mesh: Any, here: Mapping[str, Tensor]) -> Values:
    """Sum single numbers over all ranks with summands, in one collective in float64 (exact up to 2^53)."""
    taking_part = outputs.summed(program.outputs, program.axis)
    axes = outputs.sum_axes(program.outputs, program.mesh, program.axis)
    if not taking_part or mesh.members(axes) == 1:
        return {}
    over = set(program.mesh.digits(*axes))
    flat: list[Tensor] = []
    for o in taking_part:
        equal = over - set(o.summed_over) - {program.axis}  # ranks along these have the same: the first adds it
        adds = o.name in here and not any(mesh.coordinate(axis) for axis in equal)
        size = int(torch.Size(o.shape).numel())
        value = here[o.name].reshape(-1).double() if adds else torch.zeros(size, dtype=torch.float64)
        flat.append(value.to(mesh.device))
    totals = mesh.all_reduce(torch.cat(flat), axes, tag="outputs").split([x.numel() for x in flat])
    return {o.name: x.view(o.shape).to(o.dtype) for o, x in zip(taking_part, totals, strict=True)}


def _send_rows(program: Program, mesh: Any, here: Mapping[str, Tensor]) -> Values:
    """Send rows from the ranks of the stage that makes them to those of the other stages."""
    assert program.schedule is not None
    at, placement = mesh.coordinate(program.axis), program.schedule.placement
    received, works = {}, []
    for o in program.outputs:
        if o.small:
            continue
        home = placement[o.stage]
        if at == home:
            sent = here[o.name]
            sent = sent.to(torch.uint8) if sent.dtype == torch.bool else sent
            others = (c for c in range(program.mesh.size(program.axis)) if c != home)
            works += [mesh.start_send(sent, program.axis, c, direction="forward", tag=o.name) for c in others]
        else:
            dtype = torch.uint8 if o.dtype == torch.bool else o.dtype
            shape = o.layout.local_shape(o.shape, program.mesh)
            received[o.name] = torch.empty(shape, dtype=dtype, device=mesh.device)
            works.append(mesh.start_receive(received[o.name], program.axis, home, tag=o.name))
    for work in works:
        work.wait()
    dtypes = {o.name: o.dtype for o in program.outputs}
    return {name: x.to(dtypes[name]) for name, x in received.items()}


@torch.no_grad()
def gathered(program: Program, mesh: Any, values: Values) -> Values:
    """Gather the rows of all ranks, in the order of the batch, on every rank. Collective."""
    whole = dict(values)
    for o in program.outputs:
        x = whole[o.name]
        x = x.to(torch.uint8) if x.dtype == torch.bool and o.layout.shards() else x
        for axis, s in sorted(o.layout.shards(), key=lambda item: item[1].split):
            x = unchunk(list(mesh.all_gather(x, axis, tag=o.name).unbind(0)), s)
        for s in o.layout.paddings():
            x = trim(x, s)
        whole[o.name] = x.to(o.dtype)
    return whole


def own_rows(program: Program, mesh: Any, values: Values) -> Values:
    """Return this rank's rows, without padding."""
    coords = program.mesh.coords(mesh.rank)
    trimmed = dict(values)
    for o in program.outputs:
        for s in o.layout.paddings():
            rows = list(_places(o.layout, s.dim, o.shape[s.dim], program, coords))
            trimmed[o.name] = trimmed[o.name].index_select(s.dim, torch.cat(rows).to(trimmed[o.name].device))
    return trimmed


def _places(layout: Layout, dim: int, size: int, program: Program, coords: Mapping[str, int]) -> Iterator[Tensor]:
    """Yield the positions in this rank's part of the elements of a padded dim that are no padding."""
    alone = Layout(tuple((a, replace(s, dim=0)) for a, s in layout.shards(dim)))
    yield torch.empty(0, dtype=torch.int64)  # a rank may have padding alone
    for ((start, _, length),) in alone.boxes((size,), program.mesh, coords):
        yield torch.arange(start, start + length)


def divided(program: Program, values: Values) -> Values:
    """Return the outputs that the user named: sums divided by their counts, without the counts."""
    counts = outputs.divisors(program.outputs)
    return {
        o.name: values[o.name] / values[o.divisor] if o.divisor else values[o.name]
        for o in program.outputs
        if o.name not in counts
    }


def result(program: Program, mesh: Any, loss: Tensor | None, values: Values, *, gather: bool) -> Any:
    """Return loss, or (loss, {name: value}) with outputs; {name: value} if forward-only. gather: all rows."""
    if not program.outputs:
        return loss
    values = gathered(program, mesh, values) if gather else own_rows(program, mesh, values)
    return divided(program, values) if loss is None else (loss, divided(program, values))
