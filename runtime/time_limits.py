"""Define how long processes and ranks wait for one another, in seconds.

The timeout of collectives is torch's (`run: {timeout: ...}`).
"""

from __future__ import annotations

#: Until a rank that the others wait for is named, by default.
NAMED = 8.0
#: After so many times the seconds until it is named, a rank that does not answer ends the others.
ENDED = 8
#: After so many times the seconds of rank 1, the other ranks report a late rank 0, too.
LATE_RANK_0 = 4
#: How long the name of the machine where ranks meet may be unknown.
UNKNOWN_HOST = 30.0
#: How long some ranks may be stopped (SIGSTOP) while others run, before all are ended.
STOPPED = 6.0
#: How long ranks have to fail because another one did; then, to end after SIGTERM; then, after SIGKILL.
GRACE, KILLED = 1.0, 5.0
#: How long a signal that stops a run waits for its ranks to save.
SAVING = 120.0
#: How long a rank that failed has to print its error before the others do.
FIRST_WORD = 3.0
#: How long all ranks have to report an error that all have; how long a disconnected rank looks for the cause.
COMMON_ERROR, CAUSE = 3.0, 10.0
#: How long ranks that fail in a command wait for each other.
FAILING = 10.0
#: How long a check of links waits for some megabytes.
LINK = 10.0
#: How long ranks wait for each other when they meet again after an error.
MEET_AGAIN = 30.0
