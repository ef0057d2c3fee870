"""Check that ranks agree: on batches, program, seed, learning rates, the end of the data.

Ranks that differ where they must be equal train another model without an error: tensor-parallel ranks add up products
of different rows, replicas drift, and every rank still reports a loss. So every rank hashes its facts, and the hashes
are compared by one small sum on the host, at the beginning of each step:

    rank 0   h = 5   (h, h²) = (5, 25) ─┐
    rank 1   h = 5             (5, 25) ─┼─ sum ─► Σh = 16, Σh² = 86, n = 3:   n·Σh² = 258, but (Σh)² = 256
    rank 2   h = 6             (6, 36) ─┘

n·Σh² = (Σh)² holds exactly where all h are equal (Cauchy-Schwarz); these are integers, so nothing is rounded, and the
order of summing does not matter. A fact that only some ranks share, such as the slice of a weight or the part of a
batch of a group of tensor-parallel ranks, takes a slot of the vector for each group. Only if a sum is wrong do all
ranks exchange their hashes, to find which ranks differ from the others.

The first pair of every vector is what the rank is about to do ("a step", "saving"), and vectors have one length as
far as they fit. So a rank that saves because its data has ended, and ranks that take another step, meet in this sum
instead of in different collectives.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor

from shardc.errors import Errors, ShardcError
from shardc.ir.mesh import Mesh

#: Bits of a hash: n·Σh² of 2^14 ranks still fits an int64.
BITS = 24
#: Tensors of more bytes are hashed by blocks of so many, each by torch; smaller ones by zlib, byte by byte.
BLOCK = 1 << 20
SHOWN = 4  # ranks, facts and values that an error names
#: Numbers in the first sum of a check; more facts need a second sum.
ROOM = 64
#: Characters of a fact's text that ranks exchange for an error.
TEXT = 42
_ANY = Mesh(())  # names ranks without coordinates
SAME_OPTIMIZER = "construct the same optimizer and scheduler on all ranks, and load the same checkpoint on all"
SAME_PROGRAM = "compile the same model and spec, with the same version of shardc and torch, on all ranks"
SAME_CALLS = (
    "make the same calls in the same order on all ranks: all ranks together run steps, updates, evaluating, norms, "
    "saving, exporting and full_state_dict, so call them outside of `if rank == 0:`; if data ends on one rank, "
    "end it on all"
)
SAME_BATCH = (
    "give every rank the same batches: return a torch Dataset from data() or read one with engine.loader, seed all "
    "shuffling and random numbers, or pass each rank its own part with local=True"
)


@dataclass(frozen=True)
class Fact:
    """A value that ranks share. what: its name in an error; value: this rank's hash, below 2^24.

    axes: the mesh axes along which it may differ, such as those that split a weight: it is compared among ranks whose
    coordinates on them are the same. where, fix: of the error. shown: each rank's value as an error shows it; "": only
    a hash is known. placed: ranks are named with their coordinates (not where their meshes differ).
    """

    what: str
    value: int
    axes: tuple[str, ...] = ()
    where: str = ""
    fix: str = ""
    shown: str = ""
    placed: bool = True


class DisagreementError(ShardcError):
    """Ranks differ where they must be equal. It is raised on all ranks, at the same place."""

    on_all_ranks = True


class CallsDifferError(DisagreementError):
    """Ranks are about to do different things, such as to save and to take another step."""


def hashed(*values: object) -> int:
    """Hash plain values by their repr: numbers, strings, tuples of them."""
    return zlib.crc32(repr(values).encode()) & ((1 << BITS) - 1)


def stated(what: str, value: object, axes: tuple[str, ...] = (), *, where: str = "", fix: str = "") -> Fact:
    """Build a fact from a plain value, which an error shows."""
    return Fact(what, hashed(value), axes, where, fix, str(value))


def fingerprint(tensors: Iterable[Tensor]) -> int:
    """Hash the bytes, shapes and dtypes of tensors; the place of each element matters."""
    return fingerprints([tensors])[0]


def fingerprints(groups: Iterable[Iterable[Tensor]]) -> list[int]:
    """Return the fingerprint of each group of tensors. Tensors on a device are hashed there."""
    by_group: list[list[bytes | int]] = []  # by group: bytes, or the number of a tensor hashed in blocks
    blocks: list[Tensor] = []
    for tensors in groups:
        by_group.append([])
        for x in tensors:
            by_group[-1].append(f"{x.dtype} {tuple(x.shape)}{' meta' if x.is_meta else ''}".encode())
            if x.is_meta:  # has no data: its user rejects it after all ranks have compared theirs
                continue
            flat = x.as_subclass(Tensor).detach().contiguous().view(-1)
            if flat.dtype.is_complex:
                flat = torch.view_as_real(flat).reshape(-1)
            if flat.device.type == "cpu" and flat.nbytes <= BLOCK:
                by_group[-1].append(flat.view(torch.uint8).numpy().tobytes())
            elif flat.numel():
                by_group[-1].append(len(blocks))
                blocks.append(_blocks(flat.view(torch.uint8)))
    # copied to the host together
    together = torch.split(torch.cat(blocks).cpu(), list(map(len, blocks))) if blocks else ()
    sums = [x.numpy().tobytes() for x in together]
    results = []
    for parts in by_group:
        total = 0
        for part in parts:
            total = zlib.crc32(part if isinstance(part, bytes) else sums[part], total)
        results.append(total & ((1 << BITS) - 1))
    return results


def _blocks(flat: Tensor) -> Tensor:
    """Sum every 64 KiB of u8[n], each 8 bytes weighed by an odd number of their place: i64[m].

    Elements that swap places so change the sum. (Arithmetic of int64 wraps around.) It needs memory for 64 MiB at a
    time.
    """
    words = 1 << 13
    weights = torch.arange(words, device=flat.device, dtype=torch.int64).mul_(2 * 0x5851F42D4C957F2D % 2**63).add_(1)
    sums = []
    for piece in torch.split(flat, 1024 * 8 * words):
        whole = torch.nn.functional.pad(piece, (0, -piece.numel() % (8 * words)))
        sums.append((whole.view(torch.int64).view(-1, words) * weights).sum(1))
    return torch.cat(sums)


def check(
    mesh: Any, facts: Sequence[Fact], call: str = "a step", kind: type[DisagreementError] = DisagreementError
) -> list[Fact]:
    """Compare facts over the ranks of a mesh; return those with axes that are the same on all ranks.

    Collective: every rank brings the same facts in the same order. call: what this rank is about to do; where ranks do
    different things, that alone is the error. Raises an error of `kind`, on all ranks, for facts that differ: what, on
    which ranks, the remedy.
    """
    layout: Mesh = mesh.layout
    if layout.world == 1:
        return []
    if mesh.activity.callback:
        call = f"{call} in {mesh.activity.callback}"
    facts = [stated("the call of this rank", call, fix=SAME_CALLS), *facts]
    vector = [number for f in facts for number in _vector(f, mesh)]
    sums = mesh.sum_on_host(vector[:ROOM] + [0] * (ROOM - len(vector)))
    if differ(sums[:2], layout.world):
        _refuse(mesh, facts[:1], CallsDifferError)
    if len(vector) > ROOM:
        sums += mesh.sum_on_host(vector[ROOM:])
    differing, equal, rest = list[Fact](), list[Fact](), iter(sums)
    for f in facts:
        slots = slots_of(f, layout)
        sums_of_fact = list(islice(rest, 2 * slots))
        if differ(sums_of_fact, layout.world // slots):
            differing.append(f)
        if slots > 1 and len(set(sums_of_fact[::2])) == 1:
            equal.append(f)
    if differing:
        _refuse(mesh, differing, kind)
    return equal


def _vector(fact: Fact, mesh: Any) -> list[int]:
    vector, slot = [0] * (2 * slots_of(fact, mesh.layout)), 0
    for axis in fact.axes:
        slot = slot * mesh.layout.size(axis) + mesh.coordinate(axis)
    vector[2 * slot : 2 * slot + 2] = fact.value, fact.value**2
    return vector


def differ(sums: Sequence[int], ranks: int) -> bool:
    """Return whether some numbers differ. sums: Σh and Σh² of each, over so many ranks."""
    return any(ranks * squares != total**2 for total, squares in zip(sums[::2], sums[1::2], strict=True))


def _refuse(mesh: Any, facts: Sequence[Fact], kind: type[DisagreementError]) -> NoReturn:
    """Find out which ranks differ, and raise. All ranks have seen the same sums, and get here together."""
    errors, layout = Errors(), mesh.layout
    for f in facts[:SHOWN]:
        values = [0] * layout.world
        values[mesh.rank] = f.value
        every = mesh.sum_on_host(values)
        groups = layout.groups([a for a in layout.names if a not in f.axes])
        odd = _odd_ranks(every, groups, layout if f.placed else _ANY)
        errors.add(f"{f.what} {odd}{_values(mesh, f)}", where=f.where, fix=f.fix)
    if len(facts) > SHOWN:
        errors.add(f"{len(facts) - SHOWN} more differ, the last of them {facts[-1].what}")
    try:
        errors.raise_any()
    except ShardcError as e:
        combined = e.errors if len(e.errors) > 1 else ()
        raise kind(e.what, where=e.where, fix=e.fix, errors=combined) from None
    raise AssertionError("facts that differ are errors")


def text_of_first(mesh: Any, text: str) -> str:
    """Return the text of rank 0 on all ranks. Collective."""
    return texts(mesh, text if mesh.rank == 0 else "")[0]


def texts(mesh: Any, text: str) -> list[str]:
    """Return the texts of all ranks on all ranks, at any length. Equal texts are sent once. Collective."""
    data, world = text.encode(), mesh.layout.world
    own_kind = int.from_bytes(hashlib.sha256(data).digest()[:7], "big"), len(data)
    answers = mesh.sum_on_host([n if r == mesh.rank else 0 for n in own_kind for r in range(world)])
    kinds = list(zip(answers[:world], answers[world:], strict=True))
    sent = (data if kinds.index(kind) == mesh.rank else bytes(kind[1]) for kind in dict.fromkeys(kinds))
    came, by_kind = bytes(mesh.sum_on_host([*b"".join(sent)])), dict[tuple[int, int], str]()
    for kind in dict.fromkeys(kinds):
        by_kind[kind], came = came[: kind[1]].decode(), came[kind[1] :]
    return [by_kind[kind] for kind in kinds]


def failures(mesh: Any, problem: str | None) -> tuple[list[int], str]:
    """Return the ranks that have a problem, and the first one's text, on all ranks. Collective."""
    came = texts(mesh, f"!{problem}" if problem is not None else "")
    ranks = [r for r, text in enumerate(came) if text]
    return ranks, came[ranks[0]][1:] if ranks else ""


def _values(mesh: Any, fact: Fact) -> str:
    """Format the values of the ranks, each with the first rank that has it; "" if there are only hashes."""
    first: dict[str, int] = {}
    for rank, text in enumerate(texts(mesh, fact.shown[:TEXT])):
        first.setdefault(text, rank)
    if len(first) < 2:
        return ""
    return ": " + ", ".join(f"{value or 'nothing'} on rank {rank}" for value, rank in list(first.items())[:SHOWN])


def slots_of(fact: Fact, mesh: Mesh) -> int:
    return math.prod(mesh.size(axis) for axis in fact.axes)


def _odd_ranks(values: Sequence[int], groups: Iterable[Sequence[int]], mesh: Mesh) -> str:
    """Return the names of the ranks unlike most of their group; of a whole group without a majority."""
    odd: list[int] = []
    split: list[int] = []
    for ranks in groups:
        (usual, n), *others = Counter(values[r] for r in ranks).most_common()
        if others and others[0][1] == n:
            split += ranks if not split else []  # the first such group is enough
        else:
            odd += [r for r in ranks if values[r] != usual]
    names = mesh.named(*sorted(odd or split), shown=SHOWN)
    return f"{'differ' if len(odd) > 1 else 'differs'} {'on' if odd else 'between'} {names}"
