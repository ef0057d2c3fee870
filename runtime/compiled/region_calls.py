"""Replace the fused regions of a graph by calls, of compiled code or line by line.

box = boxed(gelu_grad, up, x)              a list of the region's inputs: the caller drops its own references ...
results = region_7(box, mesh, rng)         ... and the region empties the list: each value is freed at its last use
up_grad = results[0]
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from shardc.ir.conversions import CONVERSIONS
from shardc.ir.fused_regions import FusedRegion, fused_regions
from shardc.ir.graph import source_of
from shardc.ir.stage import mesh_or_rng
from shardc.runtime import ops
from shardc.runtime.compiled import masks
from shardc.runtime.compiled.compiler import Compiler, Run
from shardc.runtime.ops.experts import activation as expert_activation
from shardc.runtime.ops.experts import products
from shardc.runtime.ops.opaque import op_of
from shardc.torch_private import FakeTensor, OpOverload

#: Conversions that do nothing here, and something backward.
IDENTITIES = {getattr(ops, row.op) for row in CONVERSIONS if row.forward == "identity"}
#: The number of sizes of a region's inputs that are compiled; further ones run line by line.
LAYOUTS = 8
#: Arguments of ops.dropout after x.
_DROPOUT = ("p", "rng", "index", "mesh", "shape", "digits", "paddings")


def with_compiled_regions(graph: fx.Graph, compiler: Compiler | None) -> fx.Graph:
    """Return a copy of a graph in which each region is one call. Without a compiler: the graph itself."""
    regions = fused_regions(graph) if compiler is not None else []
    if compiler is None or not regions:
        return graph
    copy, env = fx.Graph(), dict[fx.Node, fx.Node]()
    first, within = {r.lines[0]: r for r in regions}, {n for r in regions for n in r.lines}
    for n in graph.nodes:
        if n in first:
            _call(copy, first[n], env, compiler)
        elif n not in within:
            env[n] = copy.node_copy(n, env.__getitem__)
            if (place := activation_place(n)) is not None:
                env[n].target = _with_activation(n, place, compiler)
    return copy


def _with_activation(n: fx.Node, place: int, compiler: Compiler) -> Callable[..., Any]:
    """Return an op on experts that runs a compiled activation instead of its text, the argument at `place`."""
    run: Any = n.target
    activation = CompiledActivation(str(n.args[place]), compiler, source_of(n).module or n.name)

    def on_experts(*args: Any, **kwargs: Any) -> Any:
        return run(*args[:place], activation, *args[place + 1 :], **kwargs)

    on_experts.__module__ = __name__
    return on_experts


#: Ops that take the text of an activation.
_OF_EXPERTS = {ops.experts, ops.experts_apply}


def activation_place(n: fx.Node) -> int | None:
    """Return the number of the argument that is an activation's text, in a call of an op on experts; else None."""
    whole = n.target is ops.opaque and op_of(str(n.args[0])) in _OF_EXPERTS
    if not whole and n.target not in _OF_EXPERTS:
        return None
    return next(i for i, a in enumerate(n.args) if isinstance(a, str) and i >= whole)


def _call(graph: fx.Graph, region: FusedRegion, env: dict[fx.Node, fx.Node], compiler: Compiler) -> None:
    call = _RegionCall(region, compiler)
    mesh, rng = ((env[x] if (x := call.named.get(name)) else None) for name in ("mesh", "rng"))
    label = region.outputs[0].name
    box = graph.create_node("call_function", boxed, tuple(env[x] for x in call.takes), name=f"{label}_box")
    node = graph.create_node("call_function", _function(call), (box, mesh, rng), name=f"{label}_region")
    node.meta["source"] = source_of(region.outputs[0])
    node.meta["repeats"] = all(n.meta.get("repeats") for n in region.lines)
    for i, n in enumerate(region.outputs):
        env[n] = graph.create_node("call_function", operator.getitem, (node, i), name=n.name)
        env[n].meta = dict(n.meta)


def boxed(*values: Any) -> list[Any]:
    """Return a list that the called region may empty."""
    return list(values)


def _function(call: _RegionCall) -> Callable[..., Any]:
    """Wrap a call in a function: generated code refers to its functions by name."""

    def region(box: list[Any], mesh: Any, rng: Any) -> Any:
        return call(box, mesh, rng)

    region.__module__ = __name__
    return region


@dataclass(frozen=True)
class RegionCode:
    """The parts of a region that equal regions share, as a function of tensors.

    key: equal for equal regions; takes: the number of its inputs; lines: (op, args, kwargs), in which tensors are
    numbered: `_Take` is an input, `_Line` the result of a line; outputs: numbers of lines. writes: {place of an output:
    the number of the input into which its line adds}.
    """

    key: str
    where: str
    takes: int
    lines: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    outputs: tuple[int, ...]
    writes: Mapping[int, int]

    def function(self, *inputs: Tensor) -> list[Tensor]:
        """Return the outputs without `writes`; inputs: the takes, then three for each mask (masks.inputs)."""
        values: list[Any] = []
        where = self.takes

        def value_of(a: Any) -> Any:
            if isinstance(a, _Take):
                return inputs[a.number]
            return values[a.number] if isinstance(a, _Line) else a

        for target, args, kwargs in self.lines:
            args, kwargs = map_aggregate(args, value_of), map_aggregate(kwargs, value_of)
            if target is ops.dropout:
                values.append(masks.masked(args[0], inputs[where : where + 3], args[1]))
                where += 3
            elif target is ops.add_into:
                values.append(args[0] + args[1])
            elif target in IDENTITIES:
                values.append(args[0])
            else:
                values.append(target(*args, **kwargs))
        for i, take in self.writes.items():
            inputs[take].copy_(values[self.outputs[i]])
        return [values[k] for i, k in enumerate(self.outputs) if i not in self.writes]


@dataclass(frozen=True)
class _Take:
    """An input of a region, by number."""

    number: int


@dataclass(frozen=True)
class _Line:
    """The result of a region's line, by number."""

    number: int


class CompiledRuns:
    """A function's compiled code, by sizes and strides of its inputs. key, where, any_rows: see `Compiler`."""

    def __init__(
        self, key: str, function: Callable[..., Any], where: str, compiler: Compiler, *, any_rows: bool = False
    ) -> None:
        self._key, self._function, self._where, self._compiler = key, function, where, compiler
        self._any_rows = any_rows
        self._runs: dict[Any, Run | None] = {}
        compiler.expect(key)

    def of(self, inputs: Sequence[Any], more: Callable[[], list[Tensor]] = list) -> Run | None:
        """Return the code for these inputs and `more`, whose layouts follow from theirs; None: it runs line by line."""
        layout = tuple([(x.shape[self._any_rows :], x.stride()) for x in inputs])
        if layout not in self._runs:
            few = self._any_rows and len(inputs[0]) < 2  # a compiler takes 0 and 1 for constants
            if few or len(self._runs) == LAYOUTS or any(isinstance(x, FakeTensor) for x in inputs):
                return None
            every, how = [*inputs, *more()], {"any_rows": self._any_rows}
            self._runs[layout] = self._compiler.compiled(self._key, self._function, every, self._where, **how)
        return self._runs[layout]


class CompiledActivation:
    """An activation of experts, and its backward (products.backward_of), compiled for any number of rows."""

    def __init__(self, text: str, compiler: Compiler, where: str) -> None:
        self._plain = expert_activation.read(text)
        forward, backward = (lambda x: [self._plain(x)]), partial(products.backward_of, self._plain)
        where = f"{where}, activation"
        self._forward = CompiledRuns(f"activation {text}", forward, where, compiler, any_rows=True)
        self._backward = CompiledRuns(f"backward of {text}", backward, where, compiler, any_rows=True)

    def __call__(self, first: Tensor) -> Tensor:
        """Apply the activation: [n, parts * i] -> [n, i]."""
        run = None if first.requires_grad else self._forward.of([first])
        return self._plain(first) if run is None else run([first])[0]

    def backward(self, first: Tensor, back: Tensor, *chosen: Tensor) -> tuple[Tensor, ...]:
        """Run `backward_of`."""
        run = self._backward.of([first, back, *chosen])
        return tuple(run([first, back, *chosen])) if run else products.backward_of(self._plain, first, back, *chosen)


class _RegionCall:
    """One region of one rank. takes: its inputs, in order; named: "mesh" and "rng", if its lines use them."""

    def __init__(self, region: FusedRegion, compiler: Compiler) -> None:
        self.named = {mesh_or_rng(x): x for x in region.takes if mesh_or_rng(x)}
        self.takes = tuple(x for x in region.takes if not mesh_or_rng(x))
        self._masks = [_mask(n) for n in region.lines if n.target is ops.dropout]
        self._code = code_of(region)
        self._written = sorted(self._code.writes.items())
        self._region = region
        self._lines: fx.GraphModule | None = None
        self._runs = CompiledRuns(self._code.key, self._code.function, self._code.where, compiler)

    def __call__(self, box: list[Any], mesh: Any, rng: Any) -> Any:
        run = self._runs.of(box, lambda: self._mask_inputs(box, mesh, rng))
        if run is None or (self._masks and not rng.training):
            return self._one_by_one(box, mesh, rng)
        box += self._mask_inputs(box, mesh, rng)
        if not self._written:
            return run(box)
        written = [box[take] for _, take in self._written]
        results = list(run(box))
        for (place, _), x in zip(self._written, written, strict=True):
            results.insert(place, x)
        return results

    def _one_by_one(self, box: list[Any], mesh: Any, rng: Any) -> Any:
        if self._lines is None:
            self._lines = _one_by_one(self._region, self.takes)
        return self._lines(box, mesh, rng)

    def _mask_inputs(self, box: list[Any], mesh: Any, rng: Any) -> list[Tensor]:
        """Return the inputs of its masks."""
        return [x for draw in self._masks for x in draw(rng=rng, mesh=mesh, device=box[0].device)]


def _mask(n: fx.Node) -> partial[list[Tensor]]:
    arguments: dict[str, Any] = dict(zip(_DROPOUT, n.args[1:], strict=False)) | n.kwargs
    x: Any = n.args[0]
    shape = arguments.get("shape")
    shape = x.meta["value"].shape if shape is None else shape
    options = {"digits": arguments.get("digits", ()), "paddings": arguments.get("paddings", ())}
    return partial(masks.inputs, stream=arguments["index"], shape=shape, **options)


def code_of(region: FusedRegion) -> RegionCode:
    """Return the parts of a region that equal regions share."""
    takes = [x for x in region.takes if not mesh_or_rng(x)]
    numbered: dict[fx.Node, Any] = {n: _Take(i) for i, n in enumerate(takes)}
    numbered |= {n: _Line(i) for i, n in enumerate(region.lines)}

    def numbered_or_plain(a: Any) -> Any:
        return numbered.get(a) if isinstance(a, fx.Node) else a

    lines = []
    for n in region.lines:
        args: Any = map_aggregate(n.args, numbered_or_plain)
        kwargs: Any = map_aggregate(n.kwargs, numbered_or_plain)
        if n.target is ops.dropout:  # the rest is a mask's input
            args, kwargs = (args[0], (dict(zip(_DROPOUT, args[1:], strict=False)) | kwargs)["p"]), {}
        elif n.target in IDENTITIES:
            args, kwargs = args[:1], {}
        lines.append((n.target, args, kwargs))
    outputs = tuple(numbered[n].number for n in region.outputs)
    writes = {i: take for i, n in enumerate(region.outputs) if (take := _written(n, numbered)) is not None}
    key = repr(([(_name(t), a, k) for t, a, k in lines], outputs, writes))
    source = source_of(next(n for n in region.lines if n.target is not operator.getitem))
    where = f"{source.module or source.line or region.lines[0].name}, {len(region.lines)} lines"
    return RegionCode(key, where, len(takes), tuple(lines), outputs, writes)


def _written(n: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
    """Return the input into which a line adds, whose memory nothing else uses (joint.take_over), or None."""
    x = n.args[0] if n.target is ops.add_into else None
    take = numbered[x] if isinstance(x, fx.Node) else None
    return take.number if isinstance(take, _Take) else None


def _name(target: Any) -> str:
    return str(target) if isinstance(target, OpOverload) else str(target.__name__)


def _one_by_one(region: FusedRegion, takes: Sequence[fx.Node]) -> fx.GraphModule:
    """Build the region without a compiler, as a function of (its inputs, mesh, rng)."""
    graph = fx.Graph()
    box, mesh, rng = (graph.placeholder(name) for name in ("box", "mesh", "rng"))
    env = {x: {"mesh": mesh, "rng": rng}[mesh_or_rng(x)] for x in region.takes if mesh_or_rng(x)}
    for x in takes:
        env[x] = graph.create_node("call_method", "pop", (box, 0), name=x.name)
    for n in region.lines:
        env[n] = graph.node_copy(n, env.__getitem__)
    graph.output(tuple(env[n] for n in region.outputs))
    return fx.GraphModule(nn.Module(), graph)
