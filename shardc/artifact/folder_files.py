"""Read files of a compiled folder from anybody: only names that compile writes, no links, size limits."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardc import text_file
from shardc.errors import Errors, ShardcError
from shardc.runtime.state.tensor_file import open_safetensors
from shardc.runtime.storage import disk_calls

MANIFEST, LAYOUTS, SPEC = "manifest.json", "layouts.json", "spec.yaml"
CONSTANTS, SCHEDULE = "constants.safetensors", "schedule.txt"
#: The most values of a table; each takes some 64 bytes when it is parsed.
VALUES = 500_000
_TEXT = re.compile(
    r"(?:single|counts|(?:pair|forwards)_\d{1,5}_\d{1,5}|stage\d{1,5}(?:_(?:forward|backward|weights))?)\.py", re.ASCII
)
#: Characters that control a terminal, or begin a line for some readers. Written programs have none.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
AGAIN = "compile again"


def may_hold(name: str) -> bool:
    """Return whether `shardc compile` writes a file of this name beside the manifest."""
    return name in (LAYOUTS, SPEC, CONSTANTS, SCHEDULE) or _TEXT.fullmatch(name) is not None


def digest(file: Path) -> str:
    """Return the SHA-256 of a regular file, read in blocks. Raises OSError for a link or anything else."""
    sha = hashlib.sha256()
    with disk_calls.opened(file) as descriptor:
        size, block = disk_calls.size_of(descriptor), 1 << 20
        for place in range(0, size, block):
            sha.update(disk_calls.read_range(descriptor, place, min(block, size - place)))
    return sha.hexdigest()


class FolderFiles:
    """The files that a manifest lists, read once: what was hashed is what is used.

    trust: accept files that were edited after they were written.
    """

    def __init__(self, folder: Path, *, trust: bool) -> None:
        self.folder, self.trust = folder, trust
        self._held: dict[str, bytes] = {}
        self.edited: set[str] = set()  # names of files that were edited after they were written
        try:
            self._held[MANIFEST] = disk_calls.read_file(folder / MANIFEST, text_file.LARGEST)
        except (FileNotFoundError, NotADirectoryError):
            fault = f"{folder} is not a shardc artifact: it has no {MANIFEST}"
            raise ShardcError(fault, where=str(folder), fix="make one with `shardc compile -o DIR`") from None
        except (OSError, ValueError) as e:  # a null byte in the path
            raise self._unreadable(MANIFEST, e) from None

    def check(self, listed: dict[str, str], errors: Errors) -> None:
        """Read what the manifest lists. Adds an error for each file that is missing, edited or unknown."""
        for name, expected in listed.items():
            path = self.folder / name
            if not may_hold(name):
                fault = f"the manifest lists {name!r}, which is no file of an artifact"
                errors.add(fault, where=str(self.folder / MANIFEST), fix=AGAIN)
                continue
            try:
                if name == CONSTANTS:  # may be as large as the model: not kept, and its header is checked first
                    open_safetensors(path)
                    actual = digest(path)
                else:
                    self._held[name] = disk_calls.read_file(path, text_file.LARGEST)
                    actual = hashlib.sha256(self._held[name]).hexdigest()
            except ShardcError as e:
                errors.found.append(e)
            except FileNotFoundError:
                errors.add(f"{name} is missing", where=str(path), fix=AGAIN)
            except OSError as e:
                errors.found.append(self._unreadable(name, e))
            else:
                self.edited |= {name} if actual != expected else set()
                if actual != expected and not self.trust:
                    fix = "compile again, or load it with trust=True (--trust)"
                    errors.add(f"{name} was edited after it was written", where=str(path), fix=fix)

    def __contains__(self, name: str) -> bool:
        return name in self._held or (name == CONSTANTS and (self.folder / name).is_file())

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def wrong(self, name: str, fault: str, place: str = "") -> ShardcError:
        """Return the error of a file that compile would not write so. place: in it, ":12"."""
        return ShardcError(fault, where=self.path(name) + place, fix=AGAIN)

    def text(self, name: str) -> str:
        """Return a text of the folder. Raises ShardcError with the place of a character that no shardc writes."""
        if name not in self._held:
            raise self.wrong(MANIFEST, f"{name} is missing from the manifest")
        try:
            text = self._held[name].decode()
        except UnicodeDecodeError as e:
            line = self._held[name].count(b"\n", 0, e.start) + 1
            raise self.wrong(name, f"{name} is not UTF-8 text", f":{line}") from None
        if odd := _CONTROL.search(text):
            fault = f"a character U+{ord(odd[0]):04X}, which no program has"
            line = text.count("\n", 0, odd.start()) + 1
            raise self.wrong(name, fault, f":{line}")
        return text

    def table(self, name: str) -> Any:
        """Return the values of a JSON file.

        Raises ShardcError for invalid JSON, duplicate keys, and, before it is parsed, more values than any program has.
        """
        if (count := sum(map(self._held.get(name, b"").count, (b",", b"[", b"{")))) > VALUES:
            raise self.wrong(name, f"{name} has {count:,} values, more than the {VALUES:,} of any program")
        text = self.text(name)
        try:
            values = json.loads(text, object_pairs_hook=text_file.unique)
            if "\\" in text:  # control characters may be escaped
                self._check_texts(name, values)
            return values
        except json.JSONDecodeError as e:
            raise self.wrong(name, f"{name} is not JSON: {e.msg}", f":{e.lineno}:{e.colno}") from None
        except RecursionError:
            raise self.wrong(name, f"{name} is nested too deeply") from None
        except ValueError as e:  # a duplicate key, a number of thousands of digits
            raise self.wrong(name, f"{name} cannot be read: {e}") from None

    def _check_texts(self, name: str, found: Any) -> None:
        inside = [found]
        while inside:
            x = inside.pop()
            if isinstance(x, dict):
                inside += (*x, *x.values())
            elif isinstance(x, list):
                inside += x
            elif isinstance(x, str) and (odd := _CONTROL.search(x)):
                raise ValueError(f"a character U+{ord(odd[0]):04X} in {x[:40]!r}")

    def constants(self) -> dict[str, Tensor]:
        """Return the tensors that capture found in the code, by name. Raises ShardcError for an invalid file."""
        if CONSTANTS not in self:
            return {}
        try:
            file = open_safetensors(self.folder / CONSTANTS)
            return {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (not a dict)
        except OSError as e:
            raise self._unreadable(CONSTANTS, e) from None

    def _unreadable(self, name: str, e: Exception) -> ShardcError:
        why = getattr(e, "strerror", None) or str(e)
        if (self.folder / name).is_symlink():
            why = "it is a link, which may lead out of the folder"
        return self.wrong(name, f"{name} cannot be read: {why}")


def dtype(text: str) -> torch.dtype:
    """Return the dtype of a name such as `torch.float32`. Raises ValueError for any other name."""
    value = getattr(torch, text.removeprefix("torch."), None) if text.isascii() else None
    if not isinstance(value, torch.dtype):
        raise ValueError(f"{text[:40]!r} is no dtype")
    return value
