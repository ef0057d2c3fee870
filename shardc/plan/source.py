"""The model that is planned. It is made when something about it has to be found out: where all is known, by what its
config says alone, neither transformers nor the passes are loaded.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardc.plan.disk_cache import DiskCache
from shardc.plan.installed import installed, settings

if TYPE_CHECKING:
    from shardc.plan.few_layers import Subject


@dataclass
class Source:
    """make: the model with an example batch. made_from: plain values that decide what that gives, with what is
    installed; None where it runs code of the user's, which may read anything.
    """

    make: Callable[[], Subject]
    made_from: Mapping[str, Any] | None = None

    @cached_property
    def subject(self) -> Subject:
        return self.make()

    def fingerprint(self, disk: DiskCache) -> str | None:
        """What files on disk are looked up by, of this model (shardc.plan.fingerprint); None: it cannot be told."""
        question = {"made from": self.made_from, "installed": installed(), "settings": settings()}
        known = disk.get(question) if self.made_from is not None else None
        if known is not None and known["files"] == _digests(known["files"]):
            return str(known["fingerprint"])
        from shardc.plan.fingerprint import Unknown, fingerprint

        subject = self.subject
        try:
            found, files = fingerprint(subject.model, subject.batch, subject.loss)
            if self.made_from is not None:
                disk.put(question, {"fingerprint": found, "files": _digests(files)})
        except (Unknown, OSError, RecursionError):
            return None
        return found


def _digests(files: Iterable[str]) -> dict[str, str]:
    """{path: digest}; "" of one that is not there any more."""
    paths = {name: Path(name) for name in files}
    return {name: hashlib.sha256(p.read_bytes()).hexdigest() if p.is_file() else "" for name, p in paths.items()}
