"""Joint programs broken on purpose: one of the two texts of a stage is changed, the stage itself is as it was.

tests.verify.mutants counts who notices them.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from shardc.ir.graph import copy_graph
from shardc.ir.metadata import Value
from shardc.ir.program import Program
from shardc.runtime import ops
from shardc.torch_private import OpOverload

aten = torch.ops.aten

Thunk = Callable[[], Program | None]
Kind = Callable[[Program], Iterator[Thunk]]
#: (a graph of a step) -> broken programs, lazily: a thunk each, which may find that there is nothing to break.
OF_GRAPHS: dict[str, Kind] = {}


def kind(
    name: str, wanted: Callable[[fx.Node], bool], texts: tuple[str, ...] = ("backward", "weights")
) -> Callable[[Callable[[fx.Node], bool | None]], None]:
    """Mutants that change one line of a text, in place, on a copy. False: there is nothing to do."""

    def register(change: Callable[[fx.Node], bool | None]) -> None:
        def mutants(program: Program) -> Iterator[Thunk]:
            for i, stage in enumerate(program.stages):
                for text, graph in stage.joint.graphs.items() if stage.joint is not None else ():
                    for node in graph.nodes if text in texts else ():
                        if wanted(node):
                            yield lambda i=i, text=text, name=node.name: _changed(program, i, text, name, change)  # type: ignore[misc]

        OF_GRAPHS[name] = mutants

    return register


def _changed(
    program: Program, i: int, text: str, name: str, change: Callable[[fx.Node], bool | None]
) -> Program | None:
    stage = program.stages[i]
    assert stage.joint is not None
    graph = copy_graph(stage.joint.graphs[text])
    if change(next(n for n in graph.nodes if n.name == name)) is False:
        return None
    try:
        graph.lint()
    except RuntimeError:  # it reads what is not there yet
        return None
    stages = list(program.stages)
    stages[i] = replace(stage, joint=replace(stage.joint, **{text: graph}))
    return replace(program, stages=tuple(stages))


def _calls(*targets: Any) -> Callable[[fx.Node], bool]:
    return lambda n: n.op == "call_function" and n.target in targets


def _tensor(n: Any) -> Value | None:
    value = n.meta.get("value") if isinstance(n, fx.Node) else None
    return value if isinstance(value, Value) else None


def _alike(n: fx.Node) -> fx.Node | None:
    """Another value of the same type, of the lines before."""
    before = itertools.takewhile(lambda x: x is not n, n.graph.nodes)
    return next((x for x in before if _tensor(x) is not None and _tensor(x) == _tensor(n)), None)


@kind("joint: a summand of a gradient lost", _calls(aten.add.Tensor, ops.add_into))
def _(n: fx.Node) -> bool | None:
    if len(n.args) != 2 or not isinstance(n.args[1], fx.Node):
        return False
    n.replace_all_uses_with(n.args[0])  # type: ignore[arg-type]
    n.graph.erase_node(n)
    return None


@kind("joint: a summand counted twice", _calls(aten.add.Tensor))
def _(n: fx.Node) -> bool | None:
    if len(n.args) != 2 or not isinstance(n.args[1], fx.Node):
        return False
    n.args = (n.args[0], n.args[0])
    return None


@kind("joint: factors of a product exchanged", _calls(aten.mm.default))
def _(n: fx.Node) -> bool | None:
    x, w = n.args
    same = _tensor(x) is not None and _tensor(x).shape == _tensor(w).shape  # type: ignore[union-attr]
    if not same:
        return False
    n.args = (w, x)
    return None


@kind("joint: gradient put to another parameter", _calls(ops.accumulate))
def _(n: fx.Node) -> bool | None:
    param: Any = n.args[0]
    for other in n.graph.nodes:
        if other.target is ops.accumulate and other is not n:
            to: Any = other.args[0]
            if _tensor(to) is not None and _tensor(to).shape == _tensor(param).shape:  # type: ignore[union-attr]
                n.args, other.args = (to, n.args[1]), (param, other.args[1])
                return None
    return False


@kind("joint: gradient not put", _calls(ops.accumulate))
def _(n: fx.Node) -> None:
    n.graph.erase_node(n)


@kind("joint: gradient put twice", _calls(ops.accumulate))
def _(n: fx.Node) -> None:
    with n.graph.inserting_after(n):
        n.graph.node_copy(n, lambda x: x)


@kind("joint: a bucket's sum begun too early", _calls(ops.launch))
def _(n: fx.Node) -> bool | None:
    first = next((x for x in n.graph.nodes if x.target is ops.accumulate), None)
    if first is None:
        return False
    first.prepend(n)
    return None


@kind("joint: a bucket's sum not begun", _calls(ops.launch, ops.scatter))
def _(n: fx.Node) -> None:
    n.graph.erase_node(n)


@kind("joint: a bucket's sum begun twice", _calls(ops.launch, ops.scatter))
def _(n: fx.Node) -> None:
    with n.graph.inserting_after(n):
        n.graph.node_copy(n, lambda x: x)


@kind("joint: gradients of a gathered bucket exchanged", _calls(ops.scatter))
def _(n: fx.Node) -> bool | None:
    grads: Any = list(n.args[1])  # type: ignore[arg-type]
    for i, a in enumerate(grads):
        for j in range(i + 1, len(grads)):
            if _tensor(a) is not None and _tensor(a) == _tensor(grads[j]):
                grads[i], grads[j] = grads[j], a
                n.args = (n.args[0], tuple(grads), n.args[2])
                return None
    return False


@kind("joint: collective of backward left out", _calls(ops.transpose, ops.transpose_start))
def _(n: fx.Node) -> bool | None:
    x: Any = n.args[1]
    waits = [u for u in n.users if u.target is ops.wait]
    result = waits[0] if waits else n
    if _tensor(result) is None or _tensor(result).shape != _tensor(x).shape:  # type: ignore[union-attr]
        return False
    result.replace_all_uses_with(x)
    return None


@kind("joint: read before the collective has ended", _calls(ops.wait), ("forward", "backward", "weights"))
def _(n: fx.Node) -> None:
    n.replace_all_uses_with(n.args[0])  # type: ignore[arg-type]
    n.graph.erase_node(n)


@kind("joint: another value comes back from the host", _calls(ops.reload_start))
def _(n: fx.Node) -> bool | None:
    (wait,) = n.users
    for other in n.graph.nodes:
        if other.target is ops.reload_start and other.args != n.args:
            (there,) = other.users
            if _tensor(there) is not None and _tensor(there) == _tensor(wait):
                n.args = other.args
                return None
    return False


@kind(
    "joint: not waited for on the way to the host or back",
    _calls(ops.offload_wait, ops.reload_wait),
    ("forward", "backward", "weights"),
)
def _(n: fx.Node) -> None:
    begun: Any = n.args[0]
    output = n.graph.output_node()
    if n in output.all_input_nodes:  # backward takes it by its name
        name, begun.name = n.name, f"{n.name}_begun"
        n.replace_all_uses_with(begun)
        n.graph.erase_node(n)
        begun.name = name
    else:
        n.replace_all_uses_with(begun)
        n.graph.erase_node(n)


@kind("joint: on the host is what another value has left", _calls(ops.offload_start), ("forward",))
def _(n: fx.Node) -> bool | None:
    other = _alike(n.args[0])  # type: ignore[arg-type]
    if other is None:
        return False
    n.args = (other, *n.args[1:])
    return None


@kind(
    "joint: another value of the same shape",
    lambda n: n.op == "call_function" and isinstance(n.target, OpOverload),
    ("forward", "backward", "weights"),
)
def _(n: fx.Node) -> bool | None:
    for x in n.all_input_nodes:
        other = _alike(x)
        if other is not None and other is not x:
            n.replace_input_with(x, other)
            return None
    return False


@kind("joint: saved value of another layer", lambda n: n.op == "placeholder" and _tensor(n) is not None)
def _(n: fx.Node) -> bool | None:
    other = _alike(n)
    if other is None or other.op != "placeholder" or not n.users:
        return False
    n.replace_all_uses_with(other)
    return None


@kind("joint: recomputed with another draw", lambda n: n.target is ops.dropout)
def _(n: fx.Node) -> bool | None:
    numbers = [i for i, a in enumerate(n.args) if isinstance(a, int) and not isinstance(a, bool)]
    if not numbers:
        return False
    n.update_arg(numbers[0], n.args[numbers[0]] + 1)  # type: ignore[operator]
    return None


@kind("joint: written to memory that is still read", _calls(aten.add.Tensor))
def _(n: fx.Node) -> bool | None:
    x = n.args[0]
    later = list(n.graph.nodes)
    place = {m: k for k, m in enumerate(later)}
    if not isinstance(x, fx.Node) or not any(place[u] > place[n] for u in x.users):
        return False
    n.target = ops.add_into
    return None


@kind("joint: result of the other output", lambda n: n.target is operator.getitem)
def _(n: fx.Node) -> bool | None:
    for u in n.args[0].users:  # type: ignore[union-attr]
        if u is not n and u.target is operator.getitem and _tensor(u) is not None and _tensor(u) == _tensor(n):
            n.args = (n.args[0], u.args[1])
            return None
    return False
