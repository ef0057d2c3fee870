"""Collect the facts that ranks of an engine or a module share, for `shardc.runtime.mesh.agreement`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.ir.program import Program
from shardc.runtime.data.inputs import batch_dims, leaves, name_of, type_name
from shardc.runtime.data.ragged import Ragged
from shardc.runtime.data.sampler import Order
from shardc.runtime.mesh import agreement
from shardc.runtime.mesh.agreement import SAME_BATCH, SAME_OPTIMIZER, Fact, fingerprint, hashed, slots_of, stated
from shardc.runtime.zero.several_optimizers import class_of, rates_text


def program_facts(program: Program, *, seed: int, **options: object) -> list[Fact]:
    """Return facts of a program (graphs, layouts, buckets, schedule) and of an engine's options, by name."""
    stored = [(x.name, x.shape, str(x.dtype), str(x.layout)) for x in program.stored]
    graphs = [str(stage.graph) for stage in program.stages]
    order = str(program.schedule) if program.schedule is not None else ""
    size = f"{len(stored)} weights, {sum(len(stage.graph.nodes) for stage in program.stages)} ops"
    value = hashed(stored, graphs, program.buckets, program.microbatches, order)
    return [
        stated("the version of torch", str(torch.__version__), fix="install the same version on all machines"),
        Fact("the program", value, fix=agreement.SAME_PROGRAM, shown=size),
        stated("the seed", seed, fix="use the same seed on all ranks"),
        *(stated(name, value, fix=f"use the same {name} on all ranks") for name, value in options.items()),
    ]


def joint_facts(program: Program, mesh: Any) -> list[Fact]:
    """Return facts of the graphs that this rank runs in a training step.

    Only its own stages' graphs: it need not write those of other ranks. Ranks agree on the program otherwise.
    """
    at = mesh.coordinate(program.axis) if program.axis else 0
    local = [s for i, s in enumerate(program.stages) if program.schedule is None or program.schedule.placement[i] == at]
    texts = [str(graph) for s in local if s.joint is not None for graph in s.joint.graphs.values()]
    axes = (program.axis,) if program.axis else ()
    return [Fact("the graphs of a step", hashed(texts), axes, fix=agreement.SAME_PROGRAM)]


def optimizer_facts(program: Program, optimizer: torch.optim.Optimizer | None) -> list[Fact]:
    """Return the optimizer's class and group settings. Stages of a pipeline may have other groups."""
    stage = (program.axis,) if program.axis else ()
    name = class_of(optimizer) if optimizer is not None else "none"
    settings = plain_settings(optimizer) if optimizer is not None else []
    shown = [f"{k}={g[k]}" for g in settings[:1] for k in ("weight_decay", "betas", "momentum") if k in g]
    return [
        stated("the optimizer", name, stage, fix=SAME_OPTIMIZER),
        Fact("the setting of the optimizer", hashed(settings), stage, fix=SAME_OPTIMIZER, shown=", ".join(shown)),
    ]


def rates_fact(rates: Sequence[float | None], axes: tuple[str, ...] = (), where: str = "", form: str = "") -> Fact:
    """Return the fact of learning rates. form: of `format`, in an error."""
    return Fact("the learning rate", hashed(rates), axes, where, SAME_OPTIMIZER, rates_text(rates, form))


def plain_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """Return the plain settings of each parameter group, except for its learning rate."""
    plain = (bool, int, float, str, tuple, type(None))
    return [
        {k: v for k, v in sorted(group.items()) if isinstance(v, plain) and k != "lr"}
        for group in optimizer.param_groups
    ]


def loader_facts(order: Order) -> list[Fact]:
    """Return a loader's order: ranks with other orders would read some samples twice, and others never."""
    fix = "make the same dataset and engine.loader(...) on all ranks"
    return [
        stated("the length of the dataset", order.size, fix=fix),
        stated("the loader's shuffling", order.shuffle, fix=fix),
        stated("the loader's seed", order.seed, fix=fix),
        stated("how the loader treats the rest of an epoch", "reads it" if order.rest else "drops it", fix=fix),
        stated("the loader's position", (order.epoch, order.consumed), fix="load the same checkpoint on all ranks"),
    ]


_SAME_ENTRIES = "return the same entries on all ranks, from data() and collate, also where samples are left out"
#: The name of a fact that parts need not share: a collate function may leave samples out of some.
ROWS = "the number of rows in the part of the batch"


def batch_facts(program: Program, batch: Any, *, local: bool) -> list[Fact]:
    """Return facts of the global batch, or of the part that ranks share, such as a tensor-parallel group."""
    if isinstance(batch, Ragged):
        fix = "make one engine.loader(...) of the same dataset on all ranks, and pass each part to one step"
        by_rows = {
            a
            for x in program.inputs
            for axis, _ in x.layout.shards(batch_dims(program)[x.name] or 0)
            for a in program.mesh.digits(axis)
        }
        where, facts = "its part of the batch", list[Fact]()
        for more in (False, True):  # with more rows, ranks of the sequence have rows of their own too
            split = by_rows | set(program.mesh.digits(*program.spec.token_axes) if more else ())
            axes = tuple(a for a in program.mesh.names if a in split)
            some = [p for p, size in zip(batch.parts, batch.sizes, strict=True) if (size.times > 1) == more]
            given = [x for part in some for _, x in leaves(part) if isinstance(x, Tensor)]
            facts.append(Fact("the part of the batch", fingerprint(given), axes, where, SAME_BATCH))
        return [stated("the sizes of the step's microbatches", batch.every, where=where, fix=fix), *facts]
    tensors = {path: x for path, x in sorted(leaves(batch), key=lambda leaf: name_of(leaf[0])) if isinstance(x, Tensor)}
    names = ", ".join(f"{name_of(path)} {type_name(x.dtype, x.shape)}" for path, x in tensors.items())
    if not local:
        form = Fact("the form of the batch", hashed(names), fix=SAME_BATCH, shown=names)
        return [form, Fact("the global batch", fingerprint(tensors.values()), fix=SAME_BATCH)]
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    shapes, rows, split_rows = list[list[int]](), list[list[int]](), set[str]()
    dims, mesh = batch_dims(program), program.mesh
    for x in program.inputs:
        shards = [(part, s.dim) for axis, s in x.layout.shards() for part in mesh.digits(axis)]
        axes = tuple(a for a in mesh.names if a in dict(shards))
        given = [tensors[x.path]] if x.path in tensors else []
        parts.setdefault(axes, []).extend(given)
        shape = list(given[0].shape) if given else []
        d, by_rows = dims[x.name], {part for part, dim in shards if dim == dims[x.name]}
        if d is not None and by_rows:  # the rest of the shape is the same on all ranks
            rows.append(shape[d : d + 1])
            del shape[d : d + 1]
        shapes.append(shape)
        split_rows |= by_rows
    where = "its part of the batch"
    lengths = "pad them to the same length on all ranks: batch: {lengths: [...], pad: {name: number}} in the spec does"
    inputs = ", ".join(f"{name_of(path)} {x.dtype}" for path, x in tensors.items())
    return [
        stated("the inputs in the part of the batch", inputs, where=where, fix=_SAME_ENTRIES),
        Fact("the length of the part of the batch", hashed(shapes), where=where, fix=lengths),
        stated(ROWS, rows, tuple(a for a in mesh.names if a in split_rows), where=where, fix=SAME_BATCH),
        *(Fact("the part of the batch", fingerprint(xs), axes, where, SAME_BATCH) for axes, xs in parts.items()),
    ]


def written(program: Program, written: bool) -> Fact:
    """Return the fact whether parameters were written to: then all ranks that have them gather them."""
    fix = "write to engine.params, under torch.no_grad(), in the same way on all ranks"
    return stated("whether parameters were written to", written, (program.axis,) if program.axis else (), fix=fix)


class SameRows:
    """Notes once if all ranks get the same rows in the first RUNNING batches.

    This happens if each rank reads a whole DataLoader without a sampler. The steps are right, but have fewer rows.
    """

    RUNNING = 3

    def __init__(self) -> None:
        self._left = self.RUNNING

    def look(
        self,
        program: Program,
        batch: Any,
        facts: Sequence[Fact],
        equal_facts: Sequence[Fact],
        note: Callable[[str], None],
    ) -> None:
        """Count batches with equal rows on all ranks, and note them. facts: of this rank's part of the batch."""
        if self._left <= 0:
            return
        parts = [f for f in facts if slots_of(f, program.mesh) > 1]
        same = bool(parts) and all(f in equal_facts for f in parts) and not _constant(program, batch)
        self._left = self._left - 1 if same else 0
        if same and not self._left:
            note(
                f"{self.RUNNING} times in a row all ranks got the same rows: a step then has fewer rows. Pass each rank"
                " its own: .local(batch) of a global batch, engine.loader(dataset), or your own sampler"
            )


def _constant(program: Program, batch: Any) -> bool:
    """Return whether all rows of a batch are equal, as in made-up data."""
    tensors, dims = dict(leaves(batch)), batch_dims(program)
    rows = [(tensors[x.path], d) for x in program.inputs if (d := dims[x.name]) is not None and x.path in tensors]
    if any(x.is_meta for x, _ in rows):  # refused later
        return True
    return all(torch.equal(x.select(d, 0), x.select(d, i)) for x, d in rows for i in range(1, x.shape[d]))
