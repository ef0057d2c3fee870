"""A taped op's gradients go to their parameters as autograd has them, one by one, in what a rank runs.

    y, tape = ops.taped(.., x, w, b)                         the text
    ...
    x_grad, w_grad, b_grad = ops.untaped(tape, (y_grad,), (None, None, None), (x, w))
    ops.put(b, b_grad)
    ops.put(w, w_grad)

    y, tape = tape_of(.., x, w, b)                           what runs
    ...
    box = boxed([y_grad], [x, w])                            each is freed where nothing in the op wants it any more
    x_grad, _, _ = untape(tape, box, .., (w, b))             w.grad and b.grad are there, or in their bucket

So a recurrent layer, whose backward is one op, holds about what it holds under autograd. The sum of a bucket begins
where the text says, behind all of that; that of a gathered bucket whose gradients all come from the op begins inside.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor, fx

from shardc.runtime import ops
from shardc.runtime.compiled.regions import boxed
from shardc.runtime.ops.taped import Tape, back, record


class EarlyPuts:
    """Of the texts of one stage."""

    def __init__(self, *texts: fx.Graph) -> None:
        untaped = [n for text in texts for n in _calls(text, ops.untaped)]
        #: Names of tapes.
        self._tapes = {n.args[0].name for n in untaped if any(True for _ in _ends(n))}

    def insert(self, graph: fx.Graph) -> None:
        """Change the lines of a copy of one of the texts."""
        for n in list(_calls(graph, ops.taped)):
            if any(u.name in self._tapes for u in n.users):
                n.target = tape_of
        for n in list(_calls(graph, ops.untaped)):
            if n.args[0].name in self._tapes:
                _insert(graph, n)


def _calls(graph: fx.Graph, target: Any) -> Iterator[Any]:
    return (n for n in graph.nodes if n.op == "call_function" and n.target is target)


def _ends(n: fx.Node) -> Iterator[tuple[fx.Node, dict[int, fx.Node]]]:
    """(a line that is all that looks at some of the gradients, these by number)."""
    if n.kwargs.get("zeros"):
        return
    last: dict[fx.Node, Any] = {u: u.args[1] for u in n.users if u.target is operator.getitem and len(u.users) == 1}
    for line in dict.fromkeys(next(iter(u.users)) for u in last):
        if line.target not in (ops.put, ops.scatter):
            continue
        grads: Any = (line.args[1],) if line.target is ops.put else line.args[1]
        there = [g for g in grads if g is not None]
        if all(g in last for g in there) and len(set(there)) == len(there):
            yield line, {last[g]: g for g in there}


def _insert(graph: fx.Graph, n: Any) -> None:
    ends = list(_ends(n))
    tape, grads, before, operands = n.args
    with graph.inserting_before(n):
        box = graph.create_node("call_function", boxed, (list(grads), list(operands)), name=f"{n.name}_box")
    puts = tuple((k, line.args[0]) for line, found in ends if line.target is ops.put for k in found)
    scatters = []
    for line, found in ends:
        if line.target is ops.scatter:
            params, gradients, bucket = line.args
            number = {g: k for k, g in found.items()}
            scatters.append((tuple(number.get(g) for g in gradients), params, bucket))  # type: ignore[union-attr, arg-type]
    n.target, n.args = untape, (tape, box, before, puts, tuple(scatters))
    for line, found in ends:
        graph.erase_node(line)
        for g in found.values():
            graph.erase_node(g)


def tape_of(op: str, needs: Sequence[int], again: Sequence[int], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`ops.taped`, for `untape`."""
    return record(op, needs, again, args, kwargs, lets_go=True)


def untape(
    tape: Tape,
    box: list[list[Tensor | None]],
    before: Sequence[Tensor | None],
    puts: Sequence[tuple[int, Tensor]],
    scatters: Sequence[tuple[Sequence[int | None], Sequence[Any], str]],
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """`ops.untaped`. box: lists of the gradients of results, and of operands, which it empties. puts: (number of a
    gradient, the parameter that gets it); scatters: (numbers of the gradients of a gathered bucket, its parameters, its
    name).
    """
    grads, operands = box
    box.clear()
    takes: dict[int, Callable[[Tensor], None]] = {k: partial(ops.put, p) for k, p in puts}
    for numbers, params, tag in scatters:
        takes |= _scattered(numbers, params, tag)
    return back(tape, grads, before, operands, takes, **options)  # type: ignore[arg-type]


def _scattered(
    numbers: Sequence[int | None], params: Sequence[Any], tag: str
) -> Mapping[int, Callable[[Tensor], None]]:
    """What takes the gradients of a bucket, and hands them over with the last one."""
    found: list[Tensor | None] = [None] * len(numbers)
    missing = {i for i, k in enumerate(numbers) if k is not None}

    def take(i: int, g: Tensor) -> None:
        found[i] = g
        missing.discard(i)
        if not missing:
            ops.scatter(params, found, tag)
            found.clear()

    return {k: partial(take, i) for i, k in enumerate(numbers) if k is not None}
