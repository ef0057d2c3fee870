"""The numbers in names of nodes. fx numbers what has one name: `linear_7` is the eighth linear of a graph, and where a
layer has three, the same one of the next layer is `linear_10`.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from shardc.passes.distinct_layers.twins import UnlikeError

_NUMBER = re.compile(r"\d+")
#: What ops draw random numbers by: their ordinals are numbered like names.
ORDINAL = "ordinal "


@dataclass(frozen=True)
class _Parsed:
    """head: what is stored that a name begins with, or ""; texts: those around the numbers behind it; keys: what stands
    before each number.
    """

    head: str
    texts: list[str]
    numbers: list[int]
    keys: list[str]

    @property
    def own(self) -> tuple[str, int] | None:
        """The number that fx gave it: the last, at the end. Others are those of ops that it is named after."""
        counted = self.numbers and not self.texts[-1] and self.keys[-1].endswith("_")  # the 16 of bf16 is no number
        return (self.keys[-1], self.numbers[-1]) if counted else None

    @property
    def counted(self) -> tuple[str, int]:
        """As `own`, also of the first one of its name, which has no number."""
        return self.own or ("#".join((("." if self.head else "") + self.texts[0], *self.texts[1:])) + "_", 0)


class Name(NamedTuple):
    """Of an op in a unit. form: with %d for each number; numbers: each with how much more it is in the next unit."""

    head: str
    form: str
    numbers: list[tuple[int, int]]

    def at(self, units: int, stored: Mapping[str, str]) -> str:
        """That of the same op so many units later. stored: parameters of the unit here and there."""
        head = stored.get(self.head, self.head) if self.head else ""
        return head + self.form % tuple([n + units * step for n, step in self.numbers])


@dataclass
class Numbering:
    """Of one graph. stored: its parameters, buffers and inputs, whose names come first in those of some ops, and have
    the model's numbers. steps: by the text before a number, how much it is more in the next unit of layers; firsts: the
    least ones in the first unit, and in the last.
    """

    stored: Collection[str]
    steps: dict[str, int] = field(default_factory=dict)
    firsts: dict[str, tuple[int, int]] = field(default_factory=dict)
    _known: dict[str, _Parsed] = field(default_factory=dict)

    def learn(self, units: Sequence[Sequence[str]], before: Iterable[str], after: Iterable[str]) -> None:
        """What names of a few units say of all. units: names of their ops, and ORDINAL with a number; before, after:
        those around them.

        Raises UnlikeError where numbers do not go on evenly: then more layers would have others than these.
        """
        for twins in zip(*units, strict=True):
            self._learn_one([self._parsed(n) for n in twins[:2]])
            name = self.name(twins[0])
            if name.head or any(n != name.at(i, {}) for i, n in enumerate(twins)):
                self._learn_one([self._parsed(n) for n in twins])
        own, others = dict[str, list[int]](), dict[str, list[int]]()
        for x in map(self._parsed, units[0]):
            if x.own is not None:
                own.setdefault(x.own[0], []).append(x.own[1])
            for key, n in zip(x.keys, x.numbers, strict=True):
                others.setdefault(key, []).append(n)
        before, after = list(before), list(after)
        present = {*before, *after, *(n for unit in units for n in unit)}
        for key, step in self.steps.items():
            if key in own and step and (begins := _first(key)) != key and begins not in present:
                # one pass has made as many for each layer, and a later one others in their place
                raise UnlikeError(f"{key!r} is numbered behind names that are gone")
            numbers = own.get(key, others[key])
            if key in own and step and max(numbers) - min(numbers) >= step:
                raise UnlikeError(f"{key!r} is not numbered layer by layer")
            self.firsts[key] = min(numbers), min(numbers) + (len(units) - 1) * step
        for names, later in ((before, False), (after, True)):
            for x in map(self._parsed, names):
                if x.own is not None and self.steps.get(x.own[0]):
                    first, last = self.firsts[x.own[0]]
                    if x.own[1] <= last if later else x.own[1] >= first:
                        raise UnlikeError(f"{x.own} is not numbered in its place")

    def _learn_one(self, twins: Sequence[_Parsed]) -> None:
        first = twins[0]
        for i, other in enumerate(twins[1:], start=1):
            if other.texts != first.texts or other.keys != first.keys:
                raise UnlikeError(f"{first} and {other} are named otherwise")
            for key, a, b in zip(first.keys, first.numbers, other.numbers, strict=True):
                step, left = divmod(b - a, i)
                if left or step < 0 or self.steps.setdefault(key, step) != step:
                    raise UnlikeError(f"{first} and {other} are numbered unevenly")

    def name(self, name: str) -> Name:
        """The name of an op, by which those of the same one later go."""
        x = self._parsed(name)
        numbers = [(n, self.steps[k]) for k, n in zip(x.keys, x.numbers, strict=True)]
        return Name(x.head, "%d".join(x.texts), numbers)

    def after(self, name: str, units: int) -> str:
        """The name of an op behind all units where there are so many more of them."""
        x = self._parsed(name)
        numbers = list(x.numbers)
        for i, (key, n) in enumerate(zip(x.keys, x.numbers, strict=True)):
            first, last = self.firsts.get(key, (n + 1, n + 1))
            if n >= last:
                numbers[i] += units * self.steps[key]
            elif n >= first:
                raise UnlikeError(f"{name} is named after an op inside of the layers")
        return _joined(x.head, x.texts, numbers)

    def replaced(self, names: Sequence[str], bounds: Sequence[int], units: int, captured: Collection[str]) -> list[str]:
        """Names of ops, as they are where there are so many more units. bounds: of the units; captured: names that ops
        had before all passes. Where a pass has put another op in the place of each of one name, numbers go on behind
        those that are gone, of all units.

        Raises UnlikeError where numbers outside of the units may hang on what is gone otherwise.
        """
        parsed = list(map(self._parsed, names))
        numbers: dict[str, list[int]] = {}
        outside: dict[str, int] = {}  # the greatest: before the units; behind them too, of what they have none of
        each: dict[str, int] = {}  # how many the first unit has
        for i, x in enumerate(parsed):
            key, n = x.counted
            numbers.setdefault(key, []).append(n)
            if bounds[0] <= i < bounds[-1]:
                each[key] = each.get(key, 0) + (i < bounds[1])
            elif names[i] not in captured and not x.head and (i < bounds[0] or key not in each):
                outside[key] = max(n, outside.get(key, 0))  # what is named after a parameter is numbered by itself
        later: dict[str, int] = {}
        for key in (k for k, n in outside.items() if n >= len(numbers[k])):
            count = len(numbers[key])
            if numbers[key] != list(range(count, 2 * count)):
                raise UnlikeError(f"{key!r} is not numbered from the front")
            later[key] = units * each.get(key, 0)
        if not later:
            return list(names)
        return [
            _joined(x.head, x.texts, [n + later.get(k, 0) for k, n in zip(x.keys, x.numbers, strict=True)])
            for x in parsed
        ]

    def ordinal(self, units: int) -> int:
        """How much more an ordinal is so many units later."""
        return units * self.steps.get(ORDINAL, 0)

    def _parsed(self, name: str) -> _Parsed:
        if name not in self._known:
            head = self._stored_in(name)
            rest = name[len(head) :]
            texts, numbers = _NUMBER.split(rest), [int(n) for n in _NUMBER.findall(rest)]
            begin = "." if head else ""
            keys = ["#".join((begin + texts[0], *texts[1 : i + 1])) for i in range(len(numbers))]
            self._known[name] = _Parsed(head, texts, numbers, keys)
        return self._known[name]

    def _stored_in(self, name: str) -> str:
        end = len(name)
        while end > 0:
            if name[:end] in self.stored:
                return name[:end]
            end = name.rfind("_", 0, end)
        return ""


def _first(key: str) -> str:
    """The first name that fx gives of those that are numbered behind this text: "relu" of "relu_", and "pow_1" of
    "pow_", as "pow" is Python's. Of others, such as those with several numbers, the text itself.
    """
    base = key.removesuffix("_")
    if base == key or not base.isidentifier() or base.startswith("."):
        return key
    return f"{base}_1" if keyword.iskeyword(base) or hasattr(builtins, base) else base


def _joined(head: str, texts: Sequence[str], numbers: Sequence[int]) -> str:
    return head + texts[0] + "".join(f"{n}{t}" for n, t in zip(numbers, texts[1:], strict=True))
