"""Closed forms: what is kept, in batch, sequence, hidden, heads, layers and the mesh's sizes, as sympy expressions.

    cost = program.cost()
    cost.symbolic.layers["h"]            per layer and microbatch: 5*batch*heads*sequence**2/tp + ...
    cost.symbolic.activations            of a microbatch: layers*(...) + ...
    cost.symbolic.parameters, .gradients, .optimizer
    cost.symbolic.flops, .layer_flops["h"], .comm["tp", "all_reduce"]

What is kept is what the dry run kept; its sizes are read back as products of named ones (shardc.cost.size_symbols), so
sizes have to differ (a batch of 5, not of 8 where there are 8 heads). They may be named: `cost.forms(heads=96)`.

`papers` counts as "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al. 2022) does:
    - a dropout keeps its mask, a byte an element, unless a checkpoint region computes it again; a program computes
      all masks again;
    - numbers per row (a norm's mean and deviation) are left out: it keeps what has a factor hidden or heads;
    - what is gathered for a product (sequence parallelism) counts as the part that it was gathered from, as Megatron
      gathers it again in backward, while a program keeps it, if no checkpoint region says otherwise.
And as "ZeRO" (Rajbhandari et al. 2020) does: at ZeRO 3 a rank keeps its part of the parameters in 16 bits as well,
beside the part in 32 bits that the optimizer updates, while a program casts it when it is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce

import sympy  # type: ignore[import-untyped]
from sympy import Expr, Integer, Symbol
from torch import fx

from shardc.cost.closed_form_work import bytes_by_collective, flops_by_layer
from shardc.cost.kept_activations import forwards, storages
from shardc.cost.recorded import DryRun
from shardc.cost.size_symbols import LayerSums, Symbols
from shardc.ir.graph import source_of, value_of
from shardc.ir.layers import layer_of
from shardc.ir.metadata import Collective
from shardc.ir.program import Program
from shardc.machine.work import Storage
from shardc.runtime import ops


@dataclass(frozen=True)
class Symbolic:
    """Bytes of one rank. sizes: the symbols' values in this program.

    layers: by list of layers, what one of them keeps for backward of one microbatch; rest: what all else keeps. lists:
    the number of layers of each list on this rank, as a symbol. parameters, gradients, optimizer: between two steps.
    elements: of all of the model's parameters. flops, layer_flops: of matrix products for a microbatch, forward,
    backward and recomputed: all, and of one layer. comm: {(axis, kind): bytes of whole tensors, as in CommRecord} of a
    step of one microbatch. papers: the same as papers count it.
    """

    sizes: Mapping[Symbol, int]
    layers: Mapping[str, Expr]
    rest: Expr
    lists: Mapping[str, Symbol]
    parameters: Expr
    gradients: Expr
    optimizer: Expr
    elements: Expr
    flops: Expr
    layer_flops: Mapping[str, Expr]
    comm: Mapping[tuple[str, str], Expr]
    papers: Symbolic | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{symbol}={n}" for symbol, n in self.sizes.items())
        return f"<Symbolic in {sizes}: .parameters .gradients .optimizer .activations .flops .comm>"

    @property
    def activations(self) -> Expr:
        """What a microbatch keeps for backward."""
        total: Expr = sum((self.lists[name] * each for name, each in self.layers.items()), self.rest)
        return sympy.expand(total)

    def value(self, expression: Expr, **sizes: float) -> float:
        """An expression with this program's sizes, or with others by name."""
        values = {s: sizes.get(s.name, n) for s, n in self.sizes.items()}
        return float(expression.subs(values))


def symbolic(program: Program, dry_runs: Sequence[DryRun], sizes: Mapping[str, int]) -> Symbolic:
    """The closed forms of the first dry run's rank. sizes: names, beside those that are detected."""
    r = dry_runs[0]
    symbols = Symbols(program, sizes)
    kept = storages(r)
    nodes = {n.name: n for s in program.stages for n in s.graph.nodes}
    weights = _of_weights(program)
    casts: list[Expr] = []
    ours, theirs = LayerSums(), LayerSums()
    for storage in kept:
        node = nodes.get(storage.op)
        nbytes = symbols.storage(storage, node)
        if node is not None and node in weights:
            casts.append(nbytes)
            continue
        layer = layer_of(source_of(node).module) if node is not None else None
        ours.add(layer, nbytes)
        theirs.add(layer, _as_papers(symbols, nbytes, node))
    for node in _dropouts(program, r):
        theirs.add(layer_of(source_of(node).module), _as_papers(symbols, symbols.value(value_of(node)), node))
    lists = {
        name: Symbol("layers" if len(ours.lists()) == 1 else f"layers_{name}", positive=True) for name in ours.lists()
    }
    numbers = symbols.sizes | {lists[name]: n for name, n in ours.lists().items()}
    states = _states(program, symbols, lists, r.at)
    states["parameters"] = states["parameters"] + _repeated(casts, kept, weights, nodes, lists)
    flops = flops_by_layer(r, symbols, nodes)
    comm = {key: sums.total(lists) for key, sums in bytes_by_collective(program, r, symbols, nodes).items()}
    forms = partial(
        Symbolic, sizes=numbers, lists=lists, flops=flops.total(lists), layer_flops=flops.forms()[0], comm=comm
    )
    narrow = states.pop("narrow")
    layers, rest = theirs.forms()
    other = forms(layers=layers, rest=rest, **(states | {"parameters": states["parameters"] + narrow}))
    layers, rest = ours.forms()
    return forms(layers=layers, rest=rest, **states, papers=other)


def _dropouts(program: Program, r: DryRun) -> Iterator[fx.Node]:
    """Those of a microbatch's forward that no region computes again."""
    for stage, _ in forwards(r):
        for node in program.stages[stage].graph.find_nodes(op="call_function", target=ops.dropout):
            if "region" not in node.meta:
                yield node


def _of_weights(program: Program) -> set[fx.Node]:
    """The nodes that depend on parameters alone."""
    params = {p.name for p in program.params}
    weights: set[fx.Node] = set()
    for s in program.stages:
        for n in s.graph.nodes:
            operands = [x for x in n.all_input_nodes if x.meta.get("value") is not None]
            if n.name in params or (n.op == "call_function" and operands and all(x in weights for x in operands)):
                weights.add(n)
    return weights


def _as_papers(symbols: Symbols, x: Expr, node: fx.Node | None) -> Expr:
    collective: Collective | None = node.meta.get("collective") if node is not None else None
    if collective is not None and collective.kind == "all_gather":
        for axis in collective.axes:
            x = x / symbols.axis(axis)
    wide = [s for s in x.free_symbols if s.name in ("hidden", "heads")]
    return x if wide else Integer(0)


def _repeated(
    casts: Sequence[Expr],
    kept: Sequence[Storage],
    weights: set[fx.Node],
    nodes: Mapping[str, fx.Node],
    lists: Mapping[str, Symbol],
) -> Expr:
    """Copies of weights in another dtype."""
    sums = LayerSums()
    copies = [storage for storage in kept if nodes.get(storage.op) in weights]
    for storage, x in zip(copies, casts, strict=True):
        sums.add(layer_of(source_of(nodes[storage.op]).module), x)
    return sums.total(lists)


def _states(program: Program, symbols: Symbols, lists: Mapping[str, Symbol], coordinate: int) -> dict[str, Expr]:
    """Parameters, gradients and optimizer state (AdamW) between two steps, as the buckets keep them. narrow: copies in
    the compute dtype that are made when parameters are gathered.
    """
    sums = {kind: LayerSums() for kind in ("parameters", "gradients", "optimizer", "elements", "narrow")}
    for p in program.params:
        layer = layer_of(p.fqn)
        whole = math.prod(p.shape)
        sums["elements"].add(
            layer, reduce(lambda a, b: a * b, map(symbols.size, p.shape), Integer(1)) if whole else Integer(0)
        )
        if program.axis and coordinate not in program.holders(p):
            continue
        n = symbols.value(p.value)
        bucket = program.bucket(p)
        zero = bucket.zero if bucket is not None else 0
        ranks = symbols.axis(bucket.shard) if bucket is not None and zero else Integer(1)
        stored = p.dtype.itemsize
        moments = 2 * n * stored / ranks if p.requires_grad else Integer(0)
        if zero in (1, 2) and bucket is not None and bucket.compute is not None:
            sums["parameters"].add(layer, n * bucket.compute.itemsize)
            moments += n * stored / ranks
        else:
            sums["parameters"].add(layer, n * stored / (ranks if zero == 3 else 1))
            if zero == 3 and bucket is not None and bucket.compute is not None:
                sums["narrow"].add(layer, n * bucket.compute.itemsize / ranks)
        sums["optimizer"].add(layer, moments)
        if p.requires_grad:
            width = bucket.dtype.itemsize if bucket is not None else stored
            sums["gradients"].add(layer, n * width / (ranks if zero >= 2 else 1))
    return {kind: each.total(lists) for kind, each in sums.items()}
