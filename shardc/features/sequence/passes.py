"""Split the dim of each input that `sequence` names, in addition to the batch's (context parallel).

    before   input_ids: i64[8@dp, 4096]              spec: sequence: {axis: cp}
    after    input_ids: i64[8@dp, 4096@cp]

The rest follows by the rules of ops, as for the batch. Ops that work token by token stay split. Where ops read other
tokens (keys and values of attention, a shift of labels, a sum over the sequence), conversions gather or sum values in
the sequence's order. Parameters' gradients are summed over the axis.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from shardc.errors import Errors
from shardc.features.sequence import section
from shardc.features.sequence.causal_convs import use_conv1d
from shardc.features.sequence.methods import Method
from shardc.features.sequence.scans import split_by_other_dims
from shardc.features.sequence.section import Sequence
from shardc.ir.graph import placeholders, source_of, value_of, values_of
from shardc.ir.mesh import Mesh
from shardc.ir.patterns import enclosing, match
from shardc.ir.placement import Layout, Shard
from shardc.ir.program import Program
from shardc.ir.similar_names import did_you_mean
from shardc.ir.stored import Input
from shardc.ir.types import behind
from shardc.passes.annotate import weight_axes
from shardc.passes.annotate.batch_rows import batch_rows, input_name
from shardc.passes.annotate.indivisible import indivisible_dim
from shardc.passes.annotate.padding import padded
from shardc.rules.attention import OPS
from shardc.rules.core.op_call import call_of
from shardc.spec import Spec

aten = torch.ops.aten
#: Called after placement on an axis of tokens.
improve_placement = split_by_other_dims


def annotate(spec: Spec, program: Program, errors: Errors) -> Program:
    """Add the split to the layouts of inputs, pins to ids, and its method to each attention's `meta`."""
    sequence = section.of(spec)
    if sequence is None:
        return program
    use_conv1d(program.graph)
    program = _split_inputs(spec, sequence, program, errors)
    _mark_methods(spec, sequence, program, errors)
    _split_ids(spec, sequence, program)
    return program


def recompiled_spec(spec: Spec, program: Program, running: Program) -> Spec:
    """Return the spec for a batch with several times the rows of the running program's: fewer ranks share a row."""
    rows, times = batch_rows(spec, running)[0], 1
    if rows and spec.token_axes:
        times = batch_rows(spec, program)[0] // rows
    return section.with_rows(spec, times) if times > 1 else spec


def _dim(sequence: Sequence, x: Input) -> int | None:
    """Return the dim of an input that is split.

    None for an input without such a dim, or of size 1 there, which all tokens share.
    """
    dim = next((d for pattern, d in sequence.dims.items() if match(pattern, input_name(x))), None)
    dim = dim if x.choice is None else x.choice.tokens
    return dim if dim is not None and dim < len(x.shape) and x.shape[dim] > 1 else None


def _zigzag(spec: Spec, sequence: Sequence, program: Program) -> bool:
    """Return whether each rank has two stretches of the sequence.

    With `balance: auto`: if attention is causal, and the sequences of all inputs divide or are padded.
    """
    if sequence.balance != "auto":
        return sequence.balance == "zigzag"
    calls = (call_of(n) for n in program.graph.nodes if n.target in OPS)
    dims = [(x, _dim(sequence, x)) for x in program.inputs]
    parts = 2 * spec.token_ranks
    even = spec.uneven == "pad" or not any(x.shape[d] % parts for x, d in dims if d is not None)
    return even and any(c.arg("is_causal") or dict(c.kwargs).get("window") == (None, 0) for c in calls)


def _layout(axes: tuple[str, ...], dim: int, mesh: Mesh, *, zigzag: bool) -> Layout:
    """Return the layout of a sequence.

    The first axis has the outermost digit. In a zigzag it has two stretches, and the next axes split each.
    """
    shards: dict[str, Shard] = {}
    digit = 2 if zigzag else 1
    for axis in axes:
        if mesh.size(axis) > 1:
            shards[axis] = Shard(dim, digit, mirrored=zigzag and not shards)
            digit *= mesh.size(axis)
    return Layout.of(shards, mesh)


def _split_inputs(spec: Spec, sequence: Sequence, program: Program, errors: Errors) -> Program:
    """Add the split to the layouts of inputs, and its cause to their placeholders.

    Adds errors for patterns that match nothing, sizes that the axis does not divide, and a dim that the batch's axes
    split.
    """
    mesh, nodes, names = program.mesh, placeholders(program.graph), [input_name(x) for x in program.inputs]
    where, before = spec.where(("sequence", "axis")), len(errors.found)
    for pattern in sequence.dims:
        if pattern != "*" and not any(match(pattern, n) for n in names):
            place = spec.where(("sequence", "dims", pattern))
            fix = did_you_mean(pattern, names, f"the inputs are {', '.join(names)}")
            errors.add(f"pattern {pattern!r} matches no input", where=place, fix=fix)
    layouts: dict[str, Layout] = {}
    zigzag = _zigzag(spec, sequence, program)
    for x, name in zip(program.inputs, names, strict=True):
        dim = _dim(sequence, x)
        if dim is None:
            continue
        if x.layout.shards(dim):
            fault = f"input {name!r} of shape {list(x.shape)}: dim {dim} is the batch's and the sequence's"
            fix = f"write which dim is the sequence's: sequence: {{dims: {{{name}: 1}}}}, or null for none"
            errors.add(fault, where=spec.where(("sequence", "dims")), fix=fix)
            continue
        layout = _layout(sequence.axis, dim, mesh, zigzag=zigzag)
        if spec.uneven == "pad":
            layout = padded(layout, x.shape, mesh)
        if uneven := indivisible_dim(layout, x.shape, mesh):
            other = ", or balance: none" if zigzag else ""
            fix = f"{uneven.fix(mesh, size='it')}{other}; if dim {dim} is not a sequence: dims: {{{name}: null}}"
            fault = uneven.fault(mesh, f"input {name!r}: the sequence of {uneven.size} (dim {dim})")
            errors.add(fault, where=where, fix=fix)
            continue
        layouts[x.name] = Layout.of({**dict(x.layout.items), **dict(layout.items)}, mesh)
        cause = dict.fromkeys(mesh.digits(*sequence.axis), f"{where} sequence dim {dim} of {name!r}")
        nodes[x.name].meta["cause"] = nodes[x.name].meta.get("cause", {}) | cause
    if not layouts and len(errors.found) == before:
        known = ", ".join(f"{name} {list(x.shape)}" for x, name in zip(program.inputs, names, strict=True))
        fault = f"no input has a sequence that {' × '.join(sequence.axis)} could split: {known}"
        errors.add(fault, where=where, fix="name the dim: sequence: {dims: {NAME: 1}}, or leave the section out")
    return program.with_layouts(layouts)


def _split_ids(spec: Spec, sequence: Sequence, program: Program) -> None:
    """Pin ids that a model computes from its inputs where an embedding reads them.

    A decoder's ids may be its labels, shifted. A shift reads other ranks' tokens, so it runs on whole ids; the
    embedding gets them split again.
    """
    mesh, split = program.mesh, dict[tuple[int, int], dict[str, Shard]]()
    parts = set(mesh.digits(*sequence.axis))
    for x in program.inputs:
        for a, s in x.layout.shards():
            if a in parts:
                split.setdefault((x.shape[s.dim], s.dim), {})[a] = s
    inputs = {x.name for x in program.inputs}
    for node in list(program.graph.nodes):
        ids = node.args[1] if node.target is aten.embedding.default else None
        if not isinstance(ids, fx.Node) or ids.op == "placeholder" or inputs.isdisjoint(x.name for x in behind([ids])):
            continue
        shape = value_of(ids).shape
        places = [split[n, d] for d, n in enumerate(shape) if d and (n, d) in split]
        if places and "pin" not in ids.meta:
            layout = Layout.of(places[0], mesh)
            with program.graph.inserting_before(node):
                pin = program.graph.call_function(aten.alias.default, (ids,))
            node.replace_input_with(ids, pin)
            cause = {a: f"{spec.where(('sequence', 'axis'))} sequence dim {s.dim}" for a, s in places[0].items()}
            pin.meta = {"value": value_of(ids), "source": source_of(ids), "pin": layout, "cause": cause}


# --- methods of attention

_SOFTMAX = {aten.softmax.int, aten._softmax.default}
_PRODUCTS = {aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default}
#: The most ops between a product of queries and keys and the softmax of its scores.
_BETWEEN = 16


def _mark_methods(spec: Spec, sequence: Sequence, program: Program, errors: Errors) -> None:
    """Record the method of each attention in the graph (methods.py)."""
    mesh = program.mesh
    weight_ranks = math.prod(mesh.size(a) for a in weight_axes(spec) if a not in sequence.axis)
    params = {p.name for p in program.params}
    attentions = [n for n in program.graph.nodes if n.target in OPS or _attends(n, params)]
    modules = sorted({source_of(n).module for n in attentions})
    for pattern in sequence.method:
        if pattern != "*" and not any(_within(pattern, m) for m in modules):
            close = did_you_mean(pattern, modules, f"attention is in {', '.join(modules[:8]) or 'no module'}")
            where = spec.where(("sequence", "method", pattern))
            errors.add(f"pattern {pattern!r} matches no module that attends", where=where, fix=close)
    for node in attentions:
        module = source_of(node).module
        methods = next((m for p, m in sequence.method.items() if p == "*" or _within(p, module)), ())
        head_ranks, node.meta["method"] = weight_ranks, {}  # ranks of axes that may split heads first
        one_each = methods * len(sequence.axis)  # one method is for all axes
        of_ring = one_each.index("ring") if "ring" in one_each else 0  # keys travel over one axis
        for i, (axis, name) in enumerate(zip(sequence.axis, one_each, strict=False)):
            where = spec.where(("sequence", "method"))
            method = Method(name, head_ranks, where, module, ring=i == of_ring)
            node.meta["method"] |= dict.fromkeys(mesh.digits(axis), method)
            head_ranks *= mesh.size(axis) if name in ("ulysses", "auto") else 1  # they may split heads


def _within(pattern: str, module: str) -> bool:
    """Return whether a pattern names a module, or one around it."""
    return any(match(pattern, m) for m in enclosing(module))


def _attends(node: fx.Node, params: set[str]) -> bool:
    """Return whether a softmax is of scores: over the last dim of a product of two values, not weights."""
    if node.target not in _SOFTMAX:
        return False
    ndim = len(value_of(node).shape)
    if ndim < 3 or node.args[1] not in (-1, ndim - 1):
        return False
    todo, seen = list(node.all_input_nodes), set[fx.Node]()
    while todo and len(seen) < _BETWEEN:
        x = todo.pop(0)
        if x in seen or x.op != "call_function" or not values_of(x)[0].requires_grad:  # scores have gradients
            continue
        seen.add(x)
        if x.target in _PRODUCTS:
            return not any(y.name in params for y in x.all_input_nodes)
        if x.target not in OPS and x.target is not aten.linear.default:
            todo += x.all_input_nodes
    return False
