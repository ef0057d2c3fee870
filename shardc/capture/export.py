"""Export a model's loss by torch.export and turn the graph into plain aten ops.

Regions are inlined, in-place writes and checks removed, and everything that no program can contain is refused.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from shardc.capture import equal_layers, patches, refusals, side_effects, transformers
from shardc.capture.attribute_reads import Reads
from shardc.capture.batch import Leaves, arguments, check_call
from shardc.capture.constants import FRESH
from shardc.capture.loss import Forward, Loss, LossOf, values_of_batch
from shardc.capture.masked_rows.all_rows import with_all_rows
from shardc.capture.rewrite import flex_attention, functional_twins, inline_regions, inner_autograd, inplace_ops
from shardc.capture.side_effects import Changes, ForeignParameters
from shardc.capture.value_reads import ValueReads, drop_checks, known_values
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.graph import is_call, placeholders, producer_of
from shardc.ir.source import Source
from shardc.torch_private import (
    FakeTensor,
    OpOverload,
    fake_tensor,
    functionalized,
    is_transform,
    replaced_engine,
    silent,
    traced_with,
    without_code,
)


class Exported(NamedTuple):
    """The exported program and its parts.

    updated: {FQN of a buffer: its new value}; beside: {name of a value beside the loss: name of its divisor, or ""};
    caches: buffers of a decoding step, of no module; fresh: constants that forward makes itself.
    """

    program: ExportedProgram
    updated: dict[str, fx.Node]
    beside: dict[str, str]
    notes: tuple[str, ...]
    caches: dict[str, Tensor]
    fresh: frozenset[str]


def export(
    model: nn.Module,
    leaves: Leaves,
    loss: Loss | None,
    forward: Forward | None = None,
    *,
    rows: bool = False,
    fold: tuple[Reads, Changes] | None = None,
) -> Exported:
    """Export the model without regions and in-place ops.

    forward: replaces the loss. rows: see known_values. fold: what forward has read and set so far: trace equal layers
    once. Raises UnlikeError if they are not equal.
    """
    wrapper = values_of_batch(model, leaves, loss, forward)
    names = {id(p): name for name, p in model.named_parameters()}
    beside = loss is not None or forward is not None
    wrapper.training = model.training
    with (
        warnings.catch_warnings(),
        transformers.without_cache(model),
        transformers.few_masks(),
        transformers.as_one_op(),
        transformers.as_one_more_key(written_out=True),
        patches.export_patches(wrapper.side),
        flex_attention.as_ops(),
        known_values(model, sizes=fold is None, rows=rows) as reads,
        patches.faked(wrapper) as mode,
        replaced_engine(inner_autograd.recorded),
        traced_with(source.trace_of_call),
        without_code(),
        silent(),
        equal_layers.folded(model, *fold, partial(_records_of, wrapper, reads)) if fold else nullcontext() as folding,
    ):
        warnings.simplefilter("ignore")  # warnings of export; the model's appear whenever it runs
        inputs = tuple(fake_tensor(mode, x) for x in leaves.tensors)  # separate ones: export merges identical inputs
        numbers = side_effects.random_state()
        foreign = ForeignParameters(names)
        try:
            with foreign:
                exported = torch.export.export(wrapper, inputs, strict=False)
        except Exception as e:  # of the user's Python, which tracing runs; raised again as a ShardcError
            if isinstance(e, TypeError) and not wrapper.beside.of_loss:
                check_call(model, *arguments(model, leaves.batch(leaves.tensors), beside), own_loss=beside)
            raise refusals.of_error(e, leaves.named(reads.inputs), of_loss=wrapper.beside.of_loss) from e
        if side_effects.random_state() != numbers:
            with mode:
                drawn = side_effects.line_that_changes(side_effects.random_state, lambda: wrapper(*inputs))
            if drawn is not None:
                raise side_effects.refuse_random(*drawn)
        gm = exported.graph_module
        fresh = _fresh(exported)
        cut = inline_regions.inline_regions(gm)
        if rows:
            with_all_rows(gm.graph)
        drop_checks(gm.graph)
        transformed = any(is_transform(n.target) for n in gm.graph.nodes)
        equal_layers.unfold(model, exported, folding.calls if folding else (), cut)
        if not transformed:
            _check(gm.graph, leaves.named(reads.inputs))
        signature = exported.graph_signature
        nodes = placeholders(gm.graph)
        kinds: dict[InputKind, dict[fx.Node, str]] = {}
        for spec in signature.input_specs:
            node = nodes[spec.arg.name]
            kinds.setdefault(spec.kind, {})[node] = str(spec.target)
            if spec.kind == InputKind.CUSTOM_OBJ:
                raise refusals.of_op(next(iter(node.users), node), "object")
            if spec.kind == InputKind.CONSTANT_TENSOR and isinstance(
                exported.constants[str(spec.target)].detach(), FakeTensor
            ):
                raise refusals.of_op(next(iter(node.users), node), "fake")
        stored = kinds.get(InputKind.BUFFER, {}), kinds.get(InputKind.PARAMETER, {})
        updated = None if transformed else inplace_ops.remove_inplace(gm.graph, *stored, cut)
        if updated is None:  # traced again, in ops below in-place ops and torch.func's transforms
            inplace_ops.detach_written(gm.graph, cut)
            gm.recompile()
            exported = functionalized(exported)
            _check(exported.graph_module.graph, leaves.named(reads.inputs))
            functional_twins.differentiable_copies(exported.graph_module.graph)
            updated = _mutated(exported)
        replaced = inner_autograd.expand(exported.graph_module.graph)
        functional_twins.cut_gradients(exported.graph_module.graph)
        updated = {name: replaced.get(node, node) for name, node in updated.items()}
    reads.refuse_changed(n.removeprefix("model.") for n in updated)
    notes = (
        *wrapper.beside.notes,
        *dict.fromkeys(map(_unseen, reads.sources)),
        *(foreign.notes() if forward is None else ()),
    )
    caches = dict(wrapper.named_buffers(recurse=False))
    return Exported(exported, updated, wrapper.beside.divisors, notes, caches, fresh)


def _fresh(exported: ExportedProgram) -> frozenset[str]:
    """Return the constants that forward makes, as by `torch.tensor(...)`: nobody holds or changes them."""
    nodes = placeholders(exported.graph)
    constants = [s for s in exported.graph_signature.input_specs if s.kind == InputKind.CONSTANT_TENSOR]
    return frozenset(str(s.target) for s in constants if all(u.target in FRESH for u in nodes[s.arg.name].users))


def _records_of(wrapper: LossOf, reads: ValueReads, path: str) -> object:
    """Return capture's records that a layer of this name must not add to, if it represents others."""
    values = [n for n in reads.buffers if n.startswith(f"{path}.")]
    return len(wrapper.side), len(reads.sources), len(reads.inputs), values


def _unseen(place: Source) -> str:
    """Write the note on a line that reads a number from a tensor, if it does not reach the graph."""
    return (
        f"{place.line}: a tensor becomes a number that only Python sees ({place.shown}): steps of the program do"
        " not run this line"
    )


def _mutated(exported: ExportedProgram) -> dict[str, fx.Node]:
    """Return {FQN of a buffer: its new value} of a functionalised program."""
    results: Any = exported.graph.output_node().args[0]
    mutated: dict[str, fx.Node] = {}
    for spec, node in zip(exported.graph_signature.output_specs, results, strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            mutated[str(spec.target)] = node
        elif spec.kind == OutputKind.PARAMETER_MUTATION:
            raise inplace_ops.writes_to_parameter(str(spec.target), node)
    return mutated


def _check(graph: fx.Graph, read: list[str]) -> None:
    """Refuse traced values that no program can contain.

    These are values of tensors as numbers, unknown sizes, sparse tensors and transforms. read: inputs whose values
    Python read.
    """
    for node in graph.nodes:
        val = node.meta.get("val")
        many = val if isinstance(val, (tuple, list)) else (val,)
        name = values.op_name(node.target)
        if re.search(refusals.REJECTION, name):
            raise refusals.of_op(node, str(node.target))
        if any(isinstance(v, Tensor) and v.layout is not torch.strided for v in many):
            raise refusals.of_op(node, f"sparse {name}")
        if is_call(node) and not isinstance(node.target, OpOverload):
            raise refusals.of_op(node, f"transform {name}")
        dynamic = isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) or any(
            isinstance(v, Tensor) and any(isinstance(s, torch.SymInt) for s in v.shape) for v in many
        )
        if dynamic:
            raise refusals.of_op(node, values.op_name(producer_of(node)[0].target), read)
