"""The folder that a user names, and the checkpoints in it, each whole and in a folder of its own:

    runs/a/checkpoint/step-000100/      index.json, model-00000.safetensors, optimizer-00000.safetensors, ...
                      step-000200/      the last one, because its number is the highest
                      step-000200.2/    the same step, saved once more
                      step-000300.old/  training went back to before it, and saved again: it comes after all others
                      .saving-5f0c../   one that is being written, or was when the process ended
                      .lock             held by whoever writes

Nothing says which is the last but the names, so that there is nothing to be out of date, and each name appears by one
rename.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardc.errors import ShardcError
from shardc.runtime.state import checkpoint_index, disk_calls
from shardc.runtime.state.checkpoint_index import FILE, Index

_NAME = re.compile(r"step-([0-9]{6,18})(?:\.([0-9]{1,6}))?(\.old)?")
#: So many checkpoints stay, the last ones (the command line has the same default, without torch).
KEEP = 2
WORK = ".saving-"
LOCK = ".lock"
_OLDER_FORMAT = (".metadata", "manifest.json")


class DamagedError(ShardcError):
    """A checkpoint is there, and what is in it is not what was saved."""


class SavingError(ShardcError):
    """A checkpoint was not saved, on all ranks alike; what was saved before is as it was."""

    on_all_ranks = True


@dataclass(frozen=True)
class Generation:
    """One checkpoint of a folder. number: of the saves of this step; replaced: training went back to before it."""

    path: Path
    step: int
    number: int
    replaced: bool


class Known:
    """The checkpoints that a run has saved or loaded, by folder: others are another run's, and it leaves them alone."""

    def __init__(self) -> None:
        self._names: dict[Path, set[str]] = {}

    def see(self, folder: Path) -> None:
        """All that are in a folder now."""
        self._names[folder.resolve()] = {g.path.name for g in generations(folder)}

    def others(self, folder: Path) -> list[str]:
        """Those in a folder that are not known, the last one first."""
        known = self._names.get(folder.resolve(), set())
        return [g.path.name for g in generations(folder) if g.path.name not in known]


def generations(folder: Path) -> list[Generation]:
    """The checkpoints in a folder, the last one first; those that training went back from come last. Only their names
    are looked at.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    found = []
    for name in names:
        if (match := _NAME.fullmatch(name)) and (folder / name).is_dir():
            found.append(Generation(folder / name, int(match[1]), int(match[2] or 1), match[3] is not None))
    return sorted(found, key=lambda g: (not g.replaced, g.step, g.number), reverse=True)


def is_one(folder: Path) -> bool:
    """Is the folder itself a checkpoint, not one that holds them?"""
    return (folder / checkpoint_index.NAME).exists() or _NAME.fullmatch(folder.name) is not None


def newest(folder: Path) -> Path:
    """The last checkpoint of a folder. Raises ShardcError where there is none."""
    for g in generations(folder):
        return g.path
    raise none_in(folder)


def none_in(folder: Path) -> ShardcError:
    """The error for a folder without a checkpoint."""
    if any((folder / name).exists() for name in _OLDER_FORMAT):
        return ShardcError(
            "this is a checkpoint of torch.distributed.checkpoint, which shardc wrote before: it holds pickles",
            where=str(folder),
            fix=f"convert it, in a process of its own: shardc checkpoint import {folder} NEW_FOLDER",
        )
    fix = "name a folder that shardc saved to"
    return ShardcError("there is no checkpoint in this folder", where=str(folder), fix=fix)


def free_name(folder: Path, step: int) -> Path:
    """Where the next checkpoint of a step goes."""
    number = max((g.number for g in generations(folder) if g.step == step), default=0) + 1
    return folder / (f"step-{step:06d}" + (f".{number}" if number > 1 else ""))


def aside(g: Generation) -> Path:
    """The name of a checkpoint that training went back from."""
    return g.path.with_name(g.path.name + ".old")


def prune(folder: Path, keep: int = KEEP, *, known: Path | None = None) -> list[Path]:
    """Remove all but the last `keep` complete checkpoints of a folder, and what is damaged and older than those. known:
    one that need not be looked at. Gives what was removed. The caller has the folder's lock.
    """
    whole, removed = 0, []
    for g in generations(folder):
        if whole >= keep:
            gone = g.path.with_name(f"{WORK}{g.path.name}")
            disk_calls.rename(g.path, gone)  # its name goes first: what is left of it is never taken for a checkpoint
            disk_calls.remove_folder(gone)
            removed.append(g.path)
        else:
            whole += g.path == known or complete(g.path)
    return removed


# --- one checkpoint


def read_index(path: Path) -> Index:
    """The index of one checkpoint. Raises DamagedError for one that is damaged, ShardcError where there is none."""
    where = str(path / checkpoint_index.NAME)
    try:
        return checkpoint_index.from_bytes(
            disk_calls.read_file(path / checkpoint_index.NAME, checkpoint_index.MAX_BYTES)
        )
    except (FileNotFoundError, NotADirectoryError):
        if path.is_dir() and any(FILE.fullmatch(n) for n in os.listdir(path)):
            raise DamagedError("the index is missing", where=where) from None
        raise none_in(path) from None
    except (ValueError, OSError) as e:
        raise DamagedError(f"the index cannot be read: {e}", where=where) from None


def check_file(path: Path, index: Index, number: int) -> None:
    """Raises DamagedError for a file that is not the one that the index knows, by its size and header."""
    file = index.files[number]
    where = str(path / file.name)
    try:
        with disk_calls.opened(path / file.name) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != file.nbytes:
                raise DamagedError(f"the file has {size} bytes, and had {file.nbytes}", where=where)
            header = bytearray(file.header)
            disk_calls.read_into(descriptor, memoryview(header), 0)
    except OSError as e:
        what = "the file is missing" if isinstance(e, FileNotFoundError) else f"the file cannot be read: {e}"
        raise DamagedError(f"{what}; rank {file.rank} wrote it", where=where) from None
    if hashlib.sha256(header).hexdigest() != file.sha256:
        said = re.search(rb'"checkpoint":"([0-9a-f]+)","step":"([0-9]+)"', header)
        what = "its header is damaged"
        if said is not None and said[1].decode() != index.id:
            what = f"the file is of another checkpoint, saved at step {int(said[2])}"
        raise DamagedError(f"{what}; rank {file.rank} wrote it", where=where)


def complete(path: Path) -> bool:
    """Is everything there, as far as it can be seen without reading the tensors?"""
    try:
        index = read_index(path)
        for number in range(len(index.files)):
            check_file(path, index, number)
    except ShardcError:
        return False
    return True


def remedy(path: Path) -> str:
    """What to do about a damaged checkpoint: go on with another one of its folder, if there is one."""
    for g in generations(path.parent):
        if g.path.name != path.name and complete(g.path):
            return f"{g.path} is complete: load that one, or let it be found with last_good=True (run: --last-good)"
    return "no other checkpoint is beside it: get it again from where it was copied"
