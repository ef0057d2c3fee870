"""Predict what balancing gains for a distribution of lengths, before a device is used."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardc.compile import compile
from shardc.errors import ShardcError
from shardc.features.rows import same_step
from shardc.features.rows.arrangement import Priced, Row, Step, arranged, priced, row
from shardc.features.rows.lengths import Lengths, of, read
from shardc.features.rows.runtime import of_sample, row_length, stated, suggested
from shardc.features.rows.seconds import Seconds, fitted, leaves_out, spread
from shardc.features.rows.seconds import of_cost as seconds_of
from shardc.ir.program import Program
from shardc.ir.units import count, plural, seconds
from shardc.optional import needed
from shardc.recompile import Resizer
from shardc.report.aligned import aligned
from shardc.runtime.data.inputs import leaves, mapped, part_of
from shardc.runtime.data.inputs import rows as rows_of
from shardc.runtime.data.samples import is_map_style
from shardc.runtime.step import batch_sizes

#: Steps that are drawn, and the documents that are packed at a time (shardc.text's own number).
STEPS, TOGETHER = 8, 1024


@dataclass(frozen=True)
class Way:
    """One way to give rows to ranks, over several steps. pairs: of attention in packed rows, as share of all."""

    name: str
    step_seconds: float
    slowest: float
    padding: float
    tokens_per_second: float


@dataclass(frozen=True)
class Gain:
    """What is predicted. fitted: a microbatch's seconds by its length. hidden: share of pairs that masks hide."""

    lengths: Lengths
    step: Step
    device: str
    ways: tuple[Way, ...]
    fitted: Seconds
    hidden: float
    left_out: bool
    longest: float

    @property
    def gain(self) -> float:
        """How many times as fast balanced rows are as rows as they come, each microbatch as long as it needs."""
        by_name = {w.name: w for w in self.ways}
        return by_name[COME].step_seconds / by_name[BALANCED].step_seconds

    def to_json(self) -> dict[str, Any]:
        ways = {w.name: {k: getattr(w, k) for k in _FIGURES} for w in self.ways}
        drawn = {"rows": self.lengths.rows, "mean": self.lengths.mean, "longest": self.lengths.longest}
        of_step = {"ranks": self.step.ranks, "microbatches": self.step.microbatches, "rows": self.step.rows}
        terms = {"fixed": self.fitted.fixed, "by_token": self.fitted.by_token, "by_pair": self.fitted.by_pair}
        hidden = {"hidden_pairs": self.hidden, "left_out": self.left_out}
        return {"lengths": drawn, "step": of_step, "device": self.device, "seconds": terms, "ways": ways, **hidden}

    def __str__(self) -> str:
        """Return a table, and what it means."""
        s, drawn = self.step, self.lengths
        head = f"{drawn.rows:,} rows of up to {drawn.longest:,} tokens (half up to {drawn.median():,}, mean "
        groups = f"{plural(s.ranks, 'group')} of ranks with lengths of their own"
        of_step = f"a step: {s.size} rows on {groups}, {s.microbatches} microbatches of {plural(s.rows, 'row')}"
        table = [["", "step", "slowest / mean", "padding", "tokens/s"]]
        for w in self.ways:
            figures = [f"{w.slowest:.2f}", f"{w.padding:.1%}", count(w.tokens_per_second)]
            table.append([w.name, seconds(w.step_seconds), *figures])
        computed = "and this attention leaves them out" if self.left_out else "but this attention computes them all"
        lines = [
            f"{head}{drawn.mean:,.0f}), on {self.device}",
            of_step,
            *aligned(table, "<>"),
            f"balancing: {self.gain:.2f} times as fast",
        ]
        lines += [f"packed rows: masks of documents hide {self.hidden:.0%} of the pairs, {computed}"]
        if self.longest > 1:
            more = "more microbatches of fewer rows, or a split sequence, would even that out"
            lines += [f"the longest row takes {self.longest:.1f} times the mean of a rank's step: {more}"]
        return "\n".join(lines)


_FIGURES = ("step_seconds", "slowest", "padding", "tokens_per_second")
ONE, COME, BALANCED, PACKED = "one length for all", "as they come", "balanced", "packed, balanced"


def gain(program: Any, source: str, file: Any, device: Any) -> Gain:
    """Predict the gain of balancing for `--lengths`. source: a file, or `data`; file: the model file."""
    resizer = Resizer(file.on_meta, file.loss, {}, compile, program.forward_only, file.batch)
    return predicted(replace(program, resize=resizer), _lengths(program, source, file), device)


def gain_of_plan(plan: Any, source: str, file: Any) -> Gain:
    """Predict it for a plan's best spec. Raises ShardcError if nothing fits."""
    target, example = plan.target, dict(leaves(file.batch))
    rows = min((x.shape[0] for x in example.values() if isinstance(x, Tensor) and x.dim()), default=1)

    def of_plan(_: Any, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.dim() or x.shape[0] % rows:
            return x
        return torch.empty(x.shape[0] // rows * target.batch, *x.shape[1:], dtype=x.dtype, device="meta")

    batch = mapped(file.batch, (), of_plan)
    program = compile(file.on_meta(), batch, plan.best.spec, loss=file.loss, prove=False)
    resizer = Resizer(file.on_meta, file.loss, {}, compile, program.forward_only, batch)
    return predicted(replace(program, resize=resizer), _lengths(program, source, file), target.device)


def _lengths(program: Program, source: str, file: Any) -> Lengths:
    """Return the lengths that `--lengths` names: of a file, or of data('train')."""
    if source != "data":
        return read(source)
    dataset: Any = file.data("train") if file.data is not None else None
    if not is_map_style(dataset):
        fault = "the model file has no data('train') that is a dataset with a length"
        raise ShardcError(fault, where="--lengths data", fix="name a file of lengths")
    known = stated(dataset)
    return of(known if known is not None else [of_sample(program, dataset[i]) for i in range(len(dataset))])


def predicted(program: Program, lengths: Lengths, device: Any) -> Gain:
    """Predict steps of rows of these lengths. program: one that can be compiled for others; device: of shardc.cost.

    Rows longer than the spec's lengths are cut to the longest of them. Raises ShardcError for a program that cannot be
    compiled for other lengths, and where balance would be refused.
    """
    if program.resize is None:
        fix = "name the model file and the spec"
        raise ShardcError("a loaded program has no model to compile for other lengths", where="--lengths", fix=fix)
    program = program if program.spec.batch.pad else _all_padded(program)
    sizes = tuple(sorted(program.spec.batch.lengths) or _unsplit(program, suggested(sorted(lengths.counts))))
    lengths = Lengths(_cut(lengths.counts, sizes[-1]))
    programs = {n: _of_length(program, n) for n in spread(list(sizes))}
    axes = frozenset[str]()
    for one, other in pairwise(sorted(programs)):
        axes |= same_step.length_axes(programs[one], programs[other], (one, other))
    cost = {n: p.cost(device) for n, p in programs.items()}
    found = fitted({n: seconds_of(c) for n, c in cost.items()})
    m, largest = program.microbatches, cost[max(cost)]
    busy = m * seconds_of(largest)
    groups = part_of(program, 0)[1]
    joined = {a for a in same_step.axes_of_rows(program) if axes & set(program.mesh.digits(a))}
    together = math.prod(map(program.mesh.size, joined))
    step = Step(
        ranks=max(groups // together, 1),
        microbatches=m,
        rows=rows_of(program) // (groups * m) * min(together, groups),
        seconds=found,
        meet=program.spec.data.zero >= 2 and m > 1,
        lengths=sizes,
    )
    # what does not grow with a row: sums of gradients that ranks wait for, the update; of a pipeline, its bubble
    rest, factor = (0.0, largest.step_seconds / busy) if program.axis else (max(largest.step_seconds - busy, 0.0), 1.0)
    drawn = lengths.drawn(STEPS * step.size)
    steps = [[row(n) for n in drawn[at : at + step.size]] for at in range(0, len(drawn), step.size)]
    ways = [_way(name, list(each), rest, factor) for name, each in _padded(step, steps)]
    full, hidden = _packed(drawn, sizes[-1], step)
    left_out = leaves_out(program)
    apart = replace(step, ranks=groups, rows=step.rows * step.ranks // groups)  # rows of one length need no more
    of_rows = replace(apart, lengths=(), length=sizes[-1], left_out=left_out)
    ways.append(_way(PACKED, [arranged(of_rows, some) for some in full], rest, factor, lost=hidden[1]))
    mean = sum(sum(p.of_ranks) / len(p.of_ranks) for p in (arranged(step, some) for some in steps)) / len(steps)
    longest = step.of([row(lengths.longest)])[1] / mean
    return Gain(lengths, step, largest.device.name, tuple(ways), found, hidden[0], left_out, longest)


def _padded(step: Step, steps: Sequence[Sequence[Row]]) -> Iterator[tuple[str, list[Priced]]]:
    """Yield each way to pad rows, with its steps."""
    longest = [replace(step, length=step.padded(max(r.length for r in some)), lengths=()) for some in steps]
    yield ONE, [priced(one, some, range(step.size)) for one, some in zip(longest, steps, strict=True)]
    yield COME, [priced(step, some, range(step.size)) for some in steps]
    yield BALANCED, [arranged(step, some) for some in steps]


def _way(name: str, steps: Sequence[Priced], rest: float, factor: float, lost: float = 0.0) -> Way:
    """Add up steps. lost: the share of tokens in packed rows that fill them up."""
    total = sum(p.seconds * factor + rest for p in steps)
    tokens, places = sum(p.tokens for p in steps) * (1 - lost), sum(p.padded for p in steps)
    slowest = sum(p.slowest for p in steps) / len(steps)
    return Way(name, total / len(steps), slowest, 1 - tokens / places, tokens / total)


def _packed(drawn: Sequence[int], seq: int, step: Step) -> tuple[list[list[Row]], tuple[float, float]]:
    """Pack documents by best fit; return full steps, the share of pairs that masks hide, and that of empty places."""
    best_fit = needed("text", "packing", "best_fit")
    rows: list[Row] = []
    lost = tokens = 0
    documents = list(drawn)
    while len(rows) < step.size:  # at least one step
        for at in range(0, len(documents), TOGETHER):
            some = documents[at : at + TOGETHER]
            for cells in best_fit(some, seq):
                left = seq - sum(some[i] for i in cells)
                lost, tokens = lost + left, tokens + seq
                rows.append(row([*(some[i] for i in cells), *([left] if left else [])]))
    hidden = 1 - sum(r.pairs for r in rows) / (len(rows) * seq * seq)
    steps = [rows[at : at + step.size] for at in range(0, len(rows) - step.size + 1, step.size)]
    return steps, (hidden, lost / tokens)


def _cut(counts: Any, longest: int) -> dict[int, int]:
    cut: dict[int, int] = {}
    for n, number in counts.items():
        cut[min(n, longest)] = cut.get(min(n, longest), 0) + number
    return cut


def _unsplit(program: Program, sizes: Sequence[int]) -> list[int]:
    """Return lengths that the ranks of a split sequence divide."""
    unit = 2 * math.prod(program.mesh.size(a) for x in program.inputs[:1] for a, s in x.layout.shards() if s.dim == 1)
    return sorted({max(n, unit) for n in sizes})


def _all_padded(program: Program) -> Program:
    """Return the program with all inputs as long as the longest one, padded by 0."""
    length = row_length(program)
    pad = {str(x.path[-1]): 0.0 for x in program.inputs if len(x.shape) > 1 and x.shape[1] == length and x.path}
    spec = replace(program.spec, batch=program.spec.batch.model_copy(update={"pad": pad}))
    return replace(program, spec=spec)


def _of_length(program: Program, length: int) -> Any:
    shapes, resize = batch_sizes.shapes_of_length(program, length), program.resize
    if shapes == tuple(x.shape for x in program.inputs):
        return program
    made: Any = resize
    return made(program, made.batch, shapes, "as compiled")
