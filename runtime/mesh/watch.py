"""Watch the ranks of a world: name the one that fails, hangs or is stopped, within seconds.

A rank that fails in the middle of a step never comes to the next collective, in which the others wait for it, half an
hour by default. So it reports the error in the store over which the processes met, and closes its connections: a rank
that waits for it fails in turn, reads the store, and raises an error that names the rank, what it was doing and why.

    rank 0   step 5 ── all_reduce ..................... cut off ── reads ── "rank 1 failed in step 5: ValueError"
    rank 1   step 5 ── ValueError ── says so ── is it everybody's? no ── cuts its connections

Where all ranks report their own errors within moments, such as a batch of a wrong shape, no rank waits for another: the
connections stay, and the next step can begin.

A rank that hangs reports nothing. So a thread of each rank checks whether the rank still waits where it waited before.
After too long, it asks through the store; every rank answers what it is doing; and the first that asked reports who has
not answered, or is not waiting:

    rank 0   step 5 ── all_reduce ... asks ....... "rank 2 keeps the others waiting: at model.py:22, in forward"
    rank 1   step 5 ── all_reduce ......... answers: waits
    rank 2   step 5 ── model.py:22 ........ answers: model.py:22, in forward      (or nothing, if it is stopped)

A rank that is slow, or has not come yet, is named, and waited for, until torch.distributed's time limit. One that is
stopped on the same machine is killed, and one that has ended there ends the others. One that came and does not answer
is stopped elsewhere, or its machine is gone: the others end after a while, as with NCCL's watchdog, but they report
which rank they waited for. Without trouble the only traffic is a look into the store every few seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch.distributed as dist

from shardc.errors import ShardcError
from shardc.ir.mesh import Mesh
from shardc.runtime.launch import GAVE_UP, LEFT_OVER
from shardc.runtime.mesh import activity
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.local_processes import KILLED, Processes
from shardc.runtime.time_limits import CAUSE, COMMON_ERROR, ENDED

_OVER = "shardc/watch/over"  # key of the store: why all ranks end
_FAILED = "shardc/watch/failed"  # the error of a rank that failed before all met
_SHOWN = 8  # ranks that a message lists
_ANY = Mesh(())  # names ranks without coordinates
#: Reasons why a rank does not answer.
STOPPED = "does not answer for SECONDS s: it is stopped (SIGSTOP)"
SILENT = "does not answer for SECONDS s: it is stopped, or its machine is gone"
ABSENT = "has not arrived for SECONDS s: it starts slowly, is stopped, or its machine is gone"
_WAITED = "while the others waited for it"  # where a killed rank was, if that is not known
_PLURAL = {"does": "do", "has": "have", "was": "were"}
_GONE = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "remote process exited",
    "connection refused",
    "nccl error",
)
_LATE = ("timed out waiting", "watchdog caught collective operation timeout")


class RankFailedError(ShardcError):
    """Another rank failed, and this one stopped where it waited for it."""


def cut_off(error: BaseException) -> bool:
    """Return whether it is the error of a rank whose peer has gone, or does not come."""
    return isinstance(error, RuntimeError) and _contains_any(error, _GONE + _LATE)


def _contains_any(error: BaseException, signs: tuple[str, ...]) -> bool:
    text = str(error).lower()
    return any(sign in text for sign in signs)


def within(seconds: float, done: Callable[[], bool]) -> bool:
    """Wait until `done`, at most so many seconds. Return whether it is done."""
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def print_line(text: str) -> None:
    """Print a line on this process's standard error."""
    print(text, file=sys.stderr, flush=True)


class Watch:
    """This rank among the others of its world: it announces the rank, reports its failures, and watches the others.

    store: torch.distributed's; None in a process without a world. named: seconds until the rank that the others wait
    for is named; 0: never. say: receives messages.
    .activity: what this rank is doing. .processes: of the ranks; stopped ones are killed. .layout: the mesh; before all
    have met, it has no axes. .failures: number of failures so far. .record: called when some rank asks, to save what
    this rank must keep of it.

    Half of `named` passes until a rank asks, a fifth until all have seen it, a fifth until they have answered. Before
    all have met, a slow rank, such as the one that compiles for all, is named later.
    """

    def __init__(
        self, store: Any, rank: int, world: int, named: float, *, say: Callable[[str], None] = print_line
    ) -> None:
        self.store, self.rank, self.world, self.say = store, rank, world, say
        self.layout, self.met, self.failures = _ANY, False, 0
        # a thread needs a separate connection: the main thread may hold the store while it waits
        self._asked: Any = store.clone() if _connects_again(store) else None
        self.activity, self.processes = Activity(), Processes(self._asked, rank, world)
        self.activity.note = self.processes.note
        self.record: Callable[[], object] | None = None
        self._round = 0  # number of questions so far
        self._first_ended: tuple[str, float] | None = None  # which ranks ended before all met, and when
        #: This rank's question: its number, when it was asked, its activity's count then, and since when it waited.
        self._question: tuple[int, float, int, float] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardc-watch", daemon=True)
        self._set_timeouts(named)
        if self._asked is not None and named and world > 1:
            self._thread.start()
            atexit.register(self.stop)

    def _set_timeouts(self, named: float) -> None:
        self.named = named
        # one store serves all ranks: limit it to about a thousand requests a second
        self._look = max(named / 5, self.world / 1000)

    def meet(self, layout: Mesh, named: float) -> None:
        """Note that all ranks are there, on a known mesh. named: as in the constructor; 0: stop."""
        self.layout, self.met = layout, True
        self._set_timeouts(named)
        if not named:
            self.stop()

    def stop(self) -> None:
        """Stop watching. The connection to the store is then unused when the process ends."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=1)
        atexit.unregister(self.stop)

    # --- failures

    def fail(self, text: str) -> None:
        """Give this rank's error to ranks that wait to meet it; on other machines nothing else is known of it."""
        place = self.processes.on([self.rank])
        self.store.set(_FAILED, f"{text.rstrip()}\n{place}rank {self.rank} ended with this error")

    def report(self, error: Exception, doing: str) -> bool:
        """Report that this rank failed. Returns whether all ranks failed, each with its own error."""
        first = next(iter(str(error).splitlines()), "")
        everybody, every = [self._key(r) for r in range(self.world)], False
        with contextlib.suppress(RuntimeError):  # the store went with its process: this rank's own error counts
            self.store.set(self._key(self.rank), f"failed in {doing}: {type(error).__name__}: {first}")
            every = within(COMMON_ERROR, lambda: self.store.check(everybody))
        self.failures += 1
        return every

    def cause(self, error: Exception, doing: str) -> RankFailedError:
        """Build the error of a rank whose connection another rank closed, or that waited for too long."""
        causes: dict[int, str] = {}

        def look() -> bool:
            # before, as reports precede the end
            ended = self.processes.ended(f"in {doing}")
            for r in range(self.world):
                if r not in causes and self.store.check([self._key(r)]):
                    causes[r] = self.store.get(self._key(r)).decode(errors="replace")
            if not causes:  # a killed rank reports nothing: the ranks of its machine report for it
                for r, how in ended.items():
                    causes[r] = how
                    self.store.set(self._key(r), how)  # ranks that end because of it find this report
            return bool(causes)

        with contextlib.suppress(RuntimeError):  # the store went with the process that held it
            within(CAUSE, look)
        self.failures += 1
        if causes:
            rank = min(causes)
            fault = f"{self.processes.on([rank])}{self.layout.named(rank)} {causes[rank]}"
        elif _contains_any(error, _LATE):
            fault = f"the time limit passed before another rank reached {self.activity.collective}, {self.activity}"
        else:
            fault = f"the connection to another rank broke in {doing}: its process was killed or hangs"
        fix = "see the error of that rank; continue from the last checkpoint"
        if "ended without an error" in fault:  # such as `if rank == 0: module.full_state_dict()`
            fix = "see the error of that rank, and continue from the last checkpoint; if it has none, call this on"
            fix += " every rank, not only on some: all ranks run steps, saving and full_state_dict together"
        return RankFailedError(fault, where=doing, fix=fix)

    def _key(self, rank: int) -> str:
        return f"shardc/failure{self.failures}/rank{rank}"

    # --- the thread

    def _run(self) -> None:
        # the store is gone with its process: torch wakes the ranks that wait for that process
        with contextlib.suppress(Exception):
            self._watch()

    def _watch(self) -> None:
        count, since, looked, patience = -1, time.monotonic(), 0.0, self.named / 2
        while not self._stop.wait(self.named / 40):
            now = time.monotonic()
            if self.activity.count != count or not activity.waits():
                count, since, patience = self.activity.count, now, self.named / 2
            elif now - since >= patience:
                patience *= 4  # name a slow rank less and less often
                self._ask(now, since)
                looked = 0.0
            # until all have met, check often: the first rank to end is known only for a moment
            due = now - looked >= (self._look if self.met else max(self.named / 40, self.world / 1000))
            if not self.met and (due or self.processes.known()):
                self._end_with_one_that_ended(now)
            if due:
                looked = now
                self._answer()
                self._judge(now)

    def _end_with_one_that_ended(self, now: float) -> None:
        """End this rank if another has ended: ranks that wait in native code ignore the launcher's signal."""
        if self._first_ended is None and self._asked.check([_FAILED]):
            self._first_ended = self._asked.get(_FAILED).decode(), now
        elif self._first_ended is None and (ended := self.processes.ended(_WAITED)):
            self._first_ended = verdict(self.layout, {}, 0.0, ended), now
        elif self._first_ended is not None and now - self._first_ended[1] > self.named / 4 and activity.waits():
            self._end_all(self._first_ended[0])

    def _ask(self, now: float, since: float) -> None:
        if self._asked.add(f"shardc/watch{self._round}/asked", 1) == 1:
            self._question = self._round, now, self.activity.count, since

    def _answer(self) -> None:
        """Answer the questions of other ranks, and end this rank if one of them found that a rank is gone."""
        while self._asked.check([f"shardc/watch{self._round}/asked"]):
            answer = {"waits": activity.waits(), "doing": str(self.activity), "place": activity.place()}
            self._asked.set(f"shardc/watch{self._round}/rank{self.rank}", json.dumps(answer))
            if self.record is not None:
                self.record()
            self._round += 1
        if self._asked.check([_OVER]):
            self._end(self._asked.get(_OVER).decode())

    def _judge(self, now: float) -> None:
        if self._question is None or now - self._question[1] < self._look + self.named / 5:
            return
        (number, asked, count, since), self._question = self._question, None
        keys = {r: f"shardc/watch{number}/rank{r}" for r in range(self.world)}
        answers = {r: json.loads(self._asked.get(key)) for r, key in keys.items() if self._asked.check([key])}
        seconds = now - since
        if len(answers) == self.world:
            # else the wait is over: all were slow, on a busy machine; or one compiles for all
            if self.activity.count == count and (self.met or asked - since > self.named):
                busy = [r for r, answer in answers.items() if not answer["waits"]]
                self.say(self.processes.on(busy) + verdict(self.layout, answers, seconds))
            return
        silent = self._silent(answers)
        why, ranks = _first(silent)
        text = self.processes.on(ranks) + verdict(self.layout, answers, seconds, silent)
        if why == STOPPED:
            for process in map(self.processes.stopped().get, ranks):
                if process is not None:
                    with contextlib.suppress(OSError):
                        os.kill(process, signal.SIGKILL)  # a stopped process ignores other signals
        if why == STOPPED and self.met:
            self.say(f"{text}; ended now")  # the others notice by their connections
        elif why == ABSENT:
            self.say(f"{text}; if no launcher started this process, {LEFT_OVER}")
        elif why == SILENT and seconds < ENDED * self.named:
            self.say(f"{text}; unless it answers, the run ends in {ENDED * self.named - seconds:.0f} s")
        else:
            self._end_all(text)

    def _silent(self, answers: Collection[int]) -> dict[int, str]:
        """Return {rank: why it does not answer}, as far as that is known."""
        silent = [r for r in range(self.world) if r not in answers]
        known = dict.fromkeys(self.processes.stopped(), STOPPED) | self.processes.ended(_WAITED)
        return {r: known.get(r) or (SILENT if self.processes.has_registered(r) else ABSENT) for r in silent}

    def _end_all(self, text: str) -> None:
        """End all waiting ranks."""
        self._asked.set(_OVER, text)
        self._end(text)

    def _end(self, text: str) -> None:
        """End this process: its main thread waits in native code for a rank that is gone."""
        if activity.waits():
            print_line(f"{text}; this rank has ended")
            time.sleep(1)  # torchrun names the process that it sees end first: not one that ends because of another
            if self.rank == 0:
                time.sleep(2 * self._look)  # this process may host the store, which the others have yet to read
            os._exit(GAVE_UP)


def _connects_again(store: Any) -> bool:
    """Return whether a thread can use the store at the same time, over a separate connection."""
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)  # type: ignore[attr-defined]


#: The fix where busy ranks are not in the call that the others are in.
_EVERY_RANK = "if it never gets there: every rank must call each step, backward, evaluation and save"


def verdict(layout: Mesh, answers: dict[int, dict[str, Any]], seconds: float, silent: Mapping[int, str] = {}) -> str:
    """Describe which ranks the others wait for, and where. silent: why some do not answer."""
    waiting = {r: a["doing"] for r, a in answers.items() if a["waits"]}
    busy = [r for r, a in answers.items() if not a["waits"]]
    where = ""
    if waiting:  # most of them in the same place
        at = max(waiting.values(), key=list(waiting.values()).count)
        where = f"; {_ANY.named(*waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it {at}".rstrip()
    if silent:
        why, ranks = _first(silent)
        verb, _, rest = why.replace("SECONDS", f"{seconds:.0f}").partition(" ")
        return f"{layout.named(*ranks)} {verb if len(ranks) == 1 else _PLURAL[verb]} {rest}{where}"
    if busy:
        places = [", ".join(filter(None, (answers[r]["place"], answers[r]["doing"]))) for r in busy[:_SHOWN]]
        at, many = "; ".join(dict.fromkeys(places)), len(busy) > 1
        keep, are, have = ("keep", "they are", "have") if many else ("keeps", "it is", "has")
        text = f"{keep} the others waiting for {seconds:.0f} s: {are} at {at}"
        if not waiting:
            text = f"{have} been busy for {seconds:.0f} s, at {at}"
        elsewhere = not any(answers[r]["doing"].startswith("in ") for r in busy)
        return f"{layout.named(*busy)} {text}{where}" + (f"; fix: {_EVERY_RANK}" if where and elsewhere else "")
    places = [f"rank {r} {doing}" for r, doing in list(waiting.items())[:_SHOWN]]
    return f"all ranks wait for each other for {seconds:.0f} s: {'; '.join(places)}"


def _first(silent: Mapping[int, str]) -> tuple[str, list[int]]:
    """Return (why, ranks) of the most certain reason; others may be its consequence."""
    order = STOPPED, KILLED, SILENT, ABSENT
    why = min(silent.values(), key=lambda why: next(i for i, kind in enumerate(order) if why.startswith(kind)))
    return why, [r for r, w in silent.items() if w == why]
