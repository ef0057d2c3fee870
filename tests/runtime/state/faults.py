"""Faults of disks and processes, and checkpoints made to do harm, on a tiny checkpoint: what the tests of this folder
try some of, and `make faults` many of.

    python tests/runtime/state/faults.py --damages 10000 --hostile 1000
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.ir.program import Program
from shardc.runtime.mesh.loopback import LoopbackMesh, loopback
from shardc.runtime.state import loading, saving
from shardc.runtime.state.checkpoint_folder import verify
from shardc.runtime.state.owners import RankState
from shardc.runtime.storage import disk_calls
from tests.runtime.state.test_state import OPTIMIZERS, Net, local_parameters, program_of

Value = dict[str, Any]
CALLS = ("create", "write", "sync", "sync_folder", "rename", "unlink", "make_folder", "remove_folder")


# --- a checkpoint


@functools.cache
def whole() -> nn.Module:
    torch.manual_seed(0)
    return Net()


@functools.cache
def program(sizes: tuple[tuple[str, int], ...]) -> Program:
    return program_of(whole(), dict(sizes), zero=True)


def trained(mesh: Any, step: int) -> tuple[Any, ...]:
    """Parameters, buffers and an optimizer with moments, whose numbers follow from the step."""
    p = program(mesh.layout.axes)
    params, buffers = local_parameters(p, whole(), mesh)
    optimizer = OPTIMIZERS["adamw"]([params[x.name] for x in p.params if x.requires_grad])
    for x in p.params:
        if x.requires_grad:
            grad = torch.sin(torch.arange(float(torch.Size(x.shape).numel())) + step).view(x.shape)
            params[x.name].grad = x.layout.local(grad, mesh.layout, mesh.layout.coords(mesh.rank)).clone()
    optimizer.step()
    return p, params, buffers, optimizer


def save(
    folder: Path, step: int, sizes: dict[str, int] | None = None, *, wait: bool = True, keep: int = 2
) -> list[Any]:
    """Save the state of a step from all ranks. Gives what each rank raised, or None."""
    sizes = sizes or {"tp": 2}
    program(Mesh.of(sizes).axes)  # here, not by several threads at once

    def work(mesh: LoopbackMesh) -> BaseException | None:
        p, params, buffers, optimizer = trained(mesh, step)
        saves = saving.Saves(mesh)
        extra = {"step": step, "seed": 7}
        try:
            held = RankState(p, mesh, params, buffers, optimizer)
            saves.save(folder, functools.partial(saving.planned, held, extra), keep=keep, wait=wait)
            saves.finish()
        except (ShardcError, Crash) as e:
            return e
        return None

    return loopback(Mesh.of(sizes), work)


def load(folder: Path, *, last_good: bool = False) -> Value:
    """All that one device gets from a folder of checkpoints."""

    def work(mesh: LoopbackMesh) -> Value:
        p, params, buffers, optimizer = trained(mesh, 99)
        extra = loading.load(folder, RankState(p, mesh, params, buffers, optimizer), last_good=last_good)
        return value(params, buffers, optimizer, extra)

    (found,) = loopback(Mesh.of({"dp": 1}), work)
    return found


def value(params: Any, buffers: Any, optimizer: Any, extra: Any) -> Value:
    kept = {"inv_freq", "lifted"}  # buffers that checkpoints do not have
    found = {n: _bytes(x) for n, x in (*params.items(), *buffers.items()) if n not in kept}
    for i, s in optimizer.state_dict()["state"].items():
        found |= {f"{i}.{k}": _bytes(x) for k, x in s.items()}
    groups = [{k: x for k, x in g.items() if k != "params"} for g in optimizer.param_groups]
    return {**found, "groups": repr(groups), "extra": repr(extra)}


def _bytes(x: Tensor) -> bytes:
    return x.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


# --- damage


def damages(folder: Path, other: Path, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Without end: what is done to the files of a checkpoint, and how to undo it. other: another checkpoint of the same
    model.
    """
    rng, paths = random.Random(seed), sorted(folder.iterdir())
    whole = {p: p.read_bytes() for p in paths}
    sizes = [len(x) for x in whole.values()]

    def put(path: Path, data: bytes) -> Callable[[], None]:
        path.write_bytes(data)
        return lambda: path.write_bytes(whole[path]) and None

    while True:
        (path,) = rng.choices(paths, sizes if rng.random() < 0.5 else None)
        data, kind = whole[path], rng.choice(KINDS)
        a, b = sorted(rng.sample(range(len(data)), 2))
        if kind == "flip":
            bit = rng.randrange(8 * len(data))
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            yield f"bit {bit} of {path.name}", put(path, bytes(changed))
        elif kind == "truncate":
            yield f"{path.name} cut at {a}", put(path, data[:a])
        elif kind == "zeros":
            b = min(b, a + rng.choice((1, 8, 512, 4096)))
            yield f"zeros in {path.name} from {a} to {b}", put(path, data[:a] + bytes(b - a) + data[b:])
        elif kind == "append":
            yield f"{a} bytes more in {path.name}", put(path, data + bytes(a + 1))
        elif kind == "swap words":
            n = rng.choice((4, 8, 64, 512))
            a, b = (x // n * n for x in sorted(rng.sample(range(max(2, len(data) - n)), 2)))
            if a + n <= b:
                changed = data[:a] + data[b : b + n] + data[a + n : b] + data[a : a + n] + data[b + n :]
                yield f"{n} bytes at {a} and {b} of {path.name} swapped", put(path, changed)
        elif kind == "swap files":
            mate = rng.choice(paths)
            undo = put(path, whole[mate]), put(mate, data)
            yield f"{path.name} and {mate.name} swapped", lambda undo=undo: [u() for u in undo] and None  # type: ignore[misc]
        elif kind == "stale":
            yield f"{path.name} of another step", put(path, (other / path.name).read_bytes())
        else:
            path.unlink()
            yield f"{path.name} deleted", lambda path=path, data=data: path.write_bytes(data) and None  # type: ignore[misc]


KINDS = ("flip", "flip", "flip", "truncate", "zeros", "append", "swap words", "swap files", "stale", "delete")


def try_damages(count: int, seed: int = 0) -> Counter[str]:
    """How many are told by name, change nothing, or are silent. Raises AssertionError for any other error."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder, other = Path(temporary) / "a" / "step-000002", Path(temporary) / "b" / "step-000001"
        for path, step in ((folder, 2), (other, 1)):
            assert not any(save(path.parent, step, {"dp": 2, "tp": 2}))
        good = load(folder)
        for _, (what, undo) in zip(range(count), damages(folder, other, seed), strict=False):
            try:
                result = "benign" if load(folder) == good else f"SILENT: {what}"
            except ShardcError as e:
                named = any(p in str(e) for p in (*os.listdir(folder), *WORDS, "no checkpoint"))
                result = "named" if named else f"UNCLEAR: {what}: {e}"
            if result == "benign" and list(verify(folder)):
                result = "benign to a load, named by verify"
            undo()
            found[result] += 1
        assert load(folder) == good
    return found


WORDS = ("index.json", "model-0000", "optimizer-0000")


# --- checkpoints that somebody made to do harm


def hostile(folder: Path, seed: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """Without end: a checkpoint's index or files, replaced by something that is not one; digests made to fit."""
    rng = random.Random(seed)
    index = folder / "index.json"
    text = index.read_bytes()
    table = json.loads(text)
    whole = {p: p.read_bytes() for p in folder.iterdir()}
    tensors, ran = list(table["tensors"]), folder.parent / "ran"

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(ran),)

    def restore() -> None:
        for p in folder.iterdir():
            shutil.rmtree(p) if p.is_dir() and not p.is_symlink() else p.unlink()
        for p, data in whole.items():
            p.write_bytes(data)

    def write(changed: Any) -> Callable[[], None]:
        body = json.dumps({k: v for k, v in changed.items() if k != "sha256"}, indent=0).encode()[1:].lstrip()
        index.write_bytes(b'{"sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'",\n' + body)
        return restore

    values = (
        *(-1, 0, 1, 2**31, 2**63, 2**64, 10**400, 1.5, float("nan"), True, None, "", "x", [], {}, [[]], [-1], {"a": 1}),
        *("../../../etc/passwd", "/etc/passwd", "model-00000.safetensors\0", "\ud800", "a" * 100_000, [0] * 1000),
        [2**62] * 60,
    )
    while True:
        changed = json.loads(text)
        kind = rng.randrange(12)
        if kind < 6:  # any value of the index becomes another
            where: Any = changed
            path = []
            while True:
                keys = list(where) if isinstance(where, dict) else list(range(len(where)))
                key = rng.choice(keys)
                path.append(key)
                inside = where[key]
                if not isinstance(inside, (dict, list)) or not inside or rng.random() < 0.15:
                    break
                where = inside
            where[key] = rng.choice(values)
            if path != ["sha256"]:
                yield f"{path} = {str(where[key])[:40]!r}", write(changed)
        elif kind == 6:
            changed[rng.choice(("pickle", "code", "__reduce__", "include"))] = rng.choice(values)
            yield "a key that is not known", write(changed)
        elif kind == 7:
            name = rng.choice(tensors)
            slices = changed["tensors"][name][2]
            if slices:
                rng.choice(slices)[rng.randrange(4)] = rng.choice(values)
                yield f"a slice of {name}", write(changed)
        elif kind == 8:  # a file that is a pickle, of the right size and digest
            file = rng.randrange(len(changed["files"]))
            name = changed["files"][file][0]
            data = pickle.dumps(Trap()).ljust(changed["files"][file][2], b"\0")
            (folder / name).write_bytes(data)
            changed["files"][file][4] = hashlib.sha256(data[: changed["files"][file][3]]).hexdigest()
            yield f"{name} is a pickle", write(changed)
        elif kind == 9:
            index.write_bytes(
                rng.choice((pickle.dumps(Trap()), b"[" * 10**6, b'{"a":' * 10**5, b"\xff\xfe", b"", b"9" * 10**5))
            )
            yield "index.json is something else", restore
        elif kind == 10:
            path = rng.choice(list(whole))
            path.unlink()
            kind_of = rng.choice(("link", "pipe", "folder", "loop"))
            if kind_of == "link":
                path.symlink_to("/etc/passwd")
            elif kind_of == "loop":
                path.symlink_to(path)
            else:
                os.mkfifo(path) if kind_of == "pipe" else path.mkdir()
            yield f"{path.name} is a {kind_of}", restore
        else:  # tensors change places: the model gets another's numbers, or another shape
            a, b = rng.sample(tensors, 2)
            changed["tensors"][a], changed["tensors"][b] = changed["tensors"][b], changed["tensors"][a]
            yield f"{a} and {b} change places", write(changed)


#: What loading may not do, of what Python tells its audit hooks.
FORBIDDEN = (
    "pickle.find_class",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "socket.connect",
    "exec",
)
_watched: list[tuple[str, Any]] | None = None


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if _watched is not None and (event == "open" or event in FORBIDDEN):
        _watched.append((event, args))


def try_hostile(count: int, seed: int = 0) -> Counter[str]:
    """How many are refused, and how many load as what they are: numbers, which need not be those that were saved.
    Raises AssertionError where code runs, a file outside is opened, or memory grows.
    """
    global _watched
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "step-000002"
        assert not any(save(folder.parent, 2))
        load(folder)
        sys.addaudithook(_audit)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _, (what, undo) in zip(range(count), hostile(folder, seed), strict=False):
            _watched = []
            start = time.perf_counter()
            try:
                load(folder)
                result = "loads"
            except ShardcError:
                result = "refused"
            except Exception as e:
                result = f"UNCLEAR: {what}: {type(e).__name__}: {e}"
            seen, _watched = _watched, None
            for event, args in seen:
                outside = event == "open" and not str(args[0]).startswith(temporary) and not _of_python(str(args[0]))
                if event in FORBIDDEN or outside:
                    result = f"HARM: {what}: {event} {args[:2]}"
            if time.perf_counter() - start > 20:
                result = f"SLOW: {what}"
            undo()
            found[result] += 1
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert not (Path(temporary) / "ran").exists()
        assert grown < 500_000, f"memory grew by {grown} KiB"
    return found


def _of_python(path: str) -> bool:
    """Python opens files of its own: source lines for tracebacks, modules."""
    return path.endswith((".py", ".pyc", ".so")) or path.startswith(("/proc/", "/sys/"))


# --- crashes and full disks


class Crash(BaseException):
    """The process ended here."""


class Fault:
    """Call number `at` fails, and with `for_good` all after it. error: an errno; None: the process ends."""

    def __init__(self, at: int, error: int | None, *, for_good: bool = True) -> None:
        self.at, self.error, self.for_good = at, error, for_good
        self.calls: list[str] = []
        self.lock = threading.RLock()

    def check(self, name: str, before: Callable[[], object] = lambda: None) -> None:
        """Count a call. If it fails, raise, at number `at` after `before`."""
        with self.lock:
            number = len(self.calls)
            self.calls.append(name)
        if number == self.at or (self.for_good and number > self.at):
            if number == self.at:
                before()
            if self.error is None:
                raise Crash
            raise OSError(self.error, os.strerror(self.error))


class Faulty(Fault):
    """A fault, in its `with`, at a call that reaches the disk.

    half: a write has written half of it. lose: what was not synced is not on the disk: files have no contents, names
    are what they were.
    """

    def __init__(self, at: int, error: int | None, *, half: bool = False, lose: bool = False, **more: Any) -> None:
        super().__init__(at, error, **more)
        self.half, self.lose = half, lose
        self._written: dict[int, Path] = {}
        self._renamed: list[tuple[Path, Path]] = []

    def __enter__(self) -> Faulty:
        self._real = {name: getattr(disk_calls, name) for name in CALLS}
        for name in CALLS:
            setattr(disk_calls, name, self._wrapped(name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, real in self._real.items():
            setattr(disk_calls, name, real)
        if self.lose and self.hit:
            for path in self._written.values():
                with contextlib.suppress(FileNotFoundError):
                    os.truncate(path, 0)
            for old, new in reversed(self._renamed):
                os.rename(new, old)

    @property
    def hit(self) -> bool:
        return len(self.calls) > self.at

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            with self.lock:
                half = self.half and name == "write"
                self.check(name, lambda: half and self._real[name](args[0], args[1][: len(args[1]) // 2], args[2]))
                result = self._real[name](*args)
                if name == "create":
                    self._written[result] = args[0]
                elif name == "sync":
                    self._written.pop(args[0], None)
                elif name == "rename":
                    self._renamed.append((args[0], args[1]))
                elif name == "sync_folder":
                    self._renamed = [r for r in self._renamed if r[1].parent != args[0]]
                return result

        return call


def calls_of_a_save(folder: Path, make: Any = Faulty) -> int:
    """How many calls one reaches the disk, or a store, with, that replaces an older one."""
    for step in (1, 2):
        save(folder, step)
    with make(10**9, None) as counting:
        assert not any(save(folder, 3))
    return len(counting.calls)


def try_fault(folder: Path, fault: Any, old: Value, new: Value, *, wait: bool = True) -> str:
    """Save step 3 after 1 and 2, with a fault. Which state is there after it: "old" or "new".

    Raises AssertionError for any other state, for ranks that do not agree, and where the next save fails.
    """
    for step in (1, 2):
        assert not any(save(folder, step))
    with fault:
        raised = save(folder, 3, wait=wait)
    assert len({e is None for e in raised}) == 1 or fault.error is None, raised
    assert fault.error is None or all(isinstance(e, (ShardcError, type(None))) for e in raised), raised
    found = load(folder)
    assert found in (old, new), "neither old nor new"
    assert any(raised) or found == new, "it was said to be saved"
    assert not any(save(folder, 4)), "the next save fails"
    assert "step=4" in load(folder)["extra"].replace("'step': ", "step=")
    return "new" if found == new else "old"


def try_all_faults(every: int = 1, first: int = 0) -> Counter[str]:
    """A fault at each call of a save, or at every n-th after the first."""
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        calls = calls_of_a_save(root / "count")
        new = load(root / "count")
        save(root / "old", 2)
        old = load(root / "old")
        kinds: dict[str, dict[str, Any]] = {
            "crash": {"error": None},
            "crash in the middle of a write": {"error": None, "half": True},
            "power cut": {"error": None, "lose": True},
            "full disk": {"error": errno.ENOSPC, "half": True},
            "one I/O error": {"error": errno.EIO, "for_good": False},
        }
        ways = [(wait, kind) for wait in (True, False) for kind in kinds]
        for number, (wait, kind) in enumerate(ways):
            for at in range((first + number) % every, calls, every):
                folder = root / f"{number}-{at}"
                result = try_fault(folder, Faulty(at, **kinds[kind]), old, new, wait=wait)
                found[f"{kind}{'' if wait else ', in the background'}: {result}"] += 1
                shutil.rmtree(folder)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--damages", type=int, default=10_000)
    parser.add_argument("--hostile", type=int, default=1_000)
    parser.add_argument("--every", type=int, default=1, help="a fault at every n-th call of a save")
    parser.add_argument("--first", type=int, default=0, help="the first of them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    bad = 0
    for what, work in (
        ("faults at calls that reach the disk", lambda: try_all_faults(args.every, args.first)),
        ("damaged checkpoints", lambda: try_damages(args.damages, args.seed)),
        ("hostile checkpoints", lambda: try_hostile(args.hostile, args.seed)),
    ):
        start = time.perf_counter()
        found = work()
        print(f"{what}: {sum(found.values())} in {time.perf_counter() - start:.0f} s", flush=True)
        for result, n in sorted(found.items()):
            print(f"  {n:6d}  {result}")
            bad += n if result.split(":")[0] in ("SILENT", "UNCLEAR", "HARM", "SLOW") else 0
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
