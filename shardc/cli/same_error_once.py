"""Print an error once if all ranks of torchrun or Slurm have it: the first rank prints it for all.

Ranks that fail before there is a process group share only the address at which they would have met. They meet there
for a moment and exchange their errors. A rank that cannot reach the others prints its own error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO

from shardc.errors import ShardcError

#: Seconds that the first rank waits for others to fail too, and that the others wait for it.
COLLECT, WAIT = 2.0, 4.0
_DONE, _READ = "shardc/errors/told", "shardc/errors/read"


class FirstFailedError(ShardcError):
    """An error of the first process of this machine, which prints it."""


def for_this_rank(text: str, *, alone: bool = True) -> str:
    """Return the text that this process prints of an error: "" if the first rank prints it for all ranks.

    The first rank adds which ranks have the error. alone: return `text` if no other rank can be reached.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or "MASTER_ADDR" not in os.environ or "MASTER_PORT" not in os.environ:
        return text
    try:
        with silenced_stderr():  # torch writes 30 lines of frames if a store is missing or is lost
            return _first_report(text, rank, world)
    except (RuntimeError, OSError, ValueError):  # from the store: no other rank is there
        return text if alone else ""


@contextmanager
def silenced_stderr() -> Iterator[TextIO]:
    """Drop what C++ code writes to stderr. Yield a file that still writes there."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere, os.fdopen(os.dup(kept), "w") as screen:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield screen
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _first_report(text: str, rank: int, world: int) -> str:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # by torchrun's agent; else by the first rank
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(
        *address, world, rank == 0 and not hosted, timedelta(seconds=WAIT), wait_for_workers=False, multi_tenant=True
    )
    store.set(_key(rank), text)
    if rank:
        ranks = json.loads(store.get(_DONE))
        store.add(_READ, 1)
        return "" if rank in ranks else text
    texts = {0: text, **_collected(store, world)}
    store.set(_DONE, json.dumps(list(texts)))
    _wait(lambda: store.add(_READ, 0) >= len(texts) - 1, 1.0)
    return "\n".join(_with_ranks(kind, [r for r, t in texts.items() if t == kind], world) for kind in _kinds(texts))


def _key(rank: int) -> str:
    return f"shardc/errors/{rank}"


def _collected(store: Any, world: int) -> dict[int, str]:
    """Return the errors of the other ranks that have reported one: {rank: text}."""
    others = range(1, world)
    _wait(lambda: all(store.check([_key(r)]) for r in others), COLLECT)
    return {r: store.get(_key(r)).decode() for r in others if store.check([_key(r)])}


def _wait(done: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)


def _kinds(texts: dict[int, str]) -> list[str]:
    return list(dict.fromkeys(texts.values()))


def _with_ranks(text: str, ranks: Sequence[int], world: int) -> str:
    if len(ranks) == world:
        return f"{text}\n(the same on all {world} ranks)"
    return f"{text}\n(on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
