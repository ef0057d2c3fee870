"""Find, name, check and compare the checkpoints in a user's folder, each in a separate folder.

    runs/a/checkpoint/step-000100/      index.json, model-00000.safetensors, optimizer-00000.safetensors, ...
                      step-000200/      the last one, because its number is the highest
                      step-000200.2/    the same step, saved once more
                      step-000300.old/  training went back to before it, and saved again: it comes after all others
                      .saving-5f0c../   one that is being written, or was when the process ended
                      .lock             held by the process that writes

Only the names say which one is the last, so nothing can be out of date. Each name appears by one rename. In a store
(shardc.runtime.storage.urls), which renames nothing, it is the index that appears at once.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc.errors import ShardcError
from shardc.runtime.state import checkpoint_index, torch_format
from shardc.runtime.state.boxes import Box, Numbers
from shardc.runtime.state.checkpoint_index import DIGEST, FILE, File, Index, Slice, Stored
from shardc.runtime.state.tensor_file import BLOCK, bytes_of
from shardc.runtime.storage import disk_calls
from shardc.runtime.storage.urls import Url

# --- slices of files, read and checked against their digests

READERS = 2  # slices that a rank reads at once: one is checked while another comes from the disk
REMOTE_READERS = 8  # the same of a store, where each waits for the network


def damage(file: Path, key: str, s: Slice) -> DamagedError:
    """Build the error for a slice whose digest does not match."""
    box_text = ",".join(f"{a}:{a + n}" for a, n in zip(s.offset, s.shape, strict=True))
    return DamagedError(f"{key}[{box_text}], at byte {s.start}, differs from the saved data", where=str(file))


def _read_into(descriptor: disk_calls.Opened, x: Tensor, s: Slice) -> bool:
    """Read one slice into a tensor; return False if its digest differs."""
    data, hasher = bytes_of(x), DIGEST()
    size = BLOCK if isinstance(descriptor, int) else len(data)  # each read of a store takes a while
    try:
        for done in range(0, len(data), size):
            block = data[done : done + size]
            disk_calls.read_into(descriptor, block, s.start + done)
            hasher.update(block)  # while it is in the cache
    except OSError:
        return False
    return hasher.hexdigest() == s.digest


def read_boxes(path: Path, index: Index, wanted: Iterable[tuple[str, Box, Tensor]]) -> list[DamagedError]:
    """Read boxes of a checkpoint's tensors, (key, box, local tensor), into place; return the damaged slices.

    Each slice is read once, two at a time, in the order of the files.
    """
    targets: dict[Slice, list[tuple[Box, Tensor]]] = {}
    keys: dict[Slice, str] = {}
    for key, box, local in wanted:
        for s in index.tensors[key].slices:
            if (common := box.inside(s.offset, s.shape)) is not None:
                targets.setdefault(s, []).append((common, common.of(local)))
                keys[s] = key
    errors: list[DamagedError] = []
    with ThreadPoolExecutor(REMOTE_READERS if isinstance(path, Url) else READERS) as readers:
        for number in sorted({s.file for s in targets}):
            slices = sorted((s for s in targets if s.file == number), key=lambda s: s.start)
            file = path / index.files[number].name
            with disk_calls.opened(file) as descriptor:

                def read(s: Slice, descriptor: disk_calls.Opened = descriptor) -> bool:
                    return _read_slice(descriptor, index.files[s.file], index.tensors[keys[s]].dtype, s, targets[s])

                whole = list(readers.map(read, slices))
            errors += [damage(file, keys[s], s) for s, fine in zip(slices, whole, strict=True) if not fine]
    return errors


def _read_slice(
    descriptor: disk_calls.Opened, file: File, dtype: torch.dtype, s: Slice, parts: list[tuple[Box, Tensor]]
) -> bool:
    """Read one slice, and copy parts of it to their places; return False if its digest differs."""
    if not s.digest:  # of torch's format, which has none
        return torch_format.fill(descriptor, file, dtype, s, parts)
    x = parts[0][1]  # read into directly if it is the slice
    direct = x.shape == s.shape and x.dtype == dtype and x.device.type == "cpu" and x.is_contiguous() and not parts[1:]
    buffer = x if direct else torch.empty(s.shape, dtype=dtype)
    if not _read_into(descriptor, buffer, s):
        return False
    for box, target in () if direct else parts:
        target.copy_(buffer[box.within(s.offset)])
    return True


def read_box(path: Path, index: Index, key: str, offset: Numbers, shape: Numbers) -> Tensor:
    """Read a box of a tensor of one checkpoint to the CPU. Raises DamagedError for a damaged slice."""
    tensor = torch.empty(shape, dtype=index.tensors[key].dtype)
    for error in read_boxes(path, index, [(key, Box.alone(offset, shape), tensor)]):
        raise error
    return tensor


# --- names

_NAME = re.compile(r"step-([0-9]{6,18})(?:\.([0-9]{1,6}))?(\.old)?")
WORK, _OLD = ".saving-", ".old"
LOCK = ".lock"
#: Files of other libraries' checkpoints: the end of a name, whose the checkpoint is, and what to do with it.
_OTHERS = (
    (r"\.metadata|\.distcp", "torch.distributed (FSDP)", "its folder, which has the file .metadata: {at}"),
    (
        r"zero_pp_rank_\d+\w+\.pt",
        "DeepSpeed",
        "NEW: python -m deepspeed.utils.zero_to_fp32 {at.parent} NEW",
    ),
    (r"mp_rank_\d+_\w+\.pt", "DeepSpeed", 'NEW: torch.save(torch.load("{x}", weights_only=False)["module"], "NEW")'),
)


class DamagedError(ShardcError):
    """A checkpoint exists, but its contents are not what was saved."""


class SavingError(ShardcError):
    """A save failed, on all ranks. Earlier checkpoints are unchanged, unless only cleaning up failed."""

    on_all_ranks = True


@dataclass(frozen=True)
class Generation:
    """One checkpoint. number: among saves of this step; replaced: training went back to before it."""

    path: Path
    step: int
    number: int
    replaced: bool


class Known:
    """The checkpoints that a run has saved or loaded, by folder. Others belong to other runs, and stay."""

    def __init__(self) -> None:
        self._names: dict[Path, set[str]] = {}

    def see(self, folder: Path) -> None:
        """Remember all checkpoints that are in a folder now."""
        self._names[folder.resolve()] = {g.path.name for g in generations(folder)}

    def others(self, folder: Path) -> list[str]:
        """Return the unknown checkpoints of a folder, the last one first."""
        known = self._names.get(folder.resolve(), set())
        return [g.path.name for g in generations(folder) if g.path.name not in known]


def generations(folder: Path) -> list[Generation]:
    """Return a folder's checkpoints, newest first, replaced ones last. No file is opened."""
    try:
        names = disk_calls.names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    present, remote = [], isinstance(folder, Url)
    for name in names:
        if (match := _NAME.fullmatch(name)) and _exists(folder / name):
            replaced = match[3] is not None or (remote and f"{name}{_OLD}" in names)
            present.append(Generation(folder / name, int(match[1]), int(match[2] or 1), replaced))
    return sorted(present, key=lambda g: (not g.replaced, g.step, g.number), reverse=True)


def _exists(path: Path) -> bool:
    return (path / checkpoint_index.NAME).exists() if isinstance(path, Url) else path.is_dir()


def leftovers(folder: Path) -> list[Path]:
    """Return what processes that ended have left in a folder: checkpoints without an end, or without a beginning."""
    names, remote = disk_calls.names(folder) if folder.is_dir() else [], isinstance(folder, Url)
    present = {g.path.name for g in generations(folder)} if remote else set()
    left = (n for n in names if n.startswith(WORK) or (remote and _NAME.fullmatch(n)))
    return [folder / n for n in left if n.removesuffix(_OLD) not in present]


def set_aside(g: Generation) -> None:
    """Let a checkpoint come after all others, as training went back to before it."""
    old = g.path.with_name(f"{g.path.name}{_OLD}")
    disk_calls.write_file(old, b"") if isinstance(old, Url) else disk_calls.rename(g.path, old)


def remove(path: Path) -> None:
    """Remove a checkpoint, or what was to become one. A partly removed one never looks like a checkpoint."""
    if isinstance(path, Url):
        for first in (path / checkpoint_index.NAME, path.with_name(f"{path.name}{_OLD}")):
            with contextlib.suppress(FileNotFoundError):
                disk_calls.unlink(first)
    elif not path.name.startswith(WORK):
        gone = path.with_name(f"{WORK}{path.name}")
        disk_calls.rename(path, gone)
        path = gone
    disk_calls.remove_folder(path)


def is_checkpoint(folder: Path) -> bool:
    """Return whether the folder itself is a checkpoint, and not one that holds checkpoints."""
    named = (folder / checkpoint_index.NAME).exists() or _NAME.fullmatch(folder.name) is not None
    return named or torch_format.is_torch(folder)


def checkpoints_in(path: Path) -> list[Generation]:
    """Return the checkpoints at a path, newest first: itself, or those in it or in its `checkpoint`.

    Of folders of torch.distributed.checkpoint, one for each step: the last one.
    """
    for folder in (path / "checkpoint", path):
        if folder.is_dir() and is_checkpoint(folder):
            named = [g for g in generations(folder.parent) if g.path.name == folder.name]
            return named or [Generation(folder, 0, 1, False)]  # one that the user renamed
        if present := generations(folder):
            return present
        if folder.is_dir() and (last := torch_format.last_in(folder)) is not None:
            return [Generation(last, 0, 1, False)]
    return []


def none_in(folder: Path) -> ShardcError:
    """Build the error for a folder without a checkpoint."""
    fix = "name a folder that shardc saved to"
    return of_others(folder) or ShardcError("there is no checkpoint in this folder", where=str(folder), fix=fix)


def of_others(path: Path) -> ShardcError | None:
    """Build the error for another library's checkpoint, a folder or a file of it, with how to convert it; or None."""
    if isinstance(path, Url):
        return None
    files = [x for depth in ("*", "*/*") for x in path.glob(depth)]
    if not path.is_dir() and re.search(r"mp_rank_\d+_|\.distcp$|^\.metadata$", path.name):
        files = [*path.parent.glob("*")]
    ordered = sorted(files, key=lambda x: ("optim" in x.parent.name, x))
    for end, whose, how in _OTHERS:
        if (x := next((x for x in ordered if re.search(f"({end})$", x.name)), None)) is not None:
            fix = f"{'convert it, and ' if 'NEW' in how else ''}name {how.format(at=x.parent, x=x)}"
            return ShardcError(f"this is a checkpoint of {whose}", where=str(path), fix=fix)
    return None


def free_name(folder: Path, step: int) -> Path:
    """Return the path of the next checkpoint of a step."""
    number = max((g.number for g in generations(folder) if g.step == step), default=0) + 1
    return folder / (f"step-{step:06d}" + (f".{number}" if number > 1 else ""))


def best_of(folder: Path) -> Generation | None:
    """Return the best checkpoint of the run that saved here, as its last one says; None if it does not say."""
    for last in generations(folder)[:1]:
        best = read_index(last.path).extra.get("user", {}).get("best", {})
        return next((g for g in generations(folder) if g.step == best.get("step") and not g.replaced), None)
    return None


def prune(folder: Path, keep: int, *, known: Path | None = None) -> list[Path]:
    """Keep the last `keep` complete checkpoints and everything newer, and the best one; remove the rest.

    known: a complete one. Returns the removed paths. The caller holds the folder's lock.
    """
    whole, removed, best = 0, [], None
    with contextlib.suppress(DamagedError):  # of the last one
        best = best_of(folder)
    for g in generations(folder):
        if whole >= keep and g != best:
            remove(g.path)
            removed.append(g.path)
        else:
            whole += g.path == known or complete(g.path)
    return removed


def words(error: BaseException, *, fix: bool = False) -> str:
    """Return an error in one line, for other ranks. fix: with how to fix it."""
    if isinstance(error, ShardcError):
        fault = "; ".join(f"{e.where}: {e.what}" if e.where else e.what for e in error.errors)
        return f"{fault}; {error.fix}" if fix and error.fix else fault
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return f"{type(error).__name__}: {error}"


# --- one checkpoint


def read_index(path: Path) -> Index:
    """Read the index of one checkpoint. Raises DamagedError if it is damaged, ShardcError if missing."""
    where = str(path / checkpoint_index.NAME)
    try:
        data = disk_calls.read_file(path / checkpoint_index.NAME, checkpoint_index.MAX_BYTES)
        index = checkpoint_index.from_bytes(data)
        checkpoint_index.check(index)
        return index
    except (FileNotFoundError, NotADirectoryError):
        if torch_format.is_torch(path):
            return torch_format.read(path)
        if path.is_dir() and any(re.fullmatch(FILE, n) for n in disk_calls.names(path)):
            raise DamagedError("the index is missing", where=where) from None
        raise none_in(path) from None
    except (ValueError, OSError) as e:
        raise DamagedError(f"the index cannot be read: {e}", where=where) from None


def check_files(path: Path, index: Index) -> None:
    """Raise DamagedError if a file is not the indexed one, by its size and header."""
    for number in range(len(index.files)):
        check_file(path, index, number)


def check_file(path: Path, index: Index, number: int) -> None:
    """Raise DamagedError if this file is not the indexed one."""
    file = index.files[number]
    where = str(path / file.name)
    try:
        with disk_calls.opened(path / file.name) as descriptor:
            size = disk_calls.size_of(descriptor)
            if not file.sha256 and size >= file.nbytes:  # of torch's format: this is a part of a file
                return
            if size != file.nbytes:
                raise DamagedError(f"the file has {size} bytes, and had {file.nbytes} when saved", where=where)
            header = bytearray(file.header)
            disk_calls.read_into(descriptor, memoryview(header), 0)
    except OSError as e:
        fault = "the file is missing" if isinstance(e, FileNotFoundError) else f"the file cannot be read: {e}"
        raise DamagedError(f"{fault}; rank {file.rank} wrote it", where=where) from None
    if hashlib.sha256(header).hexdigest() != file.sha256:
        match = re.search(rb'"checkpoint":"([0-9a-f]+)","step":"([0-9]+)"', header)
        fault = "its header is damaged"
        if match is not None and match[1].decode() != index.id:
            fault = f"the file is of another checkpoint, saved at step {int(match[2])}"
        raise DamagedError(f"{fault}; rank {file.rank} wrote it", where=where)


def complete(path: Path) -> bool:
    """Return whether a checkpoint is complete, without reading the tensors."""
    try:
        check_files(path, read_index(path))
    except ShardcError:
        return False
    return True


def remedy(path: Path) -> str:
    """Return how to continue after a damaged checkpoint: with another one of its folder, if there is one."""
    for g in generations(path.parent):
        if g.path.name != path.name and complete(g.path):
            return f"{g.path} is complete: load that one, or find it with last_good=True (run: --last-good)"
    return "the folder has no other checkpoint: copy it again from its source"


# --- without a program: is a checkpoint whole, and in what do two differ?


def verify(path: Path) -> Iterator[ShardcError]:
    """Yield the faults of a checkpoint. Raises ShardcError if there is none.

    Reads all bytes, one slice at a time.
    """
    try:
        index = read_index(path)
    except DamagedError as e:
        yield e
        return
    of_file: dict[int, list[tuple[str, Slice]]] = {}
    for key, stored in index.tensors.items():
        for s in stored.slices:
            of_file.setdefault(s.file, []).append((key, s))
    for number, file in enumerate(index.files):
        try:
            check_file(path, index, number)
        except DamagedError as e:
            yield e
        with contextlib.suppress(OSError), disk_calls.opened(path / file.name) as descriptor:  # see `check_file`
            for key, s in sorted(of_file.get(number, []), key=lambda x: x[1].start):
                dtype, box = index.tensors[key].dtype, Box.alone(s.offset, s.shape)
                if not _read_slice(descriptor, file, dtype, s, [(box, torch.empty(s.shape, dtype=dtype))]):
                    yield damage(path / file.name, key, s)


@dataclass(frozen=True)
class Difference:
    """A difference between two checkpoints.

    a, b: the value in each, or one text for both; "" if it is missing.
    """

    what: str
    a: str
    b: str


def diff(a: Path, b: Path) -> Iterator[Difference]:
    """Yield differences between two checkpoints: tensors, however cut, and numbers. Raises DamagedError."""
    first, second = read_index(a), read_index(b)
    for name in ("step", "model", "program", "mesh"):
        x, y = getattr(first, name), getattr(second, name)
        if x != y:
            yield Difference(name, str(x), str(y))
    yield from _values("extra", first.extra, second.extra)
    yield from _values("optimizer", first.optimizer or {}, second.optimizer or {})
    for key in sorted(first.tensors.keys() | second.tensors.keys()):
        x, y = first.tensors.get(key), second.tensors.get(key)
        if x is None or y is None or (x.dtype, x.shape) != (y.dtype, y.shape):
            yield Difference(key, _form(x), _form(y))
        elif _cut(x) != _cut(y) or not all(s.digest for s in x.slices):  # torch's format has no digests
            count, most = _compare(a, first, b, second, key)
            if count:
                text = f"{count} of its numbers differ" + (f", by {most:.3g} at most" if most is not None else "")
                yield Difference(key, text, text)


def _values(name: str, x: Any, y: Any) -> Iterator[Difference]:
    if isinstance(x, dict) and isinstance(y, dict):
        for k in sorted(x.keys() | y.keys()):
            yield from _values(f"{name}.{k}", x.get(k), y.get(k))
    elif repr(x) != repr(y):  # nan is nan
        yield Difference(name, "" if x is None else str(x), "" if y is None else str(y))


def _form(x: Stored | None) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}" if x is not None else ""


def _cut(x: Stored) -> set[Any]:
    return {(s.offset, s.shape, s.digest) for s in x.slices}


def _compare(a: Path, first: Index, b: Path, second: Index, key: str) -> tuple[int, float | None]:
    """Return how many numbers of a tensor differ, and the largest difference; None for it if one is nan."""
    stored, count, most = first.tensors[key], 0, 0.0
    for s in stored.slices:
        x, y = (read_box(path, index, key, s.offset, s.shape) for path, index in ((a, first), (b, second)))
        differ = (_bytes(x) != _bytes(y)).any(-1)
        count += int(differ.sum())
        if differ.any():
            wide = torch.complex128 if x.dtype.is_complex else torch.float64
            most = max(most, float((x.to(wide) - y.to(wide)).abs().max()))
    return count, most if most == most else None


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8).view(x.numel(), x.dtype.itemsize)
