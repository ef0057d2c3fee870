"""Find the part of a step that grows with the rows of its batch, from the calls of a dry run.

    still    parameters and state, by their kind; their gradients (`mark_fixed_size`); values that become one:
             its product, and copies of that in another dtype; values computed only from these, as a weight's cast
    grows    everything else: values that depend on the batch's numbers

So the same step with other rows has a price without another dry run (`Op.of_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from shardc.machine.flops import moved_by
from shardc.machine.work import Op, Part, Storage
from shardc.torch_private import pytree

#: Kinds of storages that do not grow with rows. (Sums of tensors from other ranks count as gradients, too.)
KINDS = ("parameters", "optimizer", "buffers", "gathered")
#: Elementwise ops: if the result does not grow, neither does an operand of as many elements.
_ONE_BY_ONE = {"_to_copy", "copy_", "clone", "add", "add_", "mul", "mul_", "div", "div_", "neg"}

#: Tensors that a call reads and writes: (place among the operands, or -1 - place among the results; bytes).
Moved = tuple[tuple[int, int], ...]
#: Tensors of a call: (storage, None if it takes no memory; number of elements).
Stored = Sequence[tuple[Storage | None, int]]


def places_moved(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any, operands: Sequence[Tensor]
) -> Moved:
    """Return what a call reads and writes; equal for calls with operands of equal sizes."""
    results = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    places = {id(x): -1 - i for i, x in enumerate(results)} | {id(x): i for i, x in enumerate(operands)}
    return tuple((places[id(x)], n) for x, n in moved_by(func, args, kwargs, result) or ())


class _Call(NamedTuple):
    """A call. at: the place of its op in the work of its part."""

    at: int
    op: Op
    moved: Moved
    operands: Stored
    results: Stored

    def still(self) -> int:
        """Return the bytes that it reads and writes of tensors that do not grow."""
        return sum(n for i, n in self.moved if _stays((self.operands[i] if i >= 0 else self.results[-1 - i])[0]))


@dataclass
class Growth:
    """The calls of the current part of a step, in order."""

    _calls: list[_Call] = field(default_factory=list)

    def called(self, at: int, op: Op | None, moved: Moved, operands: Stored, results: Stored) -> None:
        """Record a call. op, at: its op, if it runs on the device, and its place in the part's work."""
        read = [s for s, _ in operands if s is not None]
        if read and all(map(_stays, read)):
            for s, _ in results:
                if s is not None and s not in read:
                    s.still = True
        if op is not None:
            self._calls.append(_Call(at, op, moved, operands, results))

    def settle(self, part: Part) -> None:
        """Mark the part of each op that does not grow, once a part has run and its gradients are marked."""
        for c in reversed(self._calls):
            if c.op.name in _ONE_BY_ONE and any(_stays(s) for s, _ in c.results):
                for s, number in c.operands:
                    if s is not None and number == c.results[0][1]:
                        s.still = True
        for c in self._calls:
            if still := c.still():
                op = part.work[c.at]
                assert isinstance(op, Op)
                grows = None if any(_stays(s) for s, _ in c.results) else 1
                part.work[c.at] = op._replace(still=still, grows=grows)
        self._calls.clear()


def _stays(s: Storage | None) -> bool:
    return s is not None and (s.still or s.kind in KINDS)
