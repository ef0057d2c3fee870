"""Find branches that change nothing where their condition is false: a traced model always takes them.

    if (var < 0).any(): raise ValueError(...)  a check: the program does what the model does if nothing is wrong
    assert ids.max() < n                       likewise
    if mask.any(): x[mask] = 0                 always taken
    if not x.isfinite().all(): x = x.clamp(-big, big)       likewise
    if not mask.any(): mask = None             a shortcut to the same result: never taken

These are known by their form. Others are taken if rows of a mask may be traced:

    if mask.any():                        taken
        out[mask] += expert(x[mask])      no rows: nothing is written
    for e in hit.nonzero(): ...           all turns of the loop, also those of experts that were not selected
    if count == 0: continue               not taken

Random choices check that nothing else happens in them (shardc.passes.canonical.choices). Writes there must be to rows
of a mask that is empty where the condition is false. Names bound there may be used only there, unless they contain
numbers that then equal the old ones (`start = end` after `if end == start: continue`).
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

from shardc import errors
from shardc.capture.rewrite.functional_twins import mutates
from shardc.passes.canonical.choices import Draws
from shardc.torch_modes import untraced
from shardc.torch_private import expression

_OURS, _TORCHS = (f"{Path(str(module.__file__)).parent}/" for module in (errors, torch))


def caller() -> FrameType:
    """Return the frame, of the model or of torch, that reads a value."""
    frame: Any = sys._getframe(1)
    while frame.f_code.co_filename.startswith(_OURS) or _forwards(frame.f_code):
        frame = frame.f_back
    return frame  # type: ignore[no-any-return]


def _forwards(code: CodeType) -> bool:
    """Return whether code is torch's own between an operator of Python, such as `len`, and what implements it."""
    forwards = code.co_name == "handle_torch_function" or code.co_name.startswith("__")
    return forwards and code.co_filename.startswith(_TORCHS)


@dataclass(frozen=True)
class Body:
    """Code that runs only where all parts of a condition are `wanted`.

    some: the value of a condition like `len(rows) > 0` where there are rows. lines: the statements, none if the form of
    the condition and its code shows that nothing changes elsewhere; names: that they bind, and that are used elsewhere.
    fits: whether everything in them can be checked.
    """

    wanted: bool
    some: bool | None = None
    lines: range = range(0)
    names: frozenset[str] = frozenset()
    fits: bool = False


@dataclass
class Guard:
    """A branch that is always taken.

    nodes, holds: its condition; tried: the least number of choices; see Draws.implied. since: the last node of the
    graph before. held: values of the names before.
    """

    frame: FrameType
    body: Body
    nodes: Sequence[fx.Node]
    holds: Callable[[Any], bool]
    tried: int
    since: fx.Node
    held: dict[str, Any]


class Guards:
    """The guards of one trace.

    written: {id of the result of a write: (result, its value without rows)}. read: {symbol: the node of the tensor in
    which Python read the number}.
    """

    def __init__(self) -> None:
        self.open: dict[tuple[int, ...], Guard] = {}
        self.written: dict[int, tuple[Tensor, Tensor]] = {}
        self.read: dict[Any, fx.Node] = {}
        self.draws = Draws()

    def take(
        self, nodes: Sequence[fx.Node], truth: Callable[[Any], bool], *, loop: bool = False, tried: int = 3
    ) -> Body | None:
        """Mark the branch at the caller's line as always taken; return None if that is not possible.

        truth: of the part of its condition that Python reads, from the values of nodes.
        """
        frame = caller()
        body = bodies(frame.f_code).get(frame.f_lineno)
        if body is None or not body.fits:
            return None
        # the instruction distinguishes conditions of a line; that of a loop over a generator moves in Python 3.12
        key = (id(frame), body.lines.start, -1 if loop else frame.f_lasti)
        if not self._unchanged(self.open.get(key)):
            return None
        values = {name: frame.f_locals.get(name) for name in body.names}
        since = next(iter(reversed(nodes[0].graph.nodes)))
        self.open[key] = Guard(frame, body, nodes, lambda known: truth(known) == body.wanted, tried, since, values)
        return body

    def around(self) -> list[Guard]:
        """Return the guards whose branches contain the calls now in progress."""
        guards: list[Guard] = []
        frame: FrameType | None = sys._getframe(1) if self.open else None
        while frame is not None:
            guards += [g for g in self.open.values() if g.frame is frame and frame.f_lineno in g.body.lines]
            frame = frame.f_back
        return guards

    def allow(self, mask: fx.Node) -> bool:
        """Return whether rows of a mask may be written here."""
        return all(self._implied(g, [mask], lambda known: not bool(known[0].any())) for g in self.around())

    def allow_write(self, node: fx.Node) -> bool:
        """Return whether a whole tensor may be changed here: only if it was made here."""
        guards = self.around()
        if not guards:
            return True
        while mutates(node):
            node = node.args[0]  # type: ignore[assignment]
        order = {n: i for i, n in enumerate(node.graph.nodes)}
        return all(order[node] > order.get(g.since, 0) for g in guards)

    def unchanged(self) -> bool:
        """Return whether, at the end, all names have the values that they would have without the branches."""
        return all(map(self._unchanged, self.open.values()))

    def _unchanged(self, guard: Guard | None) -> bool:
        if guard is None:
            return True
        return all(self._same(guard, guard.frame.f_locals.get(name), old) for name, old in guard.held.items())

    def _same(self, guard: Guard, new: Any, old: Any) -> bool:
        """Return whether a name's value is the old one wherever a branch's condition is false."""
        while isinstance(new, Tensor) and new is not old and id(new) in self.written:
            new = self.written[id(new)][1]
        if new is old or not all(isinstance(x, int | torch.SymInt) for x in (new, old)):
            return new is old
        difference = expression(new) - expression(old)
        if isinstance(difference, int) or difference.is_number:
            return bool(difference == 0)
        nodes, value = self.evaluated(difference)
        return self._implied(guard, nodes, lambda known: bool(value(known) == 0))

    def evaluated(self, number: Any) -> tuple[list[fx.Node], Callable[[Sequence[Any]], Any]]:
        """Return the nodes of the numbers in an expression, and a function that returns its value from theirs."""
        symbols = sorted(number.free_symbols, key=str)
        nodes = [self.read[s] for s in symbols]
        return nodes, lambda known: number.subs({s: int(n) for s, n in zip(symbols, known, strict=True)})

    def _implied(self, guard: Guard, nodes: Sequence[fx.Node], quiet: Callable[[list[Any]], bool]) -> bool:
        return untraced(self.draws.implied, guard.nodes, guard.holds, nodes, quiet, guard.tried)


def harmless() -> bool | None:
    """Return the truth value with which the condition at the caller's line changes nothing, or None."""
    frame = caller()
    body = bodies(frame.f_code).get(frame.f_lineno)
    return body.wanted if body is not None and not body.lines else None


@lru_cache(maxsize=256)
def bodies(code: CodeType) -> dict[int, Body]:
    """Map lines of conditions and loop headers to the code that depends on them."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree, shift = ast.parse(textwrap.dedent("".join(lines))), max(first, 1) - 1
    except (OSError, SyntaxError):
        return {}
    by_line: dict[int, Body] = {}
    for node in ast.walk(tree):
        truths, some, statements = set[bool](), None, list[ast.stmt]()
        if isinstance(node, ast.For) and not node.orelse:
            span, truths, statements = node.iter, {True}, node.body
        elif isinstance(node, ast.If | ast.Assert):
            span, truths = node.test, _harmless(node)
            if not truths and isinstance(node, ast.If) and not node.orelse:
                skips = len(node.body) == 1 and isinstance(node.body[0], ast.Continue)
                statements = _after_branch(tree, node) if skips else node.body
                truths, some = needed(node.test, not skips) if statements else truths, _some(node.test)
        if len(truths) == 1:
            body = Body(truths.pop())
            if statements:
                inside = range(statements[0].lineno + shift, (statements[-1].end_lineno or 0) + shift + 1)
                body = Body(body.wanted, some, inside, *_effects(tree, statements, node))
            by_line |= dict.fromkeys(range(span.lineno + shift, (span.end_lineno or span.lineno) + shift + 1), body)
    return by_line


def _harmless(node: ast.If | ast.Assert) -> set[bool]:
    """Return the truth values of parts of a condition with which its form shows that nothing changes; else none."""
    if isinstance(node, ast.Assert):
        return needed(node.test, True)
    if all(isinstance(s, ast.Raise) for s in node.body):
        return needed(node.test, False)
    if node.orelse:
        return set()
    masks = {
        (n.func.attr, ast.unparse(n.args[0] if n.args else n.func.value))
        for n in ast.walk(node.test)
        if isinstance(n, ast.Call) and isinstance(n.func, ast.Attribute) and n.func.attr in ("any", "all")
    }
    written: set[str] = set()  # by x[mask] = value
    dropped: set[str] = set()  # by mask = None
    for s in node.body:
        for target in s.targets if isinstance(s, ast.Assign) else [s]:
            if isinstance(target, ast.Subscript):
                written.add(ast.unparse(target.slice))
            elif isinstance(s, ast.Assign) and isinstance(s.value, ast.Constant) and s.value.value is None:
                dropped.add(ast.unparse(target))
            else:
                return needed(node.test, True) if _clamps(node) else set()
    if isinstance(node.test, ast.Call) and not dropped and masks == {("any", m) for m in written}:
        return {True}
    hides_nothing = [({(name, m) for m in dropped}, {truth}) for name, truth in (("any", False), ("all", True))]
    return needed(node.test, False) if not written and (masks, needed(node.test, True)) in hides_nothing else set()


def _clamps(branch: ast.If) -> bool:
    """Return whether it is `if not x.isfinite().all(): x = x.clamp(-big, big)`, as in float16 models.

    isinf and isnan count too. Bounds must be made of torch.finfo: those change nothing that is finite.
    """
    bounds, clamped = set[str](), False
    for s in branch.body:
        match s:
            case ast.Assign([target], ast.Call(ast.Attribute(on, "clamp"), args, keywords)):
                on_torch = ast.unparse(on) == "torch"
                x, *limits = map(ast.unparse, [*([] if on_torch else [on]), *args, *(k.value for k in keywords)])
                large = all("finfo" in limit or limit.lstrip("-") in bounds for limit in limits)
                if not limits or not large or ast.unparse(target) != x:
                    return False
                clamped = True
            case ast.Assign([target], value) if "finfo" in ast.unparse(value):
                bounds.add(ast.unparse(target))
            case _:
                return False
    names = {n.attr for n in ast.walk(branch.test) if isinstance(n, ast.Attribute)}
    return clamped and not names.isdisjoint({"isfinite", "isinf", "isnan"})


def needed(test: ast.expr, wanted: bool) -> set[bool]:
    """Return the truth values that a condition's parts need for it to be as wanted: two if they differ."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return needed(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        return set().union(*(needed(v, wanted) for v in test.values))
    return {wanted}


def _some(test: ast.expr) -> bool | None:
    """Return the value of `n > 0` and the like for n > 0, or of a list with items; None for other tests."""
    match test:
        case ast.UnaryOp(op=ast.Not()):
            return _some(test.operand)
        case ast.Name() | ast.Call(func=ast.Name(id="len")):
            return True
        case ast.Compare(ops=[ast.Eq()], comparators=[ast.Constant(value=0)]):
            return False
        case ast.Compare(ops=[ast.Gt() | ast.NotEq()], comparators=[ast.Constant(value=0)]):
            return True
    return None


def _after_branch(tree: ast.AST, branch: ast.If) -> list[ast.stmt]:
    """Return the statements after a branch that ends this turn of a loop."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.While)) and branch in node.body:
            return node.body[node.body.index(branch) + 1 :]
    return []


_PLAIN = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.If | ast.For | ast.Continue | ast.Pass | ast.Assert
_PLAIN |= ast.With


def _effects(tree: ast.AST, statements: Sequence[ast.stmt], branch: ast.AST) -> tuple[frozenset[str], bool]:
    """Return (names that statements bind and that are used outside, whether all effects can be checked)."""
    nodes = [n for s in statements for n in ast.walk(s)]
    inside = set(map(id, nodes))
    all_names = [n for n in ast.walk(tree) if isinstance(n, ast.Name)]
    bound = {n.id for n in all_names if id(n) in inside and not isinstance(n.ctx, ast.Load)}
    used = {n.id for n in all_names if id(n) not in inside and isinstance(n.ctx, ast.Load)}
    before = {n.id for n in all_names if id(n) not in inside and not isinstance(n.ctx, ast.Load)}
    names = {n.id for n in ast.walk(branch.target) if isinstance(n, ast.Name)} if isinstance(branch, ast.For) else set()
    added = {n.target.id for n in nodes if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
    fits = all(isinstance(n, _PLAIN) for n in nodes if isinstance(n, ast.stmt)) and not any(
        isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load) for n in nodes
    )
    return frozenset((bound & used - names) | (added & before)), fits
