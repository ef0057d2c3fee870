"""canonical: write each operation in one form, so that few rules cover many models.

before                                              after
    view(x, [8, -1, 64])                                reshape(x, [8, 16, 64])
    slice(x, 1, 4, 9223372036854775807)                 slice(x, 1, 4, 16)
    chunk(x, 3, -1)                                     split_with_sizes(x, [64, 64, 64], 2)
    to(x, float32), clone(x), contiguous(x), add(x, 0)  x
    dropout(x, 0.1, True)                               dropout(x, 0.1, rng, 4)          counter-based; 4 = its ordinal
    randn_like(x)                                       random('normal', (0.0, 1.0), [8, 16], f32, rng, 5)
    cross_entropy_loss(x, t)                            sum(nll(x, t, -100)) / sum(t != -100)
    batch_norm(x, ...)                                  means and elementwise ops
    scaled_dot_product_attention(q, k, v, None, 0.1)    attention(q, k, v, None, 0.1, ..., rng, 6)
    arange(16, device=cpu)                              arange(16)                       the program decides the device

Each file beside this one has the rewrites of one kind of op. An op that has neither a rewrite nor a rule is decomposed
by torch's own decompositions (decompose.py). Random ops that cannot be drawn from the counter generator are refused,
with the model's line.

pointwise, views, factories   names, sizes and constants in one form
batch_norm, moments, loss     norms, variances and losses as sums that can be split
lookup, masked_writes, recurrent   bags of embeddings, writes under masks, recurrent layers
random_tensors                random numbers from the counter generator; random_streams: a stream for each op
grouped_mm                    captured mixtures of experts as the op `experts`
choices                       a model's choices as random numbers, on which capture and grouped_mm test ops
cleanup                       the last steps, on the whole graph
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import Errors, ShardcError
from shardc.ir import types as values
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.passes.base import Pass
from shardc.passes.canonical import (  # noqa: F401 (they register)
    batch_norm,
    dropout,
    factories,
    grouped_mm,
    lookup,
    loss,
    masked_writes,
    moments,
    pointwise,
    random_tensors,
    recurrent,
    views,
)
from shardc.passes.canonical.cleanup import cast_integers, join_slices
from shardc.passes.canonical.decompose import decompose, needed
from shardc.passes.canonical.random_streams import number_random
from shardc.passes.canonical.rewrite import KNOWN_LIMIT, TABLE, Args, Emit, Result
from shardc.torch_private import OpOverload, add_node

aten = torch.ops.aten


@dataclass(frozen=True)
class Canonical(Pass):
    """Rewrites the global graph of a captured program; parameters, buffers and inputs stay as they are.

    Raises ShardcError for calls that have no mesh-independent form.
    """

    def run(self, program: Program) -> Program:
        spec = self.spec
        chunks = (spec.data_ranks, spec.batch.microbatches) if spec.batch_norm == "local" else (1, 1)
        constants = {b.name: b.constant for b in program.buffers if b.constant is not None}
        result = rewritten(program.graph, chunks, constants)
        errors = Errors()
        errors.found.extend(
            {e.what: e for e in reversed(result.refused.values())}.values()
        )  # only the first of equal texts
        errors.raise_any()
        return replace(program, graph=result.graph)


@dataclass(frozen=True)
class Rewritten:
    """A canonical graph. refused: calls without a canonical form, which it holds unchanged.

    decomposed: ops without a rule that torch's decompositions replaced, and where the model calls them.
    """

    graph: fx.Graph
    refused: dict[fx.Node, ShardcError]
    decomposed: list[tuple[OpOverload, Source]]


def rewritten(
    captured: fx.Graph, chunks: tuple[int, int] = (1, 1), constants: Mapping[str, Tensor] | None = None
) -> Rewritten:
    """Return the canonical form of a captured graph, and the calls that have none.

    chunks: (ranks, microbatches): BatchNorm takes statistics of each one's rows separately. constants: placeholders
    whose values are known.
    """
    graph = fx.Graph()
    refused: dict[fx.Node, ShardcError] = {}
    env: dict[fx.Node, Any] = {}
    alive = _alive(captured)
    emit: Emit | None = None
    for node in captured.nodes:
        if node.op == "placeholder":
            env[node] = copy = add_node(graph, "placeholder", node.name, (), name=node.name, meta=node.meta)
            assert copy.name == node.name
            if node.name == "rng":
                emit = Emit(graph, copy, chunks)
            elif (
                emit is not None
                and constants
                and (known := constants.get(node.name)) is not None
                and known.numel() <= KNOWN_LIMIT
            ):
                emit.known[copy] = known
        elif node.op == "output":
            graph.output(fx.map_arg(node.args[0], lambda n: env[n]))
        elif node in alive:
            assert emit is not None, "no placeholder named rng"
            try:
                env[node] = _rewritten(emit, node, env)
            except ShardcError as e:
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
                missing = node.target is operator.getitem and isinstance(
                    args[0], tuple
                )  # a result that the op's replacement does not have
                target, args = (aten.empty_like.default, args[0][:1]) if missing else (node.target, args)
                env[node] = copy = _copied(emit, target, args, kwargs, node.meta["value"], node.name)
                refused[copy] = e
    join_slices(graph)
    cast_integers(graph)
    _erase_dead(graph)
    number_random(graph)
    return Rewritten(graph, refused, emit.replaced if emit is not None else [])


def _rewritten(emit: Emit, node: fx.Node, env: dict[fx.Node, Any]) -> Result:
    """Return the node, or one per result, that replaces `node` in the new graph."""
    emit.source = node.meta["source"]
    emit.mark = {"mixed": True} if "mixed" in node.meta else {}
    if node.target is operator.getitem and isinstance(parts := env[node.all_input_nodes[0]], tuple):
        part = parts[int(node.args[1])]  # type: ignore[arg-type]
        if part is None:
            raise emit.refuse(
                f"result {node.args[1]} of {node.args[0]} has no canonical form", "use the op's first result only"
            )
        assert isinstance(part, fx.Node)
        return part
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: env[n])
    result = _canonical_call(emit, node.target, args, kwargs, node.meta["value"], node.name)
    if isinstance(node.target, OpOverload):
        _same_type(node, result)
    if (
        isinstance(result, fx.Node)
        and (origin := result.meta.get("source")) is not None
        and origin.module != emit.source.module != ""
    ):
        result.meta["through"] = {
            **result.meta.get("through", {}),
            emit.source.module: None,
        }  # modules without ops: Dropout(0.0)
    return result


def _canonical_call(
    emit: Emit, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any = None, name: str | None = None
) -> Result:
    """Rewrite one call of an op; decompose it if it has no rule. value: its type, if known."""
    if value is None:
        value = values.infer(op, args, values.without_place(kwargs))
    if not isinstance(op, OpOverload):
        return _copied(emit, op, args, kwargs, value, name)
    if (change := TABLE.get(values.op_name(op))) is not None:
        return change(emit, Args(op, args, kwargs), value)
    if needed(op) and (parts := decompose(emit, op, args, kwargs, partial(_canonical_call, emit))) is not None:
        emit.replaced.append((op, emit.source))
        return parts
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise emit.refuse(
            f"{op} draws random numbers that would differ on every mesh",
            "draw them outside of the model and pass them in with the batch, or make them of rand, randn, randint,"
            " bernoulli, exponential_",
        )
    return _copied(emit, op, args, values.without_place(kwargs), value, name)


def _copied(
    emit: Emit, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any, name: str | None
) -> fx.Node:
    copy = add_node(emit.graph, "call_function", target, args, kwargs, name=name, meta={"source": emit.source})
    copy.meta["value"] = _regraded(value, copy)
    return copy


def _same_type(node: fx.Node, result: Result) -> None:
    """Assert that a rewrite changes only the form, never the type."""

    def types(v: Any) -> Any:
        return [p and (p.shape, p.dtype) for p in (v if isinstance(v, tuple) else (v,))]

    olds = types(node.meta["value"])
    news = (
        [n and types(n.meta["value"])[0] for n in result] if isinstance(result, tuple) else types(result.meta["value"])
    )
    assert len(olds) == len(news), f"{node.format_node()}: {olds} became {news}"
    assert all(n in (None, o) for o, n in zip(olds, news, strict=True)), f"{node.format_node()}: {olds} became {news}"


def _regraded(value: Value | tuple[Value | None, ...] | None, node: fx.Node) -> Any:
    """Return the type of a copied call, with the gradient flowing as it does in the new graph."""
    if node.target is operator.getitem:
        return values.typed(None, node.target, node.args, node.kwargs)
    grad = values.carries_gradient(node.target, node.args, node.kwargs)

    def put(v: Value | None) -> Value | None:
        return v and replace(v, requires_grad=grad and values.continuous(v))

    return tuple(map(put, value)) if isinstance(value, tuple) else put(value)


def _alive(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes on which the output depends. Others, as asserts, may go: graphs are functional."""
    return values.behind([graph.output_node()])


def _erase_dead(graph: fx.Graph) -> None:
    alive = _alive(graph)
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node not in alive:
            graph.erase_node(node)
