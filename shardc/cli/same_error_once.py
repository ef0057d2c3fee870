"""Print an error once if all ranks of torchrun or Slurm have it: the first rank prints it for all.

Ranks that fail before there is a process group meet at the store for a moment, and exchange their errors. A rank that
cannot reach the others prints its own error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from shardc.errors import ShardcError

#: Seconds that the first rank waits for others to connect, and to fail too; that the others wait for it.
CONNECT, COLLECT, WAIT = 10.0, 2.0, 4.0
_DONE, _READ, _CONNECTED = "errors/done", "errors/read", "connected"


class FirstFailedError(ShardcError):
    """An error of the first process of this machine, which prints it."""


def for_this_rank(text: str, *, alone: bool = True) -> str:
    """Return the text that this process prints of an error: "" if the first rank prints it for all ranks.

    The first rank adds which ranks have the error. alone: return `text` if no other rank can be reached.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world < 2 or not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        return text
    from shardc.runtime.mesh import presence

    try:
        with _silenced_stderr():  # torch writes 30 lines of frames if a store is missing or is lost
            return _first_report(text, alone, *presence.world_store(timedelta(seconds=WAIT)))
    except (RuntimeError, OSError, ValueError):  # from the store: no other rank is there
        return text if alone else ""


@contextmanager
def _silenced_stderr() -> Iterator[None]:
    """Drop what C++ code writes to stderr."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _first_report(text: str, alone: bool, store: Any, rank: int, world: int) -> str:
    from shardc.runtime.mesh.failed_rank import within

    store.set(f"errors/{rank}", text)
    if rank:
        reported = json.loads(store.get(_DONE))
        store.add(_READ, 1)
        return "" if rank in reported or not alone else text
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # this process holds the store, for late ranks too
        within(CONNECT, lambda: store.add(_CONNECTED, 0) >= world)
    others = range(1, world)
    within(COLLECT, lambda: all(store.check([f"errors/{r}"]) for r in others))
    texts = {0: text} | {r: store.get(f"errors/{r}").decode() for r in others if store.check([f"errors/{r}"])}
    store.set(_DONE, json.dumps(list(texts)))
    within(1.0, lambda: store.add(_READ, 0) >= len(texts) - 1)
    kinds = dict.fromkeys(texts.values())
    return "\n".join(_with_ranks(kind, [r for r, t in texts.items() if t == kind], world) for kind in kinds)


def _with_ranks(text: str, ranks: list[int], world: int) -> str:
    if len(ranks) == world:
        return f"{text}\n(the same on all {world} ranks)"
    return f"{text}\n(on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
