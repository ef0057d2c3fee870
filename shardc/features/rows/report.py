"""Predict what balancing gains for a distribution of lengths, before a device is used."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardc.compile import compile
from shardc.errors import ShardcError
from shardc.features.rows import same_step
from shardc.features.rows.arrangement import Priced, Row, Step, arranged, as_they_come, row
from shardc.features.rows.lengths import Lengths, of, read
from shardc.features.rows.runtime import more_rows, of_sample, stated, suggested, with_pad
from shardc.features.rows.seconds import OfSizes, leaves_out, of_cost, of_sizes, priced_sizes
from shardc.ir.program import Program
from shardc.ir.units import count, plural, seconds
from shardc.optional import needed
from shardc.recompile import Resizer
from shardc.report.aligned import aligned
from shardc.runtime.data.inputs import leaves, mapped, part_of
from shardc.runtime.data.inputs import rows as rows_of
from shardc.runtime.data.ragged import Size
from shardc.runtime.data.samples import Tensors, is_map_style
from shardc.runtime.step import batch_sizes

#: Steps that are drawn, and the documents that are packed at a time (shardc.text's own number).
STEPS, TOGETHER = 8, 1024


@dataclass(frozen=True)
class Gain:
    """What is predicted. seconds: of a microbatch, by its length; groups: of ranks with lengths of their own.

    ways: by name, the seconds of a step, the slowest rank of the mean, the share of padding, tokens a second.
    hidden: the share of pairs in packed rows that masks of documents hide; left_out: whether attention leaves them out.
    longest_share: seconds of the longest row's microbatch, of the mean of a rank's step.
    """

    rows: int
    longest: int
    median: int
    mean: float
    device: str
    groups: int
    microbatches: int
    microbatch_rows: int
    seconds: OfSizes
    ways: dict[str, dict[str, float]]
    hidden: float
    left_out: bool
    longest_share: float

    @property
    def gain(self) -> float:
        """How many times as fast balanced rows are as rows as they come, each microbatch as long as it needs."""
        return self.ways["as they come"]["step_seconds"] / self.ways["balanced"]["step_seconds"]

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "gain": self.gain}

    def __str__(self) -> str:
        """Return a table, and what it means."""
        half, size = f"half up to {self.median:,}", self.groups * self.microbatches * self.microbatch_rows
        of_step = f"a step: {size} rows on {plural(self.groups, 'group')} of ranks with lengths of their own, "
        table = [["", "step", "slowest / mean", "padding", "tokens/s"]]
        for name, w in self.ways.items():
            figures = [f"{w['slowest']:.2f}", f"{w['padding']:.1%}", count(w["tokens_per_second"])]
            table.append([name, seconds(w["step_seconds"]), *figures])
        computed = "and this attention leaves them out" if self.left_out else "but this attention computes them all"
        lines = [
            f"{self.rows:,} rows of up to {self.longest:,} tokens ({half}, mean {self.mean:,.0f}), on {self.device}",
            f"{of_step}{self.microbatches} microbatches of {plural(self.microbatch_rows, 'row')}",
            *aligned(table, "<>"),
            f"balancing: {self.gain:.2f} times as fast",
            f"packed rows: masks of documents hide {self.hidden:.0%} of the pairs, {computed}",
        ]
        if self.longest_share > 1:
            fault = f"the longest row takes {self.longest_share:.1f} times the mean of a rank's step"
            lines += [f"{fault}: more microbatches of fewer rows, or a split sequence, would even that out"]
        return "\n".join(lines)


def gain(program: Any, source: str, file: Any, device: Any, batch: Any = None) -> Gain:
    """Predict the gain of balancing rows, of which some steps are drawn.

    source: a file of lengths, or `data`; file: the model file; batch: the compiled one, if not that file's. Rows longer
    than the spec's lengths are cut to the longest of them. Raises ShardcError where balance would.
    """
    lengths, batch = _lengths(program, source, file), file.batch if batch is None else batch
    program = with_pad(program)
    sizes = sorted(program.spec.batch.lengths) or suggested(sorted(lengths))
    cut = Lengths()
    for n, number in lengths.items():
        cut[min(n, sizes[-1])] += number
    make = Resizer(file.on_meta, file.loss, {}, compile, program.forward_only, batch)
    every = [Size(n) for n in sizes]
    programs = _programs(make, program, batch, every)
    axes = same_step.joined_axes(programs)
    with suppress(ShardcError):  # as the loader does
        both = programs | _programs(make, program, batch, more := more_rows(program, sizes))
        axes, programs, every = same_step.joined_axes(both), both, [*every, *more]
    cost = {size: p.cost(device) for size, p in programs.items()}
    of_size = of_sizes({size: of_cost(c) for size, c in cost.items()})
    m, most, groups = program.microbatches, cost[Size(sizes[-1])], part_of(program, 0)[1]
    joined = [a for a in same_step.axes_of_rows(program) if axes & set(program.mesh.digits(a))]
    apart = Step(groups, m, rows_of(program) // (groups * m), of_size, program.spec.data.zero >= 2 and m > 1)
    one = min(math.prod(map(program.mesh.size, joined)), groups)  # groups of ranks that need one length
    step = replace(apart, ranks=groups // one, rows=apart.rows * one, sizes=tuple(every))
    drawn = random.Random(0).choices(sorted(cut), [cut[n] for n in sorted(cut)], k=STEPS * step.size)
    steps = [[row(n) for n in drawn[at : at + step.size]] for at in range(0, len(drawn), step.size)]
    long_steps = [replace(step, length=_least(sizes, some), sizes=()) for some in steps]
    of_rows = replace(apart, length=sizes[-1], left_out=leaves_out(program))
    packed, lost = _packed(drawn, of_rows)
    balanced = [arranged(step, some) for some in steps]
    ways = {
        "one length for all": [as_they_come(x, r) for x, r in zip(long_steps, steps, strict=True)],
        "as they come": [as_they_come(step, r) for r in steps],
        "balanced": balanced,
        "packed, balanced": [arranged(of_rows, r) for r in packed],
    }
    mean = sum(sum(p.of_ranks) / step.ranks for p in balanced) / len(steps)
    hidden = 1 - sum(r.pairs for some in packed for r in some) / (len(packed) * of_rows.size * sizes[-1] ** 2)
    half = next(
        n for n, k in zip(sorted(cut), accumulate(cut[n] for n in sorted(cut)), strict=True) if 2 * k >= cut.total()
    )
    return Gain(
        rows=cut.total(),
        longest=max(cut),
        median=half,
        mean=sum(n * k for n, k in cut.items()) / cut.total(),
        device=most.device.name,
        groups=step.ranks,
        microbatches=m,
        microbatch_rows=step.rows,
        seconds=of_size,
        ways={name: _way(some, most, lost * (name not in list(ways)[:3])) for name, some in ways.items()},
        hidden=hidden,
        left_out=of_rows.left_out,
        longest_share=step.cell([row(max(cut))], [0], Size(_least(sizes, [row(max(cut))]))).seconds / mean,
    )


def _programs(make: Resizer, program: Program, batch: Any, sizes: Sequence[Size]) -> dict[Size, Any]:
    """Compile for those of the sizes whose cost the others are fitted to."""
    shapes = {size: batch_sizes.shapes_of(program, size) for size in priced_sizes(sizes)}
    return {size: make(program, batch, s, "as compiled") for size, s in shapes.items()}


def _least(sizes: Sequence[int], rows: Sequence[Row]) -> int:
    """Return the least of these lengths, in order, that no row exceeds."""
    longest = max(r.length for r in rows)
    return next(n for n in sizes if n >= longest)


def gain_of_plan(plan: Any, source: str, file: Any) -> Gain:
    """Predict it for a plan's best spec. Raises ShardcError if nothing fits."""
    tensors = [x for _, x in leaves(file.batch) if isinstance(x, Tensor) and x.dim()]
    rows = min((x.shape[0] for x in tensors), default=1)

    def of_plan(_: Any, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or x.shape[0] % rows:
            return x
        return torch.empty(x.shape[0] // rows * plan.target.batch, *x.shape[1:], dtype=x.dtype, device="meta")

    batch = mapped(file.batch, (), of_plan)
    program = compile(file.on_meta(), batch, plan.best.spec, loss=file.loss, prove=False)
    return gain(program, source, file, plan.target.device, batch)


def _lengths(program: Program, source: str, file: Any) -> Lengths:
    """Return the lengths that `--lengths` names: of a file, or of data('train')."""
    if source != "data":
        return read(source)
    dataset: Any = file.data("train") if file.data is not None else None
    if not is_map_style(dataset):
        fault = "the model file has no data('train') that is a dataset with a length"
        raise ShardcError(fault, where="--lengths data", fix="name a file of lengths")
    known, collate = stated(dataset), file.collate or Tensors(program)
    return of(known if known is not None else [of_sample(program, dataset[i], collate) for i in range(len(dataset))])


def _way(steps: Sequence[Priced], cost: Any, lost: float) -> dict[str, float]:
    """Add up steps. cost: of the longest rows; lost: the share of tokens in packed rows that fill them up."""
    # what does not grow with a row: sums of gradients that ranks wait for, the update; of a pipeline, its bubble
    busy = cost.program.microbatches * of_cost(cost)
    factor, rest = (cost.step_seconds / busy, 0.0) if cost.program.axis else (1.0, max(cost.step_seconds - busy, 0.0))
    total = sum(p.seconds * factor + rest for p in steps)
    tokens, places = sum(p.tokens for p in steps) * (1 - lost), sum(p.padded for p in steps)
    figures = total / len(steps), sum(p.slowest for p in steps) / len(steps), 1 - tokens / places, tokens / total
    return dict(zip(("step_seconds", "slowest", "padding", "tokens_per_second"), figures, strict=True))


def _packed(drawn: Sequence[int], step: Step) -> tuple[list[list[Row]], float]:
    """Pack documents by best fit into whole steps; return their rows, and the share of places that stay empty."""
    best_fit, rows, lost = needed("text", "packing", "best_fit"), list[Row](), 0
    while len(rows) < step.size:  # at least one step
        for at in range(0, len(drawn), TOGETHER):
            some = drawn[at : at + TOGETHER]
            for cells in best_fit(some, step.length):
                left = step.length - sum(some[i] for i in cells)
                rows.append(row([*(some[i] for i in cells), *([left] if left else [])]))
                lost += left
    steps = [rows[at : at + step.size] for at in range(0, len(rows) - step.size + 1, step.size)]
    return steps, lost / (len(rows) * step.length)
