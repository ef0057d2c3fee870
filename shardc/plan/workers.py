"""Other processes that answer questions before they are asked: forks of this one, so they have the model in memory.

    this process    A                 C                      each takes what is likely to be needed next
    a worker             B                 D

A worker keeps what it has captured for its next question. It answers as this process would, with the same bytes. What
it cannot answer (it was killed, or has run into a defect) is answered here, so an error says what it always says.

A fork has none of this process's threads. torch is told to use one alone there, as in a DataLoader's workers, so it
asks for none of those; where it has an accelerator, its autograd does, and there are no workers.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

#: So many beside this process: each of a large model has half a gigabyte of its own, and guesses that lie further ahead
#: are less often right.
MOST = 3


def cores() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass
class Workers:
    """answer: the answer to a question of plain values, in a worker. processes: how many there may be, this one
    counted. Questions have names.
    """

    answer: Callable[[Any], bytes]
    processes: int
    _answers: dict[str, bytes] = field(default_factory=dict)
    _each: list[_Worker] = field(default_factory=list)

    def begin(self, likely: Iterable[tuple[str, Any]]) -> None:
        """Give (name, question) to workers that have nothing to do, the most likely ones first."""
        for worker in list(self._each):
            if worker.name and worker.connection.poll():
                self._finish(worker)
        begun = {*self._answers, *(worker.name for worker in self._each)}
        questions = (x for x in likely if x[0] not in begun)
        while self._free() and (found := next(questions, None)) is not None:
            self._idle().give(*found)
            begun.add(found[0])

    def take(self, name: str) -> bytes | None:
        """The answer, as soon as it is there; None if no worker was given the question, or it has no answer."""
        for worker in list(self._each):
            if worker.name == name:
                self._finish(worker)
        return self._answers.pop(name, None)

    def close(self) -> None:
        """End all workers."""
        for worker in self._each:
            worker.end()
        self._each.clear()

    def _free(self) -> bool:
        """Whether one has nothing to do, or there may be one more."""
        if any(not worker.name for worker in self._each):
            return True
        return len(self._each) < min(self.processes - 1, MOST) and possible()

    def _idle(self) -> _Worker:
        for worker in self._each:
            if not worker.name:
                return worker
        self._each.append(_Worker.started(self.answer))
        return self._each[-1]

    def _finish(self, worker: _Worker) -> None:
        """Wait for a worker's answer. One that has ended gets no more questions."""
        try:
            answer = worker.connection.recv_bytes()
        except (EOFError, OSError):
            worker.end()
            self._each.remove(worker)
            self.processes -= 1
            return
        if answer:
            self._answers[worker.name] = answer
        worker.name = ""


def possible() -> bool:
    """Whether this process can have forks that run torch."""
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform == "darwin":
        return False
    torch = sys.modules.get("torch")
    accelerated = torch is not None and torch.accelerator.is_available()
    return not accelerated and not multiprocessing.current_process().daemon


@dataclass
class _Worker:
    """name: of the question that it is answering; "": none."""

    process: ForkProcess
    connection: Connection
    name: str = ""

    @staticmethod
    def started(answer: Callable[[Any], bytes]) -> _Worker:
        here, there = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_work, args=(answer, here, there), daemon=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of threads in this process
            process.start()
        there.close()
        return _Worker(process, here)

    def give(self, name: str, question: Any) -> None:
        with contextlib.suppress(OSError):  # it has ended: whoever waits for the answer finds out
            self.connection.send(question)
        self.name = name

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


def _work(answer: Callable[[Any], bytes], here: Connection, there: Connection) -> None:
    """A worker's life, until the process that forked it has ended, or ends it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the other process sees to that
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    here.close()
    gc.freeze()  # so that looking for garbage copies no page of what both have
    nothing = os.open(os.devnull, os.O_WRONLY)
    for said in (1, 2):
        os.dup2(nothing, said)
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            question = there.recv()
            try:
                found = answer(question)
            except Exception:  # whatever it is: the same question is asked there then, and says so
                found = b""
            there.send_bytes(found)
