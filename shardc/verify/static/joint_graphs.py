"""Check a stage's joint graphs: forward computes its results, backward the chain rule's gradients.

Each graph is read as terms (shardc.verify.static.terms). So it does not matter what is kept or recomputed, in which
order lines come, and where a sum is written. A separate check finds lines that read memory after another line reused
it. One text serves all ranks, so collectives have one order on all of them.
"""

from __future__ import annotations

import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import operands_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.stage import Joint, Pair, Stage, second_prefix
from shardc.passes.joint.derivatives import Rules
from shardc.passes.joint.derivatives.record import is_view
from shardc.passes.joint.derivatives.transposed import CONVERTED
from shardc.passes.joint.saved import types_of
from shardc.runtime import ops
from shardc.torch_private import OpOverload
from shardc.verify.static.chain_rule import ChainRule, Results
from shardc.verify.static.pair_halves import MixedError, halves
from shardc.verify.static.terms import Term, Terms

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
#: Ops that are no views, but whose result may use the memory of the first operand.
_MEMORY_OF_FIRST = {ops.add_into}


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
    yield from _without_gradient(program, stage, rules)
    terms = Terms()
    expected = ChainRule(program, stage, rules, terms, until).results()
    texts = _Texts(program, stage, terms, expected)
    yield from texts.wrong()
    for name, graph in stage.joint.graphs.items():
        for node, fault in _overwritten(graph, texts.fresh(name)):
            yield Wrong(name, node, fault)
        for node, fault in _unfinished(graph):
            yield Wrong(name, node, fault)


def _without_gradient(program: Program, stage: Stage, rules: Rules) -> Iterator[Wrong]:
    """Yield conversions whose result needs a gradient, but has none when the graph is differentiated.

    The chain rule stops there in joint graphs and in expected terms. (For torch's ops autograd says which have one.)
    A value that is used only for new values of buffers needs none.
    """
    types, _ = types_of(program, stage.graph, rules)
    returned: Any = stage.graph.output_node().args[0]
    loss, _, *sent = returned
    needed: set[fx.Node] = set()
    fx.map_arg((loss, sent), needed.add)
    for n in reversed(stage.graph.nodes):
        if n in needed:
            needed.update(n.all_input_nodes)
        known = types.get((n, 0)) if n in needed and n.target in CONVERTED else None
        if known is not None and n.meta["value"].requires_grad and not known.grad:
            yield Wrong("backward", n, "it needs a gradient, and the chain rule stops here")


def wrong_in_pair(program: Program, pair: Pair, rules: Rules, until: float = math.inf) -> Iterator[Wrong]:
    """Yield what is wrong in the text of an overlapped pair.

    It is read as two texts, each in place of a stage's own. No line may reuse memory that either half still reads.
    """
    one, other = program.stages[pair.first], program.stages[pair.then]
    assert one.joint is not None
    assert other.joint is not None
    try:
        first, then = halves(program, pair.graph, prefix := second_prefix(pair.kind, one.joint.forward))
    except MixedError as e:
        yield Wrong("pair", e.line, "it takes a value of the other microbatch", "one of its own half")
        return
    with_first = replace(one, joint=replace(one.joint, forward=first))
    if pair.kind == "FB":
        with_then, second = replace(other, joint=Joint(other.joint.forward, then)), "backward"
    else:
        with_then, second = replace(other, joint=replace(other.joint, forward=then)), "second forward"
    for stage, half in ((with_first, "forward"), (with_then, second)):
        terms = Terms()
        expected = ChainRule(program, stage, rules, terms, until).results()
        texts = _Texts(program, stage, terms, expected)
        yield from (replace(w, text=f"pair, {half}") for w in texts.wrong())
    fresh = {f"{prefix}{name}" for name in texts.fresh("backward")}
    for node, fault in (*_overwritten(pair.graph, fresh), *_unfinished(pair.graph)):
        yield Wrong("pair", node, fault)


class _Texts:
    """The graphs of one stage as terms, compared with the expected ones."""

    def __init__(self, program: Program, stage: Stage, terms: Terms, expected: Results) -> None:
        assert stage.joint is not None
        self._program, self._stage, self._terms, self._expected = program, stage, terms, expected
        self._texts = stage.joint.graphs
        self._env: dict[str, dict[fx.Node, Term]] = {name: {} for name in self._texts}
        #: By term: the first line, of any text, that computes it.
        self._line_of: dict[int, tuple[str, fx.Node]] = {}

    def wrong(self) -> Iterator[Wrong]:
        forward = self._texts["forward"]
        self._read("forward", {})
        returned: Any = forward.output_node().args[0]
        *results, kept = returned
        yield from self._returned(results)
        inputs = {n.name: self._env["forward"][n] for n in kept}
        if len(inputs) != len(kept):
            yield Wrong("forward", None, "two values that are kept have one name")
        backward = self._texts["backward"]
        self._read("backward", inputs)
        grads: Any = backward.output_node().args[0]
        if "weights" in self._texts:
            grads, crossing = grads
            inputs |= {n.name: self._env["backward"][n] for n in crossing}
            self._read("weights", inputs)
        yield from self._received(grads)
        yield from self._parameters()
        yield from self._tapes()

    def fresh(self, text: str) -> set[str]:
        """Return the lines of a text that are results of ops that stay whole, in new memory. After `wrong`."""
        return {n.name for n, term in self._env[text].items() if term.number in self._expected.fresh}

    def _read(self, text: str, given: dict[str, Term]) -> None:
        """Compute the term of each line. given: inputs from another text, by name; others are the stage's."""
        env = self._env[text]

        def put(n: fx.Node) -> Any:
            return env[n]

        for n in self._texts[text].nodes:
            if n.op == "placeholder":
                env[n] = given[n.name] if n.name in given else Term(self._terms.given(n.name))
            elif n.op == "call_function":
                args, kwargs = fx.map_arg(n.args, put), fx.map_arg(dict(n.kwargs), put)
                env[n] = Term(self._terms.call(n.target, args, kwargs, self._shape(n)))
                self._line_of.setdefault(env[n].number, (text, n))

    def _shape(self, n: fx.Node) -> tuple[int, ...] | None:
        """Return the shape of a line with a single tensor; types in joint graphs are those of a rank."""
        value = n.meta.get("value")
        return tuple(value.shape) if isinstance(value, Value) else None

    def _returned(self, results: list[Any]) -> Iterator[Wrong]:
        expected = [*self._expected.returned, *[()] * (len(results) - len(self._expected.returned))]

        def put(n: fx.Node) -> Any:
            return self._env["forward"][n]

        named = ("the loss", "new values and outputs", "what is sent")
        for label, nodes, right in zip(named, results, expected, strict=True):
            terms: Any = fx.map_arg(nodes, put)
            if isinstance(nodes, tuple | list):
                rows = list(zip(nodes, terms, right, strict=True)) if len(terms) == len(right) else None
            else:
                rows = [(nodes, terms, right)]
            if rows is None:
                yield Wrong("forward", None, f"{label}: {len(terms)} values", f"{len(right)}")
                continue
            for node, have, want in rows:
                if have != want:
                    yield self._differs("forward", node, f"{label}: {node}", have, want)

    def _received(self, grads: Any) -> Iterator[Wrong]:
        """Compare the gradients that go to earlier stages."""
        named = [
            n.name
            for n in self._stage.graph.find_nodes(op="placeholder")
            if "collective" in n.meta and n.meta["value"].requires_grad
        ]
        if len(named) != len(grads):
            yield Wrong("backward", None, f"it returns {len(grads)} gradients", f"{len(named)}: {', '.join(named)}")
            return
        for name, node in zip(named, grads, strict=True):
            number = self._expected.received.get(name)
            have = None if node is None else self._env["backward"][node]
            want = None if number is None else Term(number)
            if have != want:
                yield self._differs("backward", node, f"the gradient of {name}", have, want)

    def _parameters(self) -> Iterator[Wrong]:
        """Check that each gradient is put once, and each bucket's sum starts once, after all its gradients."""
        begun: Counter[str] = Counter()
        puts: Counter[int] = Counter()
        bucket_of = {name: f"bucket{i}" for i, b in enumerate(self._program.buckets) for name in b.params}
        for text in ("backward", "weights"):
            for n in self._texts[text].nodes if text in self._texts else ():
                args: Any = n.args
                if n.target is ops.accumulate:
                    term = self._env[text][args[0]].number
                    name, number = self._expected.puts.get(term, (args[0].name, None))
                    puts[term] += 1
                    have = self._env[text][args[1]]
                    if have != (want := None if number is None else Term(number)):
                        yield self._differs(text, n, f"the gradient of {name}", have, want)
                    if begun[bucket_of.get(name, "")]:
                        yield Wrong(text, n, f"{name}'s bucket is being summed already", "put it before")
                elif n.target is ops.launch:
                    begun[args[1]] += 1
                elif n.target is ops.scatter:
                    begun[args[2]] += 1
                    yield from self._scattered(text, n)
        for term, (name, _) in self._expected.puts.items():
            if puts[term] != 1:
                yield Wrong("backward", None, f"{name} gets its gradient {puts[term]} times", "once")
        yield from self._begun(begun)

    def _tapes(self) -> Iterator[Wrong]:
        """Check that no line reads a tape after a line that does not keep it."""
        empty: set[tuple[str, str]] = set()
        for text in ("backward", "weights"):
            for n in self._texts[text].nodes if text in self._texts else ():
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

    def _begun(self, begun: Counter[str]) -> Iterator[Wrong]:
        """Check that each gathered bucket's sum begins once, and any other's at most once."""
        for name in self._expected.scatters:
            if begun[name] != 1:
                yield Wrong("backward", None, f"the sum of {name} begins {begun[name]} times", "once")
        for name, times in begun.items():
            if times > 1 and name not in self._expected.scatters:
                yield Wrong("backward", None, f"the sum of {name} begins {times} times", "once")

    def _scattered(self, text: str, n: fx.Node) -> Iterator[Wrong]:
        params, grads, name = n.args
        bucket = next((b for i, b in enumerate(self._program.buckets) if f"bucket{i}" == name), None)
        if bucket is None or tuple(p.name for p in params) != tuple(bucket.params):  # type: ignore[union-attr]
            yield Wrong(text, n, f"{name} has other parameters")
        numbers = self._expected.scatters.get(str(name), ())
        have = tuple(None if g is None else self._env[text][g] for g in grads)  # type: ignore[union-attr, index]
        want = tuple(None if g is None else Term(g) for g in numbers)
        if have != want:
            k = next((i for i, (a, b) in enumerate(zip(have, want, strict=False)) if a != b), 0)
            param = params[k].name  # type: ignore[index, union-attr]
            yield self._differs(
                text, n, f"the gradient of {param}", have[k] if have else None, want[k] if want else None
            )

    # --- messages

    def _differs(self, text: str, node: Any, what: str, have: Term | None, want: Term | None) -> Wrong:
        """Report two unequal terms by the first line, from the inputs on, in which they differ."""
        if have is None or want is None:
            state = "it is there" if have is not None else "there is none"
            return Wrong(text, node, f"{what}: {state}", "none" if want is None else "one")
        a, b = self._deepest(have.number, want.number)
        where, line = self._line_of.get(a, (text, node))
        return Wrong(where, line, f"{what} is not what the chain rule gives: this line differs", self._shown(b))

    def _deepest(self, have: int, want: int) -> tuple[int, int]:
        """Return the innermost unequal terms at the same place of both."""
        while True:
            (op, left), (other, right) = self._terms.parts(have), self._terms.parts(want)
            if op == "sum" and other == "sum":
                extra, missing = (list((Counter(x) - Counter(y)).elements()) for x, y in ((left, right), (right, left)))
                left, right = (extra, missing) if len(extra) == len(missing) else ([], [])
            if op != other or len(left) != len(right):
                return have, want
            pairs = [(x, y) for x, y in zip(left, right, strict=True) if x != y]
            if not pairs or sorted(left) == sorted(right):  # constants differ, or operands are swapped
                return have, want
            have, want = pairs[0]

    def _shown(self, term: int, depth: int = 2) -> str:
        op, parts = self._terms.parts(term)
        if isinstance(op, str) and op != "sum":
            return op
        if depth == 0 or term in self._line_of:
            return self._line_of[term][1].name if term in self._line_of else "..."
        name = op if op == "sum" else getattr(op, "__name__", str(op))
        return f"{name}({', '.join(self._shown(t, depth - 1) for t in parts)})"


def _overwritten(graph: fx.Graph, fresh: set[str]) -> Iterator[tuple[fx.Node, str]]:
    """Yield lines that reuse memory that another line still reads. fresh: as of `_Texts.fresh`."""
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    memory: dict[fx.Node, fx.Node] = {}  # the line that allocated it
    sharing: defaultdict[fx.Node, list[fx.Node]] = defaultdict(list)
    for n in nodes:
        first = n.args[0] if n.args and isinstance(n.args[0], fx.Node) else None
        shares = first is not None and (is_view(n.target) or n.target in _MEMORY_OF_FIRST)
        if _result(n) is not None:  # each result has its own memory; reading one twice is the same memory
            memory[n] = next(u for u in first.users if u.target is operator.getitem and u.args == n.args)  # type: ignore[union-attr]
        else:
            memory[n] = memory[first] if shares and first is not None else n
        sharing[memory[n]].append(n)
    for n in nodes:
        own = n.target is ops.accumulate and bool(n.kwargs.get("own"))
        if n.target is not ops.add_into and not own:
            continue
        x: Any = n.args[1] if own else n.args[0]
        maker = memory[x]
        op = _result(maker) or maker
        new = (isinstance(op.target, OpOverload) or maker.name in fresh) and not op.meta.get("repeats")
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


def _views_of(n: fx.Node) -> Iterator[fx.Node]:
    for u in n.users:
        if u.args and u.args[0] is n and (is_view(u.target) or u.target in _MEMORY_OF_FIRST):
            yield u
            yield from _views_of(u)


def _unfinished(graph: fx.Graph) -> Iterator[tuple[fx.Node, str]]:
    """Yield collectives and copies that begin and are not waited for exactly once, or are read before."""
    for n in graph.nodes:
        wait = _WAITS.get(n.target) if n.op == "call_function" else None
        if wait is None:
            continue
        waits = [u for u in n.users if u.target is wait]
        if len(waits) != 1:
            yield n, f"what it begins is waited for {len(waits)} times"
        others = [u for u in n.users if u.target is not wait]
        if others:
            yield n, f"{others[0].name} reads what is still on its way"
