"""Cut this rank's parts from any source of weights, and gather them again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardc.errors import Errors
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.ir.shard_chunks import trim, unchunk
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.boxes import Sliced, boxes_of, in_memory, joined
from shardc.runtime.state.fitting import SAVED_MODEL, check_tensors
from shardc.runtime.state.sources import Weights

# --- global tensors, from every rank's parts of them


def gather(x: Tensor, layout: Layout, mesh: Any, tag: str = "") -> Tensor:
    """Return the global tensor of this rank's part `x`, on every rank. Collective over its axes."""
    x = x.detach()
    for axis, shard in sorted(layout.shards(), key=lambda item: item[1].split):  # outer digits first, as Layout.join
        x = unchunk(mesh.all_gather(x.contiguous(), axis, direction="state", tag=tag), shard)
    for shard in layout.paddings():
        x = trim(x, shard)
    return x


def gathered_entry(program: Program, mesh: Any, x: Param | Buffer, held: Mapping[str, Tensor]) -> Tensor:
    """Return the global value of a parameter or buffer on the CPU, on every rank. Collective."""
    local = _everywhere(program, mesh, x, held)
    return gather(local, x.layout, mesh, x.fqn).to(device="cpu", copy=True, memory_format=torch.contiguous_format)


def _everywhere(program: Program, mesh: Any, x: Param | Buffer, held: Mapping[str, Tensor]) -> Tensor:
    """Return this rank's part, or the one of the first stage that has it. Collective over the pipeline."""
    if not program.axis:
        return held[x.name]
    first, *_ = holders = program.holders(x)
    at, others = mesh.coordinate(program.axis), [c for c in range(mesh.size(program.axis)) if c not in holders]
    if at in others:
        received = torch.empty(x.layout.local_shape(x.shape, program.mesh), dtype=x.dtype, device=mesh.device)
        mesh.start_receive(received, program.axis, first, tag=x.fqn).wait()
        return received
    local = held[x.name]
    if at == first:
        for work in [mesh.start_send(local, program.axis, c, direction="state", tag=x.fqn) for c in others]:
            work.wait()
    return local


def full_state_dict(
    program: Program,
    mesh: Any,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    rank0_only: bool = False,
) -> dict[str, Tensor]:
    """Return {fqn: global tensor on the CPU}, as the unsharded `model.state_dict()`. Collective.

    It has all names of a tied tensor, and persistent buffers. rank0_only: the other ranks return {}.
    """
    state_dict: dict[str, Tensor] = {}
    for x in program.params_and_buffers:
        if not x.fqn or (isinstance(x, Buffer) and not x.persistent):
            continue
        value = gathered_entry(program, mesh, x, params if isinstance(x, Param) else buffers)
        if mesh.rank == 0 or not rank0_only:
            state_dict |= x.by_name(value)
    return state_dict


# --- parts, from any source of weights


def local_parts(
    program: Program,
    given: Weights,
    mesh: Any,
    *,
    broadcast: bool = False,
    on_whole: Callable[[Param | Buffer, Tensor], None] = lambda x, whole: None,
) -> tuple[Iterator[tuple[str, nn.Parameter]], dict[str, Tensor]]:
    """Return this rank's parameters, made one at a time, and buffers, by placeholder name.

    In new memory on `mesh.device`, in the program's dtypes. Of files it reads only its part.
    broadcast: rank 0's weights for all ranks, one tensor at a time, instead of each rank's. Collective.
    on_whole: called with each whole tensor before this rank's part is cut from it.

    Raises ShardcError for names that are missing or unexpected, other shapes, and ties that the program has and the
    source has not.
    """
    _check(program, given)
    coords = mesh.layout.coords(mesh.rank)

    def part(x: Param | Buffer) -> Tensor:
        if isinstance(x, Buffer) and x.constant is not None:
            whole = x.constant
        else:
            source = _source(x, given)
            if not broadcast and not source.computed:
                return _read(x, source, mesh)
            whole = source.tensor()
            whole = mesh.broadcast(whole, tag=x.fqn) if broadcast else whole
        on_whole(x, whole)
        return _read(x, in_memory(whole), mesh)

    def parts(stored: Sequence[Param] | Sequence[Buffer]) -> Iterator[tuple[Any, Tensor]]:
        for x in stored:
            if program.has(x, coords):
                yield x, part(x)
            elif broadcast:
                part(x)  # ranks of other stages need rank 0's broadcast

    params = ((p.name, nn.Parameter(x, requires_grad=p.requires_grad)) for p, x in parts(program.params))
    return params, {b.name: x for b, x in parts(program.buffers)}


def blank(program: Program) -> Weights:
    """Return zeros without memory for all of a program's tensors, for weights that come later."""

    @functools.cache  # tied names are one object
    def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Sliced:
        return Sliced(shape, dtype, lambda _, size: torch.zeros((), dtype=dtype).expand(size))

    entries = [(n, shape, x.dtype) for x in program.params_and_buffers if x.fqn for n, shape in x.shapes.items()]
    return Weights("engine", {n: zeros(shape, dtype) for n, shape, dtype in entries})


def constants(program: Program, mesh: Any) -> dict[str, Tensor]:
    """Return this rank's parts of the constants that capture lifted out of the code, by placeholder name."""
    coords = mesh.layout.coords(mesh.rank)
    return {
        b.name: _read(b, in_memory(b.constant), mesh)
        for b in program.buffers
        if b.constant is not None and program.has(b, coords)
    }


def _source(x: Param | Buffer, given: Weights) -> Sliced:
    if x.members:
        return joined([given.tensors[n] for n in x.members], 0, new=True)
    return given.tensors[next(n for n in x.names if n in given.tensors)]


def _read(x: Param | Buffer, source: Sliced, mesh: Any) -> Tensor:
    """Read this rank's part only. Padding is zeros."""
    make = torch.zeros if x.layout.paddings() else torch.empty
    out = make(x.layout.local_shape(x.shape, mesh.layout), dtype=x.dtype, device=mesh.device)
    for box in boxes_of(x.shape, x.layout, None, mesh.layout, mesh.rank):
        box.of(out).copy_(source.read(box.offset, box.shape))
    return out


def _check(program: Program, given: Weights) -> None:
    errors = Errors()
    entries = [x for x in program.params_and_buffers if x.fqn]
    expected: dict[str, tuple[int, ...]] = {}
    for x in entries:
        if x.members:
            expected |= x.shapes
            continue
        present = [n for n in x.names if n in given.tensors] or [x.fqn]
        optional = isinstance(x, Buffer) and not x.persistent and not given.of_model
        if present[0] not in given.tensors and optional:
            fix = "pass the model, which computes it, and the weights: program.engine(model, weights=...)"
            errors.add(f"the buffer is not in the {given.what}: it is not persistent", where=x.fqn, fix=fix)
            continue
        expected |= dict.fromkeys(present, x.shape)
        if present[0] in given.tensors and not given.tied(present):
            tied = f"the program was compiled with {' and '.join(present)} as one tensor"
            fix = "compile the model without that tie (in transformers tie_word_embeddings: false in its config), or "
            fix += "pass weights that have it"
            errors.add(f"{tied}, but in the {given.what} they differ", where=x.fqn, fix=fix)
    known = {n for x in entries for n in x.names}
    fix = "pass the compiled model, or compile this one" if given.of_model else SAVED_MODEL
    shapes = {n: source.shape for n, source in given.tensors.items()}
    check_tensors(errors, expected, shapes, known, f"the {given.what}", fix)
    errors.raise_any()
