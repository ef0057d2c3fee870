"""Write the two graphs of a stage from its ops and the events of its backward.

forward     the stage's ops, some as the ops that they consist of, where backward needs more than operands and results;
            it also returns what backward needs
backward    the lines of every event; recomputed or gathered values where they are first needed; reloads from the host
            for each event that needs them (shardc.passes.joint.host_copies moves these lines)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.artifact.emit import EFFECTS
from shardc.ir.graph import is_call, producer_of, source_of
from shardc.ir.metadata import Collective, HostCopy, Value
from shardc.ir.program import Program
from shardc.ir.stage import Joint
from shardc.ir.types import op_name
from shardc.passes.joint.autograd_order import BucketComplete, Complete, Event, GatheredComplete, Gradient, RuleRuns
from shardc.passes.joint.derivatives import Facts, Rules
from shardc.passes.joint.derivatives.record import Line, Ref, Type, is_view, map_refs
from shardc.passes.joint.derivatives.template import Made, item_name
from shardc.passes.joint.halves import halves_of
from shardc.passes.joint.kept import Recomputed, RecomputePlan, Wanted
from shardc.passes.joint.take_over import take_over_memory
from shardc.runtime import ops
from shardc.runtime.ops.factors import factors
from shardc.runtime.zero.flat_partition import Flat
from shardc.torch_private import OpOverload, add_node

aten = torch.ops.aten

#: Small buckets of together at most 1/16 of a bucket's bytes are gathered with it, beside `prefetch` others.
_SMALL = 16

Found = dict[Wanted, fx.Node]


class Writer:
    """Writes the graphs of one stage. first_gradients, returned_gradients: of backward, by value."""

    def __init__(
        self,
        program: Program,
        graph: fx.Graph,
        rules: Rules,
        facts: Mapping[fx.Node, Facts],
        events: Sequence[Event],
        first_gradients: Mapping[Made, Gradient],
        returned_gradients: Mapping[Made, Gradient],
    ) -> None:
        self._program, self._graph, self._facts, self._events = program, graph, facts, events
        self._first_gradients, self._returned_gradients = first_gradients, returned_gradients
        self._template = rules.template
        self._replaced = {e.node: e.rule for e in events if isinstance(e, RuleRuns) and e.rule.forward is not None}
        self._inputs = {n.name: n for n in graph.find_nodes(op="placeholder")}
        self._gathered = self._views_of_gathered()
        self._recomputed = Recomputed(program, graph, list(self._all_needs()), self._through, self._part_of)
        self._back = fx.Graph()
        self._values: Found = {}  # values in backward
        self._gradients: dict[Gradient, fx.Node] = {}
        self._placeholders: dict[str, fx.Node] = {}
        self._gathers: list[tuple[fx.Node, fx.Node, fx.Node]] = []  # (of forward, start, wait), in backward's order
        self._shares_memory_with: dict[fx.Node, fx.Node] = {}  # by value in the memory of another one: that one
        self._tapes: set[fx.Node] = set()
        self._handles: dict[Wanted, fx.Node] = {}  # handles of values on the host, in backward
        #: By handle, the value reloaded for the event, or plan, that is being written; metadata of its lines.
        self._reloaded: dict[fx.Node, fx.Node] = {}
        self._reloading: dict[str, Any] = {}

    def joint(self, nbytes: Callable[[fx.Node], int] | None = None) -> Joint:
        """Write the joint graph. nbytes: of a value or a tape; if set, backward is split in halves."""
        forward, saved = self._write_forward()
        self._write_backward(saved)
        halves = [self._back]
        if nbytes is not None:
            for n in forward.find_nodes(op="call_function", target=ops.opaque):  # their tapes get sizes from it
                nbytes(n)
            halves = halves_of(self._back, nbytes)
        for graph in halves:
            take_over_memory(graph)
            graph.lint()
        output = forward.output_node()
        results: Any = output.args[0]
        *returned, kept = results
        taken = {n.name for n in self._back.find_nodes(op="placeholder")}
        output.args = ((*returned, tuple(n for n in kept if n.name in taken)),)
        _drop_unused(forward)
        forward.lint()
        return Joint(forward, *halves)

    # --- what backward needs

    def _views_of_gathered(self) -> set[Made]:
        """Return the values that must not be kept, because they would keep a gathered bucket."""
        gathered: set[Made] = set()
        for n in filter(is_call, self._graph.nodes):
            if n.target is ops.gather_wait:
                gathered.update((n, i) for i in range(len(n.meta["value"])))
                continue
            operands = self._template(n).operands
            for i, view in enumerate(self._facts[n].views):
                if view >= 0 and operands[view] in gathered:
                    gathered.add((n, i))
        return gathered

    def _all_needs(self) -> Iterator[tuple[fx.Node, Wanted]]:
        for e in self._events:
            if isinstance(e, Complete) and e.param[0].target is ops.updated:
                yield e.param[0], Wanted(e.param[0], "y", e.param[1])
            if not isinstance(e, RuleRuns):
                continue
            operands = self._template(e.node).operands
            for r in e.rule.wants:
                if r.kind == "t":
                    yield e.node, Wanted(e.node, "t", r.index)
                else:
                    producer = operands[r.index] if r.kind == "x" else (e.node, r.index)
                    yield from ((e.node, w) for w in self._through(producer))

    def _through(self, made: Made) -> Iterator[Wanted]:
        """Yield a value, or for a view of a gathered bucket its sources: the view is made again."""
        if made not in self._gathered:
            yield Wanted(made[0], "y", made[1])
        elif made[0].target is not ops.gather_wait:
            for operand in self._template(made[0]).operands:
                yield from self._through(operand)

    def _part_of(self, made: Made) -> Made | None:
        """Return the value of which this is a part, in the same memory; None if it is no part."""
        n, i = made
        if not is_call(n) or (view := self._facts[n].views[i]) < 0:
            return None
        whole, nbytes = self._template(n).operands[view], self._nbytes(made)
        if nbytes >= self._nbytes(whole):
            return None
        while is_call(whole[0]) and (view := self._facts[whole[0]].views[whole[1]]) >= 0:
            whole = self._template(whole[0]).operands[view]
        return whole

    def _nbytes(self, made: Made) -> int:
        value: Any = made[0].meta["value"]
        typed: Value = value[made[1]] if isinstance(value, tuple) else value
        return typed.nbytes(self._program.mesh)

    # --- calls

    def _call(self, graph: fx.Graph, n: fx.Node, look: Callable[[Made], fx.Node], meta: dict[str, Any]) -> Found:
        """Write a forward call, in forward or again in backward; return its results."""
        rule = self._replaced.get(n)
        types = self._facts[n].types
        if rule is None:
            args = fx.map_arg(n.args, lambda x: look(producer_of(x)))
            kwargs = fx.map_arg({k: v for k, v in n.kwargs.items() if k != "overlap"}, lambda x: look(producer_of(x)))
            several = isinstance(n.meta["value"], tuple) and n.target is not ops.gather_start  # which returns a handle
            node = _add(graph, n.target, args, kwargs, name=n.name)
            value = n.meta["value"] if n.target is ops.gather_start else _value(types[0])
            node.meta.update(meta, value=tuple(map(_value, types)) if several else value, like=self._facts[n])
            results = self._items(graph, n, node, meta) if several else {Wanted(n): node}
            for w, value in results.items():
                if (view := self._facts[n].views[w.index]) >= 0:
                    self._shares_memory_with[value] = look(self._template(n).operands[view])
            return results
        assert rule.forward is not None
        operands = self._template(n).operands
        names = self._template(n).names
        nodes: dict[int, fx.Node] = {}

        def at(r: Ref) -> Any:
            if r.kind == "x":
                return look(operands[r.index])
            if r.kind == "n":
                return names[r.index]
            return nodes[r.index] if r.kind == "t" else look((self._inputs[r.kind], 0))

        named = {r.index: item_name(n, i) for i, r in enumerate(rule.results) if r.kind == "t"}
        if rule.kind == "opaque":
            named |= {0: f"{n.name}_opaque", len(rule.results) + 1: f"{n.name}_tape"}
        for line in rule.forward:
            nodes[line.number] = self._line(graph, line, at, named.get(line.number), meta)
        if rule.kind == "opaque":
            self._tapes.add(nodes[len(rule.results) + 1])
        results = {Wanted(n, "t", k): node for k, node in nodes.items()}
        return results | {Wanted(n, "y", i): at(r) for i, r in enumerate(rule.results) if r.kind != "none"}

    def _items(self, graph: fx.Graph, n: fx.Node, node: fx.Node, meta: dict[str, Any]) -> Found:
        """Write and return the results of a call that has several."""
        items = {}
        for i, t in enumerate(self._facts[n].types):
            item = _add(graph, operator.getitem, (node, i), name=item_name(n, i))
            item.meta.update(meta, value=_value(t))
            item.meta.pop("collective", None)
            items[Wanted(n, "y", i)] = item
        return items

    def _line(
        self, graph: fx.Graph, line: Line, at: Callable[[Ref], Any], name: str | None, meta: dict[str, Any]
    ) -> fx.Node:
        args = map_refs(line.args, at)
        kwargs = {k: map_refs(v, at) for k, v in line.kwargs}
        if name is None:
            name = f"{args[0].name}_{args[1]}" if line.target is operator.getitem else _short(line)
        node = _add(graph, line.target, args, kwargs, name=name)
        node.meta.update(meta, value=line.value, like=line)
        first = args[0] if args and isinstance(args[0], fx.Node) else None
        if first is not None and (is_view(first.target) if line.target is operator.getitem else line.views):
            self._shares_memory_with[node] = first
        if "collective" in meta and line.target not in (
            ops.transpose,
            ops.transpose_start,
            ops.opaque,
            ops.opaque_backward,
        ):
            del node.meta["collective"]
        return node

    # --- forward

    def _write_forward(self) -> tuple[fx.Graph, dict[Wanted, fx.Node]]:
        graph = fx.Graph()
        nodes: Found = {}

        def look(made: Made) -> fx.Node:
            return nodes[Wanted(made[0], "y", made[1])]

        for n in self._graph.nodes:
            if n.op == "placeholder":
                nodes[Wanted(n)] = add_node(graph, "placeholder", n.name, (), name=n.name, meta=n.meta)
            elif is_call(n):
                meta = {k: v for k, v in n.meta.items() if k in ("source", "collective", "region", "kept", "again")}
                if (c := meta.get("collective")) is not None:
                    meta["collective"] = replace(c, backward="none")
                nodes |= self._call(graph, n, look, meta)
        saved = {w: node for w, node in nodes.items() if w in self._recomputed.held and not self._stored(w.node)}
        returned: Any = self._graph.output_node().args[0]
        loss, news, *sent = fx.map_arg(returned, lambda x: look(producer_of(x)))
        handles = self._leave(graph, saved)
        saved = {w: handles.get(node, node) for w, node in saved.items()}
        distinct = tuple(dict.fromkeys(saved.values()))
        graph.output((loss, news, sent[0] if sent else (), distinct))
        return graph, saved

    def _leave(self, graph: fx.Graph, saved: Found) -> dict[fx.Node, fx.Node]:
        """Write the copies to the host, at the end of forward for now; return {value: its handle}."""
        weights = _of_weights(self._graph, self._program)
        stays = {
            self._owner(node)
            for w, node in saved.items()
            if w not in self._recomputed.host or w.node in weights or not (_is_tensor(node) or node in self._tapes)
        }
        stays |= {node for node in graph.find_nodes(op="placeholder") if "collective" not in node.meta}
        causes = {r.name: r.cause for r in self._program.regions}
        mesh = self._placeholder_of(graph, "mesh")
        handles: dict[fx.Node, fx.Node] = {}
        for w, node in saved.items():
            if node in handles or self._owner(node) in stays:
                continue
            region = self._recomputed.host[w]
            start = _add(graph, ops.offload_start, (node, mesh), {"tag": region}, name=f"{node.name}_leaving")
            start.meta = {"value": None, "source": source_of(node), "copy": HostCopy(0, causes[region])}
            wait = _add(graph, ops.offload_wait, (start,), name=f"{node.name}_host")
            wait.meta = {"value": None, "source": source_of(node)}
            handles[node] = wait
        return handles

    @staticmethod
    def _placeholder_of(graph: fx.Graph, name: str) -> fx.Node:
        node: fx.Node = next(n for n in graph.find_nodes(op="placeholder") if n.name == name)
        return node

    def _owner(self, node: fx.Node) -> fx.Node:
        """Return the owner of the memory that a value is in."""
        while node in self._shares_memory_with:
            node = self._shares_memory_with[node]
        return node

    def _stored(self, n: fx.Node) -> bool:
        """Return whether backward gets a placeholder directly, as forward does."""
        return n.op == "placeholder" and "collective" not in n.meta

    # --- backward

    def _write_backward(self, saved: Mapping[Wanted, fx.Node]) -> None:
        graph = self._back
        for n in self._graph.find_nodes(op="placeholder"):
            if self._stored(n):
                self._values[Wanted(n)] = self._placeholder(n.name, n.meta)
        for w, node in saved.items():
            placeholder = self._placeholders.get(node.name) or self._placeholder(node.name, node.meta)
            (self._handles if node.target is ops.offload_wait else self._values)[w] = placeholder
        self._leaving = {node.name: node for node in saved.values() if node.target is ops.offload_wait}
        for (n, i), gradient in self._first_gradients.items():
            meta = {"value": _value(gradient.type), "source": source_of(n)}
            self._gradients[gradient] = self._placeholder(f"{item_name(n, i)}_grad", meta)
        for e in self._events:
            self._event(e)
        received = [
            n
            for n in self._graph.find_nodes(op="placeholder")
            if "collective" in n.meta and n.meta["value"].requires_grad
        ]
        left = {n: g for (n, _), g in self._returned_gradients.items()}
        graph.output(tuple(self._gradients[left[n]] if n in left else None for n in received))
        self._begin_gathers_early()
        _drop_unused(graph)
        for node in [n for n in graph.find_nodes(op="placeholder") if not n.users]:
            graph.erase_node(node)

    def _placeholder(self, name: str, meta: Mapping[str, Any]) -> fx.Node:
        known = {k: meta[k] for k in ("value", "source") if k in meta}
        node = add_node(self._back, "placeholder", name, (), name=name, meta=known)
        assert node.name == name, f"{name} is taken"
        self._placeholders[name] = node
        return node

    def _meta(self, n: fx.Node, **more: Any) -> dict[str, Any]:
        return {"source": source_of(n), "of": n.name, **more}

    def _event(self, e: Event) -> None:
        self._reloaded = {}
        if isinstance(e, RuleRuns):
            self._rule(e)
        else:
            self._complete(e)

    def _rule(self, e: RuleRuns) -> None:
        """Write a rule's lines: operands in autograd's order, its backward, the sums of gradients."""
        n, rule = e.node, e.rule
        operands = self._template(n).operands
        names = self._template(n).names
        local: dict[int, fx.Node] = {}

        def at(r: Ref) -> Any:
            if r.kind == "n":
                return names[r.index]
            if r.kind == "x":
                return self._look(operands[r.index])
            if r.kind == "y":
                return self._look((n, r.index))
            if r.kind in ("g", "p"):
                gradient = (e.tangents if r.kind == "g" else e.before)[r.index]
                assert gradient is not None
                return self._gradients[gradient]
            if r.kind == "t":
                return local[r.index] if r.index in local else self._value_for_backward(Wanted(n, "t", r.index))
            return self._placeholders[r.kind]

        meta = self._reloading = self._meta(n)
        if e.part == "data":  # autograd recomputes a saved operand before the rule makes its gradient
            x, *_ = factors(n.target, n.args)
            if (
                w := Wanted(producer_of(x)[0], "y", producer_of(x)[1])
            ) in self._recomputed.plans and w not in self._values:
                self._value_for_backward(w)
        collective: Collective | None = n.meta.get("collective")
        if collective is not None and collective.backward != "none":
            meta = {**meta, "collective": replace(collective, kind=collective.backward, backward="none", packed=0)}
        named = {
            r.index: f"{item_name(*operands[i])}_grad"
            for i, r in enumerate(rule.grads)
            if r is not None and r.kind == "t" and rule.kind != "begun"
        }
        for ref in rule.wants if self._gathered else ():
            producer = operands[ref.index] if ref.kind == "x" else (n, ref.index)
            if ref.kind != "t" and producer in self._gathered:
                at(ref)  # as under autograd: wait for a gather, and begin the next one, before anything else
        for line in rule.backward:
            local[line.number] = self._line(self._back, line, at, named.get(line.number), meta)
        for r, gradient in zip(rule.grads, e.after, strict=True):
            if r is not None and gradient is not None:
                self._gradients[gradient] = at(r)

    def _complete(self, e: Complete | BucketComplete | GatheredComplete) -> None:
        """Write the line that follows when gradients of parameters are complete."""
        before = next(iter(reversed(self._back.nodes))).meta  # before torch 2.12 it is not an iterator
        meta = {"value": None, **{k: before[k] for k in ("of", "source") if k in before}}
        if isinstance(e, Complete):
            param = self._look(e.param)
            node = _add(self._back, ops.accumulate, (param, self._gradients[e.gradient]), name=f"{param.name}_put")
            source: Any = e.param[0]
            meta["param"] = source.args[0][e.param[1]].name if source.target is ops.updated else source.name
        elif isinstance(e, BucketComplete):
            name = f"bucket{e.bucket}"
            node = _add(self._back, ops.launch, (self._placeholders["mesh"], name), name=f"{name}_launch")
            meta["collective"] = self._sum_of(e.bucket)
        else:
            start: Any = e.wait.args[0]
            params = fx.map_arg(start.args[0], lambda x: self._placeholders[x.name])
            grads = tuple(None if g is None else self._gradients[g] for g in e.gradients)
            node = _add(self._back, ops.scatter, (params, grads, start.args[1]), name=f"{start.name}_scatter")
            c: Collective | None = start.meta.get("collective")
            if c is not None and c.backward != "none":
                meta["collective"] = replace(c, kind=c.backward, backward="none", packed=0)
        node.meta.update(meta)

    def _sum_of(self, bucket: int) -> Collective:
        """Return the collective that sums the gradients of a bucket of whole parameters."""
        b = self._program.buckets[bucket]
        size = Flat.of(self._program, b).padded * b.dtype.itemsize
        kind, axes = ("reduce_scatter", (b.shard,)) if b.shard else ("all_reduce", b.axes)
        return Collective(kind, "none", axes, size, "gradients, in buckets")

    def _look(self, made: Made) -> fx.Node:
        return self._value_for_backward(Wanted(made[0], "y", made[1]))

    def _value_for_backward(self, w: Wanted) -> fx.Node:
        if w in self._handles:
            return self._reload(w)
        if w not in self._values:
            if w.node.target is ops.gather_wait:
                self._gather(w.node)
            elif (w.node, w.index) in self._gathered and w.kind == "y":
                self._values |= self._call(self._back, w.node, self._look, self._meta(w.node, repeats=True))
            else:
                self._recompute(self._recomputed.plans[w])
        return self._values[w]

    def _reload(self, w: Wanted) -> fx.Node:
        """Return a value from the host, reloaded for the event that needs it now."""
        handle = self._handles[w]
        if handle not in self._reloaded:
            left: Any = self._leaving[handle.name].args[0]
            value: Any = left.args[0]
            meta = {**self._reloading, "value": value.meta["value"]}
            start = _add(self._back, ops.reload_start, (handle,), dict(left.kwargs), name=f"{value.name}_coming")
            wait = _add(self._back, ops.reload_wait, (start,), name=value.name)
            tape = {"tape": value.name} if value in self._tapes else {}
            start.meta, wait.meta = {**meta, **tape, "copy": left.meta["copy"]}, {**meta, **tape}
            self._reloaded[handle] = wait
        return self._reloaded[handle]

    def _recompute(self, plan: RecomputePlan) -> None:
        outer = self._reloaded, self._reloading
        self._reloaded = {}
        local: Found = {}

        def look(made: Made) -> fx.Node:
            w = Wanted(made[0], "y", made[1])
            return local[w] if w in local else self._value_for_backward(w)

        for n in plan.nodes:
            self._reloading = self._meta(n, repeats=True)
            meta = {**self._reloading, "region": n.meta["region"]}
            if (c := n.meta.get("collective")) is not None:
                meta["collective"] = replace(c, backward="none")
            local |= self._call(self._back, n, look, meta)
        for w in plan.wanted:
            self._values[w] = local[w]
        self._reloaded, self._reloading = outer

    def _gather(self, n: fx.Node) -> None:
        """Gather a bucket again for backward."""
        start: Any = n.args[0]
        params = fx.map_arg(start.args[0], lambda x: self._placeholders[x.name])
        first = _add(self._back, ops.regather_start, (params, start.args[1]), name=f"{start.name}_again")
        first.meta.update(self._meta(start, repeats=True, value=tuple(map(_value, self._facts[n].types))))
        if (c := start.meta.get("collective")) is not None:
            first.meta["collective"] = replace(c, backward="none")
        wait = _add(self._back, ops.regather_wait, (first,), name=n.name)
        wait.meta.update(self._meta(n, repeats=True, value=first.meta["value"]))
        self._values |= self._items(self._back, n, wait, self._meta(n, repeats=True))
        self._gathers.append((n, first, wait))

    def _begin_gathers_early(self) -> None:
        """Gather the next buckets while one is used, together with a few small ones, such as those of biases."""
        prefetch = self._program.spec.data.prefetch
        sizes = [sum(v.nbytes() for v in first.meta["value"]) for _, first, _ in self._gathers]
        started: set[int] = set()
        for k, (_, _, wait) in enumerate(self._gathers):
            room, counted, after = sizes[k] // _SMALL, 0, wait
            for j in range(k + 1, len(self._gathers)) if prefetch else ():
                if sizes[j] <= room:
                    room -= sizes[j]
                elif counted == prefetch:
                    break
                else:
                    counted += 1
                if j not in started:
                    started.add(j)
                    after.append(self._gathers[j][1])
                    after = self._gathers[j][1]


def _add(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None, *, name: str
) -> fx.Node:
    """Add a call at the end of a graph."""
    return add_node(graph, "call_function", target, args, kwargs, name=name)


def _value(t: Type | None) -> Value | None:
    return None if t is None else t.value


def _short(line: Line) -> str:
    return op_name(line.target) if isinstance(line.target, OpOverload) else getattr(line.target, "__name__", "x")


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta["value"], Value)


def _drop_unused(graph: fx.Graph) -> None:
    for n in reversed(list(graph.nodes)):
        if n.op == "call_function" and not n.users and n.target not in EFFECTS:
            graph.erase_node(n)


def _of_weights(graph: fx.Graph, program: Program) -> set[fx.Node]:
    """Return the values that depend on parameters and buffers alone: they stay on the device anyway."""
    stored = {"mesh", *(p.name for p in program.params), *(b.name for b in program.buffers)}
    weights: set[fx.Node] = set()
    for n in graph.nodes:
        operands = n.all_input_nodes
        if n.name in stored if n.op == "placeholder" else operands and all(u in weights for u in operands):
            weights.add(n)
    return weights
