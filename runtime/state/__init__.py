"""Parameters, buffers and the optimizer's state, into an engine and out of it: keyed by the model's own names and the
place in the global tensor, never by how a program shards, so that any mesh reads what any other wrote.

    local_parameters      this rank's part of real weights, of a builder's (nothing is broadcast), of a file's
    save, load            checkpoints that any mesh can load
    full_state_dict       the plain state_dict of the unsharded model, gathered parameter by parameter
    export_safetensors    the same, in files that safetensors and transformers load

    saving, loading       checkpoints: how one is written, and read
    generations           the folder of checkpoints: which is the last one, and which are whole
    checkpoint_index      index.json: what is in a checkpoint, checked as what anybody may have written
    saving_boxes          which boxes of a global tensor a rank writes and reads
    saving_optimizer      the optimizer's state in a checkpoint
    tensor_file, digest   .safetensors files by stretches of bytes, and how damage is told
    files                 every call that reaches a disk
    sources               where weights come from: a model, a builder, a state_dict, a file
    init, init_recorder   weights of a builder, each computed by itself from a recording of the constructor
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from shardc.errors import Errors, ShardcError
from shardc.ir.cut import trim, unchunk
from shardc.ir.placement import Layout
from shardc.ir.program import Buffer, Param, Program
from shardc.runtime.state.generations import DamagedError
from shardc.runtime.state.loading import load
from shardc.runtime.state.saving import Saves, SavingError, save
from shardc.runtime.state.sources import Weights, check_names, weights

__all__ = [
    "DamagedError",
    "Saves",
    "SavingError",
    "export_safetensors",
    "full_state_dict",
    "gather",
    "load",
    "local_parameters",
    "save",
]


def local_parameters(
    program: Program, source: Any, mesh: Any, seed: int, base: Any = None
) -> tuple[dict[str, nn.Parameter], dict[str, Tensor]]:
    """`local_parts`, all parameters at once."""
    params, buffers = local_parts(program, source, mesh, seed, base)
    return dict(params), buffers


def local_parts(
    program: Program, source: Any, mesh: Any, seed: int, base: Any = None, *, broadcast: bool = False
) -> tuple[Iterator[tuple[str, nn.Parameter]], dict[str, Tensor]]:
    """This rank's parameters, made one at a time, and buffers, by placeholder name, in new memory on `mesh.device` and
    in the program's dtypes.

    source: one of
        nn.Module with weights           cut by the program's layouts; not changed
        a function that builds the model run without memory (or its `Recipe`): each parameter is computed by itself
        nn.Module on the meta device     each module's own reset_parameters, as FSDP does it
        {name: tensor}, or a path        a state_dict; a .safetensors file or a folder of them
    base: such a source again (not a file), for what a state_dict lacks: buffers that are not persistent.
    seed: of the weights that are computed. Every mesh gets the same numbers.
    broadcast: rank 0's weights for all ranks, one tensor at a time, whatever the others' models hold. Collective.

    Raises ShardcError for names that are missing or unexpected, other shapes, and ties that the program has and the
    source has not.
    """
    given, rest = weights(source, seed), weights(base, seed) if base is not None else None
    _check(program, given, rest)
    coords = {a: mesh.coordinate(a) for a in mesh.layout.names}

    def part(x: Param | Buffer) -> Tensor:
        names = x.names
        if isinstance(x, Buffer) and x.constant is not None:
            whole = x.constant
        elif x.members:
            whole = torch.stack([given.get(n, mesh.device).detach() for n in x.members])
        else:
            name = next((n for n in names if n in given.shapes), "")
            chosen = given if name else rest
            assert chosen is not None
            whole = chosen.get(name or next(n for n in names if n in chosen.shapes), mesh.device)
            whole = mesh.broadcast(whole, tag=x.fqn) if broadcast else whole
        return _local(x, whole, mesh)

    def parts(stored: Sequence[Param] | Sequence[Buffer]) -> Iterator[tuple[Any, Tensor]]:
        for x in stored:
            if program.has(x, coords):
                yield x, part(x)
            elif broadcast:
                part(x)  # ranks of other stages need rank 0's part in it

    params = ((p.name, nn.Parameter(x, requires_grad=p.requires_grad)) for p, x in parts(program.params))
    return params, {b.name: x for b, x in parts(program.buffers)}


def constants(program: Program, mesh: Any) -> dict[str, Tensor]:
    """This rank's parts of the constants that capture lifted out of the code, by placeholder name."""
    coords = {a: mesh.coordinate(a) for a in mesh.layout.names}
    return {
        b.name: _local(b, b.constant, mesh)
        for b in program.buffers
        if b.constant is not None and program.has(b, coords)
    }


def _local(x: Param | Buffer, whole: Tensor, mesh: Any) -> Tensor:
    cut = x.layout.local(whole.detach(), mesh.layout, {a: mesh.coordinate(a) for a in mesh.layout.names})
    return cut.to(device=mesh.device, dtype=x.dtype, copy=True, memory_format=torch.contiguous_format)


def _check(program: Program, given: Weights, rest: Weights | None) -> None:
    errors = Errors()
    entries: list[Param | Buffer] = [x for x in _all(program) if x.fqn]
    wanted: dict[str, tuple[int, ...]] = {}
    for x in entries:
        if x.members:
            wanted |= x.shapes
            continue
        present = [n for n in x.names if n in given.shapes] or [x.fqn]
        optional = isinstance(x, Buffer) and not x.persistent and given.what != "model"
        if present[0] not in given.shapes and optional:
            if rest is None or not any(n in rest.shapes for n in x.names):
                errors.add(
                    f"the buffer is not in the {given.what}: it is not persistent",
                    where=x.fqn,
                    fix="pass the model or its builder as `base` as well: it computes this buffer",
                )
            continue
        wanted |= dict.fromkeys(present, x.shape)
        if not given.tied(present):
            errors.add(
                f"the program was compiled with {' and '.join(present)} as one tensor, but in the {given.what} they"
                " differ",
                where=x.fqn,
                fix="compile the model that has these weights",
            )
    known = {n for x in entries for n in x.names}
    check_names(errors, wanted, given.shapes, known, f"the {given.what}")
    errors.raise_any()


def _all(program: Program) -> list[Param | Buffer]:
    return [*program.params, *program.buffers]


def gather(x: Tensor, layout: Layout, mesh: Any, tag: str = "") -> Tensor:
    """The global tensor of this rank's part `x`, on every rank. Collective over the axes that shard it."""
    x = x.detach()
    for axis, shard in sorted(layout.shards(), key=lambda item: item[1].split):  # outer digits first, as Layout.join
        x = unchunk(mesh.all_gather(x.contiguous(), axis, direction="state", tag=tag), shard)
    for shard in layout.paddings():
        x = trim(x, shard)
    return x


def _entries(
    program: Program, mesh: Any, params: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
) -> Iterator[tuple[Param | Buffer, Tensor]]:
    """Every parameter and persistent buffer with its global value on the CPU, one at a time."""
    for x in _all(program):
        if not x.fqn or (isinstance(x, Buffer) and not x.persistent):
            continue
        held: Mapping[str, Tensor] = params if isinstance(x, Param) else buffers
        local = _everywhere(program, mesh, x, held)
        yield x, gather(local, x.layout, mesh, x.fqn).to(device="cpu", copy=True, memory_format=torch.contiguous_format)


def _everywhere(program: Program, mesh: Any, x: Param | Buffer, held: Mapping[str, Tensor]) -> Tensor:
    """This rank's part; where its pipeline stage has none, that of the first stage that has. Collective over the
    pipeline's axis.
    """
    if not program.axis:
        return held[x.name]
    first, *_ = holders = program.holders(x)
    at, others = mesh.coordinate(program.axis), [c for c in range(mesh.size(program.axis)) if c not in holders]
    if at in others:
        found = torch.empty(x.layout.local_shape(x.shape, program.mesh), dtype=x.dtype, device=mesh.device)
        mesh.start_receive(found, program.axis, first, tag=x.fqn).wait()
        return found
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
    """{fqn: global tensor on the CPU}, as the unsharded `model.state_dict()` gives it: all names of tied tensors (one
    tensor under several names), persistent buffers. rank0_only: the other ranks take part but keep nothing and return
    {}. Collective."""
    found: dict[str, Tensor] = {}
    for x, whole in _entries(program, mesh, params, buffers):
        if mesh.rank == 0 or not rank0_only:
            found |= x.by_name(whole)
    return found


def export_safetensors(
    path: str | Path,
    program: Program,
    mesh: Any,
    params: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    *,
    max_file_bytes: int = 5_000_000_000,
) -> None:
    """Write the plain weights for safetensors and transformers. Rank 0 writes; collective.

    path: a `.safetensors` file, or a folder: then `model.safetensors`, or numbered files of at most `max_file_bytes`
    with an index, as transformers names them; rank 0 then never holds more than one file's tensors. A tied tensor is
    stored once, under the model's first name for it; the other names stand in the file's metadata, as
    `safetensors.torch.load_model` expects."""
    path = Path(path)
    single = path.suffix == ".safetensors"
    folder = path.parent if single else path
    if mesh.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    pending: dict[str, Tensor] = {}
    files: list[tuple[Path, list[str]]] = []
    ties: dict[str, str] = {}
    total = 0

    if wide := [x.fqn for x in _all(program) if x.dtype == torch.complex128]:
        fix = "save a checkpoint instead (engine.save), or train in complex64"
        raise ShardcError("safetensors files hold no complex128", where=", ".join(wide), fix=fix)

    def write() -> None:
        part = folder / f".part-{len(files)}.safetensors"
        kept = {alias: name for alias, name in ties.items() if name in pending}
        save_file(pending, part, metadata={"format": "pt", **kept})
        files.append((part, list(pending)))
        pending.clear()

    for x, whole in _entries(program, mesh, params, buffers):
        if mesh.rank:
            continue
        if not single and pending and sum(t.nbytes for t in pending.values()) + whole.nbytes > max_file_bytes:
            write()
        pending |= {n: w.clone() for n, w in x.by_name(whole).items()} if x.members else {x.fqn: whole}
        ties |= dict.fromkeys(x.aliases, x.fqn)
        total += whole.nbytes
    if mesh.rank == 0:
        write()
        if len(files) == 1:
            files[0][0].replace(path if single else folder / "model.safetensors")
        else:
            index: dict[str, str] = {}
            for i, (part, names) in enumerate(files):
                final = f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
                part.replace(folder / final)
                index |= dict.fromkeys(names, final)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": index}, indent=2)
            (folder / "model.safetensors.index.json").write_text(text + "\n")
    mesh.barrier()
