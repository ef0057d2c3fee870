"""Find the rank started by `shardc run` on this machine that failed first: its error is shown.

(Under torchrun and Slurm: shardc.cli.same_error_once; as an exception on other ranks: mesh.failed_rank.)
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

POLL = 0.05  # seconds between looks at the ranks
_LAST = 5  # lines at the end of an error that name its kind; notes come after it
# seconds for ranks to fail because another one did; then, for ranks to end after SIGTERM
GRACE = 1.0
#: Exit status of a rank that ended because another one failed, or does not answer.
GAVE_UP = 75
#: Errors of a rank whose peer has gone.
PEER_GONE = ("connection closed by peer", "connection reset by peer", "broken pipe", "remote process exited")


def first_failed(ranks: list[subprocess.Popen[bytes]], words_of: Callable[[int], str], failed: list[int]) -> int:
    """Return the rank that failed first. words_of: returns the last words of a rank.

    Ranks killed by a signal have no words, but come before ranks that lost their peer.
    """
    killed = [r for r in failed if ranks[r].returncode < 0]
    if killed:
        return killed[0]
    deadline = time.monotonic() + GRACE
    while time.monotonic() < deadline and len(failed) < len(ranks):
        time.sleep(POLL)
        late = [r for r, p in enumerate(ranks) if p.poll() and r not in failed]
        killed = [r for r in late if ranks[r].returncode < 0]
        if killed and all(_lost_peer(words_of(r)) for r in failed):
            return killed[0]
        failed = [*failed, *late]
    culprits = [r for r in failed if ranks[r].returncode != GAVE_UP and not _lost_peer(words_of(r))]
    return (culprits or failed)[0]


def _lost_peer(text: str) -> bool:
    """Return whether a rank's last words show that its peer went away."""
    last = "".join(text.strip().lower().splitlines()[-_LAST:])
    return any(sign in last for sign in (*PEER_GONE, "connection refused"))
