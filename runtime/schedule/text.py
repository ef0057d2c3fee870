"""Parse schedules from text, one line a rank. `str(schedule)` writes it; users may write it too.

    # a comment
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0
            1F1 1B1             a line without `rank` continues the rank before

The actions are those of actions.py; for 0F3+3B0, torch's (0F3;3B0)OVERLAP_F_B is read too. Sends and receives, REDUCE
and STEP may be left out: they are filled in. A file without any `rank` has a line a rank, split by commas or blanks:
CSV of torch.distributed.pipelining is read."""

from __future__ import annotations

import re

from shardc.errors import SHOWN, Errors
from shardc.runtime.schedule.actions import RECEIVES, SENDS, Action, Kind, Schedule, pair

#: Numbers have at most 5 digits, as tables of this size are made.
_N = r"\d{1,5}"
_RANK = re.compile(rf"\s*rank\s+({_N})\s*:")
_TITLE = re.compile(r"# (.+): \d+ stages? on \d+ ranks?, \d+ microbatch(?:es)?\n")
_WORD = re.compile(r"[^\s,]+")
_ACTION = re.compile(
    rf"(?:(?P<stage>{_N})(?:(?P<kind>[FBIW]|SEND_[FB]|RECV_[FB])(?P<microbatch>{_N})(?:(?P<way>[<>])(?P<peer>{_N}))?|REDUCE)|STEP)"
)


#: A pair, in the notation of this module and of torch.distributed.pipelining.
_PAIR = re.compile(rf"(?P<f>{_N}F{_N})\+(?P<b>{_N}[BF]{_N})|\((?P<f2>{_N}F{_N});(?P<b2>{_N}B{_N})\)OVERLAP_F_B")


def parse(text: str, file: str = "schedule") -> Schedule:
    """Parse the text of `str(schedule)`; the name is `file` where the text has none.

    Raises ShardcError with the line and column of every word that is not an action.
    """
    lines = [line.partition("#")[0] for line in text.splitlines()]
    named = any(map(_RANK.match, lines))
    actions: list[list[Action]] = []
    places: list[list[str]] = []
    errors = Errors()
    for n, line in enumerate(lines, 1):
        start = 0
        if header := _RANK.match(line):
            start = header.end()
            if int(header[1]) != len(actions):
                errors.add(
                    f"rank {header[1]} comes after {len(actions)} ranks",
                    where=f"{file}:{n}:1",
                    fix=f"write `rank {len(actions)}:` here",
                )
        if header or (not named and line.strip(" ,\t")):
            actions.append([])
            places.append([])
        if len(errors.found) > SHOWN:
            break
        for word in _WORD.finditer(line, start):
            where = f"{file}:{n}:{word.start() + 1}"
            if not actions:
                errors.add(f"{word[0][:40]} comes before the first rank", where=where, fix="begin with `rank 0:`")
                break
            action = _action(word[0])
            if isinstance(action, Action):
                actions[-1].append(action)
                places[-1].append(where)
            else:
                errors.add(f"{word[0][:40]!r} is not an action", where=where, fix=action)
    if not any(actions):
        errors.add("the schedule has no actions", where=file, fix="write a line a rank: `rank 0: 0F0 0B0`")
    errors.raise_any()
    first = _TITLE.match(text)
    return Schedule.of(first[1] if first else file, actions, tuple(map(tuple, places)))


def _action(word: str) -> Action | str:
    """Parse an action; return it, or the text of a fix."""
    if (both := _PAIR.fullmatch(word)) is not None:
        forward, then = _action(both["f"] or both["f2"]), _action(both["b"] or both["b2"])
        return pair(forward, then)  # type: ignore[arg-type]  # they matched
    parts = _ACTION.fullmatch(word)
    if parts is None:
        return "write stage, kind, microbatch: 2F0, 2B0, 2I0, 2W0, 0F3+3B0, 1SEND_F0>2, 2RECV_F0<1; or 2REDUCE, STEP"
    if parts["stage"] is None:
        return Action("STEP")
    stage = int(parts["stage"])
    if parts["kind"] is None:
        return Action("REDUCE", stage)
    kind: Kind = parts["kind"]  # type: ignore[assignment]  # one of the expression's
    sign = ">" if kind in SENDS else "<" if kind in RECEIVES else None
    if parts["way"] != sign:
        right = f"{stage}{kind}{parts['microbatch']}"
        return (
            f"write {right}"
            if sign is None
            else f"write {right}{sign}N with the other stage N, or leave all sends and receives out"
        )
    return Action(kind, stage, int(parts["microbatch"]), int(parts["peer"] or -1))
