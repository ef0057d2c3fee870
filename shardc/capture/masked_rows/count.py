"""A number that is not known while a model is traced: how many rows were chosen, or an element of a count per expert.

n = mask.sum().item()          Count: 1 * sum(mask)
ends = counts.cumsum(0).tolist()     Counts, each an element of a tensor
x[ends[0] : ends[1]]           bounds of a stretch of rows (rows.py)
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from shardc.capture.masked_rows.traced import node_of
from shardc.capture.masked_rows.unfit import Unfit

if TYPE_CHECKING:
    from shardc.capture.masked_rows import ChosenRows


@dataclass(frozen=True)
class Term:
    """An element of a traced tensor: where it is in it; and how often it counts."""

    tensor: Tensor
    at: tuple[int, ...]
    times: int

    def value(self, known: Any) -> int:
        return self.times * int(known[self.at] if self.at else known.sum())


class Count:
    """A whole number that depends on values: constant + sum of elements of traced tensors, times whole numbers.

    It may be compared with 0, and with others if the difference has one sign: then there are rows, which is taken for
    granted (shardc.capture.guards). It bounds slices of sorted rows. terms: by what the elements are.
    """

    def __init__(self, loop: ChosenRows, terms: dict[Any, Term], constant: int = 0) -> None:
        self.loop, self.constant = loop, constant
        self.terms = {key: term for key, term in terms.items() if term.times}

    @property
    def key(self) -> Any:
        return self.constant, frozenset((key, term.times) for key, term in self.terms.items())

    def tensor(self) -> Any:
        """Its value, in the graph."""
        total: Any = None
        for term in self.terms.values():
            element = term.tensor[term.at] if term.at else term.tensor.sum()
            element = element * term.times if term.times != 1 else element
            total = element if total is None else total + element
        return total + self.constant if self.constant else total

    def _plus(self, other: Any, sign: int) -> Any:
        if isinstance(other, (int, np.integer)):
            return self._simple(self.terms, self.constant + sign * int(other))
        if not isinstance(other, Count):
            return NotImplemented
        terms = dict(self.terms)
        for key, term in other.terms.items():
            before = terms[key].times if key in terms else 0
            terms[key] = replace(term, times=sign * term.times + before)
        return self._simple(terms, self.constant + sign * other.constant)

    def _simple(self, terms: dict[Any, Term], constant: int) -> Count | int:
        count = Count(self.loop, terms, constant)
        return count if count.terms else constant

    def __add__(self, other: Any) -> Any:
        return self._plus(other, 1)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._plus(other, -1)

    def __neg__(self) -> Count:
        return Count(self.loop, {k: replace(t, times=-t.times) for k, t in self.terms.items()}, -self.constant)

    def __rsub__(self, other: Any) -> Any:
        return (-self)._plus(other, 1)

    def _compared(self, other: Any, compare: Callable[[int, int], bool]) -> bool:
        left = self - other
        if isinstance(left, int):
            return compare(left, 0)
        if not isinstance(left, Count):
            raise Unfit("their number is compared with something else")
        signs = {term.times > 0 for term in left.terms.values()}
        some = 1 if signs == {True} else -1
        answers = {compare(some * n + left.constant, 0) for n in (1, 1 << 40)}
        if len(signs) > 1 or len(answers) > 1 or compare(left.constant, 0) in answers:
            raise Unfit("their number is compared with more than 0")
        (answer,) = answers
        terms, constant = list(left.terms.values()), left.constant

        def truth(known: Any) -> bool:
            return compare(sum(t.value(k) for t, k in zip(terms, known, strict=True)) + constant, 0)

        nodes = [node_of(t.tensor) for t in terms]
        keys = frozenset(left.terms)
        body = self.loop.guards.take(sys._getframe(2), nodes, truth, keys=keys)
        if body is None or body.wanted != answer:
            raise Unfit("what is done depends on whether there are any, in a way that cannot be checked")
        return answer

    def __eq__(self, other: object) -> bool:
        return self._compared(other, operator.eq)

    def __ne__(self, other: object) -> bool:
        return self._compared(other, operator.ne)

    def __lt__(self, other: Any) -> bool:
        return self._compared(other, operator.lt)

    def __le__(self, other: Any) -> bool:
        return self._compared(other, operator.le)

    def __gt__(self, other: Any) -> bool:
        return self._compared(other, operator.gt)

    def __ge__(self, other: Any) -> bool:
        return self._compared(other, operator.ge)

    def __bool__(self) -> bool:
        return self._compared(0, operator.ne)

    def __hash__(self) -> int:
        raise Unfit("their number is put in a set, or is the key of a dict")
