"""Turn loops over experts, written as all experts on all rows (all_rows.py), into the experts op.

    before   y = zeros
             y = index_add(y, 0, t, where(m0, linear(silu(linear(x[t], up0)), down0) * w, 0))        one step an expert
             y = index_add(y, 0, t, where(m1, linear(silu(linear(x[t], up1)), down1) * w, 0))
    after    y = experts(x, index, w, stack([up0, up1]), stack([down0, down1]), None, None, "silu(x)", False)

A mixture of experts is several steps that add to (or fill) the same tensor and differ only in parameters and masks. The
steps are unified: parts that are the same in all belong to the tokens, parameters are stacked, and other differences
are weights of the choices. Only the computation counts, not how the model writes it down. Random choices test whether
masks exclude each other, and whether `index` agrees with them, as in shardc.passes.canonical.grouped_mm; the whole is
proven against eager as any captured graph is (shardc.capture.compare_eager). Other loops stay as they are: slow, and
right.

Rows that a model sorts by expert stay sorted here, each with one choice; that pass then removes the order.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from shardc.capture.constants import is_random
from shardc.errors import ShardcError
from shardc.ir import types as values
from shardc.ir.graph import copy_graph, placeholders, source_of, value_of
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.types import op_name
from shardc.nn import text_of
from shardc.passes.canonical.choices import draws, leaves, numel, run, unrepeated
from shardc.passes.canonical.rewrite import Emit, shape
from shardc.torch_private import OpOverload

aten = torch.ops.aten
#: Ops whose result has the elements of the operand in their order.
_SAME = {"reshape", "view", "_unsafe_view", "flatten", "clone", "contiguous", "squeeze", "unsqueeze", "alias"}
_MOVES = _SAME | {"index", "transpose", "permute", "t", "expand", "select", "slice", "index_select", "gather"}


class StaysLoop(Exception):
    """Raised for steps that are no mixture of experts of this form."""


def with_experts(program: Program) -> Program:
    """Replace the program's loops over experts by ops; add notes for those that stay loops."""
    writer = _Writer(program)
    writer.run()
    return replace(program, graph=writer.graph, notes=(*program.notes, *writer.notes))


class _Writer:
    def __init__(self, program: Program) -> None:
        self.graph = copy_graph(program.graph)
        self.emit = Emit(self.graph, placeholders(self.graph)["rng"])
        self.notes: list[str] = []

    def run(self) -> None:
        loops = list(chains(self.graph))
        self.sums = {
            steps[-1].node: (tuple(s.mask for s in steps), tuple(s.value for s in steps))
            for steps in loops
            if _zeros(steps[0].before) and all(s.adds for s in steps)
        }
        for steps in reversed(loops):
            last = steps[-1].node
            if not last.users:
                continue  # it was part of another loop
            self.emit.source = source_of(last)
            try:
                with self.graph.inserting_before(last):
                    last.replace_all_uses_with(self._mixture(steps))
            except StaysLoop as e:
                self.notes.append(
                    f"{source_of(last) or 'a loop over experts'}: all {len(steps)} experts run on all rows, because the"
                    f" loop could not become one op ({e}); use `shardc.nn.experts`"
                )
            for n in reversed(self.graph.nodes):
                if n.op == "call_function" and not n.users and (not n.is_impure() or bare(n) is not n):
                    self.graph.erase_node(n)

    def _mixture(self, steps: list[Step]) -> fx.Node:
        """Write the op of a loop before its last step; return what replaces that one."""
        first, last, emit = steps[0], steps[-1].node, self.emit
        if any(s.adds != first.adds or not _equal(s.to, first.to) for s in steps):
            raise StaysLoop("its iterations write in different ways")
        masks = tuple(s.mask for s in steps)
        factors, core = weighted(Unifier(masks, self.sums).unified([s.value for s in steps]))
        width = shape(first.value)[-1]
        n = numel(first.value) // width
        x, up, down, up_bias, down_bias, text, transposed = self._expert(core)
        if any(numel(m) != n for m in masks) or shape(x)[-1] != width:
            raise StaysLoop("its masks and its experts' results have different rows")
        x, index, share = self._choices(_Trial(masks), factors, first.to, x, n)
        rows = emit.reshape(x, (numel(x) // width, width))
        typed = replace(value_of(rows), requires_grad=values.requires_grad(first.value))
        args = (rows, index, share, up, down, up_bias, down_bias, text, transposed)
        result = emit.reshape(emit.typed(typed, torch.ops.shardc.experts.default, *args), shape(last))
        if typed.dtype != value_of(last).dtype:
            result = emit(aten._to_copy.default, result, dtype=value_of(last).dtype)
        base = first.before
        if _zeros(base):
            return result
        if first.adds:
            return emit(aten.add.Tensor, base, result)
        routed = emit(aten.any.dim, emit(aten.ge.Scalar, index, 0), -1)
        return emit(aten.where.self, emit.reshape(routed, (*shape(last)[:-1], 1)), result, base)

    # --- the expert

    def _expert(self, core: Any) -> tuple[Any, ...]:
        """Return (tokens, up, down, biases, the activation's text, transposed) of an expert's computation."""
        if (second := _product(core)) is None:
            raise StaysLoop("its experts do not end with a product with a parameter")
        middle, down_weight, down_bias, down_transposed = second
        firsts = list(dict.fromkeys(_products_in(middle)))
        ups = [p for t in firsts if (p := _product(t)) is not None]
        forms = {(x, transposed, weight.size, bias is None) for x, weight, bias, transposed in ups}
        if len(forms) != 1 or not isinstance(ups[0][0], fx.Node):
            raise StaysLoop("its experts do not begin with products of the rows")
        ((x, transposed, _, plain),) = forms
        out = [shape(t.nodes[0])[-1] for t in firsts]

        def activation(y: Tensor) -> Any:
            known: dict[Each, Any] = dict(zip(firsts, y.split_with_sizes(out, -1), strict=True))

            def value(t: Any) -> Any:
                if isinstance(t, tuple):
                    return [value(part) for part in t]
                if isinstance(t, Each) and t not in known:
                    known[t] = t.target(*value(t.args), **{k: value(v) for k, v in t.kwargs})
                return known[t] if isinstance(t, Each) else t

            return value(middle)

        try:
            text = text_of(activation, sum(out), down_weight.size[0 if down_transposed else 1])
        except (ShardcError, KeyError, RuntimeError, TypeError) as e:
            raise StaysLoop("its experts compute more than elementwise ops between two products") from e
        up = self._joined([p[1] for p in ups], 2 if transposed else 1)
        up_bias = None if plain else self._joined([p[2] for p in ups], 1)
        down = self._joined([down_weight], 1)
        if down_transposed != transposed:
            down = self.emit(aten.transpose.int, down, 1, 2)
        biases = up_bias, None if down_bias is None else self._joined([down_bias], 1)
        return x, up, down, *biases, text, transposed

    def _joined(self, stacks: list[Any], dim: int) -> fx.Node:
        nodes = [s.nodes[0] if len(s.nodes) == 1 else self.emit(aten.stack.default, list(s.nodes)) for s in stacks]
        return nodes[0] if len(nodes) == 1 else self.emit(aten.cat.default, nodes, dim)

    # --- the choices

    def _choices(
        self, trial: _Trial, factors: list[Any], to: Tensor | None, x: fx.Node, n: int
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Return tokens, their experts [tokens, k] (-1: none), and weights. to: each row's token, or None."""
        order = torch.arange(n).view(n, 1)  # [tokens, k]: the rows of each token
        if to is not None:
            x, rows = _taken(x)
            t = numel(x) // shape(x)[-1]
            if not _equal(rows, to) or not torch.equal(to.bincount(minlength=t), torch.full((t,), n // t)):
                raise StaysLoop("rows are not added to the tokens that they come from")
            order = to.argsort(stable=True).view(t, n // t)
        t, k = order.shape
        emit = self.emit
        plain = all(isinstance(f, (int, float, fx.Node)) for f in factors)
        if plain and (leaf := trial.index(order)) is not None:
            numbers = index = emit.reshape(leaf, (t, k))
        elif to is None:
            chosen = emit(aten.stack.default, [emit.reshape(m, (n,)) for m in trial.masks], 1)  # [n, experts]
            if all(bool((c.sum(0) <= 1).all()) for _, c in trial.tries):  # masks exclude each other
                numbers = emit(aten._to_copy.default, chosen, dtype=torch.int64)
                numbers = emit.reshape(emit(aten.argmax.default, numbers, 1), (n, 1))
            elif (covering := trial.covering(n)) is not None:
                numbers = emit.reshape(covering, (n, numel(covering) // n))
            else:
                numbers = emit.expand(emit(aten.arange.default, len(trial.masks)), [n, len(trial.masks)])
            inside = emit(aten.gather.default, chosen, 1, numbers)
            index = emit(aten.where.ScalarOther, inside, numbers, -1)
        else:
            raise StaysLoop("no number says which expert a token chose")
        share: Any = 1.0
        for f in factors:
            if isinstance(f, fx.Node):
                single = numel(f) == 1
                origin = f if single else _moved(f, order)
                if origin is None:
                    raise StaysLoop("its weights do not belong to its rows")
                f = emit.reshape(origin, (1, 1) if single else (t, k))
            elif not isinstance(f, (int, float)):
                if len(f.nodes) != len(trial.masks):
                    raise StaysLoop("its weights are one tensor for all experts")
                flat = [emit.expand(emit.reshape(c, (numel(c),)), [n]) for c in f.nodes]
                f = emit(aten.gather.default, emit(aten.stack.default, flat, 1), 1, numbers)
            share = self._times(share, f)
        if isinstance(share, fx.Node):
            return x, index, emit.expand(share, list(shape(index)))
        return x, index, emit(aten.full.default, list(shape(index)), float(share), dtype=value_of(x).dtype)

    def _times(self, a: Any, b: Any) -> Any:
        if not isinstance(a, fx.Node) and not isinstance(b, fx.Node):
            return a * b
        a, b = (a, b) if isinstance(a, fx.Node) else (b, a)
        return a if isinstance(b, float) and b == 1.0 else self.emit(aten.mul.Tensor, a, b)


class _Trial:
    """Tests masks on random choices, such as which numbers agree with them."""

    def __init__(self, masks: tuple[fx.Node, ...]) -> None:
        self.masks = masks
        self.drawn = leaves(masks)
        self.tries: list[tuple[dict[fx.Node, Any], Tensor]] = []  # drawn values, and the masks [experts, n]
        for _, known in zip(range(3), draws(self.drawn, len(masks)), strict=False):
            try:
                results = run(masks, known)
            except (RuntimeError, IndexError, KeyError) as e:
                raise StaysLoop("its masks cannot be evaluated") from e
            self.tries.append((known, torch.stack([m.reshape(-1).bool() for m in results])))

    def _chosen_by(self, leaf: fx.Node, known: dict[fx.Node, Any], n: int) -> Tensor:
        """Return bool [experts, n, k]: whether a leaf's number is an expert's."""
        return known[leaf].reshape(n, -1) == torch.arange(len(self.masks)).view(-1, 1, 1)  # type: ignore[no-any-return]

    def _numbers(self, n: int) -> Iterator[fx.Node]:
        for leaf in self.drawn:
            dtype = leaf.meta["value"].dtype
            if numel(leaf) % n == 0 and not dtype.is_floating_point and dtype != torch.bool:
                yield leaf

    def index(self, order: Tensor) -> fx.Node | None:
        """Return the leaf that contains, in this order of the masks' rows, the number of the true mask."""
        n = order.numel()
        for leaf in (m for m in self._numbers(n) if numel(m) == n):
            if all(torch.equal(self._chosen_by(leaf, k, n)[..., 0], c[:, order.reshape(-1)]) for k, c in self.tries):
                return leaf
        return None

    def covering(self, n: int) -> fx.Node | None:
        """Return numbers of experts [n, k], without repeats, that include all whose mask is true."""
        for leaf in self._numbers(n):
            more = any(bool((c & ~self._chosen_by(leaf, k, n).any(-1)).any()) for k, c in self.tries)
            if not more and unrepeated(leaf) and shape(leaf)[-1] == numel(leaf) // n:
                return leaf
        return None


def _taken(x: fx.Node) -> tuple[fx.Node, Tensor | None]:
    """Return (y, which row of y each row of x is) for rows selected by a constant index."""
    node = bare(x, rows=True)
    if node.target is aten.index.Tensor:
        where: Any = node.args[1]
        indexed = [d for d, i in enumerate(where) if i is not None]
        size = shape(bare(node.args[0]))
        if len(indexed) == 1 and indexed[0] == len(size) - 2 and torch.Size(size[: indexed[0]]).numel() == 1:
            return bare(node.args[0], rows=True), constant_of(where[indexed[0]])
    elif node.target is aten.index_select.default and node.args[1] == 0 and len(shape(node.args[0])) == 2:
        return node.args[0], constant_of(node.args[2])
    return node, None


def _moved(node: fx.Node, order: Tensor) -> fx.Node | None:
    """Return the value whose elements, in row-major order, are a node's in this order."""
    path = [node]
    while isinstance(path[-1].target, OpOverload) and op_name(path[-1].target) in _MOVES:
        n = path[-1]
        x: Any = n.args[0]
        if any(constant_of(o) is None for o in n.all_input_nodes if o is not x):
            break
        path.append(x)
    for origin in reversed([x for x in path if numel(x) == numel(node) == order.numel()]):
        try:
            (places,) = run([node], {origin: torch.arange(numel(origin)).view(shape(origin))})
        except RuntimeError:  # an op that takes no integers
            continue
        if torch.equal(places.reshape(-1)[order.reshape(-1)], torch.arange(order.numel())):
            return origin
    return None


def _zeros(node: fx.Node) -> bool:
    start = bare(node, rows=True)
    return start.op == "call_function" and op_name(start.target) in ("zeros", "zeros_like", "new_zeros")


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b or (a is not None and b is not None and torch.equal(a, b))


# --- steps ------------------------------------------------------------------------------------------------------------


def bare(node: Any, *, rows: bool = False) -> Any:
    """Skip ops that change nothing. rows: also skip ops that only change the shape."""
    while isinstance(node, fx.Node) and isinstance(node.target, OpOverload) and node.args:
        name, x = op_name(node.target), node.args[0]
        old, new = (n.meta.get("value") if isinstance(n, fx.Node) else None for n in (x, node))
        if not isinstance(old, Value) or not isinstance(new, Value) or old.dtype != new.dtype:
            break
        off = name == "dropout" and (node.args[1] == 0 or not node.args[2])
        kept = name in _SAME and rows
        kept |= name in _SAME | {"to", "_to_copy", "expand"} and old.shape == new.shape
        if not off and not kept:
            break
        node = x
    return node


def constant_of(node: Any) -> Tensor | None:
    """Return the value of a tensor that depends on no placeholder, or None."""
    if not isinstance(node, fx.Node) or any(n.op == "placeholder" for n in values.behind([node])):
        return None
    value: Tensor = run([node], {})[0]
    return value


@dataclass(frozen=True)
class Step:
    """`before` with rows written to it.

    adds: whether rows are added, or replace the old ones. mask: bool [n]. value: these rows. to: i64 [n], the row that
    each is written to; None: its own row.
    """

    node: fx.Node
    before: fx.Node
    adds: bool
    mask: fx.Node
    value: fx.Node
    to: Tensor | None = None


def _step(node: Any) -> Step | None:
    """Return the last write to a tensor, if it is of rows selected by a mask."""
    args, to = node.args, None
    if node.target is aten.where.self and isinstance(args[1], fx.Node) and shape(args[1]) == shape(node):
        mask = _mask(args[0], node)
        return Step(node, args[2], False, mask, args[1]) if mask is not None else None
    if node.target is aten.index_add.default and args[1] == 0 and not node.kwargs:
        before, rows, to = args[0], args[3], constant_of(args[2])
        if to is None:
            return None
    elif node.target is aten.add.Tensor and not node.kwargs and isinstance(args[1], fx.Node):
        before, rows = args[:2]
        if shape(rows) != shape(node):
            return None
    else:
        return None
    masked = bare(rows, rows=True)
    if not isinstance(masked, fx.Node) or masked.target is not aten.where.ScalarOther or masked.args[2] != 0:
        return None
    mask = _mask(masked.args[0], masked)
    return None if mask is None else Step(node, before, True, mask, masked.args[1], to)  # type: ignore[arg-type]


def _mask(mask: Any, of: fx.Node) -> fx.Node | None:
    """Return the mask of rows, bool of any shape, behind a mask of [rows, 1]."""
    size, rest = shape(mask), shape(of)
    cut = max((d + 1 for d, n in enumerate(size) if n != 1), default=0)
    if len(size) != len(rest) or cut in (0, len(rest)) or size[:cut] != rest[:cut]:
        return None
    rows: fx.Node = bare(mask, rows=True)
    return rows


def chains(graph: fx.Graph) -> Iterator[list[Step]]:
    """Yield steps that write to one tensor, one after the other, in the order of the graph."""
    steps: dict[fx.Node, Step] = {n: s for n in graph.nodes if n.op == "call_function" and (s := _step(n)) is not None}
    follows: dict[fx.Node, fx.Node] = {}
    for n, s in steps.items():
        before = bare(s.before, rows=True)
        if before in steps and steps[before].adds == s.adds:
            follows[n] = before
    followed = set(follows.values())
    for n in [n for n in steps if n not in followed]:
        chain = [n]
        while chain[-1] in follows:
            chain.append(follows[chain[-1]])
        if len(chain) > 1:
            yield [steps[m] for m in reversed(chain)]


# --- unification ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Each:
    """A value that differs between experts: one node each, or a single one, [experts, ...].

    target, args, kwargs: the call that makes it, if that is the same for all; arguments that differ are `Each`, too.
    """

    nodes: tuple[fx.Node, ...]
    target: Any = None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    @property
    def size(self) -> tuple[int, ...]:
        """The shape of an expert's parameter; () for values that are no parameters, or not of one expert each."""
        if len(self.nodes) == 1:
            return shape(self.nodes[0])[1:]
        stored = all(n.op == "placeholder" for n in self.nodes) and len(set(self.nodes)) == len(self.nodes)
        return shape(self.nodes[0]) if stored else ()


@dataclass
class Unifier:
    """Finds the common structure of steps. A node is one value for all. sums: {sum of masked rows: (masks, values)}."""

    masks: tuple[fx.Node, ...]
    sums: dict[fx.Node, tuple[tuple[fx.Node, ...], tuple[fx.Node, ...]]]
    known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def unified(self, turns: Sequence[Any]) -> Any:
        nodes = tuple(bare(n) for n in turns)
        if nodes not in self.known:
            self.known[nodes] = self._unified(nodes)
        return self.known[nodes]

    def _has_masks(self, node: fx.Node) -> bool:
        return node in self.sums and self.sums[node][0] == self.masks

    def _unified(self, nodes: tuple[Any, ...]) -> Any:
        first = nodes[0]
        if not isinstance(first, fx.Node):
            return first if all(type(n) is type(first) and n == first for n in nodes) else None
        if all(n is first for n in nodes):
            if self._has_masks(first):
                return self.unified(self.sums[first][1])
            if not any(map(self._has_masks, values.behind([first]))):
                return first
        if not all(isinstance(n, fx.Node) and n.meta["value"] == first.meta["value"] for n in nodes):
            return None
        if (whole := _parts(nodes)) is not None and whole.op == "placeholder":
            return Each((whole,))
        if all(n.op == "call_function" and n.target == first.target for n in nodes):
            args = self._arguments([n.args for n in nodes])
            kwargs = self._arguments([tuple(sorted(n.kwargs.items())) for n in nodes])
            if args is not None and kwargs is not None:
                differs = is_random(first) or any(map(_differs, (*args, *kwargs)))
                return Each(nodes, first.target, args, kwargs) if differs else first
        return Each(nodes)

    def _arguments(self, many: Sequence[Any]) -> Any:
        """Unify arguments; return None if they differ in more than nodes."""
        first = many[0]
        if isinstance(first, (tuple, list)):
            if any(not isinstance(m, (tuple, list)) or len(m) != len(first) for m in many):
                return None
            parts = [self._arguments(p) for p in zip(*many, strict=True)]
            wrong = any(p is None and q is not None for p, q in zip(parts, first, strict=True))
            return None if wrong else tuple(parts)
        return self.unified(many)


def _differs(x: Any) -> bool:
    """Return whether a template contains anything that differs between experts."""
    return any(map(_differs, x)) if isinstance(x, tuple) else isinstance(x, Each)


def _parts(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return the tensor whose entries these are, in order."""
    wholes = set()
    for e, n in enumerate(nodes):
        x: Any = n.args[0] if n.args else None
        if n.target is aten.select.int and n.args[1:] == (0, e):
            wholes.add(bare(x))
        elif n.target is operator.getitem and n.args[1] == e and x.target is aten.unbind.int:
            wholes.add(bare(x.args[0]))
        else:
            return None
    (whole, *others) = wholes
    return whole if not others and shape(whole)[0] == len(nodes) else None


# --- what one expert computes -----------------------------------------------------------------------------------------


def _product(t: Any) -> tuple[Any, Each, Each | None, bool] | None:
    """Return (x, weight, bias, False) of `x @ weight.T + bias` with parameters of the experts; True: `x @ weight`."""
    if not isinstance(t, Each) or t.target not in (aten.linear.default, aten.matmul.default, aten.mm.default):
        return None
    x, weight, bias = (*t.args, None)[:3]
    transposed = t.target is not aten.linear.default
    while isinstance(weight, Each) and weight.target in (aten.t.default, aten.transpose.int, aten.numpy_T.default):
        weight, transposed = weight.args[0], not transposed
    if (
        not isinstance(weight, Each)
        or len(weight.size) != 2
        or not (bias is None or (isinstance(bias, Each) and bias.size))
    ):
        return None
    return x, weight, bias, transposed


def _products_in(t: Any) -> Iterator[Each]:
    """Yield the products that a value is made of."""
    if isinstance(t, tuple):
        for part in t:
            yield from _products_in(part)
    elif isinstance(t, Each) and t.target is not None:
        yield from [t] if _product(t) is not None else _products_in((t.args, t.kwargs))
    elif isinstance(t, (fx.Node, Each)):
        raise StaysLoop("its experts are not two layers of products with elementwise ops in between")


def weighted(t: Any) -> tuple[list[Any], Any]:
    """Split a product into (weights [n, 1] or numbers, the rest), without casts: the op casts itself."""
    factors: list[Any] = []
    while isinstance(t, Each):
        name = op_name(t.target)
        if name in ("to", "_to_copy") or (name in _SAME and rows_of(t) == rows_of(t.args[0])):
            t = t.args[0]
            continue
        columns = [i for i, side in enumerate(t.args) if _column(side, t)] if name == "mul" else []
        if len(columns) != 1:
            break
        factors.append(t.args[columns[0]])
        t = t.args[1 - columns[0]]
    return factors, t


def rows_of(x: Any) -> tuple[int, int] | None:
    """Return (rows, columns) of a value."""
    node = x.nodes[0] if isinstance(x, Each) else x if isinstance(x, fx.Node) else None
    return (numel(node) // max(shape(node)[-1], 1), shape(node)[-1]) if node and shape(node) else None


def _column(side: Any, out: Each) -> bool:
    """Return whether it is a number for each row of `out`, or one for all."""
    rows, all_ = rows_of(side), rows_of(out)
    return isinstance(side, (int, float)) or (rows is not None and all_ is not None and rows in ((1, 1), (all_[0], 1)))
