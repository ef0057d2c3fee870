"""Which of the ranks that `shardc run` started on this machine failed first: its error is the one that is shown. (Under
torchrun and Slurm: shardc.cli.same_error_once; as an exception of the others: shardc.runtime.mesh.failed_rank.)"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

POLL = 0.05  # seconds between looks at the ranks
_LAST = 5  # lines at the end of an error that name its kind; notes come after it
# seconds in which ranks may still fail because another one did; then, in which a SIGTERM is heeded
GRACE = 1.0
#: Exit status of a rank that ended because another one failed, or does not answer.
GAVE_UP = 75


def first_failed(ranks: list[subprocess.Popen[bytes]], said: Callable[[int], str], failed: list[int]) -> int:
    """The rank that failed first. Ranks that died of a signal have nothing to say but come before those that lost their
    peer. said: by rank, its last words.
    """
    killed = [r for r in failed if ranks[r].returncode < 0]
    if killed:
        return killed[0]
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and len(failed) < len(ranks):
        time.sleep(POLL)
        late = [r for r, p in enumerate(ranks) if p.poll() and r not in failed]
        killed = [r for r in late if ranks[r].returncode < 0]
        if killed and all(_lost_peer(said(r)) for r in failed):
            return killed[0]
        failed = [*failed, *late]
    own = [r for r in failed if ranks[r].returncode != GAVE_UP and not _lost_peer(said(r))]
    return (own or failed)[0]


def _lost_peer(said: str) -> bool:
    """Whether a rank's last words are those of one whose peer went away."""
    last = "".join(said.strip().lower().splitlines()[-_LAST:])
    signs = (
        "connection closed by peer",
        "connection reset by peer",
        "broken pipe",
        "connection refused",
        "remote process exited",
    )
    return any(sign in last for sign in signs)
