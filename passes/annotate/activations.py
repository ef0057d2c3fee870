"""Pin activations: add the layouts of `activations` as nodes that placement has to satisfy.

before   y = gelu(x)                        x: the output of h.0.mlp.fc
after    pin = alias(x); y = gelu(pin)      pin's layout is the annotation
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import fx

from shardc.errors import Errors
from shardc.ir.graph import operands_of, source_of, value_of
from shardc.ir.mesh import Mesh
from shardc.ir.patterns import enclosing
from shardc.ir.placement import Layout
from shardc.ir.program import Program
from shardc.passes.annotate.padding import padded
from shardc.passes.annotate.spec_layouts import check_fits, dims_text, layout_of, quote
from shardc.spec import ActivationRule, Spec
from shardc.spec.model_names import Selector, select_modules


@dataclass(frozen=True)
class Pin:
    """A pin. users: the ops that read the pin in place of the value; None: all of them."""

    layout: Layout
    cause: str
    users: set[fx.Node] | None


def pin_activations(
    spec: Spec, program: Program, mesh: Mesh, of_axis: Callable[[fx.Node, str], tuple[str, ...]]
) -> None:
    """Add the pins to the program's graph. Raises ShardcError for all invalid entries before it adds any.

    of_axis: the digits that an axis of the spec means for an op.
    """
    errors = Errors()
    nodes = [n for n in program.graph.nodes if n.op == "call_function"]
    batch = {x.name for x in program.inputs}
    pins: dict[fx.Node, Pin] = {}
    for rule, modules in zip(spec.activations, _modules(spec, program, nodes, errors), strict=True):
        where = spec.where(("activations", _key(rule)))
        cause = quote(spec, "activations", _key(rule), dims_text(rule.dims))
        ends = [(module, end) for module in modules for end in _boundary(nodes, module, rule.at, _flows)]
        if not ends:  # values of the batch alone, as an encoder's pixels, have no gradient
            single = partial(_single, batch=batch)
            ends = [(module, end) for module in modules for end in _boundary(nodes, module, rule.at, single)]
        if modules and not ends:
            errors.add(
                f"the entry has no effect: no tensor {'enters' if rule.at == 'input' else 'leaves'}"
                f" {modules[0]}" + (f" and {len(modules) - 1} more" if len(modules) > 1 else ""),
                where=where,
                fix="name the module that makes the value; for a tensor of the batch, `batch: {dims: ...}`",
            )
        for module, (node, inside) in ends:
            shape = value_of(node).shape
            layout = layout_of(rule.dims, mesh, partial(of_axis, node if rule.at == "output" else next(iter(inside))))
            if spec.uneven == "pad":
                layout = padded(layout, shape, mesh)
            if not check_fits(layout, shape, mesh, f"{rule.at} of {module}", where, errors):
                continue
            pin = pins.setdefault(node, Pin(layout, cause, inside if rule.at == "input" else None))
            if pin.layout != layout:
                fault = f"{rule.at} of {module} is the same value as one that {pin.cause} lays out differently"
                errors.add(fault, where=where, fix="make both annotations the same, or drop one")
    errors.raise_any()
    for node, pin in pins.items():
        insert_pin(program.graph, node, pin, mesh)


def _key(rule: ActivationRule) -> str:
    """Return an entry's key as it is written in the spec."""
    return rule.pattern + (":in" if rule.at == "input" else "")


def _modules(spec: Spec, program: Program, nodes: list[fx.Node], errors: Errors) -> list[list[str]]:
    """Return the modules that each entry pins."""
    names: set[str] = set()
    for node in nodes:
        names.update(enclosing(source_of(node).module), node.meta.get("through", ()))
    selectors = [Selector(r.pattern, spec.where(("activations", _key(r))), _key(r), r.at) for r in spec.activations]
    return select_modules(selectors, sorted(names), program.module_aliases, errors)


def insert_pin(graph: fx.Graph, node: fx.Node, pin: Pin, mesh: Mesh) -> fx.Node:
    """Add a pin after a value, and return it; its users read the pin."""
    with graph.inserting_after(node):
        new = graph.call_function(torch.ops.aten.alias.default, (node,))
    for user in [u for u in node.users if u is not new and (pin.users is None or u in pin.users)]:
        user.replace_input_with(node, new)
    cause = dict.fromkeys(mesh.names, pin.cause)
    new.meta = {"value": value_of(node), "source": source_of(node), "pin": pin.layout, "cause": cause}
    return new


def _boundary(
    nodes: list[fx.Node], module: str, side: str, counts: Callable[[fx.Node], bool]
) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Yield for each call of a module the last value that it returns (or the first that it takes), and its nodes.

    counts: whether a value is considered. A module without ops, as Dropout(0.0), returns its input; then the nodes are
    those that use it.
    """

    def is_inside(node: fx.Node) -> bool:
        name = source_of(node).module
        return name == module or name.startswith(module + ".")

    calls = [list(run) for inside, run in groupby(nodes, is_inside) if inside]
    for call in calls:
        inside = set(call)
        if side == "output":
            values = [n for n in reversed(call) if counts(n) and any(u not in inside for u in n.users)]
        else:
            values = [t for n in call for t in operands_of(n) if t not in inside and counts(t)]
        if values:
            yield values[0], inside
    if not calls:
        yield from ((n, set(n.users)) for n in nodes if module in n.meta.get("through", ()) and counts(n))


def _flows(node: fx.Node) -> bool:
    """Return whether a value is computed, and a gradient flows through it."""
    return node.op != "placeholder" and _single(node) and value_of(node).requires_grad


def _single(node: fx.Node, batch: Collection[str] = ()) -> bool:
    """Return whether a value is one computed tensor, or a tensor of the batch."""
    v = node.meta.get("value")
    return v is not None and not isinstance(v, tuple) and (node.op != "placeholder" or node.name in batch)
