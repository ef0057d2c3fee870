"""Mark a module's state_dict with its rank's slices, so that another rank does not load it.

`module.state_dict()` of one rank has what that rank has. The checkpoint of every tutorial (rank 0 saves, all ranks
load) would put rank 0's slices into all ranks: shapes and names fit, and the model is wrong. So the state_dict
has a mark in its `_metadata`, which torch.save keeps. A copy made by hand, `{k: v.clone() for ...}`, loses it:
then the next forward compares what ranks have loaded (`check_loaded`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh.agreement import Fact, fingerprint, hashed
from shardc.runtime.zero.flat_partition import FlatShard

KEY = "shardc"


def slices(program: Program, mesh: Any, shards: Mapping[str, FlatShard]) -> dict[str, str]:
    """Return {name: this rank's slice as text} of the tensors of which this rank has a slice.

    shards: flat shards of ZeRO, by placeholder name.
    """
    texts: dict[str, str] = {}
    coords = {a: mesh.coordinate(a) for a in mesh.layout.names}
    for x in program.params_and_buffers:
        if text := _slice(x, mesh, coords, shards.get(x.name)):
            texts |= dict.fromkeys(x.names if x.fqn else (), text)
    return texts


def _slice(x: Param | Buffer, mesh: Any, coords: Mapping[str, int], shard: FlatShard | None) -> str:
    if 0 in x.shape:
        return ""
    boxes = list(x.layout.boxes(x.shape, mesh.layout, coords))
    whole = [tuple((0, 0, n) for n in x.shape)]
    text = "" if boxes == whole else " and ".join(_box(b) for b in boxes) or "nothing"
    if shard is not None and shard.size != math.prod(shard.shape):
        text = f"elements {shard.start}:{shard.stop} of {text or 'the whole'}"
    return text


def _box(box: Sequence[tuple[int, int, int]]) -> str:
    return f"[{', '.join(f'{start}:{start + n}' for _, start, n in box)}]"


def check(
    state_dict: Mapping[str, Any], prefix: str, note: Any, own: Mapping[str, str], names: Iterator[str], split: Set[str]
) -> bool:
    """Raise ShardcError for a state_dict with other slices than this rank's.

    note: the mark in the state_dict, or None. own: from `slices`. names: all names in the module. split: names of which
    any rank has a slice, the same on all ranks: at ZeRO one may have all of a weight, and the others nothing. Returns
    whether it has slices without a mark.
    """
    present = [n for n in names if prefix + n in state_dict]
    if not isinstance(note, Mapping):
        return any(n in split for n in present)
    saved: Mapping[str, str] = note["slices"]
    if other := [n for n in present if saved.get(n) != own.get(n)]:
        first, rank = other[0], note["rank"]
        raise ShardcError(
            f"these are the slices of rank {rank}: {saved.get(first, 'the whole')}, where this rank has"
            f" {own.get(first, 'the whole')} ({len(other)} such)",
            where=f"module.load_state_dict: {prefix}{first}",
            fix="save with module.save(folder, optimizer) on all ranks, which any mesh loads; or save "
            "module.full_state_dict() of the whole model, and load it with program.module(model, weights=state_dict)",
        )
    return False


def loaded_facts(held: Sequence[tuple[tuple[str, ...], Tensor]], rank: int) -> list[Fact]:
    """Return facts of loaded tensors, for `agreement.check`. held: (axes, tensor split over them) pairs."""
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for axes, x in held:
        groups.setdefault(axes, [])
        if x.numel() and bool((x != x.reshape(-1)[0]).any()):  # constants (zeros, ones) may be equal on all ranks
            groups[axes].append(x)
    return [
        Fact("what was loaded", fingerprint(xs) if xs else hashed("constant", rank), axes)
        for axes, xs in sorted(groups.items())
    ]


def check_loaded(facts: Sequence[Fact], equal_facts: Sequence[Fact]) -> None:
    """Raise ShardcError, on all ranks, if all loaded the same values into different slices."""
    if facts and all(f in equal_facts for f in facts):
        raise ShardcError(
            "all ranks loaded the same values into parameters of which each rank has a different slice",
            where="module.load_state_dict",
            fix="load what this rank saved; or save with module.save(folder, optimizer) on all ranks, which any mesh"
            " loads",
        )
