"""Folders in stores that fsspec reaches, such as s3://bucket/run, as paths.

A store replaces one object at once, and renames nothing at once. So a checkpoint there has its name from the beginning,
and exists when its index does, which is written last and removed first:

    s3://bucket/run/checkpoint/step-000100/      each rank's files, then index.json
                               step-000300.old   an empty object: training went back to before step-000300

A `Url` is a path, so that code which joins names need not know where a folder is. Whatever opens it as a file of this
machine gets an error, and never a local folder named `s3:`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path, PosixPath
from typing import Any

from shardc.errors import ShardcError

_URL = re.compile(r"([A-Za-z][\w+.:-]+):/{1,3}(?=.)")  # pathlib has made one slash of two
#: Stores without folders: a name with slashes needs none, and making one could make a bucket.
_FLAT = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "oss", "oci", "r2", "memory")
#: Bytes of a part of an upload: s3 takes 10,000 parts of a file.
PART = 64 << 20


def expanded(path: str | Path) -> Path:
    """Return a user's path: a `Url`, or one on this machine, with `~` as the home folder, as in a shell."""
    if isinstance(path, Url) or (match := _URL.match(str(path))) is None or Path(f"{match[1]}:").exists():
        return path if isinstance(path, Url) else Path(path).expanduser()
    return Path("/", str(path)[match.end() :]) if match[1] == "file" else Url(path)


def _asked(name: str) -> Any:
    return lambda path, **_: bool(path.call(name))


class Url(PosixPath):
    """A folder or a file in a store, with what shardc uses of paths. The store's errors are OSError."""

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    def __fspath__(self) -> str:
        fix = "copy it to this machine, and name that folder"
        raise ShardcError("this needs a folder of this machine, not one of a store", where=str(self), fix=fix)

    def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a function of the store on this path. Raises ShardcError for a store that is not known."""
        import fsspec  # type: ignore[import-untyped]  # torch needs it too

        try:
            store, path = fsspec.core.url_to_fs(str(self), use_listings_cache=False)
        except (ImportError, ValueError) as e:  # `ValueError: Protocol not known`, `ImportError: Install s3fs to ...`
            fix = f"{e}; or name a folder" if isinstance(e, ImportError) else "name a folder, or a URL such as s3://"
            raise ShardcError(f"this store cannot be reached: {e}", where=str(self), fix=fix) from None
        return _called(getattr(store, name), path, *args, **options)

    def check(self, option: str) -> None:
        """Raise ShardcError unless an object can be written here, and removed again."""
        if str(self).startswith("memory:"):
            fix = "name a folder, or a URL such as s3://"
            raise ShardcError("memory ends with its process, and nothing would be kept", where=option, fix=fix)
        try:
            self.mkdir()
            (self / ".tried").write_bytes(b"")
            (self / ".tried").unlink()
        except OSError as e:
            fix = "check the name of the bucket, and the credentials of this machine"
            raise ShardcError(f"cannot write to {self}: {e}", where=option, fix=fix) from None

    exists, is_dir, is_file = map(_asked, ("exists", "isdir", "isfile"))

    def resolve(self, strict: bool = False) -> Url:
        return self

    absolute = expanduser = resolve

    def mkdir(self, *_: Any, **__: Any) -> None:
        if str(self).partition("://")[0] not in _FLAT:
            self.call("makedirs", exist_ok=True)

    def iterdir(self) -> Generator[Url, None, None]:
        names = (str(x).rstrip("/").rpartition("/")[2] for x in self.call("ls", detail=False))
        yield from (self / name for name in names if name != self.name)  # some stores list the folder too

    def read_bytes(self) -> bytes:
        return bytes(self.call("cat_file"))

    def read_text(self, *_: Any, **__: Any) -> str:
        return self.read_bytes().decode()

    def write_bytes(self, data: Any) -> int:
        self.call("pipe_file", bytes(data))
        return len(data)

    def unlink(self, missing_ok: bool = False) -> None:
        self.call("rm_file")


def _called(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return function(*args, **options)
    except OSError:
        raise
    except Exception as e:  # each library has its own: no credentials, no such host
        raise OSError(f"{type(e).__name__}: {e}") from e


class Remote:
    """An object that is open for reading by ranges. size: its bytes."""

    def __init__(self, url: Url) -> None:
        self._url, facts = url, url.call("info")
        if facts["type"] != "file":
            raise OSError("not a regular file")
        self.size = int(facts["size"])

    def read(self, start: int, count: int) -> bytes:
        """Read bytes. Raises OSError if the object is shorter."""
        data = bytes(self._url.call("cat_file", start=start, end=start + count)) if count else b""
        if len(data) != count:
            raise OSError(f"the file ends at byte {start + len(data)}")
        return data


class Upload:
    """A new object, written from beginning to end; it exists after `finish`."""

    def __init__(self, path: Url) -> None:
        self._file, self._done = path.call("open", "wb", block_size=PART), False

    def add(self, data: memoryview) -> None:
        _called(self._file.write, data)

    def finish(self) -> None:
        _called(self._file.close)
        self._done = True

    def close(self) -> None:
        """Give up an upload that is not finished."""
        if not self._done and hasattr(self._file, "discard"):
            _called(self._file.discard)
