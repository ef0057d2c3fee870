"""Name the rank that keeps the others waiting, because it hangs or is stopped, within seconds.

A thread of each rank checks whether the rank still waits where it waited before. After too long, it asks through the
store over which the processes met; every rank answers what it is doing; and the first that asked reports who has not
answered, or is not waiting:

    rank 0   step 5 ── all_reduce ... asks ....... "rank 2 keeps the others waiting: at model.py:22, in forward"
    rank 1   step 5 ── all_reduce ......... answers: waits
    rank 2   step 5 ── model.py:22 ........ answers: model.py:22, in forward      (or nothing, if it is stopped)

A rank that is slow, or has not come yet, is named, and waited for, until torch.distributed's time limit. One that is
stopped on the same machine is killed, and one that has ended there ends the others. One that came and
does not answer is stopped elsewhere, or its machine is gone: the others end after a while, as with NCCL's watchdog, but
they report which rank they waited for. Without trouble the only traffic is a look into the store every few seconds.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from shardc.ir.mesh import Mesh
from shardc.runtime.launch import GAVE_UP, NAMED
from shardc.runtime.mesh import activity
from shardc.runtime.mesh.activity import Activity
from shardc.runtime.mesh.processes import KILLED, Processes

#: After this many times the seconds until it is named, the others end if a rank does not answer.
ENDED = 8
_OVER = "shardc/watch/over"  # key of the store: why all ranks end
_SHOWN = 8  # ranks that a message lists
_ANY = Mesh(())  # names ranks without coordinates
#: Reasons why a rank does not answer.
STOPPED = "does not answer for SECONDS s: it is stopped (SIGSTOP)"
SILENT = "does not answer for SECONDS s: it is stopped, or its machine is gone"
ABSENT = "has not arrived for SECONDS s: it starts slowly, is stopped, or its machine is gone"
_WAITED = "while the others waited for it"  # where a killed rank was, if that is not known
_PLURAL = {"does": "do", "has": "have", "was": "were"}


class _Question(NamedTuple):
    """The question of the rank that asked first.

    number: of the question; asked: when; done: the count of the rank's activity then; since: when it began to wait.
    """

    number: int
    asked: float
    done: int
    since: float


def print_line(text: str) -> None:
    """Print a line on this process's standard error."""
    print(text, file=sys.stderr, flush=True)


class Watch:
    """The thread of one rank that watches the ranks.

    layout: the mesh; before all have met, it has no axes, and world is the number of ranks. activity: what the rank is
    doing. store: torch.distributed's, cloned for a separate connection. processes: of the ranks; stopped ones are
    killed. named: seconds until the rank that the others wait for is named. met: all ranks are there; before, a slow
    rank, such as the one that compiles for all, is named later. say: receives messages. .record: called when some rank
    asks, to save what this rank must keep of it.

    Half of `named` passes until a rank asks, a fifth until all have seen it, a fifth until they have answered.
    """

    def __init__(
        self,
        layout: Mesh,
        rank: int,
        activity: Activity,
        store: Any,
        processes: Processes | None = None,
        *,
        world: int = 0,
        named: float = NAMED,
        met: bool = True,
        say: Callable[[str], None] = print_line,
    ) -> None:
        self._layout, self._rank, self._activity, self._store = layout, rank, activity, store.clone()
        self._world, self._met, self.say = world or layout.world, met, say
        self._processes = processes or Processes(None, rank, self._world)
        self._set_timeouts(named)
        self._stop = threading.Event()
        self.record: Callable[[], object] | None = None
        self._round = 0  # number of questions so far
        self._first_ended: tuple[str, float] | None = None  # which ranks ended before all met, and when
        self._question: _Question | None = None
        self._thread = threading.Thread(target=self._run, name="shardc-watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def _set_timeouts(self, named: float) -> None:
        self._named, self._ended = named, ENDED * named
        # one store serves all ranks: limit it to about a thousand requests a second
        self._look = max(named / 5, self._world / 1000)

    def meet(self, layout: Mesh, named: float) -> None:
        """Note that all ranks are there, on a known mesh. named: as in the constructor; 0: stop."""
        if not named:
            self.stop()
            return
        self._layout, self._world, self._met = layout, layout.world, True
        self._set_timeouts(named)

    def stop(self) -> None:
        """Stop watching. The connection to the store is then unused when the process ends."""
        self._stop.set()
        self._thread.join(timeout=1)
        atexit.unregister(self.stop)

    def _run(self) -> None:
        # the store is gone with its process: torch wakes the ranks that wait for that process
        with contextlib.suppress(Exception):
            self._watch()

    def _watch(self) -> None:
        count, since, looked, patience = -1, time.monotonic(), 0.0, self._named / 2
        while not self._stop.wait(self._named / 40):
            now = time.monotonic()
            if self._activity.count != count or not activity.waits():
                count, since, patience = self._activity.count, now, self._named / 2
            elif now - since >= patience:
                patience *= 4  # name a slow rank less and less often
                self._ask(now, since)
                looked = 0.0
            # until all have met, check often: the first rank to end is known only for a moment
            due = now - looked >= (self._look if self._met else max(self._named / 40, self._world / 1000))
            if not self._met and (due or self._processes.known()):
                self._end_with_one_that_ended(now)
            if due:
                looked = now
                self._answer()
                self._judge(now)

    def _end_with_one_that_ended(self, now: float) -> None:
        """End this rank if another has ended: ranks that wait in native code ignore the launcher's signal."""
        if self._first_ended is None and (ended := self._processes.ended(_WAITED)):
            self._first_ended = verdict(self._layout, {}, 0.0, ended), now
        elif self._first_ended is not None and now - self._first_ended[1] > self._named / 4 and activity.waits():
            self._end_all(self._first_ended[0])

    def _ask(self, now: float, since: float) -> None:
        if self._store.add(f"shardc/watch{self._round}/asked", 1) == 1:
            self._question = _Question(self._round, now, self._activity.count, since)

    def _answer(self) -> None:
        """Answer the questions of other ranks, and end this rank if one of them found that a rank is gone."""
        while self._store.check([f"shardc/watch{self._round}/asked"]):
            answer = {"waits": activity.waits(), "doing": str(self._activity), "place": activity.place()}
            self._store.set(f"shardc/watch{self._round}/rank{self._rank}", json.dumps(answer))
            if self.record is not None:
                self.record()
            self._round += 1
        if self._store.check([_OVER]):
            self._end(self._store.get(_OVER).decode())

    def _judge(self, now: float) -> None:
        question = self._question
        if question is None or now - question.asked < self._look + self._named / 5:
            return
        self._question = None
        answers, seconds = self._answers(question.number), now - question.since
        if len(answers) == self._world:
            # else the wait is over: all were slow, on a busy machine; or one compiles for all
            if self._activity.count == question.done and (self._met or question.asked - question.since > self._named):
                self.say(verdict(self._layout, answers, seconds))
            return
        silent = self._silent(answers)
        why, ranks = _first(silent)
        text = verdict(self._layout, answers, seconds, silent)
        if why == STOPPED:
            for rank in ranks:
                self._processes.end(rank)
        if why == STOPPED and self._met:
            self.say(f"{text}; ended now")  # the others notice by their connections
        elif why == ABSENT:
            self.say(text)
        elif why == SILENT and seconds < self._ended:
            self.say(f"{text}; unless it answers, the run ends in {self._ended - seconds:.0f} s")
        else:
            self._end_all(text)

    def _silent(self, answers: Collection[int]) -> dict[int, str]:
        """Return {rank: why it does not answer}, as far as that is known."""
        silent = [r for r in range(self._world) if r not in answers]
        known = dict.fromkeys(self._processes.stopped(), STOPPED) | self._processes.ended(_WAITED)
        return {r: known.get(r) or (SILENT if self._processes.has_registered(r) else ABSENT) for r in silent}

    def _answers(self, number: int) -> dict[int, dict[str, Any]]:
        keys = {r: f"shardc/watch{number}/rank{r}" for r in range(self._world)}
        return {r: json.loads(self._store.get(key)) for r, key in keys.items() if self._store.check([key])}

    def _end_all(self, text: str) -> None:
        """End all waiting ranks."""
        self._store.set(_OVER, text)
        self._end(text)

    def _end(self, text: str) -> None:
        """End this process: its main thread waits in native code for a rank that is gone."""
        if activity.waits():
            print_line(f"{text}; this rank has ended")
            if self._rank == 0:
                time.sleep(2 * self._look)  # this process may host the store, which the others have yet to read
            os._exit(GAVE_UP)


#: The fix where busy ranks are not in the call that the others are in.
_EVERY_RANK = "if it never gets there: every rank must call each step, backward, evaluation and save"


def verdict(layout: Mesh, answers: dict[int, dict[str, Any]], seconds: float, silent: Mapping[int, str] = {}) -> str:
    """Describe which ranks the others wait for, and where. silent: why some do not answer."""
    waiting = {r: a["doing"] for r, a in answers.items() if a["waits"]}
    busy = [r for r, a in answers.items() if not a["waits"]]
    where = ""
    if waiting:  # most of them in the same place
        at = max(waiting.values(), key=list(waiting.values()).count)
        where = f"{_ANY.named(*waiting)} {'waits' if len(waiting) == 1 else 'wait'} for it {at}".rstrip()
    if silent:
        why, ranks = _first(silent)
        text = why.replace("SECONDS", f"{seconds:.0f}")
        verb, _, rest = text.partition(" ")
        verb = verb if len(ranks) == 1 else _PLURAL[verb]
        return f"{layout.named(*ranks)} {verb} {rest}" + (f"; {where}" if where else "")
    if busy:
        places = [", ".join(filter(None, (answers[r]["place"], answers[r]["doing"]))) for r in busy[:_SHOWN]]
        at, many = "; ".join(dict.fromkeys(places)), len(busy) > 1
        keep, are, have = ("keep", "they are", "have") if many else ("keeps", "it is", "has")
        text = f"{keep} the others waiting for {seconds:.0f} s: {are} at {at}"
        if not waiting:
            text = f"{have} been busy for {seconds:.0f} s, at {at}"
        elsewhere = not any(answers[r]["doing"].startswith("in ") for r in busy)
        fix = f"; fix: {_EVERY_RANK}" if where and elsewhere else ""
        return f"{layout.named(*busy)} {text}" + (f"; {where}{fix}" if where else "")
    places = [f"rank {r} {doing}" for r, doing in list(waiting.items())[:_SHOWN]]
    return f"all ranks wait for each other for {seconds:.0f} s: {'; '.join(places)}"


def _first(silent: Mapping[int, str]) -> tuple[str, list[int]]:
    """Return (why, ranks) of the most certain reason; others may be its consequence."""
    order = STOPPED, KILLED, SILENT, ABSENT
    why = min(silent.values(), key=lambda why: next(i for i, kind in enumerate(order) if why.startswith(kind)))
    return why, [r for r, w in silent.items() if w == why]
