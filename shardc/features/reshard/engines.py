"""Move weights into an engine that is no program of shardc: in the same processes, in others, or into files.

    engine.weights_to(engines.here(layout, tensors))              rank r of the engine is in process r
    engine.weights_to(engines.at("host:29600", layout))           the engine's ranks are other processes:
    sync = engines.receive("host:29600", layout, tensors, 0, 4)   what they call; they need no model and no compiler
    engine.weights_to(engines.files(layout, "weights"))           a safetensors file for each rank of the engine

Each element goes once to each rank that keeps it, in the engine's dtype: casts are done where it is read. Numbers of 8
bits are scaled there too, by the largest absolute value of each block over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from pydantic import TypeAdapter
from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.features.reshard.conventions import checked
from shardc.features.reshard.layout import DTYPES, EIGHT_BITS, Held, Layout, Part, by_rank, scales_of
from shardc.features.reshard.moves import Moves
from shardc.features.reshard.places import Kept, Key, Listed, Place, Plan, Wanted, Whole, readable
from shardc.features.reshard.transports import OverAddress, OverMesh, Transport
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.state.boxes import Box, Numbers, index
from shardc.runtime.storage import disk_calls

_DTYPES = DTYPES | EIGHT_BITS


@dataclass(frozen=True)
class Source:
    """A tensor of the model, or of scales, as an engine reads it. key: see Kept; dtype: by its name.

    of: the local tensor that one of 8 bits is made of.
    """

    key: Key
    dtype: str
    shape: Numbers
    by_rank: tuple[tuple[Box, ...], ...]
    of: Key = ("", "")


#: By name in the model and dtype of the engine.
Sources = dict[tuple[str, str], Source]
_TEXT = TypeAdapter(list[tuple[str, str, Source]])


def sources(plan: Plan, layout: Layout) -> Sources:
    """Return the tensors that a layout reads, and where ranks have them."""
    result: Sources = {}
    shapes, world = sizes(plan.program), plan.program.mesh.world
    first = ties(plan.program)

    def boxes(place: Place) -> tuple[tuple[Box, ...], ...]:
        return tuple(tuple(place.boxes(r)) for r in range(world))

    for x in layout.tensors.values():
        for of in dict.fromkeys(p.of for p in x.parts if p.of):
            shape = shapes[of]
            kept = readable(plan, first.get(of, of), torch.float32 if x.scale is not None else _DTYPES[x.dtype])
            if x.scale is None:
                dtype = str(kept.dtype).removeprefix("torch.")
                result[of, x.dtype] = Source(kept.key, dtype, shape, boxes(kept.place))
                continue
            scales, each = scales_of(of, x.scale), Whole(x.scale.of(shape), frozenset(range(world)))
            result[of, x.dtype] = Source((x.dtype, scales), x.dtype, shape, boxes(kept.place), kept.key)
            result[scales, "float32"] = Source(("scale", scales), "float32", each.shape, boxes(each))
    return result


def sizes(program: Program) -> dict[str, Numbers]:
    """Return the shapes of a program's parameters and the model's buffers, by all their names."""
    plan = Plan(program)
    shapes = {n: p.shapes[n] for n, p in plan.params.items()}
    shapes |= {n: b.shape for n, b in plan.buffers.items() if b.persistent and b.dtype.is_floating_point}
    return shapes | {alias: shapes[first] for alias, first in ties(program).items() if first in shapes}


def ties(program: Program) -> dict[str, str]:
    """Return the first name of each tensor under its other names."""
    stored: list[Param | Buffer] = [*program.params, *program.buffers]
    return {alias: x.fqn for x in stored for alias in x.aliases}


def wanted(layout: Layout, of: Sources, processes: Sequence[int | None]) -> list[Wanted]:
    """Return the moves into an engine. processes: the engine's rank in each process; None: it has none."""
    shapes = {name: s.shape for (name, _), s in of.items()}
    result = []
    for name, x in layout.every(shapes).items():
        for i, part in enumerate(x.parts):
            if part.of:
                s = of[part.of, x.dtype]
                boxes = tuple(_boxes(part, r) for r in processes)
                need = Kept(("engine", f"{name}/{i}"), _DTYPES[x.dtype], Listed(boxes))
                result.append(Wanted(name, Kept(s.key, _DTYPES[s.dtype], Listed(s.by_rank)), need))
    return result


def _boxes(part: Part, rank: int | None) -> tuple[Box, ...]:
    box = part.box(rank) if rank is not None else None
    return (box,) if box is not None else ()


def _needed(layout: Layout, shapes: Mapping[str, Numbers], tensors: Mapping[str, Tensor]) -> dict[Key, Tensor]:
    """Return the engine's tensors as each of their parts sees them."""
    parts = ((n, i, p) for n, x in layout.every(shapes).items() for i, p in enumerate(x.parts) if p.of)
    return {("engine", f"{n}/{i}"): p.seen(tensors[n], len(shapes[p.of])) for n, i, p in parts}


def _checked(held: Mapping[str, Held], rank: int, tensors: Mapping[str, Tensor]) -> None:
    """Raise ShardcError for tensors of the engine that are not as the layout says; write its zeros."""
    errors = Errors()
    for name, x in held.items():
        shape = by_rank(x.shapes, rank)
        if name not in tensors:
            errors.add("the engine has no such tensor", where=name, fix="pass all of the engine's tensors, by name")
            continue
        has = tensors[name]
        if tuple(has.shape) != shape or has.dtype != _DTYPES[x.dtype]:
            fault = f"rank {rank} of the engine has {str(has.dtype).removeprefix('torch.')} {list(has.shape)}"
            errors.add(f"{fault}, and the layout {x.dtype} {list(shape)}", where=name, fix="use the engine's layout")
            continue
        for part in x.parts:
            if not part.of and (place := part.place(rank)) is not None:
                has.detach()[index(*place)] = 0
    errors.raise_any()


@dataclass(eq=False)
class Target:
    """An engine as the target of `engine.weights_to`. Made by `here`, `at`, `files` and `through`.

    over: makes the transport of a mesh. apart: its last processes are the engine's. tensors: of the engine's rank that
    is in this process. only_changes: see Moves. folder: of files.
    """

    layout: Layout
    tensors: Mapping[str, Tensor] | None = None
    over: Any = OverMesh
    apart: bool = False
    only_changes: bool = False
    folder: Path | None = None
    _transport: Transport | None = field(default=None, repr=False)
    _plan: tuple[Any, _Plan] | None = field(default=None, repr=False)  # of the last program's buckets

    def take(self, program: Program, mesh: Any, buckets: Any, have: Mapping[Key, Tensor]) -> Moves:
        """Move the weights that ranks of a program have. Collective. Raises ShardcError before anything is sent."""
        if self._plan is None or self._plan[0]() is not buckets:
            self._transport = self._transport or self.over(mesh)
            self._plan = ref(buckets), _Plan(self, self._transport, program)
        return self._plan[1].run(mesh, have)


class _Plan:
    """The moves from the ranks of a program to an engine: in waves, if files are written for more ranks than these."""

    def __init__(self, target: Target, over: Transport, program: Program) -> None:
        layout, self.target, self.over = target.layout, target, over
        checked(layout, sizes(program), ties(program))
        self.of = sources(Plan(program), layout)
        self.shapes = {name: s.shape for (name, _), s in self.of.items()}
        self.held = layout.every(self.shapes)
        n, world = layout.ranks, over.world
        if target.folder is None and n > world:
            fault = f"the engine has {n} ranks, and there are {world} processes for them"
            fix = "use engines.files, or other processes: engines.at"
            raise ShardcError(fault, where="weights_to", fix=fix)
        begin = n - world if target.apart else 0
        self.waves = [[r if 0 <= r < n else None for r in range(at, at + world)] for at in range(begin, n, world)]
        self.moves: list[Moves] = []

    def run(self, mesh: Any, have: Mapping[Key, Tensor]) -> Moves:
        target, layout = self.target, self.target.layout
        if target.apart:
            text = "" if self.moves else _TEXT.dump_json([(*n, s) for n, s in self.of.items()]).decode()
            self.over.spread(text)  # once: the engine has them then
        have, held = {**have, **scaled(layout, self.of, mesh, have)}, self.held
        for number, processes in enumerate(self.waves):
            rank, tensors = processes[self.over.rank], target.tensors or {}
            if rank is not None:
                if target.folder is not None:
                    tensors = {n: torch.empty(by_rank(x.shapes, rank), dtype=_DTYPES[x.dtype]) for n, x in held.items()}
                _checked(held, rank, tensors)
            if len(self.moves) == number:
                moves = wanted(layout, self.of, processes)
                self.moves.append(Moves(self.over, moves, only_changes=target.only_changes))
            self.moves[number](have, _needed(layout, self.shapes, tensors) if rank is not None else {})
            if target.folder is not None and rank is not None:
                _write(target.folder, rank, layout.ranks, tensors)
        if target.folder is not None:
            _commit(target.folder, layout, self.over)
        return self.moves[-1]


def here(layout: Layout, tensors: Mapping[str, Tensor] | None = None, *, only_changes: bool = False) -> Target:
    """Return an engine whose rank r is in process r. tensors: of this process's rank, by the engine's names.

    only_changes: a later `weights_to` sends only what differs from the one before.
    """
    return Target(layout, tensors, only_changes=only_changes)


def at(address: str, layout: Layout, *, only_changes: bool = False) -> Target:
    """Return an engine whose ranks are other processes, which call `receive`. address: "host:port" of rank 0."""
    return through(
        lambda mesh: OverAddress(address, mesh.rank, mesh.layout.world + layout.ranks, mesh.device),
        layout,
        only_changes=only_changes,
    )


def through(transport: Callable[[Any], Transport], layout: Layout, *, only_changes: bool = False) -> Target:
    """Return an engine whose ranks are the last processes of a transport. transport: makes it, of the training mesh."""
    return Target(layout, over=transport, apart=True, only_changes=only_changes)


def files(layout: Layout, folder: str | Path) -> Target:
    """Return an engine that reads its weights from files: rank-00000-of-00002.safetensors, layout.json last."""
    return Target(layout, folder=Path(folder))


class Receiver:
    """The engine's end of `at` and `through`: call it for each `weights_to` of the other end."""

    def __init__(self, layout: Layout, tensors: Mapping[str, Tensor], transport: Transport, only_changes: bool) -> None:
        self._layout, self._tensors, self._over, self._only_changes = layout, tensors, transport, only_changes
        self._moves: Moves | None = None
        self._needed: dict[Key, Tensor] = {}

    def __call__(self) -> Moves:
        """Receive the weights. Collective."""
        if text := self._over.spread(""):  # of another program than before
            of = {(name, dtype): s for name, dtype, s in _TEXT.validate_json(text)}
            first = self._over.world - self._layout.ranks
            shapes = {name: s.shape for (name, _), s in of.items()}
            _checked(self._layout.every(shapes), self._over.rank - first, self._tensors)
            processes = [r - first if r >= first else None for r in range(self._over.world)]
            self._moves = Moves(self._over, wanted(self._layout, of, processes), only_changes=self._only_changes)
            self._needed = _needed(self._layout, shapes, self._tensors)
        assert self._moves is not None
        self._moves({}, self._needed)
        return self._moves


def receive(
    at: str | Transport,
    layout: Layout,
    tensors: Mapping[str, Tensor],
    rank: int = 0,
    trainers: int = 1,
    *,
    only_changes: bool = False,
) -> Receiver:
    """Return the engine's end of `engines.at`: a function to call for each sync. Needs no model and no compiler.

    at: the address, or a transport. tensors: of this rank of the engine, by its names; they are filled in place.
    trainers: the number of ranks that train. only_changes: as there.
    """
    if isinstance(at, str):
        device = next(iter(tensors.values())).device
        at = OverAddress(at, trainers + rank, trainers + layout.ranks, device)
    return Receiver(layout, tensors, at, only_changes)


# --- 8 bits


def scaled(layout: Layout, of: Sources, mesh: Any, have: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Return this rank's parts of tensors in 8 bits, and their scales. Collective."""
    result: dict[Key, Tensor] = {}
    for x in layout.tensors.values():
        for name in dict.fromkeys(p.of for p in x.parts if p.of and x.scale is not None):
            assert x.scale is not None
            low, scales = of[name, x.dtype], of[scales_of(name, x.scale), "float32"]
            if low.key in result:
                continue
            local, dtype = have.get(low.of), _DTYPES[low.dtype]
            boxes = low.by_rank[mesh.rank] if local is not None else ()
            most = torch.zeros(scales.shape, device=mesh.device)
            block = x.scale.sizes(low.shape)
            for box in boxes:
                assert local is not None
                _put_largest(most, box, local, block)
            most = mesh.all_reduce(most, mesh.layout.names, op="max", direction="state", tag="scales")
            scale = torch.where(most > 0, most / torch.finfo(dtype).max, 1.0)
            result[scales.key] = scale
            if local is not None:
                result[low.key] = made = torch.empty(local.shape, dtype=dtype, device=local.device)
                for box in boxes:
                    box.of(made).copy_(box.of(local).float() / _spread(scale, box, block))
    return result


def _blocks(box: Box, block: Numbers, dim: int, device: torch.device) -> Tensor:
    """Return the number of the block of each place of a box in a dim."""
    return (torch.arange(box.shape[dim], device=device) + box.offset[dim]) // block[dim]


def _put_largest(most: Tensor, box: Box, local: Tensor, block: Numbers) -> None:
    """Raise `most`, the largest absolute value of each block, to that of a box."""
    values = box.of(local).abs().float()
    for dim, count in enumerate(most.shape):
        size = (*values.shape[:dim], count, *values.shape[dim + 1 :])
        numbers = _blocks(box, block, dim, values.device)
        at = numbers.view(-1, *(1,) * (values.dim() - dim - 1)).expand(values.shape)
        values = values.new_zeros(size).scatter_reduce_(dim, at, values, "amax")
    torch.maximum(most, values.to(most.device), out=most)


def _spread(scale: Tensor, box: Box, block: Numbers) -> Tensor:
    """Return the scale of each element of a box."""
    for dim in range(scale.dim()):
        scale = scale.index_select(dim, _blocks(box, block, dim, scale.device))
    return scale


# --- files


def _write(folder: Path, rank: int, ranks: int, tensors: Mapping[str, Tensor]) -> None:
    from safetensors.torch import save

    folder.mkdir(parents=True, exist_ok=True)
    name = f"rank-{rank:05d}-of-{ranks:05d}.safetensors"
    disk_calls.write_file(folder / f".{name}.writing", save({n: x.contiguous() for n, x in tensors.items()}))


def _commit(folder: Path, layout: Layout, transport: Transport) -> None:
    """Give the files their names when all are written, and layout.json last. Collective."""
    transport.totals([1])  # all have written
    if transport.rank == 0:
        (folder / "layout.json").unlink(missing_ok=True)
        for part in sorted(folder.glob(".rank-*.writing")):
            disk_calls.rename(part, folder / part.name.removeprefix(".").removesuffix(".writing"))
        layout.save(folder / ".layout.writing")
        disk_calls.rename(folder / ".layout.writing", folder / "layout.json")
        disk_calls.sync_folder(folder)
    transport.totals([1])
