"""Find batches whose sizes differ from the compiled ones, and pad them to the lengths of the spec.

The *length* of a batch is the size of the dim after the batch dim (before it, if that is dim 1) of the inputs that the
spec's `batch: {pad: {...}}` names. With `lengths: [128, 256]` a batch of length 150 is padded to 256. The user states
the pad value of each input: only the user knows which values the loss ignores.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardc.errors import ShardcError
from shardc.ir.outputs import Output
from shardc.ir.patterns import match
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.stored import Input
from shardc.runtime.data.inputs import Path, batch_dims, leaves, mapped, name_of
from shardc.runtime.data.ragged import Size
from shardc.runtime.stage import outputs
from shardc.runtime.stage.communicators import groups_of

_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
#: Global shapes of a batch's tensors, in the order of the program's inputs.
Shapes = tuple[tuple[int, ...], ...]
#: Why a program is compiled again: as before; in eval mode; for log-probabilities of the loss's targets.
Use = Literal["as compiled", "evaluate", "score"]


def cast_and_pad(program: Program, mesh: Any, batch: Any, *, local: bool) -> Any:
    """Return a batch in the compiled dtypes (narrower integers are widened), padded to one of the lengths.

    local: the batch is this rank's part; the call is then collective, since all parts need the same length.
    Raises ShardcError for a batch longer than all lengths, and for an input that has the length but no pad value.
    """
    dtypes = {x.path: x.dtype for x, leaf in _inputs_in(program, batch) if _widens(leaf, x.dtype)}
    if dtypes:
        batch = mapped(batch, (), lambda path, leaf: leaf.to(dtypes[path]) if path in dtypes else leaf)
    section = program.spec.batch
    return _padded(program, mesh, batch, section.lengths, section.pad, local=local) if section.pad else batch


def padded_to(program: Program, mesh: Any, batch: Any, length: int, numbers: Mapping[str, float]) -> Any:
    """Return a batch in the compiled dtypes, padded to this length. Raises ShardcError if it is longer.

    numbers: to pad inputs with instead of the spec's, by name.
    """
    section = program.spec.batch
    changed = section.model_copy(
        update={"lengths": (length,), "pad": {**numbers, **{n: x for n, x in section.pad.items() if n not in numbers}}}
    )
    longer = replace(program, spec=replace(program.spec, batch=changed))
    return cast_and_pad(longer, mesh, batch, local=False)


def length_inputs(program: Program) -> dict[str, int]:
    """Return {input that has the batch's length, by a number of `pad`: the dim of it}."""
    dims, patterns = batch_dims(program), program.spec.batch.pad
    named = [x for x in program.inputs if any(match(pattern, name_of(x.path)) for pattern in patterns)]
    at = {x.name: 0 if dims[x.name] == 1 else 1 for x in named}
    return {x.name: at[x.name] for x in named if len(x.shape) > at[x.name]}


def shapes_of(program: Program, size: Size) -> Shapes:
    """Return the global shapes of a batch whose microbatches all have this size."""
    at, dims = length_inputs(program), batch_dims(program)

    def dim(x: Input, d: int, n: int) -> int:
        if d == at.get(x.name):
            return size.length
        return n * size.times if d == dims[x.name] and n > 1 else n

    return tuple(tuple(dim(x, d, n) for d, n in enumerate(x.shape)) for x in program.inputs)


def _inputs_in(program: Program, batch: Any) -> list[tuple[Input, Any]]:
    by_path = dict(leaves(batch))
    return [(x, by_path[x.path]) for x in program.inputs if x.path in by_path]


def _widens(leaf: Any, dtype: torch.dtype) -> bool:
    """Return whether a tensor holds integers that the other integer dtype can hold too."""
    if not isinstance(leaf, Tensor) or leaf.dtype == dtype or not {leaf.dtype, dtype} <= _WHOLE:
        return False
    return torch.promote_types(leaf.dtype, dtype) == dtype


def _padded(
    program: Program, mesh: Any, batch: Any, lengths: tuple[int, ...], fills: Mapping[str, float], *, local: bool
) -> Any:
    dims = batch_dims(program)
    length_dim = {x.path: 0 if dims[x.name] == 1 else 1 for x in program.inputs}
    fill: dict[Path, float | None] = {}
    for x, leaf in _inputs_in(program, batch):
        name = name_of(x.path)
        number = next((n for pattern, n in fills.items() if match(pattern, name)), None)
        repeats = x.choice is not None and x.choice.tokens == length_dim[x.path]
        if (number is None and not repeats) or not isinstance(leaf, Tensor) or leaf.dim() <= length_dim[x.path]:
            continue
        if local and x.layout.shards(length_dim[x.path]):
            fault = "its length is split over ranks, so its parts cannot be padded separately"
            fix = "pass the engine whole batches, without local=True"
            raise ShardcError(fault, where=f"batch.pad: {name}", fix=fix)
        fill[x.path] = number
    if not fill:
        return batch
    by_path = dict(leaves(batch))
    length = max(by_path[path].shape[length_dim[path]] for path in fill)
    if local:
        every = [0] * mesh.layout.world
        every[mesh.rank] = length
        length = max(mesh.sum_on_host(every))
    size = next((n for n in sorted(lengths) if n >= length), None if lengths else length)
    if size is None:
        fault = f"a batch of length {length} is longer than all of the spec's lengths, {', '.join(map(str, lengths))}"
        raise ShardcError(fault, where="batch.lengths", fix=f"add {length} or more to them, or cut the samples")
    for x, leaf in _inputs_in(program, batch):
        d = length_dim[x.path]
        if x.path not in fill and isinstance(leaf, Tensor) and leaf.dim() > d and leaf.shape[d] == length != size:
            fault = f"its dim {d} has the batch's length, {length}, which is padded to {size}, but it has no number "
            fault += "to pad with"
            raise ShardcError(fault, where=name_of(x.path), fix=f"write batch: {{pad: {{{name_of(x.path)}: ...}}}}")

    def longer(path: Path, leaf: Any) -> Any:
        if path not in fill or leaf.shape[length_dim[path]] == size:
            return leaf
        d = length_dim[path]
        if fill[path] is None:  # choices: those of the last token, which fit
            last = torch.full((size - leaf.shape[d],), leaf.shape[d] - 1, device=leaf.device)
            return torch.cat([leaf, leaf.index_select(d, last)], d)
        return pad(leaf, (*[0, 0] * (leaf.dim() - 1 - d), 0, size - leaf.shape[d]), value=fill[path])

    return mapped(batch, (), longer)


@torch.no_grad()
def joined_parts(program: Program, mesh: Any, batch: Any) -> Any:
    """Return the global batch, whole on every rank, of parts with different numbers of rows. Collective.

    Parts are filled up to the longest and joined by their layouts, and what filled them is left out.
    """
    whole: dict[Path, Tensor] = {}
    for x, leaf in _inputs_in(program, batch):
        if not isinstance(leaf, Tensor) or not 0 < leaf.dim() == len(x.shape):
            continue  # not split, or refused by all ranks when they cut the batch
        layout = Layout(tuple((a, replace(s, padding=0)) for a, s in x.layout.shards()))
        d, part = batch_dims(program)[x.name] or 0, leaf.to(mesh.device)
        counts = [0] * mesh.layout.world
        counts[mesh.rank] = part.shape[d]
        counts = mesh.sum_on_host(counts)
        filling = part.new_zeros((*part.shape[:d], max(counts) - part.shape[d], *part.shape[d + 1 :]))
        o = Output(x.name, x.shape, x.dtype, layout)
        part = outputs.gathered(replace(program, outputs=(o,)), mesh, {x.name: torch.cat([part, filling], d)})[x.name]
        filled = [torch.arange(max(counts)) < n for n in counts]
        rows = Layout(tuple((a, replace(s, dim=0)) for a, s in layout.shards() if s.dim == d))
        kept = rows.join(lambda c, filled=filled: filled[program.mesh.rank(c)], program.mesh)  # type: ignore[misc]
        whole[x.path] = part.index_select(d, kept.nonzero().flatten().to(part.device))
    return mapped(batch, (), lambda path, leaf: whole.get(path, leaf))


def other_shapes(program: Program, batch: Any, *, local: bool) -> Shapes | None:
    """Return a batch's global shapes if it differs from the compiled batch in sizes only, else None.

    Dims may have other sizes. There may be fewer rows, by the same ratio in all inputs. None also for an equal batch.
    """
    by_path, dims, shapes = dict(leaves(batch)), batch_dims(program), []
    rows: list[tuple[int, int]] = []
    for x in program.inputs:
        leaf, d = by_path.get(x.path), dims[x.name]
        if not isinstance(leaf, Tensor) or leaf.dtype != x.dtype or leaf.dim() != len(x.shape) or not all(leaf.shape):
            return None
        shape = tuple(leaf.shape)
        if local:
            shape = tuple(n * _ranks(program, x, i) for i, n in enumerate(shape))
        shapes.append(shape)
        if d is not None and x.shape[d] > 1:
            rows.append((shape[d], x.shape[d]))
    same = all(n * rows[0][1] == m * rows[0][0] and n <= m for n, m in rows)
    return tuple(shapes) if same and tuple(shapes) != tuple(x.shape for x in program.inputs) else None


def _ranks(program: Program, x: Input, dim: int) -> int:
    """Return over how many ranks a dim of an input is split."""
    return math.prod(program.mesh.size(axis) for axis, _ in x.layout.shards(dim))


def fewer_rows(program: Program, shapes: Shapes) -> bool:
    dims = batch_dims(program)
    return any(
        d is not None and shape[d] < x.shape[d]
        for x, shape in zip(program.inputs, shapes, strict=True)
        for d in (dims[x.name],)
    )


def empty_batch(batch: Any, program: Program, shapes: Shapes) -> Any:
    """Return a batch of these global shapes on the meta device, where a rank has only its part of it."""
    by_path = {x.path: shape for x, shape in zip(program.inputs, shapes, strict=True)}

    def empty(path: Path, leaf: Any) -> Any:
        return torch.empty(by_path[path], dtype=leaf.dtype, device="meta") if path in by_path else leaf

    return mapped(batch, (), empty)


def sizes_text(program: Program, shapes: Shapes) -> str:
    """Return the shapes that differ from the compiled ones as text: `ids [8, 48], labels [8, 48]`."""
    differing = [(x, s) for x, s in zip(program.inputs, shapes, strict=True) if s != x.shape]
    return ", ".join(f"{name_of(x.path)} {list(s)}" for x, s in differing)


_BRANCHES = "forward has its own branches on self.training"
_PLAIN = "evaluate the plain model with engine.full_state_dict()"


def step_can_evaluate(program: Program, mesh: Any) -> bool:
    """Return whether the program of a step can evaluate as well; note it if that is unknown.

    Raises ShardcError if the program cannot evaluate, and there is no model to compile for it.
    """
    if program.evaluates == "alike":
        return True
    if program.resize is not None:
        return False
    if program.evaluates == "otherwise":
        fault = f"{_BRANCHES}, and behaves differently in eval mode; a loaded program has no model to compile"
        raise ShardcError(fault, where="evaluating", fix=f"compile in this process (shardc.compile), or {_PLAIN}")
    mesh.note(f"{_BRANCHES}, which stay as in training: their eval mode was not tried. If it matters, {_PLAIN}")
    return True


def recompile(program: Program, batch: Any, shapes: Shapes, mesh: Any, *, use: Use) -> Program:
    """Compile the program for a batch of these global shapes, and make the process groups it needs. Collective.

    Raises ShardcError, on all ranks, if one of them cannot compile it. For evaluation it raises only if the program is
    known to differ from that of a step; otherwise it notes why, and the program of a step evaluates.
    """
    mesh.barrier()  # if ranks are threads of one process, none may run during compilation
    result = _recompiled(program, batch, shapes, mesh, use)
    mesh.barrier()
    if result.mesh == program.mesh:  # else a view of it has them
        mesh.add_groups(groups_of(result))
    return result


def _recompiled(program: Program, batch: Any, shapes: Shapes, mesh: Any, use: Use) -> Program:
    if program.resize is None:
        fault = "scoring compiles another program, but a loaded program has no model to compile"
        fix = 'compile in this process, or for scoring: shardc.compile(..., forward="score")'
        raise ShardcError(fault, where="engine.score", fix=fix)
    result, error = program, None
    try:
        result = program.resize(program, batch, shapes, use)
    except ShardcError as e:
        error = e
    # the model may be alive on some ranks only, or a proof may fail on one rank's rows
    if not mesh.sum_on_host([error is not None])[0]:
        return result
    if use != "evaluate" or program.evaluates == "otherwise":
        raise error or ShardcError("another rank could not compile the program for this batch", where="engine")
    why = error.what if error is not None else "another rank could not compile the model in eval mode"
    mesh.note(f"{why}. So evaluate switches only dropout and BatchNorm. If it matters, {_PLAIN}")
    same = shapes == tuple(x.shape for x in program.inputs)
    return program if same else _recompiled(program, batch, shapes, mesh, "as compiled")
