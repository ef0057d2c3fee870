"""Answer a loader: which rank and microbatch takes which sample of a step, and how long each microbatch is.

The samples of a step are those of the sampler, whatever the mesh. Lengths are known before training: the dataset says
them (`lengths`), or each rank reads a part of the samples once. So every rank computes the same order, no rank sends
anything for it, and a resumed run on another mesh goes on at the same sample.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from shardc.errors import ShardcError
from shardc.features.rows import same_step
from shardc.features.rows.arrangement import Priced, Step, arranged, row
from shardc.features.rows.seconds import Seconds, fitted, leaves_out, of_program, spread
from shardc.ir.program import Program
from shardc.runtime.data.inputs import batch_dims, leaves
from shardc.runtime.data.loader import Loader
from shardc.runtime.step import batch_sizes

_WHERE = "batch.balance"
#: Steps whose order is kept: workers read ahead.
_KEPT = 64
#: The most lengths that an error suggests.
SUGGESTED = 6


class Balance:
    """The order of a loader's samples. ragged: microbatches have lengths of their own.

    seconds: of a microbatch, as predicted. Collective: all ranks make it together.
    """

    def __init__(self, loader: Loader, *, drop_last: bool) -> None:
        self._loader, program = loader, loader.program
        self._refuse(program, drop_last=drop_last)
        mesh, batch = loader.mesh, program.spec.batch
        self.rows = [row(x) for x in _lengths(loader)]
        self._places = _places(loader)  # [group of ranks, microbatch, row]: its place in the global batch
        length = row_length(program)
        sizes = sorted({r.length for r in self.rows})
        self.ragged = bool(batch.lengths) and sizes[-1:] != sizes[:1]
        lengths = sorted({next((n for n in sorted(batch.lengths) if n >= x), 0) for x in sizes}) if self.ragged else []
        if lengths[:1] == [0]:
            fault = f"a sample has {sizes[-1]} tokens, more than all of the spec's lengths"
            raise ShardcError(fault, where="batch.lengths", fix=f"add {sizes[-1]} or more to them, or cut the samples")
        if not self.ragged and sizes[-1] > length:
            fault = f"samples have {sizes[0]} to {sizes[-1]} tokens, and `batch` names no lengths to pad them to"
            raise ShardcError(fault, where=_WHERE, fix=f"write batch: {{lengths: {suggested(sizes)}, pad: {{...}}}}")
        start = time.perf_counter()
        programs = {n: _compiled(program, mesh, n) for n in lengths or [length]}
        if lengths:
            mesh.note(f"compiled for lengths {', '.join(map(str, lengths))} in {time.perf_counter() - start:.1f} s")
        self._noted(program)
        self._joined(programs)
        groups, m, rows = self._places.shape
        prices = (
            {n: of_program(programs[n], _device(loader)) for n in spread(sorted(programs))} if not mesh.rank else {}
        )
        self.seconds = Seconds.of_numbers(mesh.sum_on_host(fitted(prices).numbers if prices else [0, 0, 0]))
        self.step = Step(
            ranks=groups,
            microbatches=m,
            rows=rows,
            seconds=self.seconds,
            meet=program.spec.data.zero >= 2 and m > 1,
            lengths=tuple(lengths),
            length=length,
            left_out=leaves_out(program),
        )
        self._steps: dict[bytes, Priced] = {}
        self._order: tuple[int, Tensor] | None = None

    def arranged(self, samples: Tensor) -> Tensor:
        """Return the samples of a step by their places in the global batch: i64[batch]."""
        if len(samples) != self.step.size:
            return samples
        result = torch.empty_like(samples)
        result[self._places.flatten()] = samples[list(self.priced(samples).order)]
        return result

    def priced(self, samples: Tensor) -> Priced:
        """Return the step of these samples, as predicted."""
        key = samples.numpy().tobytes()
        if key not in self._steps:
            while len(self._steps) >= _KEPT:
                del self._steps[next(iter(self._steps))]
            self._steps[key] = arranged(self.step, [self.rows[i] for i in samples.tolist()])
        return self._steps[key]

    def lengths_of_next(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Return the lengths of this rank's microbatches of the loader's next step, and all lengths of that step.

        None if all are as compiled.
        """
        order = self._loader.order
        if not self.ragged:
            return None
        if self._order is None or self._order[0] != order.epoch:
            self._order = order.epoch, order.whole()
        step = self.priced(self._order[1][order.consumed : order.consumed + order.batch])
        m = self.step.microbatches
        return step.lengths[self._group * m : (self._group + 1) * m], tuple(sorted(set(step.lengths)))

    def _refuse(self, program: Program, *, drop_last: bool) -> None:
        fault = fix = ""
        if self._loader.order.size is None:
            fault, fix = "a stream does not say how long its next samples are", "give a dataset with a length"
        elif not drop_last:
            fault, fix = "the rest of an epoch has fewer rows than a step", "leave drop_last out"
        elif program.resize is None and program.spec.batch.lengths:
            fault = "a loaded program has no model to compile for other lengths"
            fix = "compile it in this process, as `shardc run model.py spec.yaml` does"
        elif program.pairs and program.spec.batch.lengths:
            fault, fix = "two microbatches run as one graph, which has one length", "choose another schedule"
        elif any(x.choice is not None for x in program.inputs):
            fault, fix = "choices are recorded by place, and balance chooses the places", "leave out one of the two"
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

    def _joined(self, programs: dict[int, Program]) -> None:
        """Check that the programs run in one step; join groups of ranks that need one length in a microbatch."""
        axes = frozenset[str]()
        for one, other in pairwise(sorted(programs)):
            axes |= same_step.length_axes(programs[one], programs[other], (one, other))
        program, mesh = self._loader.program, self._loader.program.mesh
        by_rows = [o for o in program.outputs if o.microbatch is not None and self.ragged]
        if by_rows:
            fault = (
                f"the output {by_rows[0].name!r} has a row for each of the batch's, and they would have several lengths"
            )
            raise ShardcError(fault, where=_WHERE, fix="return a number or a (sum, count) pair; or leave out balance")
        group_of = [
            next(g for g, p in enumerate(self._places) if torch.equal(p, _mine(self._loader, r)))
            for r in range(mesh.world)
        ]
        cluster = list(range(len(self._places)))
        for r in range(mesh.world):
            for other in mesh.group(r, tuple(axes)) if axes else ():
                a, b = cluster[group_of[r]], cluster[group_of[other]]
                cluster = [min(a, b) if c in (a, b) else c for c in cluster]
        names = sorted(set(cluster))
        joined = [torch.cat([p for p, c in zip(self._places, cluster, strict=True) if c == name], 1) for name in names]
        self._group = names.index(cluster[group_of[self._loader.mesh.rank]])
        if len({p.shape for p in joined}) > 1:
            raise ShardcError(
                "ranks that need one length are of several numbers", where=_WHERE, fix="leave out balance"
            )
        self._places = torch.stack(joined)


def _mine(loader: Loader, rank: int) -> Tensor:
    """Return the places in a global batch of a rank's rows: i64[microbatch, row]."""
    program, m = loader.program, loader.program.microbatches
    places = loader._samples(program.mesh.coords(rank))
    return places.reshape(m, -1)


def _places(loader: Loader) -> Tensor:
    """Return the places of each group of ranks with rows of their own: i64[group, microbatch, row]."""
    groups: dict[tuple[int, ...], Tensor] = {}
    for rank in range(loader.program.mesh.world):
        places = _mine(loader, rank)
        groups.setdefault(tuple(places.flatten().tolist()), places)
    return torch.stack(list(groups.values()))


def row_length(program: Program) -> int:
    """Return the length of a row, as compiled: of the inputs that have a number for padding, else the longest."""
    dims, named = batch_dims(program), batch_sizes.length_inputs(program)
    among = [x for x in program.inputs if x.name in named] or [x for x in program.inputs if len(x.shape) > 1]
    return max((x.shape[0 if dims[x.name] == 1 else 1] for x in among), default=1)


def _compiled(program: Program, mesh: Any, length: int) -> Program:
    shapes = batch_sizes.shapes_of_length(program, length)
    if shapes == tuple(x.shape for x in program.inputs):
        return program
    example: Any = program.resize
    return batch_sizes.recompile(program, example.batch, shapes, mesh, use="as compiled")


def _device(loader: Loader) -> str | None:
    """Return the device that a step is priced for: the spec's, else this machine's if it was measured."""
    return None if loader.program.spec.device is not None else str(loader.mesh.device.type)


def suggested(sizes: Sequence[int]) -> list[int]:
    """Return lengths for rows of these sizes: powers of two up to the longest, few, as each costs a compilation."""
    powers = range((sizes[0] - 1).bit_length(), (sizes[-1] - 1).bit_length() + 1)
    return [1 << p for p in powers][-SUGGESTED:]


def _lengths(loader: Loader) -> list[int | Sequence[int]]:
    """Return the length of each sample, or of its documents: what the dataset says, or what its samples have."""
    known = stated(loader.dataset)
    if known is not None:
        if len(known) != len(loader.dataset):
            fault = f"the dataset's `lengths` are {len(known)}, and it has {len(loader.dataset)} samples"
            raise ShardcError(fault, where=_WHERE, fix="give one for each sample")
        return known
    size, world, rank = len(loader.dataset), loader.mesh.layout.world, loader.mesh.rank
    counted = [0] * size
    for i in range(rank, size, world):
        counted[i] = of_sample(loader.program, loader.dataset[i])
    return list(loader.mesh.sum_on_host(counted))


def stated(dataset: Any) -> list[int | Sequence[int]] | None:
    """Return what a dataset says of the lengths of its samples (`lengths`); None if it says nothing."""
    if isinstance(dataset, Subset) and (inner := stated(dataset.dataset)) is not None:
        return [inner[i] for i in dataset.indices]
    known = getattr(dataset, "lengths", None)
    return [x if isinstance(x, Sequence) else int(x) for x in known] if known is not None else None


def of_sample(program: Program, sample: Any) -> int:
    """Return the length of a sample, of the inputs that have a number for padding. Raises ShardcError without any."""
    named = batch_sizes.length_inputs(program)
    paths = {x.path for x in program.inputs if x.name in named or not named}
    sizes = [len(x) for path, x in leaves_of(sample) if path in paths]
    if not sizes:
        fault = "the samples do not have the inputs that `batch: {pad}` names, so their lengths are unknown"
        fix = "give the dataset an attribute `lengths`, a number for each sample"
        raise ShardcError(fault, where=_WHERE, fix=fix)
    return max(sizes)


def leaves_of(sample: Any) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Yield (path, value) of the tensors, arrays and lists of numbers in a sample."""
    if isinstance(sample, dict):
        for key, value in sample.items():
            if isinstance(value, list) and not any(isinstance(x, (dict, list, Tensor)) for x in value):
                yield (key,), value
            else:
                yield from (
                    (path, x) for path, x in leaves(value, (key,)) if hasattr(x, "__len__") and not isinstance(x, str)
                )
    else:
        yield from ((path, x) for path, x in leaves(sample) if hasattr(x, "__len__") and not isinstance(x, str))
