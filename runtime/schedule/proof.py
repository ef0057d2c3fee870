"""Prove a schedule before anything runs: complete, in legal order, matched sends, no deadlock.

It runs in one process, without torch. The checks, in this order, as the first kinds of mistakes hide later ones:

    what is there    every action's stage and microbatch exist, the stage is this rank's, the action is there once
    what is missing  every stage runs F once for every microbatch, and B once or I and W once; REDUCE and STEP: all or
                     none
    order on a rank  F before B or I, I before W; what a stage takes from another one of its rank comes first;
                     a receive before its use, a send after what it sends; REDUCE after the stage's last backward, STEP
                     last
    pairs of ranks   what one rank sends to another one it receives in the same order
    deadlock         all is run with no buffers at all: a send waits for its receive, and a receive for its send

The last check covers any buffering. An action waits for the one before it on its rank and for the other end of a send
or receive. If all actions run to the end without buffers, these waits have no circle, and buffers only remove waits. As
a send and its receive happen at one moment, both ranks of a pair see all that goes between them, in both directions, in
one order: NCCL requires this.

A schedule without sends and receives is proven as if each action waited for its own inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from shardc.errors import Errors
from shardc.runtime.schedule.actions import SENDS, Action, Edges, Link, Schedule, links, live

#: The number of mistakes of one kind that are shown.
SHOWN = 20


@dataclass(frozen=True)
class Proof:
    """The result. live: by rank, the peak number of (stage, microbatch) whose activations it keeps."""

    live: tuple[int, ...]


def prove(schedule: Schedule, edges: Edges | None = None, *, training: bool = True) -> Proof:
    """Check a schedule. Raises ShardcError with every mistake, each naming the action and its place.

    edges: which stages use values of which others; None: each stage uses the one before. training: False: nothing runs
    backward.
    """
    prover = _Prover(schedule, links(edges, schedule.stages), training)
    for check in (prover.check_actions, prover.check_missing, prover.order, prover.pairs, prover.deadlock):
        check()
        prover.raise_any()
    return Proof(tuple(live(row) for row in schedule.actions))


class _Prover:
    """The checks of one schedule. at: the rank and position of each action.

    explicit: sends and receives are among the actions.
    """

    def __init__(self, schedule: Schedule, edges: tuple[Link, ...], training: bool) -> None:
        self.schedule, self.training = schedule, training
        self.links = edges
        self.at: dict[Action, tuple[int, int]] = {}
        self.backward: dict[
            tuple[int, int], Action
        ] = {}  # {(stage, microbatch): the action that makes the gradients of its inputs}
        self.explicit = any(a.peer >= 0 for row in schedule.actions for a in row)
        self.found: dict[str, list[tuple[str, str, str]]] = {}

    # --- errors

    def add(self, kind: str, where: str, what: str, fix: str) -> None:
        self.found.setdefault(kind, []).append((where, what, fix))

    def raise_any(self) -> None:
        errors = Errors()
        for faults in self.found.values():
            for where, fault, fix in faults[:SHOWN]:
                errors.add(fault, where=where, fix=fix)
            if len(faults) > SHOWN:
                errors.add(f"and {len(faults) - SHOWN} more of this kind", where=self.schedule.name)
        errors.raise_any()

    def place(self, a: Action) -> str:
        return self.schedule.place(*self.at[a.parts[0]])

    # --- checks

    def check_actions(self) -> None:
        s = self.schedule
        between = {(e.source, e.target): e for e in self.links if s.placement[e.source] != s.placement[e.target]}
        for rank, i, a in s.parts():
            if a.kind == "STEP":
                if i + 1 < len(s.actions[rank]):
                    self.add(
                        "STEP", s.place(rank, i), f"STEP of rank {rank} is not its last action", "move it to the end"
                    )
                continue
            if a in self.at:
                self.add("twice", s.place(rank, i), f"{a} occurs twice: also at {self.place(a)}", "remove one of them")
                continue
            if not (
                0 <= a.stage < s.stages
                and -1 <= a.peer < s.stages
                and (a.kind == "REDUCE" or 0 <= a.microbatch < s.microbatches)
            ):
                self.add(
                    "range",
                    s.place(rank, i),
                    f"{a} with {s.stages} stages and {s.microbatches} microbatches",
                    "take it out",
                )
                continue
            self.at[a] = rank, i
            if (home := s.placement[a.stage]) != rank:
                self.add(
                    "rank",
                    s.place(rank, i),
                    f"{a} is on rank {rank}, and stage {a.stage} is rank {home}'s",
                    f"move it to rank {home}",
                )
            elif a.peer >= 0:
                self._link(a, between)
            elif a.kind in ("B", "I") and self.training:
                if (other := self.backward.setdefault((a.stage, a.microbatch), a)) != a:
                    self.add("twice", s.place(rank, i), f"{a} repeats {other}", f"remove {a} or {other}")
            elif a.kind in ("B", "I", "W", "REDUCE") and not self.training:
                self.add("evaluation", s.place(rank, i), f"{a} in a schedule that only runs forward", "take it out")

    def _link(self, a: Action, between: dict[tuple[int, int], Link]) -> None:
        forward = a.kind in ("SEND_F", "RECV_F")
        source, target = (a.stage, a.peer) if a.kind in SENDS else (a.peer, a.stage)
        link = between.get((source, target) if forward else (target, source))
        if link is None or not (forward or (link.gradient and self.training)):
            fault = f"{a}: stage {source} sends no {'values' if forward else 'gradients'} to stage {target}"
            self.add("link", self.place(a), fault, "take it out")

    def check_missing(self) -> None:
        s = self.schedule
        for stage in range(s.stages):
            for m in range(s.microbatches):
                for a in self._needed(stage, m):
                    if a not in self.at:
                        where = f"{s.name}: rank {s.placement[stage]}" if s.placement[stage] >= 0 else s.name
                        self.add("missing", where, f"{a} is missing", f"add it: stage {stage}, microbatch {m}")
        for rank, i, a in s:
            if a.kind == "W" and a._replace(kind="B") in self.at:
                self.add(
                    "twice",
                    s.place(rank, i),
                    f"{a} repeats {a._replace(kind='B')}",
                    "remove it, or write I and W for B",
                )
        reduced = {a.stage for a in self.at if a.kind == "REDUCE"}
        for stage in range(s.stages):
            if reduced and stage not in reduced:
                self.add(
                    "missing",
                    f"{s.name}: rank {s.placement[stage]}",
                    f"{stage}REDUCE is missing",
                    "add it, or remove all of them",
                )
        stepping = [bool(row) and row[-1].kind == "STEP" for row in s.actions]
        for rank in range(s.ranks):
            if any(stepping) and not stepping[rank]:
                self.add("missing", f"{s.name}: rank {rank}", "STEP is missing", "add it, or remove all of them")

    def _needed(self, stage: int, m: int) -> Iterator[Action]:
        yield Action("F", stage, m)
        if self.training:
            b = Action("B", stage, m)
            if (backward := self.backward.get((stage, m))) is None:
                yield Action("I", stage, m) if b._replace(kind="W") in self.at else b
            elif backward.kind == "I":
                yield b._replace(kind="W")

    def order(self) -> None:
        """Check the order on each rank. Dependencies on other ranks without sends are left to `deadlock`."""
        last: dict[int, int] = {}
        for m in range(self.schedule.microbatches):
            for stage in range(self.schedule.stages):
                if b := self.backward.get((stage, m)):
                    self._before(Action("F", stage, m), b)
                    w = b
                    if b.kind == "I":
                        self._before(b, w := Action("W", stage, m))
                    last[stage] = max(last.get(stage, -1), self.at[b][1], self.at[w][1])
            for link in self.links:
                self._carried(link, m)
        for stage, i in last.items():
            reduce = Action("REDUCE", stage)
            if reduce in self.at and self.at[reduce][1] < i:
                rank = self.schedule.placement[stage]
                self.add(
                    "order",
                    self.place(reduce),
                    f"{reduce} comes before {self.schedule.actions[rank][i]}",
                    "reduce after the last backward",
                )

    def _carried(self, link: Link, m: int) -> None:
        """Check what goes over a link for one microbatch, forward and back."""
        s, t = link.source, link.target
        self._over(Action("F", s, m), Action("SEND_F", s, m, t), Action("RECV_F", t, m, s), Action("F", t, m))
        if link.gradient and self.training:
            self._over(self.backward[t, m], Action("SEND_B", t, m, s), Action("RECV_B", s, m, t), self.backward[s, m])

    def _over(self, producer: Action, send: Action, receive: Action, used: Action) -> None:
        if self.at[producer][0] == self.at[used][0]:
            self._before(producer, used)
            return
        for a in (send, receive):
            if self.explicit and a not in self.at:
                self.add(
                    "missing",
                    f"{self.schedule.name}: rank {self.schedule.placement[a.stage]}",
                    f"{a} is missing",
                    "add it",
                )
        if send in self.at:
            self._before(producer, send)
        if receive in self.at:
            self._before(receive, used)

    def _before(self, first: Action, then: Action) -> None:
        if self.at[first][1] == self.at[then][1]:
            self.add("order", self.place(then), f"{then} runs beside {first}", f"run {then} behind {first}")
        elif self.at[first][1] > self.at[then][1]:
            self.add("order", self.place(then), f"{then} comes before {first}", f"move {then} behind {first}")

    def pairs(self) -> None:
        """Check that both ranks of a pair have the same order of messages, in each direction."""
        sent: dict[tuple[int, int], list[Action]] = {}
        received: dict[tuple[int, int], list[Action]] = {}
        for rank, _, a in self.schedule:
            if a.peer >= 0:
                peer = self.schedule.placement[a.peer]
                if a.kind in SENDS:
                    sent.setdefault((rank, peer), []).append(a)
                else:
                    received.setdefault((peer, rank), []).append(a.other_end())
        for pair, sends in sent.items():
            for a, b in zip(sends, received[pair], strict=True):
                if a != b:
                    fault = f"rank {pair[0]} sends {a} where rank {pair[1]} receives {b.other_end()}"
                    self.add(
                        "pairs", self.place(b.other_end()), fault, f"receive in the order of rank {pair[0]}'s sends"
                    )
                    break

    def deadlock(self) -> None:
        """Run the schedule without buffers; see the module's docstring."""
        s = self.schedule
        progress = [0] * s.ranks  # the next action of each rank
        needs = {} if self.explicit else self._needs()
        waiting = deque(range(s.ranks))
        waiters: dict[Action, list[int]] = {}
        while waiting:
            rank = waiting.popleft()
            actions = s.actions[rank]
            while progress[rank] < len(actions):
                a = actions[progress[rank]]
                if a.peer >= 0:
                    peer = s.placement[a.peer]
                    if self.at[a.other_end()] != (peer, progress[peer]):
                        break
                    progress[peer] += 1
                    waiting.append(peer)
                elif late := self._late(a, needs, progress):
                    waiters.setdefault(late[0], []).append(rank)
                    break
                progress[rank] += 1
                for part in a.parts:
                    waiting.extend(waiters.pop(part, ()))
        stuck = [(r, s.actions[r][i]) for r, i in enumerate(progress) if i < len(s.actions[r])]
        if stuck:
            self._report(dict(stuck), needs, progress)

    def _late(self, a: Action, needs: dict[Action, list[Action]], progress: list[int]) -> list[Action]:
        """Return the actions that an action waits for, and that have not run yet."""
        needed = (n for part in a.parts for n in needs.get(part, ()))
        return [n for n in needed if self.at[n][1] >= progress[self.at[n][0]]]

    def _needs(self) -> dict[Action, list[Action]]:
        """Return {action: the actions of other ranks that it waits for}."""
        s = self.schedule
        needs: dict[Action, list[Action]] = {}
        for link in self.links:
            if s.placement[link.source] != s.placement[link.target]:
                for m in range(s.microbatches):
                    needs.setdefault(Action("F", link.target, m), []).append(Action("F", link.source, m))
                    if link.gradient and self.training:
                        needs.setdefault(self.backward[link.source, m], []).append(self.backward[link.target, m])
        return needs

    def _report(self, stuck: dict[int, Action], needs: dict[Action, list[Action]], progress: list[int]) -> None:
        """Add an error with the circle of ranks that wait for each other."""

        def awaited(a: Action) -> Action:
            if a.peer >= 0:
                return a.other_end()
            return self._late(a, needs, progress)[0]

        path: list[int] = []
        rank = next(iter(stuck))
        while rank not in path:
            path.append(rank)
            rank = self.at[awaited(stuck[rank])][0]
        circle = path[path.index(rank) :]
        waits = [f"rank {r} at {stuck[r]} waits for {awaited(stuck[r])}" for r in circle]
        first = stuck[circle[0]]
        fault = f"a deadlock: {'; '.join(waits)}"
        fix = f"run {awaited(first)} before {stuck[self.at[awaited(first)][0]]}, or {first} later"
        self.add("deadlock", self.place(first), fault, fix)
