"""Equal layers are traced once. While a model is captured, the first of them runs as it is; each of the others is one
op, which afterwards becomes a copy of what the first one added to the graph.

    for layer in self.layers:     layers.0   norm, linear, ... 25 ops
        x = layer(x, mask)        layers.1   equal_layer(1, [x, mask, weights of 1], [x, mask, weights of 0, results])
                                  layers.2   equal_layer(2, [x, mask, weights of 2], [...])

The model's own loop runs over all layers, so what it does between them, and what it gives to which, is traced. A layer
stands for another one only where Python could not tell them apart while it was traced (`folded`), and where the graph
shows that nothing went past the arguments and results (`unfold`). Else the model is traced whole.
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

from shardc.capture.attribute_reads import Reads
from shardc.capture.inline_regions import unchanged
from shardc.capture.inner_autograd import GRADIENT
from shardc.capture.side_effects import Changes, identity
from shardc.torch_private import (
    FakeTensor,
    HigherOrderOperator,
    OpOverload,
    call_modes,
    fake_device,
    module_calls,
    pytree,
    traced_so_far,
)

torch.library.define("shardc::equal_layer", "(int call, Tensor[] own, Tensor[] first, int results) -> Tensor[]")


def _results(call: int, own: Sequence[Tensor], first: Sequence[Tensor], results: int) -> list[Tensor]:
    """Tensors like the results of the first layer, which are the last ones of `first`."""
    like = first[len(first) - results :]
    return [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in like]


def _no_backward(ctx: Any, *grads: Any) -> Any:
    raise AssertionError("equal_layer is gone before anything runs")


torch.library.impl("shardc::equal_layer", "CompositeExplicitAutograd", _results)
torch.library.register_autograd("shardc::equal_layer", _no_backward)
EQUAL_LAYER = torch.ops.shardc.equal_layer.default

#: Values that Python compares by what they are.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
#: Of every module: its tensors and modules are compared one by one, hooks have to be none.
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_HOOKS = tuple(name for name in vars(nn.Module()) if name.endswith(("_hooks", "_hooks_with_kwargs")))
#: How far values in lists, dicts and functions are followed.
_DEEP = 6


class UnlikeError(Exception):
    """Layers that were taken for equal are not: the model is traced whole."""


# --- layers that Python cannot tell apart


@dataclass
class _Layer:
    """A module of a list of layers. kind: a number that layers have in common which differ in `unlike` at most:
    (number of the module in the layer, attribute).
    """

    module: nn.Module
    path: str
    modules: list[nn.Module]
    kind: tuple[int, int] = (0, 0)
    unlike: set[tuple[int, str]] = field(default_factory=set)
    called: bool = False

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, in order; one that has several names comes several times."""
        found = []
        for m in self.modules:
            for held in ("_parameters", "_buffers"):
                found += [x for x in _attributes(m)[held].values() if x is not None]
        return found


def _attributes(m: nn.Module) -> dict[str, Any]:
    """Past what records reads (shardc.capture.attribute_reads)."""
    found: dict[str, Any] = object.__getattribute__(m, "__dict__")
    return found


def _lists(model: nn.Module) -> Iterator[list[tuple[str, nn.Module]]]:
    """The modules of every list of layers, by name: those that their parent has under numbers."""
    for name, module in model.named_modules():
        children = [(f"{name}.{k}" if name else k, m) for k, m in module.named_children() if k.isdigit()]
        if len(children) > 1:
            yield children


def _unlike(a: _Layer, b: _Layer) -> set[tuple[int, str]] | None:
    """The attributes in which two layers differ; None where that is more than values that Python may never read."""
    if len(a.modules) != len(b.modules):
        return None
    twins = {id(x): y for x, y in zip(a.modules, b.modules, strict=True)}
    found: set[tuple[int, str]] = set()
    for i, (x, y) in enumerate(zip(a.modules, b.modules, strict=True)):
        mine, other = _attributes(x), _attributes(y)
        if type(x) is not type(y) or mine.keys() != other.keys() or mine["training"] != other["training"]:
            return None
        for held in ("_parameters", "_buffers", "_modules"):
            if list(mine[held]) != list(other[held]):
                return None
        children = zip(mine["_modules"].values(), other["_modules"].values(), strict=True)
        if any(twins.get(id(m)) is not n for m, n in children if m is not None):
            return None
        if not all(_alike(mine[held][n], other[held][n]) for held in ("_parameters", "_buffers") for n in mine[held]):
            return None
        if mine["_non_persistent_buffers_set"] != other["_non_persistent_buffers_set"]:
            return None
        found |= {(i, k) for k in mine if k not in _OF_EVERY_MODULE and not _same(mine[k], other[k], twins, _DEEP)}
    return found if _ties(a.tensors()) == _ties(b.tensors()) else None


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    return _type(a) == _type(b)


def _type(x: Tensor) -> tuple[Any, ...]:
    device = fake_device(x) if isinstance(x, FakeTensor) else x.device
    return type(x), tuple(x.shape), x.stride(), x.dtype, device, x.requires_grad, x.is_leaf


def _ties(tensors: Sequence[Tensor]) -> list[int]:
    """Which of them are one."""
    places: dict[int, int] = {}
    return [places.setdefault(id(x), i) for i, x in enumerate(tensors)]


def _same(a: Any, b: Any, twins: Mapping[int, nn.Module], deep: int) -> bool:
    """Would Python do the same with either? Two objects are alike only where they are one. twins: modules that stand
    for each other.
    """
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
    """A call of a layer that was traced as it is. key: what Python sees of its arguments; touched: the attributes of
    its modules that Python read; results: what it returned, flat; at: for each the number of the operand that it is, or
    -1.
    """

    layer: _Layer
    key: Any
    operands: list[Tensor]
    touched: set[tuple[int, str]]
    results: list[Any]
    structure: Any
    at: list[int]

    @property
    def made(self) -> list[Tensor]:
        """The results that are tensors, and no operands."""
        return [x for x, i in zip(self.results, self.at, strict=True) if isinstance(x, Tensor) and i < 0]


class Folding:
    """What was folded while a model was traced. calls: names of (the layer that was traced, the one that is equal to
    it), by the number of the op.
    """

    def __init__(
        self, reads: Reads, changes: Changes, effects: Callable[[str], object], callers: Sequence[nn.Module]
    ) -> None:
        self._reads, self._changes, self._effects, self._callers = reads, changes, effects, callers
        self._firsts: dict[tuple[int, int], list[_First]] = {}
        self.calls: list[tuple[str, str]] = []

    def forward_of(self, layer: _Layer) -> Callable[..., Any]:
        """What a layer runs in the place of its forward."""
        function = type(layer.module).forward

        @functools.wraps(layer.module.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            caller = self._callers[-1] if self._callers else layer.module
            called = _attributes(caller) is _attributes(layer.module)
            original = functools.partial(function, caller if called else layer.module)
            again, layer.called = layer.called, True
            leaves, structure = pytree.tree_flatten((args, kwargs))
            if again or not all(isinstance(x, (FakeTensor, *_PLAIN)) for x in leaves) or not self._plain(layer):
                return original(*args, **kwargs)
            operands = [*(x for x in leaves if isinstance(x, Tensor)), *layer.tensors()]
            known = [("tensor", *_type(x)) if isinstance(x, Tensor) else (type(x), x) for x in leaves]
            key = (structure, known, _ties(operands), call_modes())
            for first in self._firsts.get(layer.kind, ()):
                if first.key == key and _read_alike(first, layer):
                    return self._copy(first, layer, operands)
            return self._trace(layer, functools.partial(original, *args, **kwargs), key, operands)

        return forward

    def _plain(self, layer: _Layer) -> bool:
        """Nobody looks into the layer from outside, and forward has set nothing in it."""
        hooked = any(_attributes(m)[h] for m in layer.modules[1:] for h in _HOOKS)
        return not hooked and not any(n.startswith(f"{layer.path}.") for n in self._changes.written)

    def _trace(self, layer: _Layer, run: Callable[[], Any], key: Any, operands: list[Tensor]) -> Any:
        """Run the layer. It may stand for others if it did nothing but give its results."""
        outer, self._reads.touched = self._reads.touched, set()
        before, nodes = self._state(layer, operands), len(traced_so_far())
        try:
            result = run()
        finally:
            touched, self._reads.touched = self._reads.touched, outer
            outer |= touched
        results, structure = pytree.tree_flatten(result)
        places = {id(x): i for i, x in reversed(list(enumerate(operands)))}
        at = [places.get(id(x), -1) for x in results]
        first = _First(layer, key, operands, _own(layer, touched), results, structure, at)
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
        added = traced_so_far()
        constants = any(n.op == "get_attr" for n in added[: len(added) - nodes])  # each layer has its own
        if (
            not constants
            and self._state(layer, operands) == before
            and all(isinstance(x, (FakeTensor, *_PLAIN)) for x in results)
            and first.made
            and all(x.requires_grad == (grad and (x.is_floating_point() or x.is_complex())) for x in first.made)
        ):
            self._firsts.setdefault(layer.kind, []).append(first)
        return result

    def _state(self, layer: _Layer, operands: list[Tensor]) -> Any:
        """What must be the same after a layer as before: what it holds, the modes, what capture has noted."""
        held = [_contents(v) for m in layer.modules for k, v in _attributes(m).items() if k not in _OF_EVERY_MODULE]
        return (
            *(held, call_modes(), len(self._changes.written), [x.requires_grad for x in operands]),
            self._effects(layer.path),
        )

    def _copy(self, first: _First, layer: _Layer, operands: list[Tensor]) -> Any:
        self.calls.append((first.layer.path, layer.path))
        made = first.made
        each = iter(EQUAL_LAYER(len(self.calls) - 1, operands, [*first.operands, *made], len(made)))
        results = [
            (operands[i] if i >= 0 else next(each)) if isinstance(x, Tensor) else x
            for x, i in zip(first.results, first.at, strict=True)
        ]
        for i, name in first.touched:  # a later change of this layer's attributes is to be noticed, too
            self._reads.again(layer.modules[i], name)
        for name in [n for n in self._reads.reading if n == first.layer.path or n.startswith(f"{first.layer.path}.")]:
            self._reads.reading.add(layer.path + name.removeprefix(first.layer.path))
        return pytree.tree_unflatten(results, first.structure)


def _read_alike(first: _First, layer: _Layer) -> bool:
    """Are all attributes that were read of the first layer the same in this one?"""
    perhaps = first.touched & (first.layer.unlike | layer.unlike)
    twins = {id(x): y for x, y in zip(first.layer.modules, layer.modules, strict=True)} if perhaps else {}
    return all(
        _same(_attributes(first.layer.modules[i])[name], _attributes(layer.modules[i])[name], twins, _DEEP)
        for i, name in perhaps
    )


def _own(layer: _Layer, touched: set[tuple[int, str]]) -> set[tuple[int, str]]:
    """Attributes that were read, by the number of their module in the layer."""
    number = {identity(m): i for i, m in enumerate(layer.modules)}
    found = {(number[m], name) for m, name in touched if m in number}
    for i in [i for i, name in found if name == "__dict__"]:
        found |= {(i, name) for name in _attributes(layer.modules[i])}
    return found


def _contents(x: Any) -> Any:
    """Of a list, a dict, a set or an object: what it holds, as it is now."""
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
    """While open, the model's equal layers are traced once. reads, changes: what forward has read and set so far;
    effects: what else capture noted, of a layer of this name.
    """
    layers = [x for x in _layers(model) if "forward" not in _attributes(x.module)]
    try:
        with module_calls() as callers:
            folding = Folding(reads, changes, effects, callers)
            for layer in layers:
                _attributes(layer.module)["forward"] = folding.forward_of(layer)
            yield folding
    finally:
        for layer in layers:
            _attributes(layer.module).pop("forward", None)


def _layers(model: nn.Module) -> Iterator[_Layer]:
    """Those of which there are two alike."""
    seen: set[int] = set()
    for number, children in enumerate(_lists(model)):
        kinds: list[list[_Layer]] = []
        for path, module in children:
            if id(module) in seen:
                continue
            seen.add(id(module))
            layer = _Layer(module, path, list(module.modules()))
            for i, kind in enumerate(kinds):
                if (unlike := _unlike(kind[0], layer)) is not None:
                    layer.kind, layer.unlike = (number, i), unlike
                    kind.append(layer)
                    break
            else:
                layer.kind = number, len(kinds)
                kinds.append([layer])
        yield from (layer for kind in kinds if len(kind) > 1 for layer in kind)


# --- in the graph


def unfold(graph: fx.Graph, calls: Sequence[tuple[str, str]], cut: set[fx.Node]) -> None:
    """Put a copy of the first layer's ops in the place of every `equal_layer`. calls: of `Folding`; cut: the nodes that
    were computed without gradients, to which their copies are added.

    Raises UnlikeError where a layer took or gave more than its arguments, weights and results.
    """
    if not calls:
        return
    if any(n.target is GRADIENT for n in graph.nodes):
        raise UnlikeError("a gradient inside of forward looks at the graph while it is made")
    segments: dict[str, list[fx.Node]] = {}
    for node in graph.find_nodes(op="call_function", target=EQUAL_LAYER):
        number: Any = node.args[0]
        first, layer = calls[number]
        if first not in segments:
            segments[first] = _segment(graph, first)
        _unfold(graph, node, segments[first], first, layer, cut)


def _segment(graph: fx.Graph, path: str) -> list[fx.Node]:
    """The nodes that a layer added."""
    full = f"model.{path}"
    return [n for n in graph.nodes if any(v[0] == full for v in (n.meta.get("nn_module_stack") or {}).values())]


def _unfold(graph: fx.Graph, call: fx.Node, segment: list[fx.Node], first: str, layer: str, cut: set[fx.Node]) -> None:
    args: Any = call.args
    _, own, others, count = args
    inside = set(segment)
    operands = [_same_tensor(x, lambda n: n not in inside) for x in others[: len(others) - count]]
    results = [_same_tensor(x, inside.__contains__) for x in others[len(others) - count :]]
    env: dict[fx.Node, fx.Node] = {}
    for x, y in zip(operands, own, strict=True):
        if env.setdefault(x, y) is not y:
            raise UnlikeError("one operand of a layer is two of another")
    given = set(results)
    with graph.inserting_before(call):
        for n in segment:
            outside = [u for u in n.users if u not in inside and u.target is not EQUAL_LAYER]
            if n.op != "call_function" or isinstance(n.target, HigherOrderOperator) or (outside and n not in given):
                raise UnlikeError("a layer gives more than its results")
            if any(x not in env for x in n.all_input_nodes):
                raise UnlikeError("a layer takes more than its arguments and weights")
            env[n] = copy = graph.node_copy(n, env.__getitem__)
            copy.meta["nn_module_stack"] = _renamed(n.meta["nn_module_stack"], first, layer)
            if n in cut:
                cut.add(copy)
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(env[results[int(user.args[1])]])  # type: ignore[arg-type]
        graph.erase_node(user)
    graph.erase_node(call)


def _same_tensor(node: fx.Node, fits: Callable[[fx.Node], bool]) -> fx.Node:
    """The name that a tensor had earlier: an op that gives its operand back, as `x.to(dtype)` of that dtype, or that
    writes into it, gives it a new one, by which it goes from then on.
    """
    before: Any = node
    while not fits(before):
        writes = isinstance(before.target, OpOverload) and before.target._schema.is_mutable
        before = before.args[0] if writes else unchanged(before) if before.op == "call_function" else None
        if before is None:
            raise UnlikeError("operands or results of a layer are none in the graph")
    found: fx.Node = before
    return found


def _renamed(stack: Mapping[str, Any], first: str, layer: str) -> dict[str, Any]:
    """The modules around a node, which are those of another layer."""
    old, new = f"model.{first}", f"model.{layer}"

    def of(text: str) -> str:
        head, found, tail = f"{text}.".partition(f"{old}.")
        return f"{head}{new}.{tail}"[:-1] if found else text

    return {of(k): (of(v[0]), *v[1:]) for k, v in stack.items()}
