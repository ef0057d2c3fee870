"""Which slices a module's state_dict holds, written beside its tensors, so that another rank does not load them.

`module.state_dict()` of one rank holds what that rank has. The checkpoint of every tutorial (rank 0 saves, all ranks
load) would put rank 0's slices into all ranks: shapes fit, names fit, and the model is another one. So the state_dict
carries a note in its `_metadata`, which torch.save keeps. A copy made by hand, `{k: v.clone() for ...}`, has lost it:
for such a one the next forward compares what ranks have loaded (`check_loaded`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.ir.stored import Buffer, Param
from shardc.runtime.mesh.agreement import Fact, fingerprint, hashed
from shardc.runtime.zero.flat_partition import FlatShard

KEY = "shardc"


def slices(program: Program, mesh: Any, runs: Mapping[str, FlatShard]) -> dict[str, str]:
    """{name: which slice of the whole tensor this rank has}, of those that it has a slice of. runs: ZeRO's stretches,
    by placeholder name.
    """
    found: dict[str, str] = {}
    coords = {a: mesh.coordinate(a) for a in mesh.layout.names}
    stored: list[Param | Buffer] = [*program.params, *program.buffers]
    for x in stored:
        if text := _slice(x, mesh, coords, runs.get(x.name)):
            found |= dict.fromkeys(x.names if x.fqn else (), text)
    return found


def _slice(x: Param | Buffer, mesh: Any, coords: Mapping[str, int], run: FlatShard | None) -> str:
    if 0 in x.shape:
        return ""
    boxes = list(x.layout.boxes(x.shape, mesh.layout, coords))
    whole = [tuple((0, 0, n) for n in x.shape)]
    text = "" if boxes == whole else " and ".join(_box(b) for b in boxes) or "nothing"
    if run is not None and (run.start, run.stop) != (0, _size(run.shape)):
        text = f"elements {run.start}:{run.stop} of {text or 'the whole'}"
    return text


def _size(shape: Sequence[int]) -> int:
    return torch.Size(shape).numel()


def _box(box: Sequence[tuple[int, int, int]]) -> str:
    return f"[{', '.join(f'{start}:{start + n}' for _, start, n in box)}]"


def check(
    state_dict: Mapping[str, Any], prefix: str, note: Any, own: Mapping[str, str], names: Iterator[str], split: Set[str]
) -> bool:
    """Raises ShardcError for a state_dict with other slices than this rank's. note: as `state_dict` has it, or None.
    own: of `slices`. names: of all that the module holds. split: those of which any rank has a slice, the same on all
    ranks: one of ZeRO may have all of a weight, and the others nothing. Returns whether there are slices in it that
    nobody vouches for.
    """
    there = [n for n in names if prefix + n in state_dict]
    if not isinstance(note, Mapping):
        return any(n in split for n in there)
    saved: Mapping[str, str] = note["slices"]
    if other := [n for n in there if saved.get(n) != own.get(n)]:
        first, rank = other[0], note["rank"]
        raise ShardcError(
            f"these are the slices of rank {rank}: {saved.get(first, 'the whole')}, where this rank has"
            f" {own.get(first, 'the whole')} ({len(other)} such)",
            where=f"module.load_state_dict: {prefix}{first}",
            fix="save by module.save(folder, optimizer) on all ranks, which any mesh loads; or save"
            " module.full_state_dict(), the whole model's, and load it by program.module(model, weights=state_dict)",
        )
    return False


def loaded_facts(held: Sequence[tuple[tuple[str, ...], Tensor]], rank: int) -> list[Fact]:
    """What ranks have loaded, for `agreement.check` to find out whether it is alike where it should differ. held: split
    tensors, each with the axes that split it.
    """
    groups: dict[tuple[str, ...], list[Tensor]] = {}
    for axes, x in held:
        groups.setdefault(axes, [])
        if x.numel() and bool((x != x.reshape(-1)[0]).any()):  # zeros and ones may well be alike
            groups[axes].append(x)
    return [
        Fact("what was loaded", fingerprint(xs) if xs else hashed("constant", rank), axes)
        for axes, xs in sorted(groups.items())
    ]


def check_loaded(facts: Sequence[Fact], alike: Sequence[Fact]) -> None:
    """Raises ShardcError, on all ranks, where each loaded the same values into slices that differ."""
    if facts and all(f in alike for f in facts):
        raise ShardcError(
            "all ranks have loaded the same values into parameters of which each has another slice",
            where="module.load_state_dict",
            fix="load what this rank has saved; or save by module.save(folder, optimizer) on all ranks, which any mesh"
            " loads",
        )
