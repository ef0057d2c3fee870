"""capture: an unmodified model and one global batch -> the global graph, as a Program on no mesh.

    model ─► wrapper that returns only the loss ─► torch.export, non-strict, on fake tensors ─► no regions, no in-place
          ops ─► Program: placeholders mesh, rng, params, buffers, inputs; typed nodes that know module and line ─►
          proven against eager

The model is captured in the mode it is in: put it in train mode first. It may lie on the meta device; it is not
changed."""

from __future__ import annotations

import inspect
import operator
import re
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from shardc.capture import causes, compare_eager, functionalize, inner_autograd, patches, side_effects, transformers
from shardc.capture.data_dependent_values import known_values
from shardc.capture.tensor_methods import traceable
from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir import types as values
from shardc.ir.mesh import Mesh
from shardc.ir.program import Buffer, Input, Param, Program, Source, Value
from shardc.runtime.ops.torch_library import with_gradient_of
from shardc.torch_private import (
    FakeTensor,
    OpOverload,
    fake_tensor,
    functionalized,
    is_transform,
    pytree,
    silent,
    traced_node,
    traced_with,
)

Loss = Callable[[Any, Any], Tensor]


def capture(model: nn.Module, batch: Any, *, loss: Loss | None = None, prove: bool = True) -> Program:
    """The global graph of `loss(model(batch))`, at the shapes of one global batch.

    model: on any device, also meta; in train mode for training. Not changed.
    batch: dict (keyword arguments), tuple (positional) or tensor; nested; real, fake or meta. Other leaves are baked
    in.
    loss:  `(output, batch) -> scalar`, given also the keys that forward does not name; default: the output itself, its
           `.loss`, its "loss" or its first element.
    prove: compare loss, gradients and buffers with eager once, if the model is small enough to run here (see
        shardc/capture/compare_eager.py).

    Returns a Program with mesh = Mesh(()), whose graph has functional aten ops only, in the model's own spelling.
    Raises ShardcError, with the model's line, for whatever cannot be captured or would come out differently.
    """
    started = time.perf_counter()
    if not isinstance(model, nn.Module):
        raise ShardcError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module", fix="pass an instance of the model"
        )
    patches.check_hooks(model)
    batch = _plain(batch)
    leaves = Leaves(batch)
    try:
        with side_effects.unchanged(model) as changes:
            exported, updated, notes = _export(model, leaves, loss)
    except (
        ShardcError
    ):  # perhaps for a size that hangs on values: few models' do, and to look for them costs a tenth of the time
        with side_effects.unchanged(model) as changes:
            exported, updated, notes = _export(model, leaves, loss, sizes=True)
    changes.refuse_made()
    program = _lift(model, leaves, exported, updated)
    program.notes = notes
    if loss is not None:
        unread = {n.name for n in program.graph.nodes if n.op == "placeholder" and not n.users}
        keys = {i.path[0] for i in program.inputs if i.name in unread} & _of_loss(model, batch)
        program.notes += tuple(
            f"{key}: neither forward nor the loss reads this key of the batch" for key in sorted(map(str, keys))
        )
    program.meta["capture_seconds"] = round(time.perf_counter() - started, 3)
    if prove:
        with side_effects.unchanged(model):
            program.notes += compare_eager.prove(
                program, model, batch, lambda b: _Wrapper(model, Leaves(b), loss)(*Leaves(b).tensors), changes.set
            )
    return program


class Leaves:
    """The tensors of a batch, their paths, and how to put a batch together again from others.

    >>> Leaves({"x": torch.zeros(2), "flag": True}).paths
    [('x',)]
    """

    def __init__(self, batch: Any) -> None:
        flat, self.spec = pytree.tree_flatten_with_path(batch)
        self.flat = [x for _, x in flat]
        self.at = [i for i, x in enumerate(self.flat) if isinstance(x, Tensor)]
        self.tensors: list[Tensor] = [self.flat[i] for i in self.at]
        self.paths: list[tuple[str | int, ...]] = [tuple(_key(k) for k in flat[i][0]) for i in self.at]
        self.nodes: list[fx.Node | None] = []  # of the tensors, while they are traced
        if not self.tensors:
            raise ShardcError(
                "the batch has no tensor in it", fix="give a dict (keyword arguments), a tuple or a tensor"
            )

    def named(self, nodes: set[fx.Node]) -> list[str]:
        """The names of tensors that are these nodes in the graph in the making."""
        return [".".join(map(str, path)) for path, node in zip(self.paths, self.nodes, strict=False) if node in nodes]

    def batch(self, tensors: Iterable[Tensor]) -> Any:
        flat = list(self.flat)
        for i, x in zip(self.at, tensors, strict=True):
            flat[i] = x
        return pytree.tree_unflatten(flat, self.spec)


def _plain(batch: Any) -> Any:
    """A batch with every mapping as a dict: transformers' tokenizers return a class of their own, which pytrees take
    for a leaf.
    """
    if isinstance(batch, Mapping) and (type(batch) is dict or type(batch) not in pytree.SUPPORTED_NODES):
        return {k: _plain(v) for k, v in batch.items()}
    return type(batch)(map(_plain, batch)) if type(batch) in (list, tuple) else batch


def _call(model: nn.Module, batch: Any, loss: Loss | None) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """The arguments of forward that a batch is. A loss is given the whole batch: keys that forward does not name are
    for it alone.
    """
    if isinstance(batch, Mapping):
        own = _of_loss(model, batch) if loss is not None else set()
        return (), {key: x for key, x in batch.items() if key not in own}
    return (tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)), {}


def _of_loss(model: nn.Module, batch: Any) -> set[Any]:
    """The batch's keys that forward does not name: labels, when a function computes the loss."""
    named = inspect.signature(model.forward).parameters
    if not isinstance(batch, Mapping) or any(p.kind is p.VAR_KEYWORD for p in named.values()):
        return set()
    return {key for key in batch if key not in named}


def _key(key: Any) -> str | int:
    found = getattr(key, "key", getattr(key, "idx", getattr(key, "name", None)))
    assert isinstance(found, (str, int)), f"unknown path element {key!r}"
    return found


class _Wrapper(nn.Module):
    """Takes the batch's tensors, returns only the scalar loss: caches, output classes and logits die in the graph."""

    def __init__(self, model: nn.Module, leaves: Leaves, loss: Loss | None) -> None:
        super().__init__()
        self.model, self.leaves, self.loss = model, leaves, loss
        self.side: list[Tensor] = []  # terms of the loss of which only the gradient counts

    def forward(self, *tensors: Tensor) -> Tensor:
        self.leaves.nodes = list(map(traced_node, tensors))
        batch = self.leaves.batch(tensors)
        args, kwargs = _call(self.model, batch, self.loss)
        output = self.model(*args, **kwargs)
        found = self.loss(output, batch) if self.loss is not None else default_loss(output)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.is_floating_point():
            what = f"the loss is {_described(found)}, not a scalar"
            raise ShardcError(what, fix="return one floating-point number, e.g. loss.mean()")
        found = found.reshape(()) if found.dim() else found
        return with_gradient_of(found.detach(), sum(self.side, found)) if self.side else found


def default_loss(output: Any) -> Any:
    """The loss in a model's output: the output itself, its `.loss`, its "loss", its first element or the only number in
    it: `(logits, loss)`.
    """
    found = output
    if not isinstance(output, Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Mapping):
            found = output.get("loss")
        elif found is None and isinstance(output, (tuple, list)) and output:
            numbers = [x for x in output if isinstance(x, Tensor) and x.numel() == 1 and x.is_floating_point()]
            found = output[0] if len(numbers) != 1 else numbers[0]
    if not isinstance(found, Tensor) or found.numel() != 1:
        raise ShardcError(
            f"the model returns {_described(output)}: there is no scalar loss in it",
            fix=(
                "define loss(output, batch) in the model's file, in Python pass loss=lambda output, batch: ...; "
                "or give the model the labels with which it computes its loss itself"
            ),
        )
    return found


def _described(x: Any) -> str:
    return f"a tensor of shape {list(x.shape)} and {x.dtype}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


# --- export -----------------------------------------------------------------------------------------------------------


def _export(
    model: nn.Module, leaves: Leaves, loss: Loss | None, *, sizes: bool = False
) -> tuple[ExportedProgram, dict[str, fx.Node], tuple[str, ...]]:
    """The exported model without regions and in-place ops, {FQN of a buffer: its new value}, and notes. sizes: see
    known_values.
    """
    mode, tensors = patches.fakes(model)
    inputs = tuple(
        fake_tensor(mode, x) for x in leaves.tensors
    )  # a new one each: export merges inputs that are one object
    wrapper = _Wrapper(model, leaves, loss)
    wrapper.training = model.training
    with (
        warnings.catch_warnings(),
        patches.lean_transformers(model),
        transformers.as_one_op(),
        patches.watching(wrapper.side),
        known_values(model, sizes=sizes) as asked,
        traceable(),
        patches.swapped(model, tensors),
        inner_autograd.recorded(),
        traced_with(source.trace_of_call),
        silent(),
    ):
        warnings.simplefilter("ignore")  # export's own; the model's appear whenever it runs
        numbers = side_effects.random_state()
        try:
            exported = torch.export.export(wrapper, inputs, strict=False)
        except (
            Exception
        ) as e:  # tracing runs the user's Python, which may raise anything; it is raised again as what it means
            if isinstance(e, TypeError):
                patches.check_call(model, *_call(model, leaves.batch(leaves.tensors), loss))
            raise causes.of_error(e, leaves.named(asked.inputs)) from e
        if side_effects.random_state() != numbers:
            with mode:
                raise side_effects.refuse_random(
                    *side_effects.line_that_changes(side_effects.random_state, lambda: wrapper(*inputs))
                )
        gm = exported.graph_module
        cut = functionalize.inline_regions(gm)
        functionalize.drop_checks(gm.graph)
        transformed = any(is_transform(n.target) for n in gm.graph.nodes)
        if not transformed:
            _check(gm.graph, leaves.named(asked.inputs))
        signature = exported.graph_signature
        nodes = {n.name: n for n in gm.graph.nodes if n.op == "placeholder"}
        kinds: dict[InputKind, dict[fx.Node, str]] = {}
        for spec in signature.input_specs:
            kinds.setdefault(spec.kind, {})[nodes[spec.arg.name]] = str(spec.target)
            if spec.kind == InputKind.CUSTOM_OBJ:
                raise causes.of_input(nodes[spec.arg.name], "object")
            if spec.kind == InputKind.CONSTANT_TENSOR and isinstance(
                exported.constants[str(spec.target)].detach(), FakeTensor
            ):
                raise causes.of_input(nodes[spec.arg.name], "fake")
        stored = kinds.get(InputKind.BUFFER, {}), kinds.get(InputKind.PARAMETER, {})
        updated = None if transformed else functionalize.remove_inplace(gm.graph, *stored, cut)
        if (
            updated is None
        ):  # traced once more, in ops below those that write in place, and below torch.func's transforms
            gm.recompile()
            exported = functionalized(exported)
            _check(exported.graph_module.graph, leaves.named(asked.inputs))
            functionalize.differentiable(exported.graph_module.graph)
            updated = _mutated(exported)
        stands = inner_autograd.expand(exported.graph_module.graph)
        updated = {name: stands.get(node, node) for name, node in updated.items()}
    asked.refuse_changed(n.removeprefix("model.") for n in updated)
    return exported, updated, tuple(dict.fromkeys(map(_unseen, asked.sources)))


def _unseen(at: Source) -> str:
    """A note on a line that asks for a number of which nothing in the graph is made."""
    return (
        f"{at.line}: a tensor becomes a number that only Python sees ({at.code}): steps of the program do not run this"
        " line"
    )


def _mutated(exported: ExportedProgram) -> dict[str, fx.Node]:
    """{FQN of a buffer: its new value} of a functionalised program."""
    output = next(n for n in reversed(exported.graph.nodes) if n.op == "output")
    found: dict[str, fx.Node] = {}
    for spec, node in zip(exported.graph_signature.output_specs, output.args[0], strict=True):
        if spec.kind == OutputKind.BUFFER_MUTATION:
            found[str(spec.target)] = node
        elif spec.kind == OutputKind.PARAMETER_MUTATION:
            raise ShardcError(
                f"the forward pass writes to the parameter {str(spec.target).removeprefix('model.')!r}",
                where=source.place(node),
                fix="change parameters outside of forward, or make it a buffer",
            )
    return found


def _check(graph: fx.Graph, asked: list[str]) -> None:
    """Refuse what was traced though no program can hold it: values of tensors as numbers, unknown sizes, sparse
    tensors,
    transforms.

    asked: inputs whose values Python asked for.
    """
    for node in graph.nodes:
        val = node.meta.get("val")
        many = val if isinstance(val, (tuple, list)) else (val,)
        name = values.op_name(node.target)
        if re.search(causes.REJECTION, name):
            raise causes.of_op(node, str(node.target))
        if any(isinstance(v, Tensor) and v.layout is not torch.strided for v in many):
            raise causes.of_op(node, f"sparse {name}")
        if (
            node.op == "call_function"
            and node.target is not operator.getitem
            and not isinstance(node.target, OpOverload)
        ):
            raise causes.of_op(node, f"transform {name}")
        dynamic = isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)) or any(
            isinstance(v, Tensor) and any(isinstance(s, torch.SymInt) for s in v.shape) for v in many
        )
        if dynamic:
            first = node.args[0] if node.target is operator.getitem else node
            assert isinstance(first, fx.Node)
            raise causes.of_op(node, values.op_name(first.target), asked)


# --- into a Program ---------------------------------------------------------------------------------------------------


def _lift(model: nn.Module, leaves: Leaves, exported: ExportedProgram, updated: Mapping[str, fx.Node]) -> Program:
    """Put an exported graph into the form that program.py describes."""
    graph = fx.Graph()
    for name in ("mesh", "rng"):
        graph.placeholder(name).meta["value"] = None

    def place(base: str, value: Value) -> fx.Node:
        """A placeholder; fx makes its name unique and legal."""
        node = graph.placeholder("".join(c if c.isalnum() else "_" for c in base).strip("_") or "input")
        node.target = node.name
        node.meta["value"], node.meta["source"] = value, Source()
        return node

    fresh = {fqn.removeprefix("model."): node for fqn, node in updated.items()}
    params: list[Param] = []
    buffers: list[Buffer] = []
    inputs: list[Input] = []
    by_fqn: dict[str, fx.Node] = {}
    for names, p in _tied(model.named_parameters(remove_duplicate=False)):
        node = place(names[0], values.of_tensor(p, p.requires_grad))
        params.append(Param(node.name, names[0], tuple(p.shape), p.dtype, p.requires_grad, tuple(names[1:])))
        by_fqn.update(dict.fromkeys(names, node))
    persistent = {n for path, m in model.named_modules(remove_duplicate=False) for n in _persistent(path, m)}
    for names, b in _tied(model.named_buffers(remove_duplicate=False)):
        node = place(names[0], values.of_tensor(b))
        buffers.append(
            Buffer(
                node.name,
                names[0],
                tuple(b.shape),
                b.dtype,
                tuple(names[1:]),
                updated=any(n in fresh for n in names),
                persistent=names[0] in persistent,
            )
        )
        by_fqn.update(dict.fromkeys(names, node))
    env: dict[fx.Node, fx.Node] = {}
    placeholders = {n.name: n for n in exported.graph.nodes if n.op == "placeholder"}
    specs = exported.graph_signature.input_specs
    for spec in specs:
        if spec.kind == InputKind.CONSTANT_TENSOR:
            constant = exported.constants[str(spec.target)].detach()
            node = place(str(spec.target).removeprefix("model."), values.of_tensor(constant))
            buffers.append(
                Buffer(node.name, "", tuple(constant.shape), constant.dtype, persistent=False, constant=constant)
            )
            env[placeholders[spec.arg.name]] = node
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            env[placeholders[spec.arg.name]] = by_fqn[str(spec.target).removeprefix("model.")]
    given = iter(zip(leaves.paths, leaves.tensors, strict=True))
    for spec in specs:
        if spec.kind == InputKind.USER_INPUT:
            path, x = next(given)
            named = path if path and isinstance(path[0], str) else ("input", *path)
            node = place("_".join(map(str, named)), values.of_tensor(x))
            inputs.append(Input(node.name, path, tuple(x.shape), x.dtype))
            env[placeholders[spec.arg.name]] = node

    loss = _copy(exported.graph, graph, env)
    owners = {n: b for b in buffers if b.updated for n in (b.fqn, *b.aliases)}
    news = {owners[fqn].name: env.get(node, node) for fqn, node in fresh.items()}
    with_news = tuple(_detached(graph, news[b.name]) for b in buffers if b.updated)
    if not values.requires_grad(loss) and any(p.requires_grad for p in params):
        what = "the loss depends on no trainable parameter"
        fix = "check that nothing between the parameters and the loss is detached, or computed under no_grad"
        raise ShardcError(what, where=source.where(loss.meta.get("source", Source())), fix=fix)
    graph.output((loss, with_news))
    graph.lint()
    meta, shared = {"model": type(model).__name__}, _shared_modules(model)
    return Program(Mesh(()), graph, tuple(params), tuple(buffers), tuple(inputs), meta=meta, shared_modules=shared)


def _shared_modules(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of modules that are one object under several: a graph's nodes carry just one of them."""
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    return tuple(tuple(aliases) for aliases in names.values() if len(aliases) > 1)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    if not values.requires_grad(node):
        return node
    cut = graph.call_function(torch.ops.aten.detach.default, (node,))
    cut.meta = {"source": node.meta["source"], "value": replace(node.meta["value"], requires_grad=False)}
    return cut


def _tied(named: Iterable[tuple[str, Tensor]]) -> list[tuple[list[str], Any]]:
    """Names grouped by the identity of what they name: never by address, which is 0 for tensors without storage."""
    found: dict[int, tuple[list[str], Tensor]] = {}
    for name, x in named:
        found.setdefault(id(x), ([], x))[0].append(name)
    return list(found.values())


def _persistent(path: str, module: nn.Module) -> list[str]:
    lost = module._non_persistent_buffers_set
    return [f"{path}.{n}" if path else n for n in module._buffers if n not in lost]


def _copy(old: fx.Graph, new: fx.Graph, env: dict[fx.Node, fx.Node]) -> Any:
    """Copy the calls of `old` with typed metadata; returns the loss's node."""
    for node in old.nodes:
        if node.op == "call_function":
            copy = new.node_copy(node, lambda n: env[n])
            if (
                copy.target is torch.ops.aten.view.default
            ):  # real and fake attention differ in strides: a view may need a copy
                copy.target = torch.ops.aten.reshape.default
            elif copy.target is torch.ops.aten.embedding.default:
                copy.args = copy.args[:4]  # without `sparse`: gradients are dense, so that they add up in buckets
            copy.meta = {"source": source.of_node(node)}
            copy.meta["value"] = values.typed(node.meta.get("val"), copy.target, copy.args, copy.kwargs)
            env[node] = copy
        elif node.op == "output":
            return env[node.args[0][-1]]
        else:
            assert node.op == "placeholder", f"{node.format_node()} in an exported graph"
    raise AssertionError("a graph without output")
