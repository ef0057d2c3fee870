"""Trace equal layers once: the first runs as it is; each other one is an op, later replaced by a copy.

    for layer in self.layers:     layers.0   norm, linear, ... 25 ops
        x = layer(x, mask)        layers.1   equal_layer(1, [x, mask], [x and mask of layers.0], [its results])
                                  layers.2   equal_layer(2, [x, mask], [], [...])

The model's own loop runs over all layers, so what it does between them, and passes to each, is traced. A layer
represents another one only if Python could not distinguish them while it was traced (`folded`), and if the graph
shows that nothing bypassed the arguments and results (`unfold`). Else the whole model is traced.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from shardc.capture.attribute_reads import Reads
from shardc.capture.constants import FRESH
from shardc.capture.rewrite import replace_results
from shardc.capture.rewrite.inline_regions import unchanged
from shardc.capture.rewrite.inner_autograd import GRADIENT
from shardc.capture.side_effects import Changes, identity
from shardc.ir.graph import placeholders
from shardc.torch_private import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    call_modes,
    fake_device,
    module_calls,
    pytree,
    traced_call,
    traced_node,
    traced_so_far,
    unseen,
)

torch.library.define(
    "shardc::equal_layer",
    "(int call, Tensor[] own, Tensor[] first, Tensor[] like) -> Tensor[]",
    tags=torch.Tag.flexible_layout,  # else the tracer fixes the strides of every operand
)

#: (number of the call, inputs of the layer, inputs of the first layer, results of that one). The third is
#: empty except in the first call that copies that layer.
EQUAL_LAYER = torch.ops.shardc.equal_layer.default
#: Types that are compared by value.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
#: Attributes of every module: tensors and modules are compared one by one, hooks must not exist.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs")))
_hooks_of = operator.itemgetter(*_HOOKS)
#: Depth to which values in lists, dicts and functions are compared.
_DEEP = 6


# --- layers that Python cannot distinguish


@dataclass
class _Layer:
    """A module of a list of layers. firsts: calls that were traced, shared by layers of one structure."""

    module: nn.Module
    path: str
    modules: list[nn.Module]
    firsts: list[_First] = field(default_factory=list)
    called: bool = False

    def tensors(self) -> list[Tensor]:
        """Return parameters and buffers, in order; one that has several names occurs several times."""
        tables = (_attributes(m)[h] for m in self.modules for h in ("_parameters", "_buffers"))
        return [x for table in tables for x in dict.values(table) if x is not None]


def _attributes(m: nn.Module) -> dict[str, Any]:
    """Return a module's attributes without a recorded read (shardc.capture.attribute_reads)."""
    attributes: dict[str, Any] = object.__getattribute__(m, "__dict__")
    return attributes


def _structure(layer: _Layer) -> Any:
    """Return a key that is equal for layers that differ at most in values of their attributes."""
    number = {id(m): i for i, m in enumerate(layer.modules)}
    modules = []
    for m in layer.modules:
        own = _attributes(m)
        tensors = [(name, _type(x)) for table in ("_parameters", "_buffers") for name, x in own[table].items()]
        children = [(name, number.get(id(x))) for name, x in own["_modules"].items()]
        unsaved = own["_non_persistent_buffers_set"]
        modules.append((type(m), frozenset(own), own["training"], tuple(tensors), tuple(children), frozenset(unsaved)))
    return tuple(modules), tuple(_places(layer.tensors(), layer.tensors()))


def _type(x: Tensor | None) -> tuple[Any, ...]:
    if x is None:
        return ()
    device = fake_device(x) if isinstance(x, FakeTensor) else x.device
    return type(x), tuple(x.shape), x.stride(), x.dtype, device, x.requires_grad, x.is_leaf


def _same(a: Any, b: Any, twins: Mapping[int, nn.Module], deep: int) -> bool:
    """Return whether Python would do the same with either; objects must be one. twins: matching modules."""
    if isinstance(a, nn.Module) and id(a) in twins:
        return twins[id(a)] is b
    if a is b:
        return True
    if type(a) is not type(b) or not deep:
        return False

    def each(x: Any, y: Any) -> bool:
        return _same(x, y, twins, deep - 1)

    if isinstance(a, _PLAIN):
        return bool(a == b)
    if type(a) in (list, tuple):
        return len(a) == len(b) and all(map(each, a, b))
    if type(a) in (set, frozenset):
        return bool(a == b) and all(isinstance(x, _PLAIN) for x in a)
    if type(a) is dict:
        return list(a) == list(b) and all(isinstance(k, _PLAIN) and each(v, b[k]) for k, v in a.items())
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and each(a.__self__, b.__self__)
    if isinstance(a, functools.partial):
        return each((a.func, a.args, a.keywords), (b.func, b.args, b.keywords))
    if isinstance(a, FunctionType):
        cells = [tuple(c.cell_contents for c in f.__closure__ or ()) for f in (a, b)]
        return a.__code__ is b.__code__ and each(
            (cells[0], a.__defaults__, a.__kwdefaults__, dict(vars(a))),
            (cells[1], b.__defaults__, b.__kwdefaults__, dict(vars(b))),
        )
    return False


# --- while the model is traced


@dataclass(eq=False)
class _First:
    """A call of a layer that was traced as it is.

    key: what Python sees of its arguments; operands: the tensors among them; touched: the attributes of its modules
    that Python read; outside: attributes of others, (owner, name, contents); results: what it returned, flat; at: for
    each the number of the operand that it is, or -1. copied: a copy already represents another layer.
    """

    layer: _Layer
    key: Any
    operands: list[Tensor]
    touched: set[tuple[int, str]]
    outside: list[tuple[Any, str, Any]]
    results: list[Any]
    structure: Any
    at: list[int]
    copied: bool = False

    @property
    def fresh(self) -> list[Tensor]:
        """The results that are tensors, and no operands."""
        return [x for x, i in zip(self.results, self.at, strict=True) if isinstance(x, Tensor) and i < 0]


class Folding:
    """What was folded during a trace. callers: modules in progress; calls: see `unfold`."""

    def __init__(
        self, callers: Sequence[nn.Module], reads: Reads, changes: Changes, effects: Callable[[str], object]
    ) -> None:
        self._callers, self._reads, self._changes, self._effects = callers, reads, changes, effects
        self.calls: list[tuple[str, str]] = []

    def forward_of(self, layer: _Layer) -> Callable[..., Any]:
        """Return the function that a layer runs instead of its forward."""
        function = type(layer.module).forward

        @functools.wraps(layer.module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            caller = self._callers[-1] if self._callers else layer.module
            called = _attributes(caller) is _attributes(layer.module)
            original = functools.partial(function, caller if called else layer.module)
            again, layer.called = layer.called, True
            modes = call_modes()
            leaves, structure = pytree.tree_flatten((args, kwargs))
            operands = [x for x in leaves if isinstance(x, Tensor)]
            key: Any = None
            with unseen():
                plain = (
                    not again
                    and all(isinstance(x, (FakeTensor, *_PLAIN)) for x in leaves)
                    and all(traced_node(x) is not None for x in operands)
                    and self._plain(layer)
                )
                if plain:
                    known = [("tensor", *_type(x)) if isinstance(x, Tensor) else (type(x), x) for x in leaves]
                    at = _places(operands, operands), _places(operands, layer.tensors())
                    key = (structure, known, at, modes)
                    for first in layer.firsts:
                        if first.key == key and _reads_same(first, layer) and _is_as_then(first):
                            return self._copy(first, layer, operands)
            if not plain:
                return original(*args, **kwargs)
            return self._trace(layer, functools.partial(original, *args, **kwargs), key, operands)

        return forward

    def _plain(self, layer: _Layer) -> bool:
        """Return whether nobody looks into the layer from outside, and forward has set nothing in it."""
        hooked = any(any(_hooks_of(_attributes(m))) for m in layer.modules[1:])
        return not hooked and not any(n.startswith(f"{layer.path}.") for n in self._changes.written)

    def _trace(self, layer: _Layer, run: Callable[[], Any], key: Any, operands: list[Tensor]) -> Any:
        """Run the layer. It may represent others if it did nothing but return its results."""
        outer, self._reads.touched = self._reads.touched, {}
        before, nodes = self._state(layer, operands), len(traced_so_far())
        try:
            result = run()
        finally:
            touched, self._reads.touched = self._reads.touched, outer
            outer |= touched
        results, structure = pytree.tree_flatten(result)
        tensors = [x for x in results if isinstance(x, Tensor)]
        at = _places(results, operands)
        first = _First(layer, key, operands, _inside(layer, touched), _outside(layer, touched), results, structure, at)
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (*operands, *layer.tensors()))
        added = traced_so_far()
        if (
            all(map(_is_fresh, added[: len(added) - nodes]))
            and self._state(layer, operands) == before
            and all(isinstance(x, (FakeTensor, *_PLAIN)) for x in results)
            and first.fresh
            and all(i < 0 for i in _places(tensors, layer.tensors()))
            and all(x.requires_grad == (grad and (x.is_floating_point() or x.is_complex())) for x in first.fresh)
        ):
            layer.firsts.append(first)
        return result

    def _state(self, layer: _Layer, operands: list[Tensor]) -> Any:
        """Return what must be the same before and after a layer: its contents, modes, and capture's records."""
        values = [_contents(v) for m in layer.modules for k, v in _attributes(m).items() if k not in _OF_EVERY_MODULE]
        return (
            *(values, call_modes(), self._changes.assigned),
            [x.requires_grad for x in (*operands, *layer.tensors())],
            self._effects(layer.path),
        )

    def _copy(self, first: _First, layer: _Layer, operands: list[Tensor]) -> Any:
        self.calls.append((first.layer.path, layer.path))
        others, first.copied = [] if first.copied else first.operands, True
        outputs = iter(traced_call(EQUAL_LAYER, (len(self.calls) - 1, operands, others, first.fresh), first.fresh))
        results = [
            (operands[i] if i >= 0 else next(outputs)) if isinstance(x, Tensor) else x
            for x, i in zip(first.results, first.at, strict=True)
        ]
        for i, name in first.touched:  # so that later changes of this layer's attributes are detected, too
            self._reads.again(layer.modules[i], name)
        for name in [n for n in self._reads.reading if n == first.layer.path or n.startswith(f"{first.layer.path}.")]:
            self._reads.reading.add(layer.path + name.removeprefix(first.layer.path))
        return pytree.tree_unflatten(results, first.structure)


def _places(each: Sequence[Any], among: Sequence[Tensor]) -> list[int]:
    """Return for each item its first index among some tensors, or -1."""
    places = {id(x): i for i, x in reversed(list(enumerate(among)))}
    return [places.get(id(x), -1) for x in each]


def _reads_same(first: _First, layer: _Layer) -> bool:
    """Return whether all attributes that were read of the first layer are the same in this one."""
    pairs = list(zip(first.layer.modules, layer.modules, strict=True))
    twins = {id(x): y for x, y in pairs}
    for i, name in first.touched - {(0, "forward")}:  # that one is replaced in every layer
        one, other = map(_attributes, pairs[i])
        if name in one and name not in _OF_EVERY_MODULE and not _same(one[name], other.get(name), twins, _DEEP):
            return False
    return True


def _is_as_then(first: _First) -> bool:
    """Return whether outside values that the layer read are unchanged; forward may set them in between."""
    return all(_contents(_attributes_of(x).get(name)) == then for x, name, then in first.outside)


def _attributes_of(x: Any) -> dict[str, Any]:
    return _attributes(x) if isinstance(x, nn.Module) else vars(x)


def _outside(layer: _Layer, touched: Mapping[tuple[int, str], Any]) -> list[tuple[Any, str, Any]]:
    """Return attributes that were read outside the layer: owner, name, and contents."""
    inside = {identity(m) for m in layer.modules}
    reads = ((x, name, _attributes_of(x)) for (number, name), x in touched.items() if number not in inside)
    return [(x, name, _contents(attributes[name])) for x, name, attributes in reads if name in attributes]


def _is_fresh(n: fx.Node) -> bool:
    """Return whether no one holds the tensor, as with `torch.tensor(...)`: equal layers make equal ones."""
    return n.op != "get_attr" or all(u.target in FRESH for u in n.users)


def _inside(layer: _Layer, touched: Mapping[tuple[int, str], Any]) -> set[tuple[int, str]]:
    """Return attributes that were read, by the number of their module in the layer."""
    number = {identity(m): i for i, m in enumerate(layer.modules)}
    reads = {(number[m], name) for m, name in touched if m in number}
    for i in [i for i, name in reads if name == "__dict__"]:
        reads |= {(i, name) for name in _attributes(layer.modules[i])}
    return reads


def _contents(x: Any) -> Any:
    """Return what a list, dict, set or object holds now."""
    if isinstance(x, dict):
        return [(k, _plain_or_id(v)) for k, v in x.items()]
    if isinstance(x, (list, tuple, set)):
        return [_plain_or_id(v) for v in x]
    if isinstance(x, (nn.Module, type, Tensor)) or not hasattr(x, "__dict__"):
        return _plain_or_id(x)
    return [(k, _plain_or_id(v)) for k, v in vars(x).items()]


def _plain_or_id(x: Any) -> Any:
    return (type(x), x) if isinstance(x, _PLAIN) else id(x)


@contextmanager
def folded(model: nn.Module, reads: Reads, changes: Changes, effects: Callable[[str], object]) -> Iterator[Folding]:
    """Trace the model's equal layers once inside the block.

    reads, changes: what forward has read and set so far; effects: layer name -> what else capture recorded.
    """
    layers = [x for x in _layers(model) if "forward" not in _attributes(x.module)]
    with module_calls() as calls:
        try:
            folding = Folding(calls, reads, changes, effects)
            for layer in layers:
                _attributes(layer.module)["forward"] = folding.forward_of(layer)
            yield folding
        finally:
            for layer in layers:
                _attributes(layer.module).pop("forward", None)


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """Yield the layers that have at least one of the same structure in their list: children with numbers as names."""
    seen: set[int] = set()
    for path, parent in model.named_modules():
        kinds: dict[Any, list[_Layer]] = {}
        for number, module in parent.named_children():
            if number.isdigit() and id(module) not in seen:
                seen.add(id(module))
                layer = _Layer(module, f"{path}.{number}".lstrip("."), list(module.modules()))
                kinds.setdefault(_structure(layer), []).append(layer)
        for kind in kinds.values():
            for layer in kind[1:]:
                layer.firsts = kind[0].firsts
        yield from (layer for kind in kinds.values() if len(kind) > 1 for layer in kind)


# --- in the exported graph --------------------------------------------------------------------------------------------


class UnlikeError(Exception):
    """Layers that seemed equal are not: the whole model is traced."""


@dataclass
class _Traced:
    """A layer that was traced. nodes: its ops.

    operands, results: its input and output tensors; weights: its parameters and buffers, by the end of their names.
    """

    nodes: list[fx.Node]
    operands: list[fx.Node]
    results: list[fx.Node]
    weights: dict[str, fx.Node]


def unfold(model: nn.Module, exported: ExportedProgram, calls: Sequence[tuple[str, str]], cut: set[fx.Node]) -> None:
    """Write the copies into a graph. Raises UnlikeError if a layer bypassed its arguments or results.

    calls: (name of a layer that was traced, name of an equal one), by the number of the `equal_layer`; cut: the nodes
    that were computed without gradients, to which their copies are added.
    """
    if not calls:
        return
    graph, nodes, specs = exported.graph, placeholders(exported.graph), exported.graph_signature.input_specs
    by_name = {str(s.target).removeprefix("model."): nodes[s.arg.name] for s in specs}
    tensors = {
        name: x for named in (model.named_parameters, model.named_buffers) for name, x in named(remove_duplicate=False)
    }
    by_tensor: dict[int, fx.Node] = {}
    for name, node in ((n, by_name[n]) for n in tensors if n in by_name):  # one of two names has two placeholders
        if (same := by_tensor.setdefault(id(tensors[name]), node)) is not node:
            node.replace_all_uses_with(same)
    stored = {name: by_tensor[id(x)] for name, x in tensors.items() if id(x) in by_tensor}
    constants = {nodes[s.arg.name] for s in specs if s.kind == InputKind.CONSTANT_TENSOR}  # all copies share them
    if any(n.target is GRADIENT for n in graph.nodes):
        raise UnlikeError("a gradient inside of forward looks at the graph while it is made")
    firsts: dict[str, _Traced] = {}
    for call in graph.find_nodes(op="call_function", target=EQUAL_LAYER):  # in the order of the graph
        number, inputs, others, like = call.args
        name, layer = calls[number]
        if name not in firsts:
            firsts[name] = _traced(graph, name, others, like, stored, constants)
        first = firsts[name]
        env = {x: x for x in constants} | {n: stored[layer + end] for end, n in first.weights.items()}
        for x, y in zip(first.operands, inputs, strict=True):
            if env.setdefault(x, y) is not y:
                raise UnlikeError("one operand of a layer is two of another")
        renamed = _renamer(f"model.{name}", f"model.{layer}")
        with graph.inserting_before(call):
            for n in first.nodes:
                env[n] = graph.node_copy(n, env.__getitem__)
                stack = n.meta["nn_module_stack"]
                env[n].meta["nn_module_stack"] = {renamed(k): (renamed(v[0]), *v[1:]) for k, v in stack.items()}
                if n in cut:
                    cut.add(env[n])
        replace_results(call, [env[n] for n in first.results])


def _traced(
    graph: fx.Graph,
    name: str,
    operands: Sequence[fx.Node],
    results: Sequence[fx.Node],
    stored: Mapping[str, fx.Node],
    constants: set[fx.Node],
) -> _Traced:
    inside = dict.fromkeys(_segment(graph, name))
    taken = [_same_tensor(x, lambda n: n not in inside) for x in operands]
    outputs = [_same_tensor(x, inside.__contains__) for x in results]
    weights = {k.removeprefix(name): n for k, n in stored.items() if k.startswith(f"{name}.")}
    if set(taken) & set(weights.values()):
        raise UnlikeError("a layer gets one of its own weights as an argument")
    known = {*taken, *constants, *weights.values()}
    for n in inside:
        leaves = any(u not in inside and (u.target is not EQUAL_LAYER or n in u.args[1]) for u in n.users)  # type: ignore[operator]
        if n.op != "call_function" or isinstance(n.target, HigherOrderOperator) or (leaves and n not in outputs):
            raise UnlikeError("a layer returns more than its results")
        if any(x not in inside and x not in known for x in n.all_input_nodes):
            raise UnlikeError("a layer takes more than its arguments and weights")
    return _Traced(list(inside), taken, outputs, weights)


def _segment(graph: fx.Graph, path: str) -> list[fx.Node]:
    """Return the nodes that a layer added."""
    full = f"model.{path}"
    return [n for n in graph.nodes if any(v[0] == full for v in (n.meta.get("nn_module_stack") or {}).values())]


def _same_tensor(node: fx.Node, fits: Callable[[fx.Node], bool]) -> fx.Node:
    """Return the earlier node of a tensor that `fits`.

    An op that returns its operand, such as `x.to(dtype)` of the same dtype, or that writes into it, makes a new node.
    """
    before: Any = node
    while not fits(before):
        writes = isinstance(before.target, OpOverload) and before.target._schema.is_mutable
        before = before.args[0] if writes else unchanged(before) if before.op == "call_function" else None
        if before is None:
            raise UnlikeError("operands or results of a layer are none in the graph")
    result: fx.Node = before
    return result


def _renamer(first: str, layer: str) -> Callable[[str], str]:
    """Return a function that maps a module's name in one layer to its name in another."""

    @functools.cache
    def renamed(text: str) -> str:
        within = text == first or text.startswith(f"{first}.")
        return layer + text.removeprefix(first) if within else text

    return renamed
