"""Read the tensor-parallel plan of a transformers model, word by word (`shard: {use: model}`).

    "layers.*.self_attn.q_proj": "colwise"     ->  q_proj.weight: f32[64@tp, 64]
    "layers.*.mlp.gate_up_proj": "packed_colwise"   ->  f32[2·256@tp, 64]

A word names the dim of a weight that is split. How it is split (fused parts, sections) and what is communicated follow
from the graph (propagate_split.py). So a word for "gather the output" or "split the input" has no effect where the
split can go on: logits are not gathered for a loss that takes them split, nor fused projections before they are divided
into their parts. Words that only name a collective, or a sum of gradients, have no effect: the algebra derives both.

transformers/distributed/tensor_parallel.py (5.23) has the styles; their parameters are stored [.., out, in].

A model's plan of experts (`ep_plan`) names the modules that hold them; for `use: structure` the graph does. If the mesh
has an axis `ep` that the spec does not use, these modules become entries of `experts`:

    "layers.*.mlp.experts": "ep_dispatch_experts"   ->  experts: [{match: "model.layers.*.mlp.experts", axis: ep}]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx, nn

from shardc.errors import Errors, ShardcError
from shardc.ir.graph import values_of
from shardc.ir.placement import Shard
from shardc.ir.program import Program
from shardc.ir.similar_names import nearest
from shardc.ir.stored import Param
from shardc.layer_names import of_every_layer
from shardc.passes.annotate.propagate_split import Follower, SplitGroup, uses
from shardc.spec import Spec
from shardc.spec.module_sections import EXPERTS_AXIS, Expert
from shardc.spec.yaml_reader import Places


@dataclass(frozen=True)
class Plan:
    """The weights to split over one axis, by the model's plan or by the graph's structure (structure.py).

    splits: parameter's name -> (its split, the cause to cite); others stay whole. notes: for the user.
    """

    axis: str
    splits: dict[str, tuple[Shard, str]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Word:
    """The meaning of a style word. dim: of the stored weight, from the right; None: nothing is split.

    parts: fused parts in that dim. bias: whether parameters of one dim are split too.
    """

    dim: int | None
    parts: int = 1
    bias: bool = False


_WHOLE = Word(None)
_COLUMN, _ROW = Word(-2, bias=True), Word(-1)
WORDS: dict[str, Word] = {
    "colwise": _COLUMN,
    "colwise_rep": _COLUMN,  # gathers the output: the algebra does it where needed
    "colwise_gather_output": _COLUMN,
    "local_colwise": _COLUMN,
    "packed_colwise": Word(-2, 2, bias=True),
    "local_packed_colwise": Word(-2, 2, bias=True),
    "rowwise": _ROW,
    "rowwise_rep": _ROW,  # splits the input first
    "rowwise_split_input": _ROW,
    "local_rowwise": _ROW,
    "packed_rowwise": Word(-1, 2),
    "local_packed_rowwise": Word(-1, 2),
    "embedding_rowwise": Word(-2),  # rows = the vocabulary
    "embedding_colwise": Word(-1),
    "replicate": _WHOLE,
    "replicated_with_grad_allreduce": _WHOLE,  # a sum that the rules derive
    "mla_kv_a_proj": _WHOLE,
    "all_reduce": _WHOLE,
    "gather": _WHOLE,
    "local": _WHOLE,
    "local_params": _WHOLE,
    "sequence_parallel": _WHOLE,  # the section `activations` splits them
    "moe_tp_experts": _WHOLE,  # the experts' parameters have separate words
    "moe_identity_expert": _WHOLE,
    "ep_router": _WHOLE,  # experts over ranks: the section `experts`
    "ep_dispatch_experts": _WHOLE,
    "grouped_gemm": _WHOLE,
    "megamoe_router": _WHOLE,  # both only in transformers 5.17: its plans for one fused kernel
    "megamoe_experts": _WHOLE,
}


def read(model: nn.Module) -> dict[str, str]:
    """Return a model's plan: {pattern over its names: word}, `*` for a layer's number; {} without a plan.

    transformers' models collect the plans of their configs and parts in `tp_plan`; parts of an ordinary module keep
    their own.
    """
    return _plan_words(model, "tp_plan")


def with_experts(spec: Spec, model: nn.Module, program: Program) -> Spec:
    """Return the spec with the `experts:` entries of its plan (`use`), if that leaves an axis for them.

    The model's own plan names them; `structure` takes those that are one op in the captured graph.
    Raises ShardcError if the mesh has no axis that the plan could use.
    """
    if spec.shard_use is None:
        return spec
    where, entries = spec.where(("shard", "use")), tuple[Expert, ...]()
    if not spec.experts and EXPERTS_AXIS in spec.mesh.names and EXPERTS_AXIS not in spec.named_axes:
        modules = _planned_experts(model) if spec.shard_use == "model" else _stacked_experts(program)
        entries = tuple(Expert(match=m, axis=EXPERTS_AXIS) for m in dict.fromkeys(modules))
    if spec.shard_axis not in spec.mesh.names and not (entries or spec.experts):
        fault = (
            f"splits weights over {spec.shard_axis!r}, which the mesh does not have, and finds no experts for"
            f" {EXPERTS_AXIS!r}"
        )
        fix = f"write use: {{plan: {spec.shard_use}, axis: {EXPERTS_AXIS}}}, or add {spec.shard_axis} to the mesh"
        raise ShardcError(f"`use: {spec.shard_use}` {fault}", where=where, fix=fix)
    if not entries:
        return spec
    places = Places(dict(spec.places.keys), dict(spec.places.values))
    for i in range(len(entries)):
        places.put(("experts", i), f"{where} use: {spec.shard_use},")
    return replace(spec, experts=entries, places=places)


def _planned_experts(model: nn.Module) -> list[str]:
    """Return the modules that hold experts, by the model's own plan."""
    words = _plan_words(model, "ep_plan")
    dispatched = [module for module, word in words.items() if word == "ep_dispatch_experts"]
    grouped = [param.rpartition(".")[0] for param, word in words.items() if word == "grouped_gemm"]
    return dispatched + grouped


def _stacked_experts(program: Program) -> list[str]:
    """Return the modules that run experts as one op, in a captured graph."""
    modules = (
        n.meta["source"].module
        for n in program.graph.find_nodes(op="call_function", target=torch.ops.shardc.experts.default)
    )
    return [of_every_layer(module) or "*" for module in modules]


def _plan_words(model: nn.Module, kind: str) -> dict[str, str]:
    """Return {name: word} of a model's plan, with the plans of its parts. kind: "tp_plan" or "ep_plan"."""
    words: dict[str, str] = {}
    for name, module in model.named_modules():
        plan = getattr(module, kind, None) or getattr(module, f"_{kind}", None)
        if isinstance(plan, Mapping):
            prefix = f"{name}." if name else ""
            for key, word in plan.items():
                words.setdefault(f"{prefix}{key}", str(word))
    return words


def resolve(words: Mapping[str, str], program: Program, axis: str, named: set[str], where: str) -> Plan:
    """Return the weights that the model's plan splits over an axis. named: parameters of spec entries, which win.

    where: the spec's line. Raises ShardcError for a model without a plan, and for all unknown words at once.
    """
    if not words:
        fault = "the model has no tensor-parallel plan (transformers' models have one, `tp_plan`)"
        fix = "write `use: structure`, or name the weights by patterns"
        raise ShardcError(fault, where=f"{where} use: model", fix=fix)
    errors, follower, entries = Errors(), Follower(program), _Entries(words)
    wrapped = _wrapped(entries, program)
    planned: dict[fx.Node, tuple[Shard, str]] = {}
    notes: list[str] = []
    unknown: set[str] = set()
    for p in program.params:
        if p.name in named:
            continue
        layer_weights = wrapped.get(p.name, {})
        for key in layer_weights or _keys(entries, p):
            word = words[key]
            if word in WORDS:
                split = _shard_by_word(WORDS[word], p, layer_weights.get(key))
                if split is not None:
                    planned.setdefault(follower.placeholders[p.name], (split, f"{where} use: model '{key}: {word}'"))
            elif key not in unknown:
                unknown.add(key)
                close = nearest(word, WORDS)
                errors.add(
                    f"the model's plan has the word {word!r} for {key!r}, which shardc does not know",
                    where=f"{where} use: model",
                    fix=(f"is it {close!r}? " if close else "")
                    + f'write an entry for it beside `use`, e.g. "*{key.rpartition("*")[2]}": column',
                )
    errors.raise_any()
    splits = _with_parts(follower, planned)
    for node in [n for n in splits if not _usable(follower, n, splits[n][0])]:
        split, cause = splits.pop(node)
        notes.append(
            f"{cause}: {program.param(node.name).fqn} stays whole: the op that uses it has no rule for its dim"
            f" {split.dim} split"
        )
    return Plan(axis, {n.name: s for n, s in splits.items()}, tuple(notes))


class _Entries:
    """The names of a plan, by how many parts they have."""

    def __init__(self, names: Iterable[str]) -> None:
        self._of: dict[int, list[tuple[str, list[str]]]] = {}
        for key in names:
            parts = key.split(".")
            self._of.setdefault(len(parts), []).append((key, parts))

    def of(self, parts: Sequence[str]) -> str | None:
        """Return the first entry that matches these parts of a name: `*` is one part, as in `layers.*.mlp`."""
        for key, keys in self._of.get(len(parts), ()):
            if all(k in ("*", part) for k, part in zip(keys, parts, strict=True)):
                return key
        return None


def _keys(entries: _Entries, p: Param) -> list[str]:
    """Return the plan's entries for a parameter: by its name, or else by its module's."""
    keys: list[str] = []
    for name in (p.fqn, *p.names):
        parts = name.split(".")
        for path in (parts, parts[:-1] or [""]):
            if hit := entries.of(path):
                keys.append(hit)
                break
    return keys


def _wrapped(entries: _Entries, program: Program) -> dict[str, dict[str, Param]]:
    """Return {parameter: {entry: the layer's own weight}} where an adapter wraps the planned module.

    Adapters (LoRA, by peft or by hand) move the layer one level down, beside their own matrices: the largest matrix is
    the layer's.
    """
    within: dict[tuple[str, str], list[Param]] = {}
    for p in program.params:
        parts = p.fqn.split(".")
        for n in range(1, len(parts)):
            if hit := entries.of(parts[:n]):
                within.setdefault((hit, ".".join(parts[:n])), []).append(p)
    by_param: dict[str, dict[str, Param]] = {}
    for (key, module), params in within.items():
        weight = max(params, key=lambda p: (len(p.shape) > 1, math.prod(p.shape)))
        if len(weight.shape) > 1 and weight.fqn.rpartition(".")[0] != module:  # else the module is the layer itself
            for p in params:
                by_param.setdefault(p.name, {})[key] = weight
    return by_param


def _shard_by_word(word: Word, p: Param, layer_weight: Param | None = None) -> Shard | None:
    """Return the split of a stored parameter by a word, or None.

    layer_weight: the weight of the layer, if p is an adapter's matrix beside it. Of an adapter's matrices, the one that
    shares the weight's split dim is split: B of a column-parallel one, A of a row-parallel one.
    """
    if word.dim is None or not p.shape or (len(p.shape) < 2 and not word.bias):
        return None
    dim = max(len(p.shape) + word.dim, 0)
    if layer_weight is not None and p.shape[dim] != layer_weight.shape[word.dim]:
        return None
    return Shard(dim, word.parts if len(p.shape) > 1 else 1)


def _with_parts(follower: Follower, planned: Mapping[fx.Node, tuple[Shard, str]]) -> dict[fx.Node, tuple[Shard, str]]:
    """Return the planned splits, each in the fused parts in which ops need it.

    A word names a dim only. How many parts a fused weight has follows from the weights that its result meets. So
    row-parallel weights, which are split plainly, are followed first.
    """
    result: dict[fx.Node, tuple[Shard, str]] = {}

    def is_row(node: fx.Node) -> bool:
        dim = planned[node][0].dim
        return dim > 0 and dim == len(values_of(node)[0].shape) - 1

    for node in sorted(planned, key=is_row, reverse=True):
        if node in result:
            continue
        split, cause = planned[node]
        group = follower.follow((node, 0), split)
        if isinstance(group, SplitGroup):
            for other, s in group.params.items():
                if other in planned and planned[other][0].dim == s.dim:
                    result.setdefault(other, (s, planned[other][1]))
        result.setdefault(node, (split, cause))
    return result


def _usable(follower: Follower, node: fx.Node, split: Shard) -> bool:
    """Return whether ops can use a weight with this split: else it would be gathered for every use."""
    todo = [((node, 0), split)]
    while todo:
        key, s = todo.pop()
        for user, i in uses(key):
            strategy = follower.by_operand(user, i, s) if user.op != "output" else None
            if strategy is None:
                return False
            if user in follower.derived:
                todo += [((user, j), out) for j, out in enumerate(strategy.outputs) if isinstance(out, Shard)]
    return True
