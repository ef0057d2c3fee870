"""Check a stage's joint graphs: forward computes its results, backward the chain rule's gradients.

Each graph is read as terms (shardc.verify.static.terms). So it does not matter what is kept or recomputed, in which
order lines come, and where a sum is written. A separate check finds lines that read memory after another line reused
it. One text serves all ranks, so collectives have one order on all of them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from shardc.artifact.emit import EFFECTS
from shardc.ir.graph import operands_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.stage import Joint, Pair, Stage, names_in_both, second_prefix
from shardc.ir.types import nodes_in
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.derivatives.record import is_view
from shardc.runtime import ops
from shardc.torch_private import OpOverload
from shardc.verify.static.chain_rule import ChainRule
from shardc.verify.static.terms import Term, Terms, parts

aten = torch.ops.aten

#: Ops that begin a collective, or a copy to the host or back, with the op that waits for each.
_WAITS = {
    ops.start: ops.wait,
    ops.transpose_start: ops.wait,
    ops.gather_start: ops.gather_wait,
    ops.regather_start: ops.regather_wait,
    ops.offload_start: ops.offload_wait,
    ops.reload_start: ops.reload_wait,
}


@dataclass(frozen=True)
class Wrong:
    """A fault of a joint graph. line: where, if it is one line; what: the fault; right: what would be.

    text: "forward", "backward" or "weights", or "pair" and which half.
    """

    text: str
    line: fx.Node | None
    what: str
    right: str = ""


def wrong(program: Program, stage: Stage, rules: Rules, until: float = math.inf) -> Iterator[Wrong]:
    """Yield what is wrong in a stage's joint graph. rules: shared by stages. until: on time.perf_counter."""
    assert stage.joint is not None
    texts = _Texts(program, stage, rules, until, Lines.of(stage.joint))
    for node in texts.expected.stops:
        yield Wrong("backward", node, "it needs a gradient, and the chain rule stops here")
    yield from texts.wrong()
    for name, graph in stage.joint.graphs.items():
        for node, fault in _overwritten(graph, texts.fresh(name)):
            yield Wrong(name, node, fault)
        for node, fault in _unfinished(graph):
            yield Wrong(name, node, fault)


@dataclass(frozen=True)
class Lines:
    """The lines of a text in their order, and what it returns. prefix: of names, in the second half of a pair."""

    nodes: Sequence[fx.Node]
    returned: Any
    prefix: str = ""

    @classmethod
    def of(cls, joint: Joint) -> dict[str, Lines]:
        """Return the lines of each text, by its name."""
        return {name: cls(list(g.nodes), g.output_node().args[0]) for name, g in joint.graphs.items()}


def halves(program: Program, pair: Pair) -> tuple[Lines, Lines]:
    """Return the two texts of an overlapped pair (shardc.ir.stage); lines without a result are backward's."""
    forward, same = program.stages[pair.first].joint, names_in_both(program)
    assert forward is not None
    prefix = second_prefix(pair.kind, forward.forward)
    first, second = list[fx.Node](), list[fx.Node]()
    *lines, end = pair.graph.nodes
    for n in lines:
        in_second = n.target in EFFECTS or n.name.startswith(prefix)
        for half in (first, second) if n.name in same else (second if in_second else first,):
            half.append(n)
    returned: Any = end.args[0]
    return Lines(first, returned[0]), Lines(second, returned[1], prefix)


def wrong_in_pair(program: Program, pair: Pair, rules: Rules, until: float = math.inf) -> Iterator[Wrong]:
    """Yield what is wrong in the text of an overlapped pair.

    It is read as two texts, each in place of a stage's own. No line may reuse memory that either half still reads.
    """
    one, other = program.stages[pair.first], program.stages[pair.then]
    assert one.joint is not None
    assert other.joint is not None
    first, then = halves(program, pair)
    for half in (first, then):
        own, takes = set(half.nodes), {n: n.all_input_nodes for n in half.nodes}
        takes[pair.graph.output_node()] = list(nodes_in(half.returned))
        if mixed := [n for n, values in takes.items() if not own.issuperset(values)]:
            yield Wrong("pair", mixed[0], "it takes a value of the other microbatch", "one of its own half")
            return
    of_first, of_then, second = Lines.of(one.joint) | {"forward": first}, Lines.of(other.joint), "second forward"
    if pair.kind == "FB":
        of_then, second = {"forward": of_then["forward"]}, "backward"
    of_then["backward" if pair.kind == "FB" else "forward"] = then
    for stage, lines, label in ((one, of_first, "forward"), (other, of_then, second)):
        texts = _Texts(program, stage, rules, until, lines)
        yield from (replace(w, text=f"pair, {label}") for w in texts.wrong())
    for node, fault in (*_overwritten(pair.graph, texts.fresh("backward")), *_unfinished(pair.graph)):
        yield Wrong("pair", node, fault)


class _Texts:
    """The graphs of one stage as terms, compared with the expected ones."""

    def __init__(self, program: Program, stage: Stage, rules: Rules, until: float, texts: dict[str, Lines]) -> None:
        self._program, self._stage, self._terms, self._texts = program, stage, Terms(), texts
        self.expected = ChainRule(program, stage, rules, self._terms, until)
        self._env: dict[str, dict[fx.Node, Term]] = {name: {} for name in self._texts}
        #: By term: the first line, of any text, that computes it.
        self._line_of: dict[Term, tuple[str, fx.Node]] = {}

    def wrong(self) -> Iterator[Wrong]:
        *results, kept = self._read("forward", {})
        yield from self._returned(results)
        inputs = self._passed("forward", kept)
        if len(inputs) != len(kept):
            yield Wrong("forward", None, "two values that are kept have one name")
        grads = self._read("backward", inputs)
        if "weights" in self._texts:
            grads, crossing = grads
            self._read("weights", inputs | self._passed("backward", crossing))
        yield from self._received(grads)
        yield from self._parameters()
        yield from self._tapes()

    def fresh(self, text: str) -> set[fx.Node]:
        """Return the lines of a text that are results of ops that stay whole, in new memory. After `wrong`."""
        return {n for n, term in self._env[text].items() if term in self.expected.fresh}

    def _passed(self, text: str, values: Sequence[fx.Node]) -> dict[str, Term]:
        """Return the terms that a text passes to the next one, by the names that this has for them."""
        return {n.name.removeprefix(self._texts[text].prefix): self._env[text][n] for n in values}

    def _read(self, text: str, given: dict[str, Term]) -> Any:
        """Compute the term of each line, and return what the text returns.

        given: inputs from another text, by name; others are the stage's.
        """
        env, lines = self._env[text], self._texts[text]

        def put(n: fx.Node) -> Any:
            return env[n]

        for n in lines.nodes:
            if n.op == "placeholder":
                name = n.name.removeprefix(lines.prefix)
                env[n] = given.get(name) or self._terms.given(name)
            elif n.op == "call_function":
                args, kwargs = fx.map_arg(n.args, put), fx.map_arg(dict(n.kwargs), put)
                value = n.meta.get("value")  # types in joint graphs are those of a rank
                shape = tuple(value.shape) if isinstance(value, Value) else None
                env[n] = self._terms.call(n.target, args, kwargs, shape)
                self._line_of.setdefault(env[n], (text, n))
        return lines.returned

    def _returned(self, results: list[Any]) -> Iterator[Wrong]:
        named = ("the loss", "new values and outputs", "what is sent")
        for label, values, right in zip_longest(named[: len(results)], results, self.expected.returned, fillvalue=()):
            nodes, wants = (x if isinstance(x, tuple | list) else (x,) for x in (values, right))
            if len(nodes) != len(wants):
                yield Wrong("forward", None, f"{label}: {len(nodes)} values", f"{len(wants)}")
                continue
            for node, want in zip(nodes, wants, strict=True):
                yield from self._compared("forward", node, f"{label}: {node}", node, want)

    def _received(self, grads: Any) -> Iterator[Wrong]:
        """Compare the gradients that go to earlier stages."""
        names = [name for name, value in self._stage.receives.items() if value.requires_grad]
        if len(names) != len(grads):
            yield Wrong("backward", None, f"it returns {len(grads)} gradients", f"{len(names)}: {', '.join(names)}")
            return
        for name, node in zip(names, grads, strict=True):
            want = self.expected.received.get(name)
            yield from self._compared("backward", node, f"the gradient of {name}", node, want)

    def _parameters(self) -> Iterator[Wrong]:
        """Check that each gradient is put once, and each bucket's sum starts once, after all its gradients."""
        begun: Counter[str] = Counter()
        puts: Counter[Term] = Counter()
        bucket_of = {name: f"bucket{i}" for i, b in enumerate(self._program.buckets) for name in b.params}
        for text, n in self._backward_lines():
            args: Any = n.args
            if n.target is ops.accumulate:
                term = self._env[text][args[0]]
                name, number = self.expected.puts.get(term, (args[0].name, None))
                puts[term] += 1
                yield from self._compared(text, n, f"the gradient of {name}", args[1], number)
                if begun[bucket_of.get(name, "")]:
                    yield Wrong(text, n, f"{name}'s bucket is being summed already", "put it before")
            elif n.target is ops.launch:
                begun[args[1]] += 1
            elif n.target is ops.scatter:
                begun[args[2]] += 1
                yield from self._scattered(text, n)
        for term, (name, _) in self.expected.puts.items():
            if puts[term] != 1:
                yield Wrong("backward", None, f"{name} gets its gradient {puts[term]} times", "once")
        for name in dict.fromkeys((*self.expected.scatters, *begun)):
            if begun[name] > 1 or (name in self.expected.scatters and not begun[name]):
                yield Wrong("backward", None, f"the sum of {name} begins {begun[name]} times", "once")

    def _backward_lines(self) -> Iterator[tuple[str, fx.Node]]:
        """Yield the lines of backward, then those of the weights' gradients, each with the text's name."""
        return ((text, n) for text, lines in self._texts.items() if text != "forward" for n in lines.nodes)

    def _tapes(self) -> Iterator[Wrong]:
        """Check that no line reads a tape after a line that does not keep it."""
        empty: set[tuple[str, str]] = set()
        for text, n in self._backward_lines():
            if n.target is not ops.opaque_backward:
                continue
            tape: Any = n.args[0]
            while tape.target in (ops.reload_wait, ops.reload_start):
                tape = tape.args[0]
            key = (text if tape.op == "call_function" else "", tape.name)
            if key in empty or (("backward", tape.name) in empty and tape.op == "placeholder"):
                yield Wrong(text, n, f"{tape} is empty", "`keep=True` in the line before")
            if not n.kwargs.get("keep"):
                empty.add(key)

    def _scattered(self, text: str, n: fx.Node) -> Iterator[Wrong]:
        args: Any = n.args
        params, grads, name = args
        bucket = next((b for i, b in enumerate(self._program.buckets) if f"bucket{i}" == name), None)
        if bucket is None or tuple(p.name for p in params) != tuple(bucket.params):
            yield Wrong(text, n, f"{name} has other parameters")
        numbers = self.expected.scatters.get(name, ())
        if len(grads) != len(numbers):
            yield Wrong(text, n, f"{name} gets {len(grads)} gradients", f"{len(numbers)}")
        for p, g, want in zip(params, grads, numbers, strict=False):
            yield from self._compared(text, n, f"the gradient of {p.name}", g, want)

    # --- messages

    def _compared(
        self, text: str, at: fx.Node | None, label: str, value: fx.Node | None, want: Term | None
    ) -> Iterator[Wrong]:
        """Report a value that is another term, by the first line, from the inputs on, in which they differ.

        at: the line to name if there is none.
        """
        have = None if value is None else self._env[text][value]
        if have is None or want is None:
            if have is not want:
                state = "it is there" if have is not None else "there is none"
                yield Wrong(text, at, f"{label}: {state}", "none" if want is None else "one")
        elif have != want:
            a, b = self._deepest(have, want)
            where, line = self._line_of.get(a, (text, at))
            yield Wrong(where, line, f"{label} is not what the chain rule gives: this line differs", self._shown(b))

    def _deepest(self, have: Term, want: Term) -> tuple[Term, Term]:
        """Return the innermost unequal terms at the same place of both."""
        while True:
            (op, left), (other, right) = parts(have), parts(want)
            if op == "sum" and other == "sum":
                extra, missing = (list((Counter(x) - Counter(y)).elements()) for x, y in ((left, right), (right, left)))
                left, right = (extra, missing) if len(extra) == len(missing) else ([], [])
            if op != other or len(left) != len(right):
                return have, want
            pairs = [(x, y) for x, y in zip(left, right, strict=True) if x is not y]
            if not pairs or Counter(left) == Counter(right):  # constants differ, or operands are swapped
                return have, want
            have, want = pairs[0]

    def _shown(self, term: Term, depth: int = 2) -> str:
        op, operands = parts(term)
        if isinstance(op, str) and op != "sum":
            return op
        if depth == 0 or term in self._line_of:
            return self._line_of[term][1].name if term in self._line_of else "..."
        name = op if op == "sum" else getattr(op, "__name__", str(op))
        return f"{name}({', '.join(self._shown(t, depth - 1) for t in operands)})"


def _overwritten(graph: fx.Graph, fresh: set[fx.Node]) -> Iterator[tuple[fx.Node, str]]:
    """Yield lines that reuse memory that another line still reads. fresh: as of `_Texts.fresh`."""
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    memory: dict[fx.Node, fx.Node] = {}  # the line that allocated it
    sharing: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for n in nodes:
        first = _shared(n)
        if first is not None and _result(n) is not None:  # reading one result twice is the same memory
            memory[n] = next(u for u in first.users if u.target is operator.getitem and u.args == n.args)
        else:
            memory[n] = n if first is None else memory[first]
        sharing[memory[n]].append(n)
    for n in nodes:
        own = n.target is ops.accumulate and bool(n.kwargs.get("own"))
        if n.target is not ops.add_into and not own:
            continue
        x: Any = n.args[1] if own else n.args[0]
        maker = memory[x]
        op = _result(maker) or maker
        new = (isinstance(op.target, OpOverload) or maker in fresh) and not op.meta.get("repeats")
        if maker.op != "call_function" or not new:
            yield n, f"it takes over the memory of {maker.name}, which is not this text's own"
            continue
        rest = {n, *_views_of(n)} if not own else {n}
        for y in sharing[maker]:
            later = [u for u in y.users if place[u] > place[n] and u not in rest] if y not in rest else []
            if later:
                yield n, f"it takes over the memory of {y.name}, which {later[0].name} reads later"
        if not own and any(y in operands_of(n)[1:] for y in sharing[maker] if y is not x):
            yield n, "it is added to another view of itself"


def _result(n: fx.Node) -> fx.Node | None:
    """Return the op that n is one of several results of, if each has its own memory; else None."""
    of: Any = n.args[0] if n.target is operator.getitem else n
    separate = of.target is ops.opaque_backward or (isinstance(of.target, OpOverload) and not is_view(of.target))
    return of if separate and of is not n else None


def _shared(n: fx.Node) -> fx.Node | None:
    """Return the first operand of a line whose result may use its memory; else None."""
    first = n.args[0] if n.args and (is_view(n.target) or n.target is ops.add_into) else None
    return first if isinstance(first, fx.Node) else None


def _views_of(n: fx.Node) -> Iterator[fx.Node]:
    for u in (u for u in n.users if _shared(u) is n):
        yield u
        yield from _views_of(u)


def _unfinished(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Yield collectives and copies that begin and are not waited for exactly once, or are read before."""
    for n in graph.nodes:
        if (wait := _WAITS.get(n.target)) is None:
            continue
        waits, others = ([u for u in n.users if (u.target is wait) == of_wait] for of_wait in (True, False))
        if len(waits) != 1:
            yield n, f"what it begins is waited for {len(waits)} times"
        if others:
            yield n, f"{others[0].name} reads what is still on its way"
