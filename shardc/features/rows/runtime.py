"""Answer a loader: which rank and microbatch takes which sample of a step, and how long each microbatch is.

The samples of a step are those of the sampler, whatever the mesh. Lengths are known before training: the dataset says
them (`lengths`), or each rank reads a part of the samples once. So every rank computes the same order, no rank sends
anything for it, and a resumed run on another mesh goes on at the same sample.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.features.rows import same_step
from shardc.features.rows.arrangement import Step, arranged, row
from shardc.features.rows.seconds import leaves_out, of_program, of_sizes, priced_sizes
from shardc.ir.program import Program
from shardc.runtime.data.inputs import batch_dims, leaves
from shardc.runtime.data.loader import Loader, samples_of
from shardc.runtime.data.ragged import Size
from shardc.runtime.step import batch_sizes

_WHERE = "batch.balance"
Collate = Callable[[list[Any]], Any]
#: Steps whose order is kept: workers read ahead.
_KEPT = 64
#: The most lengths that an error suggests.
SUGGESTED = 6


class Balance:
    """The order of a loader's samples. ragged: microbatches have lengths of their own. Collective."""

    def __init__(self, loader: Loader, collate: Collate, *, drop_last: bool) -> None:
        self._loader, program, mesh = loader, loader.program, loader.mesh
        self._refuse(program, drop_last=drop_last)
        self.rows = [row(x) for x in _lengths(loader, collate)]
        named, length, sizes = (
            sorted(program.spec.batch.lengths),
            row_length(program),
            sorted({r.length for r in self.rows}),
        )
        self.ragged = bool(named) and sizes[0] != sizes[-1]
        longest = named[-1] if named else length
        if sizes[-1] > longest:
            fault = f"samples have {sizes[0]} to {sizes[-1]} tokens, more than {longest}"
            enough = [*named, suggested(sizes)[-1]] if named else suggested(sizes)
            fix = f"write batch: {{lengths: {enough}, pad: {{...}}}}, or cut the samples"
            raise ShardcError(fault, where="batch.lengths", fix=fix)
        lengths = sorted({next(n for n in named if n >= x) for x in sizes}) if self.ragged else [length]
        start = time.perf_counter()
        programs = self._compiled(program, [Size(n) for n in lengths])
        axes = same_step.joined_axes(programs)
        if self.ragged and (more := more_rows(program, lengths)):
            try:
                both = programs | self._compiled(program, more)
                axes, programs = same_step.joined_axes(both), both
            except ShardcError as e:
                mesh.note(f"{_WHERE}: short rows are split over as many ranks as long ones: {e.what}")
        if self.ragged:
            mesh.note(f"compiled for lengths {', '.join(map(str, lengths))} in {time.perf_counter() - start:.1f} s")
        self._noted(program)
        self._places, self._group, members = self._joined(axes)
        #: Of each size, which of the runs of `rank_rows` in its group's microbatch this rank has.
        self._run = {size: _run(p, mesh.rank, members) for size, p in programs.items()}
        self.rank_rows = len(samples_of(program, mesh.rank)) // program.microbatches
        groups, m, rows = self._places.shape
        meet, left_out, every = program.spec.data.zero >= 2 and m > 1, leaves_out(program), tuple(programs)
        if left_out and not self.ragged and program.resize is not None:
            with contextlib.suppress(ShardcError):  # what pairs cost shows at other lengths alone
                programs |= self._compiled(with_pad(program), [Size(length // 4), Size(length // 2)])
        # the first rank's seconds, for all; on this machine, if it was measured
        device, at = None if program.spec.device is not None else str(mesh.device.type), priced_sizes(sorted(programs))
        prices = [of_program(programs[size], device) if mesh.rank == 0 else 0.0 for size in at]
        whole = mesh.sum_on_host([round(x * 1e15) for x in prices])
        seconds = of_sizes({size: n / 1e15 for size, n in zip(at, whole, strict=True)})
        self.step = Step(groups, m, rows, seconds, meet, every if self.ragged else (), length, left_out)
        self._priced = lru_cache(_KEPT)(lambda samples: arranged(self.step, [self.rows[i] for i in samples]))
        self._order: tuple[int, Tensor] | None = None

    def _compiled(self, program: Program, sizes: Sequence[Size]) -> dict[Size, Program]:
        """Compile a program for each size; the program itself is that of its own. Collective."""
        mesh, programs = self._loader.mesh, dict[Size, Program]()
        for size in sizes:
            shapes, again = batch_sizes.shapes_of(program, size), cast(Any, program.resize)
            same = shapes == tuple(x.shape for x in program.inputs)
            programs[size] = (
                program if same else batch_sizes.recompile(program, again.batch, shapes, mesh, use="as compiled")
            )
        return programs

    def arranged(self, samples: Tensor) -> Tensor:
        """Return the samples of a step by their places in the global batch: i64[batch]."""
        if len(samples) != self.step.size:
            return samples
        result = torch.empty_like(samples)
        result[self._places.flatten()] = samples[list(self._priced(tuple(samples.tolist())).order)]
        return result

    def mine(self, samples: Tensor) -> Tensor:
        """Return the samples of a step that this rank reads, by its microbatches of several sizes."""
        n, cells = self.rank_rows, self._priced(tuple(samples.tolist())).groups[self._group]
        return samples[[i for cell in cells for i in cell.rows[n * self._run[cell.size] :][:n]]]

    def sizes_of_next(self) -> tuple[tuple[Size, ...], tuple[Size, ...]] | None:
        """Return the sizes of this rank's microbatches of the loader's next step, and all sizes of that step.

        None if all are as compiled.
        """
        order = self._loader.order
        if not self.ragged:
            return None
        if self._order is None or self._order[0] != order.epoch:
            self._order = order.epoch, order.whole()
        samples = self._order[1][order.consumed : order.consumed + order.batch]
        groups = self._priced(tuple(samples.tolist())).groups
        every = sorted({cell.size for cells in groups for cell in cells})
        return tuple(cell.size for cell in groups[self._group]), tuple(every)

    def _refuse(self, program: Program, *, drop_last: bool) -> None:
        lengths, fault, fix = program.spec.batch.lengths, "", ""
        if self._loader.order.size is None:
            fault, fix = "a stream does not say how long its next samples are", "give a dataset with a length"
        elif not drop_last:
            fault, fix = "the rest of an epoch has fewer rows than a step", "leave drop_last out"
        elif program.resize is None and lengths:
            fault, fix = "a loaded program has no model to compile for other lengths", "compile it in this process"
        elif program.pairs and lengths:
            fault, fix = "two microbatches run as one graph, which has one length", "choose another schedule"
        elif any(x.choice is not None for x in program.inputs):
            fault, fix = "choices are recorded by place, and balance chooses the places", "leave out one of the two"
        elif lengths and (by_rows := next((o.name for o in program.outputs if o.microbatch is not None), "")):
            fault = f"the output {by_rows!r} has a row for each of the batch's, which would have several lengths"
            fix = "return a number or a (sum, count) pair"
        if fault:
            raise ShardcError(fault, where=_WHERE, fix=f"{fix}; or leave out balance")

    def _noted(self, program: Program) -> None:
        """Note what depends on the place of a row, which balance chooses by the mesh."""
        random = any(n.name == "rng" and n.users for s in program.stages for n in s.graph.find_nodes(op="placeholder"))
        dropped = any(entry.capacity is not None for entry in program.spec.experts)
        for applies, subject in ((random, "dropout draws"), (dropped, "experts of a fixed capacity drop tokens")):
            if applies:
                note = f"{_WHERE}: {subject} by a row's place in the batch, which now depends on the mesh"
                self._loader.mesh.note(f"{note}: a step is one device's with the rows in that order")

    def _joined(self, axes: frozenset[str]) -> tuple[Tensor, int, list[int]]:
        """Return the places of each group of ranks with rows and sizes of its own, this rank's group, and its ranks.

        i64[group, microbatch, row]. axes: over which ranks need one size in a microbatch.
        """
        mesh = self._loader.program.mesh
        mine = [places_of(self._loader.program, r) for r in range(mesh.world)]
        places = {tuple(p.flatten().tolist()): p for p in mine}
        names = [list(places).index(tuple(p.flatten().tolist())) for p in mine]  # of each rank's rows
        cluster = list(range(len(places)))
        for r in range(mesh.world) if axes else ():
            for other in mesh.group(r, tuple(axes)):
                a, b = cluster[names[r]], cluster[names[other]]
                cluster = [min(a, b) if c in (a, b) else c for c in cluster]
        groups = sorted(set(cluster))
        cells = [[p for p, c in zip(places.values(), cluster, strict=True) if c == name] for name in groups]
        here = cluster[names[self._loader.mesh.rank]]
        members = [r for r in range(mesh.world) if cluster[names[r]] == here]
        return torch.stack([torch.cat(some, 1) for some in cells]), groups.index(here), members


def places_of(program: Program, rank: int) -> Tensor:
    """Return the places in a global batch of a rank's rows: i64[microbatch, row]."""
    return samples_of(program, rank).reshape(program.microbatches, -1)


def _run(program: Program, rank: int, members: Sequence[int]) -> int:
    """Return the number of a rank's rows among those of a group of ranks, in a microbatch."""
    rows = {r: tuple(places_of(program, r)[0].tolist()) for r in members}
    return sorted(set(rows.values())).index(rows[rank])


def more_rows(program: Program, lengths: Sequence[int]) -> list[Size]:
    """Return the sizes of microbatches with more rows than compiled, each on fewer ranks of the sequence's outer axis.

    No rank has more tokens than of the longest rows. A group of ranks has as many rows as a step has microbatches, so
    only as many help.
    """
    axes, mesh = [a for a in program.spec.token_axes if program.mesh.size(a) > 1][:1], program.mesh
    if not axes or mesh.digits(*axes) != tuple(axes):
        return []
    ranks = mesh.size(axes[0])
    times = [k for k in range(2, min(ranks, program.microbatches) + 1) if ranks % k == 0]
    fitting = ((n, [k for k in times if n * k <= lengths[-1]]) for n in lengths)
    return [Size(n, max(some)) for n, some in fitting if some]


def with_pad(program: Program) -> Program:
    """Return the program with a number to pad for all inputs as long as a row, unless its spec has any."""
    if program.spec.batch.pad:
        return program
    long = [x for x in program.inputs if x.path and len(x.shape) > 1 and x.shape[1] == row_length(program)]
    batch = program.spec.batch.model_copy(update={"pad": {str(x.path[-1]): 0.0 for x in long}})
    return replace(program, spec=replace(program.spec, batch=batch))


def row_length(program: Program) -> int:
    """Return the length of a row, as compiled: of the inputs that have a number for padding, else the longest."""
    dims, named = batch_dims(program), batch_sizes.length_inputs(program)
    among = [x for x in program.inputs if x.name in named] or [x for x in program.inputs if len(x.shape) > 1]
    return max((x.shape[0 if dims[x.name] == 1 else 1] for x in among), default=1)


def suggested(sizes: Sequence[int]) -> list[int]:
    """Return lengths for rows of these sizes: powers of two up to the longest, few, as each costs a compilation."""
    powers = range((sizes[0] - 1).bit_length(), (sizes[-1] - 1).bit_length() + 1)
    return [1 << p for p in powers][-SUGGESTED:]


def _lengths(loader: Loader, collate: Collate) -> list[int | Sequence[int]]:
    """Return the length of each sample, or of its documents: what the dataset says, or what its samples have."""
    size, world, rank = len(loader.dataset), loader.mesh.layout.world, loader.mesh.rank
    known = stated(loader.dataset)
    if known is None:
        mine = range(rank, size, world)
        read = {i: of_sample(loader.program, loader.dataset[i], collate) for i in mine}
        return list(loader.mesh.sum_on_host([read.get(i, 0) for i in range(size)]))
    if len(known) != size:
        fault = f"the dataset's `lengths` are {len(known)}, and it has {size} samples"
        raise ShardcError(fault, where=_WHERE, fix="give one for each sample")
    return known


def stated(dataset: Any) -> list[int | Sequence[int]] | None:
    """Return what a dataset says of the lengths of its samples (`lengths`); None if it says nothing."""
    known = getattr(dataset, "lengths", None)
    return [x if isinstance(x, Sequence) else int(x) for x in known] if known is not None else None


def of_sample(program: Program, sample: Any, collate: Collate) -> int:
    """Return the length of a sample in a batch. Raises ShardcError if it has no input that has a length."""
    dims, named = batch_dims(program), batch_sizes.length_inputs(program)
    at = named or {x.name: 0 if dims[x.name] == 1 else 1 for x in program.inputs}
    made = dict(leaves(collate([sample])))
    tensors = [(made.get(x.path), at[x.name]) for x in program.inputs if x.name in at]
    sizes = [x.shape[d] for x, d in tensors if isinstance(x, Tensor) and x.dim() > d]
    if not sizes:
        fault = "the samples do not have the inputs that `batch: {pad}` names, so their lengths are unknown"
        raise ShardcError(fault, where=_WHERE, fix="give the dataset `lengths`, a number for each sample")
    return max(sizes)
