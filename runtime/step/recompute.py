"""Recomputation: values of a region are not kept for backward, but computed again when backward first needs one.

The program says which ops are in which region, and whose results are kept all the same (shardc.passes.recompute). At
run time autograd is the one who saves tensors; this file decides, tensor by tensor, what it really holds. A region

    h = linear(x, w1)      autograd saves x, w1
    a = relu(h)            autograd saves a
    y = linear(a, w2)      autograd saves a, w2

holds x (from outside; w1 and w2 are the model's own anyway) and two *notes*, "the result of relu":

    forward             an op saves a tensor that     is a result of the region, not kept    a note (op, part, size,
                                                                                             stride, offset) is saved
                                                      is anything else                       the tensor itself (or what
                                                                                             hooks around it make of it)
    the region ends     a *plan* is made: which ops must run again for the notes that are still alive (linear, relu: not
                        the second linear), and which values from outside they take (x): only those are held. Notes
                        whose ops have nothing in common get a plan each
    backward unpacks    its plan runs, in order, without autograd; each note gets its tensor, and all else is freed at
    a plan's first note its last use

A product that sums its input's gradient over ranks (shardc.runtime.ops.overlap) has the plan for its input begin before
the product that needs that input not: a gather that ends the plan goes on beside it.

So an op whose result nobody needs does not run again: the last products and sums of a layer never do, nor a collective
whose result is kept. What an op makes for itself (a norm's statistics) is no op's result: that op
runs again under autograd, alone, to catch what it saves. Regions may nest: what an inner region takes from its outer
one is a note of the outer one.

(Compare torch.utils.checkpoint with use_reentrant=False, which runs forward again as a whole, under autograd, up to the
last saved tensor; and Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost".)"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks

from shardc.ir.conversions import CONVERSIONS
from shardc.ir.graph import copy_graph
from shardc.ir.program import Program
from shardc.runtime import ops
from shardc.runtime.mesh.base import Work
from shardc.runtime.ops.by_storage import ByStorage
from shardc.runtime.ops.local_math import UNEQUAL
from shardc.runtime.step.activation_offload import OffloadedTensor, OffloadedTensors
from shardc.runtime.step.bindings import bind, binding
from shardc.torch_private import outer_hooks

#: Ops whose result may be their operand on some ranks and a new tensor on others: what they save must not start a
#: recomputation on some ranks only. It is small, and kept.
BY_RANK = {getattr(ops, row.op) for row in CONVERSIONS if "first" in (row.forward, row.backward)} | UNEQUAL

#: What was made by an op: (op, part). part -1: its result; 0, 1, ...: that one of several results; -2 - n: the n-th
#: tensor that it saved for backward and made for itself.
Origin = tuple[int, int]


@dataclass(frozen=True)
class _Slot:
    """The place, in an op's arguments, of one of the nodes that it takes."""

    index: int


@dataclass(eq=False)
class _Region:
    """A region's ops in a graph, those of inner regions too. above: itself and the regions around it, innermost first.

    ops: in their order; inside: those whose results it computes again; offload: what it holds waits on the CPU for
    backward."""

    name: str
    above: tuple[_Region, ...]
    offload: bool
    ops: list[int] = field(default_factory=list)
    inside: set[int] = field(default_factory=set)
    plans: dict[frozenset[Origin], tuple[_Plan, ...]] = field(default_factory=dict)


@dataclass(eq=False)
class _Op:
    """An op of a region. call: it, on the values of `takes`, the nodes among its arguments; chain: its regions,
    innermost first; closes: those whose last op it is.

    foreign: positions in `takes` of nodes of no region; outside: by region of the chain, of what that region does not
    compute again."""

    target: Callable[..., Any]
    call: Callable[[Sequence[Any]], Any]
    takes: tuple[int, ...]
    chain: tuple[_Region, ...]
    closes: tuple[_Region, ...] = ()
    foreign: tuple[int, ...] = ()
    outside: tuple[tuple[_Region, tuple[int, ...]], ...] = ()


def _calling(n: fx.Node) -> Callable[[Sequence[Any]], Any]:
    """Calls an op on the values of the nodes that it takes. In most, each of these is an argument by itself."""
    target, slots = binding(n.target), {u: _Slot(k) for k, u in enumerate(n.all_input_nodes)}
    found: list[_Slot] = []

    def slot(node: fx.Node) -> Any:
        found.append(slots[node])
        return slots[node]

    args: tuple[Any, ...] = fx.map_arg(n.args, slot)
    kwargs: dict[str, Any] = fx.map_arg(n.kwargs, slot)
    places = [(k, a.index) for k, a in enumerate(args) if isinstance(a, _Slot)]
    if len(places) < len(found):  # others stand in lists, or have names

        def filled(values: Sequence[Any]) -> Any:
            return target(*_fill(args, values), **{k: _fill(a, values) for k, a in kwargs.items()})

        return filled
    if kwargs or [*range(len(args))] != [index for _, index in places]:

        def placed(values: Sequence[Any]) -> Any:
            given = list(args)
            for k, index in places:
                given[k] = values[index]
            return target(*given, **kwargs)

        return placed
    return lambda values: target(*values)


def _fill(a: Any, values: Sequence[Any]) -> Any:
    if isinstance(a, _Slot):
        return values[a.index]
    if isinstance(a, (tuple, list)):
        return type(a)([_fill(x, values) for x in a])
    return a


@dataclass(frozen=True)
class _Plan:
    """How a region computes some of its values again. ops: all that run; steps: (op, nodes whose last use it is);
    inputs: nodes that it takes.
    """

    ops: frozenset[int]
    steps: tuple[tuple[int, tuple[int, ...]], ...]
    inputs: tuple[int, ...]


class Regions:
    """The regions of one graph. weights: nodes that follow from parameters and buffers alone. `recording(mesh, rng)`
    begins a run. offloaded: where regions with `offload: cpu` keep tensors.
    """

    def __init__(self, ops: dict[int, _Op], weights: frozenset[int], offloaded: type[OffloadedTensors]) -> None:
        self.ops, self.weights, self.offloaded = ops, weights, offloaded
        self._asked_after: dict[tuple[int, int], int] = {}

    def recording(self, mesh: Any, rng: Any) -> Recording:
        return Recording(self, mesh, rng)

    def offloads(self, device: torch.device) -> OffloadedTensors:
        """Where a run of forward keeps tensors until its backward."""
        return self.offloaded(device, self._asked_after)

    def plans(self, region: _Region, wanted: frozenset[Origin]) -> tuple[_Plan, ...]:
        """What has to run for the wanted values: found by walking back from them, to values that the region does not
        compute. What has no op in common is a plan of its own.
        """
        if wanted not in region.plans:
            needed = {op for op, _ in wanted}
            for i in reversed(region.ops):
                if i in needed:
                    needed.update(node for node in self.ops[i].takes if node in region.inside)
            together: dict[int, set[int]] = {}  # by op, all that it has something in common with
            for i in (i for i in region.ops if i in needed):
                parts = {id(p): p for node in self.ops[i].takes if (p := together.get(node)) is not None}
                whole = set().union({i}, *parts.values())
                together.update(dict.fromkeys(whole, whole))
            distinct = {id(whole): whole for whole in together.values()}
            region.plans[wanted] = tuple(self._plan(region, whole) for whole in distinct.values())
        return region.plans[wanted]

    def _plan(self, region: _Region, needed: set[int]) -> _Plan:
        order = [i for i in region.ops if i in needed]
        last = {i: i for i in order}  # what nothing takes is gone at once
        last |= {node: i for i in order for node in self.ops[i].takes}
        gone: dict[int, list[int]] = {i: [] for i in order}
        for node, i in last.items():
            gone[i].append(node)
        inputs = dict.fromkeys(node for i in order for node in self.ops[i].takes if node not in region.inside)
        return _Plan(frozenset(needed), tuple((i, tuple(gone[i])) for i in order), tuple(inputs))


def with_regions(
    graph: fx.Graph, program: Program, offloaded: type[OffloadedTensors] = OffloadedTensors
) -> fx.GraphModule:
    """A stage's graph as a module in which the ops of regions are recorded. A graph without regions stays as it is."""
    index = {n: i for i, n in enumerate(graph.nodes)}
    tagged = [n for n in graph.nodes if "region" in n.meta]
    if not tagged:
        return fx.GraphModule(nn.Module(), bind(copy_graph(graph)))
    regions: dict[str, _Region] = {}
    for r in program.regions:  # outer ones first
        regions[r.name] = inner = _Region(r.name, (), r.offload)
        inner.above = (inner, *(regions[r.parent].above if r.parent else ()))
    by_node: dict[int, _Op] = {}
    for n in tagged:
        takes = tuple(index[u] for u in n.all_input_nodes)
        op = by_node[index[n]] = _Op(binding(n.target), _calling(n), takes, regions[n.meta["region"]].above)
        for region in op.chain:
            region.ops.append(index[n])
            if region.name not in n.meta.get("kept", ()):
                region.inside.add(index[n])
    for op in by_node.values():
        op.foreign = tuple(k for k, node in enumerate(op.takes) if node not in by_node)
        op.outside = tuple((r, tuple(k for k, node in enumerate(op.takes) if node not in r.inside)) for r in op.chain)
    for region in reversed(regions.values()):
        if region.ops:
            by_node[region.ops[-1]].closes += (region,)
    weights = frozenset(index[n] for n in of_weights(graph, program))
    return _module(graph, Regions(by_node, weights, offloaded))


def of_weights(graph: fx.Graph, program: Program) -> set[fx.Node]:
    """What follows from parameters and buffers alone: it stays on the device anyway, or its parts do."""
    stored = {"mesh", *(p.name for p in program.params), *(b.name for b in program.buffers)}
    weights: set[fx.Node] = set()
    for n in graph.nodes:
        if (
            n.name in stored
            if n.op == "placeholder"
            else n.all_input_nodes and all(u in weights for u in n.all_input_nodes)
        ):
            weights.add(n)
    return weights


def _module(graph: fx.Graph, regions: Regions) -> fx.GraphModule:
    copy, env = fx.Graph(), dict[fx.Node, fx.Node]()
    recording: fx.Node | None = None
    for i, n in enumerate(graph.nodes):
        if i in regions.ops:
            if recording is None:
                first = {n.name: env[n] for n in graph.nodes if n in env and n.op == "placeholder"}
                recording = copy.call_method("recording", (copy.get_attr("regions"), first["mesh"], first["rng"]))
            env[n] = copy.create_node(
                "call_method", "run", (recording, i, *(env[u] for u in n.all_input_nodes)), name=n.name
            )
        else:
            env[n] = copy.node_copy(n, env.__getitem__)
            env[n].target = binding(n.target)
    root = nn.Module()
    root.regions = regions  # type: ignore[assignment]
    return fx.GraphModule(root, copy)


class Saved:
    """What autograd holds for a tensor that it wanted to save. It is one of: the tensor; what outer hooks made of it,
    or its way back from the CPU (`held`, `unpack`); or who will compute it.
    """

    __slots__ = ("__weakref__", "held", "source", "tensor", "unpack", "version")

    def __init__(self) -> None:
        self.source: _Frame | _Recomputation | None = None
        self.tensor: Tensor | None = None
        self.version = 0
        self.held: Any = None
        self.unpack: Callable[[Any], Tensor] | None = None

    def put(self, x: Tensor) -> None:
        """This is the tensor. Its graph is not held: that would hold this."""
        self.tensor, self.version, self.source = x.detach() if x.grad_fn is not None else x, x._version, None

    def begin(self) -> None:
        """It will be asked for soon: if it has to be computed, begin."""
        if isinstance(self.source, _Recomputation):
            self.source.begin()

    def get(self) -> Tensor:
        """The tensor. Raises RuntimeError, as autograd does, if it was changed in place meanwhile."""
        if isinstance(self.source, _Recomputation):
            self.source.recompute()
        if self.unpack is not None:
            return self.unpack(self.held)
        assert self.tensor is not None
        if self.tensor._version != self.version:
            what = (
                "a tensor that backward needs was modified in place: backward ran twice over an op that reuses it, or"
                " something wrote to it"
            )
            raise RuntimeError(what)
        return self.tensor


@dataclass(slots=True, eq=False)
class _Wanted:
    """A note of a frame: where to put which part of which op's results, and seen how."""

    saved: weakref.ref[Saved]
    origin: Origin
    size: torch.Size
    stride: tuple[int, ...]
    offset: Any

    def put(self, x: Tensor) -> None:
        saved = self.saved()
        if saved is not None:  # else autograd needs it no more
            same = x.size() == self.size and x.stride() == self.stride and x.storage_offset() == self.offset
            saved.put(x if same else x.as_strided(self.size, self.stride, self.offset))


class _Frame:
    """One run of a region in forward.

    seen: what the region may have to hold; wanted: what autograd has notes of. needs: of ops that saved something of
    their own, which of the nodes they take needed a gradient.
    """

    def __init__(self, region: _Region) -> None:
        self.region = region
        self.seen: dict[int, Any] = {}
        self.wanted: list[_Wanted] = []
        self.needs: dict[int, tuple[bool, ...]] = {}


class _Recomputation:
    """One plan of one run of a region, until backward is through with it. inputs: what it holds, by node; wanted: by
    op; late: results that are still on their way from other ranks.
    """

    def __init__(self, plan: _Plan, regions: Regions, needs: Mapping[int, tuple[bool, ...]], mesh: Any) -> None:
        self.plan, self.regions, self.needs = plan, regions, needs
        self.mesh, self.microbatch = mesh, mesh.step.microbatch
        self.inputs: dict[int, Any] = {}
        self.wanted: dict[int, list[_Wanted]] = {}
        self.late: list[tuple[_Wanted, Tensor, Work]] = []
        self.begun = False

    def begin(self) -> None:
        """Compute what is wanted, but for gathers: these are begun."""
        if self.begun:
            return
        self.begun = True
        wanted_of, self.wanted = self.wanted, {}
        env: dict[int, Any] = {}
        with torch.no_grad(), self.mesh.step.recompute(self.microbatch) as gathers:
            for i, gone in self.plan.steps:
                op = self.regions.ops[i]
                for node in op.takes:
                    if node not in env:  # an input: fetched or gathered as late as possible
                        x = self.inputs.pop(node)
                        env[node] = x.get() if isinstance(x, Saved) else x
                operands = [env[node] for node in op.takes]
                wanted = wanted_of.get(i, ())
                gathers.may_end_later = i in gone  # nothing of the plan takes its result
                env[i] = result = self._caught(i, operands, wanted) if i in self.needs else op.call(operands)
                work = gathers.taken()
                for w in wanted:
                    if w.origin[1] >= -1:
                        x = result if w.origin[1] == -1 else result[w.origin[1]]
                        if work is None:
                            w.put(x)
                        else:
                            self.late.append((w, x, work))
                for node in gone:
                    del env[node]

    def recompute(self) -> None:
        """Compute what is wanted. It happens once: then all who want something have it."""
        self.begin()
        late, self.late = self.late, []
        for work in dict.fromkeys(work for _, _, work in late):
            work.wait()
        for w, x, _ in late:
            w.put(x)

    def _caught(self, i: int, operands: Sequence[Any], wanted: Sequence[_Wanted]) -> Any:
        """Run an op as autograd does, for what it saves of its own."""
        caught: list[Tensor] = []
        needing = [
            g.detach().requires_grad_() if needs else g for g, needs in zip(operands, self.needs[i], strict=True)
        ]
        with torch.enable_grad(), saved_tensors_hooks(caught.append, _never):
            result = self.regions.ops[i].call(needing)
        for w in wanted:
            if w.origin[1] < -1:
                w.put(caught[-2 - w.origin[1]])
        caught.clear()  # autograd holds the hook, the hook this list, and a result in it would hold autograd's graph
        return result.detach() if isinstance(result, Tensor) else type(result)(x.detach() for x in result)


def _never(_: None) -> Tensor:
    raise AssertionError("backward of a recomputation")


@dataclass(slots=True, eq=False)
class _Packing:
    """Collects what one op saves. Autograd keeps this as long as what was saved: it must not know the recording."""

    pending: list[tuple[Saved, Tensor]]

    def __call__(self, x: Tensor) -> Saved:
        self.pending.append((saved := Saved(), x))
        return saved


class Recording:
    """One run of a graph with regions, used by the code that `with_regions` writes. It ends with forward."""

    def __init__(self, regions: Regions, mesh: Any, rng: Any) -> None:
        self.regions, self.mesh = regions, mesh
        self.microbatch = mesh.step.microbatch
        self.rng, self._then = rng, replace(rng)  # as it is now: someone's own loop may step it before backward
        self.outer = outer_hooks()
        self._frames: dict[_Region, _Frame] = {}
        self._where = ByStorage[Origin]()
        self._kept = ByStorage[dict[Any, OffloadedTensor]]()
        self._offloaded: OffloadedTensors | None = None

    def run(self, i: int, *operands: Any) -> Any:
        """Run op i on the values of the nodes that it takes."""
        op = self.regions.ops[i]
        if not torch.is_grad_enabled():
            return op.call(operands)
        for k in op.foreign:
            self._note(op.takes[k], operands[k])
        for region, positions in op.outside:
            seen = self._frame(region).seen
            for k in positions:
                seen[op.takes[k]] = operands[k]
        pending: list[tuple[Saved, Tensor]] = []
        with saved_tensors_hooks(_Packing(pending), Saved.get):
            result = op.call(operands)
        self._note(i, result)
        for n, (saved, x) in enumerate(pending):
            self._settle(i, n, saved, x, operands)
        if (ahead := getattr(getattr(result, "grad_fn", None), "ahead", None)) is not None:  # ops.overlap.product
            ahead.extend(weakref.WeakMethod(saved.begin) for saved, _ in pending)
        pending.clear()  # as in `_Recomputation._caught`
        for region in op.closes:
            self._close(self._frames.pop(region))
        return result

    def _frame(self, region: _Region) -> _Frame:
        if region not in self._frames:
            self._frames[region] = _Frame(region)
        return self._frames[region]

    def _note(self, node: int, result: Any) -> None:
        """A storage belongs to the first node that had it: views of it are views of that node's result."""
        if isinstance(result, Tensor):
            if result.layout is torch.strided:
                self._where.first(result, (node, -1))
        elif isinstance(result, (tuple, list)):
            for k, x in enumerate(result):
                if isinstance(x, Tensor) and x.layout is torch.strided:
                    self._where.first(x, (node, k))

    def _settle(self, i: int, n: int, saved: Saved, x: Tensor, operands: Sequence[Any]) -> None:
        """The n-th tensor that op i saved: where it will come from."""
        op = self.regions.ops[i]
        own = i, -2 - n
        origin = (self._where.get(x) if x.layout is torch.strided and x.numel() else None) or own
        frame = self._ask(() if origin is own and op.target in BY_RANK else op.chain, op.chain, saved, origin, x)
        if frame is not None and origin is own:
            frame.needs[i] = tuple(isinstance(g, Tensor) and g.requires_grad for g in operands)

    def _ask(
        self, askable: Sequence[_Region], chain: Sequence[_Region], saved: Saved, origin: Origin, x: Tensor
    ) -> _Frame | None:
        """Have the innermost region that computes it again compute it; hold it if there is none."""
        for region in askable:
            if origin[0] in region.inside:
                frame = saved.source = self._frames[region]
                frame.wanted.append(_Wanted(weakref.ref(saved), origin, x.size(), x.stride(), x.storage_offset()))
                return frame
        away = next((r.name for r in chain if r.offload), None)
        if away is not None and origin[0] not in self.regions.weights and self.regions.offloaded.useful(x):
            views, key = self._kept.first(x, {}), (x.size(), x.stride(), x.storage_offset())
            if key not in views:
                self._offloaded = self._offloaded or self.regions.offloads(x.device)
                views[key] = self._offloaded.keep(x, away)
            saved.held, saved.unpack = views[key], OffloadedTensor.fetch
        elif self.outer is not None:
            saved.held, saved.unpack = self.outer[0](x.detach() if x.grad_fn is not None else x), self.outer[1]
        else:
            saved.put(x)
        return None

    def _close(self, frame: _Frame) -> None:
        """Forward is through with the region: it holds just what it needs to compute what is wanted of it."""
        wanted = [w for w in frame.wanted if w.saved() is not None]
        chain = frame.region.above
        for plan in self.regions.plans(frame.region, frozenset(w.origin for w in wanted)):
            again = _Recomputation(plan, self.regions, frame.needs, self.mesh)
            for w in wanted:
                saved = w.saved()
                if saved is not None and w.origin[0] in plan.ops:
                    again.wanted.setdefault(w.origin[0], []).append(w)
                    saved.source = again
            for node in reversed(plan.inputs):  # what is noted last is expected first in backward (zero.gather)
                x = frame.seen[node]
                if isinstance(x, Tensor):
                    again.inputs[node] = held = Saved()
                    self._ask(chain[1:], chain, held, (node, -1), x)
                else:
                    again.inputs[node] = self._then if x is self.rng else x
        frame.seen = {}
