"""What all ranks have to share, checked: weights, batches, program, seed, learning rates, the end of the data.

Ranks that differ where they should be alike train another model without an error: tensor-parallel ranks add up products
of different rows, replicas drift, and every rank still reports a loss. So every rank hashes what it has, and the hashes
are compared by one small sum on the host, at the beginning of each step:

    rank 0   h = 5   (h, h²) = (5, 25) ─┐
    rank 1   h = 5             (5, 25) ─┼─ sum ─► Σh = 16, Σh² = 86, n = 3:   n·Σh² = 258, but (Σh)² = 256
    rank 2   h = 6             (6, 36) ─┘

n·Σh² = (Σh)² holds exactly where all h are equal (Cauchy-Schwarz); these are integers, so nothing is rounded, and the
order of summing does not matter. What only some ranks share, such as the slice of a weight or the part of a batch that
a group of tensor-parallel ranks has, takes a slot of the vector for each group. Only if a sum does not come out are the
hashes of all ranks exchanged, to say which ranks differ from the others.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.program import Buffer, Param, Program
from shardc.runtime.step.inputs import leaves

#: Bits of a hash: n·Σh² of 2^14 ranks still fits an int64.
BITS = 24
#: Tensors of more bytes are hashed by blocks of so many, each by torch; smaller ones by zlib, byte by byte.
BLOCK = 1 << 20
SAID = 1000  # characters that ranks tell one another
SHOWN = 4  # ranks, or weights, that an error names
SAME_WEIGHTS = (
    "give every rank the same weights: call torch.manual_seed before the model is made, pass the function that builds"
    " it, or broadcast=True, which sends those of rank 0"
)
SAME_BATCH = (
    "give every rank the same batches: return a torch Dataset from data() or read one with engine.loader, seed what"
    " shuffles or draws, or pass each rank its own part with local=True"
)


@dataclass(frozen=True)
class Fact:
    """One thing that ranks share. what: its name in an error; value: this rank's hash, below 2^24.

    axes: the mesh axes over whose coordinates it may differ, such as those that split a weight: it is compared among
    ranks whose coordinates on them are the same. where, fix: of the error.
    """

    what: str
    value: int
    axes: tuple[str, ...] = ()
    where: str = ""
    fix: str = ""


def hashed(*values: object) -> int:
    """A hash of plain values by what they print: numbers, strings, tuples of them."""
    return zlib.crc32(repr(values).encode()) & ((1 << BITS) - 1)


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """A hash of tensors' bytes, shapes and dtypes that depends on the place of each element. Tensors on a device are
    hashed there; the result is read back, which waits for it.
    """
    total = 0
    for x in tensors:
        total = zlib.crc32(f"{x.dtype} {tuple(x.shape)}".encode(), total)
        flat = x.detach().contiguous().view(-1)
        if flat.dtype.is_complex:
            flat = torch.view_as_real(flat).reshape(-1)
        if flat.device.type == "cpu" and flat.nbytes <= BLOCK:
            total = zlib.crc32(flat.view(torch.uint8).numpy().data, total)
        elif flat.numel():
            total = zlib.crc32(_blocks(flat.view(torch.uint8)).cpu().numpy().data, total)
    return total & ((1 << BITS) - 1)


def _blocks(flat: Tensor) -> Tensor:
    """u8[n] -> i64[m]: a sum for each stretch of 64 KiB, every 8 bytes of it weighed by an odd number of their own
    place, so that elements that changed places change the sum. (Arithmetic of int64 wraps around.)
    """
    words = 1 << 13
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % (8 * words)))
    numbers = flat.view(torch.int64).view(-1, words)
    weights = torch.arange(words, device=flat.device, dtype=torch.int64).mul_(2 * 0x5851F42D4C957F2D % 2**63).add_(1)
    return (numbers * weights).sum(1)


def check(mesh: Any, facts: Sequence[Fact]) -> None:
    """Compare facts over the ranks of a runtime mesh. Collective: every rank brings the same facts in the same order.

    Raises ShardcError, on all ranks, for facts that differ: what, on which ranks, the remedy.
    """
    layout: Mesh = mesh.layout
    if layout.world == 1:
        return
    sums: list[int] = []
    for f in facts:
        mine = [0] * (2 * _slots(f, layout))
        slot = 2 * _slot(f, mesh)
        mine[slot : slot + 2] = f.value, f.value**2
        sums += mine
    sums = mesh.sum_on_host(sums)
    differing, start = [], 0
    for f in facts:
        slots = _slots(f, layout)
        ranks = layout.world // slots  # of each slot
        pairs = [(sums[i], sums[i + 1]) for i in range(start, start + 2 * slots, 2)]
        start += 2 * slots
        if any(ranks * squares != total**2 for total, squares in pairs):
            differing.append(f)
    if differing:
        _refuse(mesh, differing)


def _refuse(mesh: Any, facts: Sequence[Fact]) -> None:
    """Find out who differs. All ranks have seen the same sums, and get here together."""
    errors, layout = Errors(), mesh.layout
    for f in facts:
        values = [0] * layout.world
        values[mesh.rank] = f.value
        every = mesh.sum_on_host(values)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in range(layout.world):
            coords = layout.coords(rank)
            groups.setdefault(tuple(coords[a] for a in f.axes), []).append(rank)
        odd: list[int] = []
        for ranks in groups.values():
            usual, _ = Counter(every[r] for r in ranks).most_common(1)[0]
            odd += [r for r in ranks if every[r] != usual]
        errors.add(f"{f.what} {_who(odd, layout)}", where=f.where, fix=f.fix)
    errors.raise_any()


def said(mesh: Any, text: str, rank: int = 0) -> str:
    """What one rank says, on all ranks: at most 1000 characters. Collective."""
    mine = [ord(c) for c in text[:SAID]] if mesh.rank == rank else []
    codes = mesh.sum_on_host(mine + [0] * (SAID - len(mine)))
    return "".join(chr(c) for c in codes if c)


def failures(mesh: Any, problem: str | None) -> tuple[list[int], str]:
    """The ranks that have a problem, and the first one's words. Collective, so that all ranks go on, or none."""
    mine = [0] * mesh.layout.world
    mine[mesh.rank] = int(problem is not None)
    ranks = [r for r, failed in enumerate(mesh.sum_on_host(mine)) if failed]
    return ranks, said(mesh, problem or "", ranks[0]) if ranks else ""


def program_facts(program: Program, *, seed: int, clip_norm: float | None) -> list[Fact]:
    """What an engine is made of: the program's graphs, layouts, buckets and schedule, and its options."""
    stored = [(x.name, x.shape, str(x.dtype), str(x.layout)) for x in program.stored]
    graphs = [str(stage.graph) for stage in program.stages]
    order = str(program.schedule) if program.schedule is not None else ""
    same = "compile the same model and spec, with the same version of shardc and torch, on all ranks"
    return [
        Fact("the program", hashed(stored, graphs, program.buckets, program.microbatches, order), fix=same),
        Fact("the version of torch", hashed(str(torch.__version__)), fix="install one version on all machines"),
        Fact("the seed", hashed(seed), fix="give all ranks one seed"),
        Fact("clip_norm", hashed(clip_norm), fix="give all ranks one clip_norm"),
    ]


def batch_facts(program: Program, batch: Any, *, local: bool) -> list[Fact]:
    """The global batch, which all ranks share; or of this rank's part of one, what the ranks share that have the same
    part, such as those of a tensor-parallel group.
    """
    tensors = {path: x for path, x in leaves(batch) if isinstance(x, Tensor)}
    if not local:
        return [Fact("the global batch", fingerprint(tensors.values()), fix=SAME_BATCH)]
    parts: dict[tuple[str, ...], list[Tensor]] = {}
    for x in program.inputs:
        split = {part for axis, _ in x.layout.shards() for part in program.mesh.parts(axis)}
        axes = tuple(a for a in program.mesh.names if a in split)
        parts.setdefault(axes, [])
        if x.path in tensors:
            parts[axes].append(tensors[x.path])
    where = "its part of the batch"
    shapes = [tuple(tensors[x.path].shape) if x.path in tensors else () for x in program.inputs]
    lengths = "pad them to one length on all ranks: batch: {lengths: [...], pad: {name: number}} in the spec does"
    alike = Fact("the sizes of the part of the batch", hashed(shapes), where=where, fix=lengths)
    return [alike] + [
        Fact("the part of the batch", fingerprint(xs), axes, where, SAME_BATCH) for axes, xs in parts.items()
    ]


def printed(parts: Iterable[tuple[str, Any]], prints: dict[str, int]) -> Iterator[tuple[str, Any]]:
    """The same (name, tensor) pairs, whose fingerprints go into `prints` as they pass."""
    for name, x in parts:
        prints[name] = fingerprint([x])
        yield name, x


def check_weights(program: Program, mesh: Any, prints: Mapping[str, int]) -> None:
    """Compare weights and buffers. prints: the fingerprints of this rank's parts, cut by the program's layouts, by
    placeholder name. Collective.

    Raises ShardcError, on all ranks, that names weights that differ.
    """
    groups = _weights(program, prints)
    try:
        check(mesh, [whole for whole, _ in groups])
    except ShardcError:
        for _, each in groups:
            check(mesh, each)
        raise  # hashes of hashes differ, and no hash does: nothing to name


def _weights(program: Program, prints: Mapping[str, int]) -> list[tuple[Fact, list[Fact]]]:
    """For each set of axes that splits weights: one fact of all weights that these axes split, and a fact of each of
    them, to name those that differ.
    """
    stored: list[Param | Buffer] = [*program.params, *program.buffers]
    by_axes: dict[tuple[str, ...], list[Param | Buffer]] = {}
    for x in stored:
        split = {part for axis, _ in x.layout.shards() for part in program.mesh.parts(axis)}
        # a stage's weights are compared among its own ranks; ranks of other stages do not have them
        by_axes.setdefault(tuple(a for a in program.mesh.names if a in split or a == program.axis), []).append(x)
    groups = []
    for axes, mine in by_axes.items():
        each = [Fact(f"the weight {x.fqn or x.name}", prints.get(x.name, 0), axes, fix=SAME_WEIGHTS) for x in mine]
        groups.append((Fact("the weights", hashed(*(f.value for f in each)), axes), each))
    return groups


def _slots(fact: Fact, mesh: Mesh) -> int:
    n = 1
    for axis in fact.axes:
        n *= mesh.size(axis)
    return n


def _slot(fact: Fact, mesh: Any) -> int:
    slot = 0
    for axis in fact.axes:
        slot = slot * mesh.layout.size(axis) + mesh.coordinate(axis)
    return slot


def _who(ranks: Sequence[int], mesh: Mesh) -> str:
    """The ranks that differ from most others, with their coordinates."""
    names = [f"rank {r} ({', '.join(f'{a}={c}' for a, c in mesh.coords(r).items())})" for r in sorted(ranks)[:SHOWN]]
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"{'differs' if len(ranks) == 1 else 'differ'} on {', '.join(names)}{more}"
