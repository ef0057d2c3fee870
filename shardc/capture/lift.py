"""Convert an exported graph to the form of shardc/ir/program.py.

It has placeholders for stored tensors and for the batch, and typed nodes that know their module and line.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind
from torch.nn.parameter import is_lazy

from shardc.capture.batch import Leaves
from shardc.capture.constants import contents
from shardc.capture.export import Exported
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.graph import placeholders, source_of
from shardc.ir.mesh import Mesh
from shardc.ir.metadata import Value
from shardc.ir.outputs import Output
from shardc.ir.program import Program
from shardc.ir.source import Source
from shardc.ir.stored import Buffer, Input, Param
from shardc.torch_private import add_node


def lift(model: nn.Module, leaves: Leaves, made: Exported, *, with_loss: bool = True) -> Program:
    """Convert an exported graph to a Program. with_loss: its first result is the loss; else it has none."""
    exported = made.program
    graph = fx.Graph()
    for name in ("mesh", "rng"):
        graph.placeholder(name).meta["value"] = None

    by_fqn: dict[str, fx.Node] = {}

    def place(base: str, value: Value, names: Iterable[str] = (), *, stored: bool = True) -> fx.Node:
        """Add a placeholder; fx makes its name unique and legal. names: of the tensor, in the model."""
        node = graph.placeholder(_ILLEGAL.sub("_", base).strip("_") or "input")
        node.target = node.name
        node.meta["value"], node.meta["source"] = value, Source()
        if stored:
            node.meta["stored"] = True
        by_fqn.update(dict.fromkeys(names, node))
        return node

    fresh = {fqn.removeprefix("model."): node for fqn, node in made.updated.items()}
    _check_memory([*model.named_parameters(), *model.named_buffers()])
    params: list[Param] = []
    buffers: list[Buffer] = []
    inputs: list[Input] = []
    for names, p in _group_ties(model.named_parameters(remove_duplicate=False)):
        node = place(names[0], values.of_tensor(p, p.requires_grad), names)
        params.append(Param(node.name, names[0], tuple(p.shape), p.dtype, p.requires_grad, tuple(names[1:])))
    modules = model.named_modules(remove_duplicate=False)
    lost = {f"{path}.{n}".lstrip(".") for path, m in modules for n in m._non_persistent_buffers_set}
    for names, b in _group_ties(model.named_buffers(remove_duplicate=False)):
        node = place(names[0], values.of_tensor(b), names)
        updated, persistent = any(n in fresh for n in names), names[0] not in lost
        shape, aliases = tuple(b.shape), tuple(names[1:])
        buffers.append(Buffer(node.name, names[0], shape, b.dtype, aliases, updated=updated, persistent=persistent))
    for name, x in made.caches.items():
        node = place(name, values.of_tensor(x), [name], stored=False)
        buffers.append(
            Buffer(node.name, name, tuple(x.shape), x.dtype, updated=name in fresh, persistent=False, cache=True)
        )
    env: dict[fx.Node, fx.Node] = {}
    exported_nodes = placeholders(exported.graph)
    specs = exported.graph_signature.input_specs
    constants: dict[bytes | str, fx.Node] = {}
    for spec in specs:
        if spec.kind == InputKind.CONSTANT_TENSOR:
            placeholder, constant = exported_nodes[spec.arg.name], exported.constants[str(spec.target)].detach()
            made_here = str(spec.target) in made.fresh
            key = contents(constant) if made_here else str(spec.target)
            if key not in constants:  # equal constants are merged, so that equal layers have the same
                name = f"constant_{len(constants)}" if made_here else str(spec.target).removeprefix("model.")
                node = constants[key] = place(name, values.of_tensor(constant))
                shape, dtype = tuple(constant.shape), constant.dtype
                buffers.append(Buffer(node.name, "", shape, dtype, persistent=False, constant=constant))
            env[placeholder] = constants[key]
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            env[exported_nodes[spec.arg.name]] = by_fqn[str(spec.target).removeprefix("model.")]
    pairs = iter(zip(leaves.paths, leaves.tensors, strict=True))
    for spec in specs:
        if spec.kind == InputKind.USER_INPUT:
            path, x = next(pairs)
            named = path if path and isinstance(path[0], str) else ("input", *path)
            node = place("_".join(map(str, named)), values.of_tensor(x), stored=False)
            inputs.append(Input(node.name, path, tuple(x.shape), x.dtype))
            env[exported_nodes[spec.arg.name]] = node

    results = _copy(exported.graph, graph, env)
    first = len(results) - len(made.beside)
    loss = results[first - 1] if with_loss else None
    owners = {n: b for b in buffers if b.updated for n in (b.fqn, *b.aliases)}
    news = {owners[fqn].name: env.get(node, node) for fqn, node in fresh.items()}
    with_news = tuple(_detached(graph, news[b.name]) for b in buffers if b.updated)
    kept = tuple(_detached(graph, n) for n in results[first:] if n is not None)
    graph.output((loss, (*with_news, *kept)))
    graph.lint()
    if loss is not None and not values.requires_grad(loss) and any(p.requires_grad for p in params):
        fault = "the loss depends on no trainable parameter"
        fix = "check that nothing between the parameters and the loss is detached, or computed under no_grad"
        raise ShardcError(fault, where=source.where(source_of(loss)), fix=fix)
    outputs = tuple(
        Output(name, v.shape, v.dtype, divisor=divisor)
        for (name, divisor), v in zip(made.beside.items(), (n.meta["value"] for n in kept), strict=True)
    )
    meta = {"model": type(model).__name__}
    # modules that are one object under several names: graph nodes have only one of them
    shared = _group_ties(model.named_modules(remove_duplicate=False))
    return Program(
        Mesh(()),
        graph,
        tuple(params),
        tuple(buffers),
        tuple(inputs),
        outputs=outputs,
        meta=meta,
        shared_modules=tuple(tuple(names) for names, _ in shared if len(names) > 1),
    )


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if not values.requires_grad(node):
        return node
    cut = graph.call_function(torch.ops.aten.detach.default, (node,))
    cut.meta = {"source": node.meta["source"], "value": replace(node.meta["value"], requires_grad=False)}
    return cut


def _group_ties(named: Iterable[tuple[str, Any]]) -> list[tuple[list[str], Any]]:
    """Group names by the identity of what they name, not by a tensor's address: that is 0 for those without storage."""
    by_id: dict[int, tuple[list[str], Any]] = {}
    for name, x in named:
        by_id.setdefault(id(x), ([], x))[0].append(name)
    return list(by_id.values())


def _check_memory(stored: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ShardcError if a trained parameter shares memory with another tensor: a program would hold both apart."""
    of_storage: dict[int, list[tuple[str, torch.Tensor]]] = {}
    for name, x in stored:
        if x.layout == torch.strided and x.numel() and not is_lazy(x):
            of_storage.setdefault(x.untyped_storage()._cdata, []).append((name, x))
    for (one, x), (other, y) in (pair for some in of_storage.values() for pair in combinations(some, 2)):
        if (x.requires_grad or y.requires_grad) and _overlap(x, y):
            fault = f"{one} and {other} are two tensors in the same memory: training one changes the other"
            fix = f"make them one parameter, module.{other} = module.{one}, or compute one from the other in forward"
            raise ShardcError(fault, where=other, fix=fix)


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors of one storage have an element in common."""

    def span(t: torch.Tensor) -> range:
        last = sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
        return range(t.element_size() * t.storage_offset(), t.element_size() * (t.storage_offset() + last + 1))

    one, other = span(x), span(y)
    if one.start >= other.stop or other.start >= one.stop or x.element_size() != y.element_size():
        return max(one.start, other.start) < min(one.stop, other.stop)
    taken = torch.zeros(max(one.stop, other.stop) // x.element_size(), dtype=torch.bool)
    taken.as_strided(x.shape, x.stride(), x.storage_offset()).fill_(True)
    return bool(taken.as_strided(y.shape, y.stride(), y.storage_offset()).any())


#: Illegal in a placeholder's name.
_ILLEGAL = re.compile(r"\W")
#: The number in a node's name. Nodes are renumbered, so that names do not depend on how the graph was made.
_NUMBER = re.compile(r"_\d+$")
#: Ops that read or write the memory of their first operand by strides.
_STRIDED = {
    torch.ops.aten.as_strided.default,
    torch.ops.aten.as_strided_copy.default,
    torch.ops.aten.as_strided_scatter.default,
}


def _as_in_memory(x: fx.Node, user: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
    """Permute the copy of an exported value to the order of its dims in memory.

    Raises ShardcError if that memory is not the value's alone.
    """
    val, copied = x.meta["val"], env[x]
    order = sorted(range(val.dim()), key=lambda d: (-val.stride(d), d))
    if val.storage_offset() or not val.permute(order).is_contiguous():
        fault = "as_strided reads memory of which its operand is a part only, and a program knows values, not memory"
        fix = "call .contiguous() on the operand first, or write it as unfold, or as an index"
        raise ShardcError(fault, where=source.place(user), fix=fix)
    if order == list(range(val.dim())):
        return copied
    with user.graph.inserting_before(user):
        ordered = user.graph.call_function(torch.ops.aten.permute.default, (copied, order))
    ordered.meta = {"source": source.of_node(x)}
    ordered.meta["value"] = values.typed(val.permute(order), ordered.target, ordered.args, ordered.kwargs)
    return ordered


def _copy(old: fx.Graph, new: fx.Graph, env: dict[fx.Node, fx.Node]) -> list[fx.Node]:
    """Copy the calls of `old` with typed metadata; return the copied nodes of its results."""
    for node in old.nodes:
        if node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            name = _NUMBER.sub("", node.name)
            copy = add_node(new, "call_function", node.target, args, kwargs, name=name)
            if copy.target is torch.ops.aten.view.default:
                # real and fake attention differ in strides: a view may need a copy
                copy.target = torch.ops.aten.reshape.default
            elif copy.target in _STRIDED:
                copy.replace_input_with(env[node.all_input_nodes[0]], _as_in_memory(node.all_input_nodes[0], copy, env))
            elif copy.target is torch.ops.aten.embedding.default:
                copy.args = copy.args[:4]  # without `sparse`: gradients are dense, so that they add up in buckets
            copy.meta = {"source": source.of_node(node)}
            copy.meta["value"] = values.typed(node.meta.get("val"), copy.target, copy.args, copy.kwargs)
            env[node] = copy
        elif node.op == "output":
            return [env[n] for n in node.args[0] if n in env]
        else:
            assert node.op == "placeholder", f"{node.format_node()} in an exported graph"
    raise AssertionError("a graph without output")
