"""What is known, and can be changed, while torch traces a model to a graph."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor, fx
from torch._export.utils import _is_preservable_cia_op  # which composed ops export keeps
from torch._ops import OpOverload  # types of export's wrappers around regions of code, and of ops
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.autograd import forward_ad  # whose level is private
from torch.autograd.function import _SingleLevelFunction  # what capture replaces is not its `apply`
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot

from shardc.torch_private.fake_tensors import fake_device, fake_mode_of, fake_result


def traced_node(x: Tensor) -> fx.Node | None:
    """While a model is traced: the graph node that made `x`, if it is known."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(x, mode.tracer, None)
    return slot.proxy.node if slot is not None else None


class _Made(_SingleLevelFunction):
    """Tensors that want gradients, as results of an op have them: none of them is a leaf."""

    apply: ClassVar[Callable[..., Any]]

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("what is only traced is never run")


#: No torch function sees what is asked of tensors while open: not even `x.shape`, which a mode intercepts like an op.
unseen = torch._C.DisableTorchFunction


def traced_call(op: OpOverload, args: Sequence[Any], like: Sequence[Tensor]) -> list[Tensor]:
    """While a model is traced: the results of an op that gives fake tensors like these, which are traced, too. args:
    its arguments, tensors in lists.

    What the dispatcher would do, by way of autograd, the tracer and the fake mode, in a tenth of its time.
    """
    mode = get_proxy_mode()
    assert mode is not None
    tracer: Any = mode.tracer

    def node_of(x: Any) -> Any:
        return [get_proxy_slot(t, tracer).proxy.node for t in x] if isinstance(x, list) else x

    call: fx.Node = tracer.create_node("call_function", op, tuple(map(node_of, args)), {}, op._opname)
    made = [fake_result(tuple(x.shape), x.stride(), x.dtype, fake_device(x), fake_mode_of(x)) for x in like]
    if any(x.requires_grad for x in like):
        made = list(_Made.apply(made, *like))
    call.meta["val"] = [get_proxy_slot(x, tracer).proxy.node.meta["val"] for x in like]
    for i, (x, val) in enumerate(zip(made, call.meta["val"], strict=True)):
        result = tracer.graph.create_node("call_function", operator.getitem, (call, i))
        result.meta = call.meta | {"val": val}
        set_proxy_slot(x, tracer, _ProxyTensor(tracer.proxy(result), None))
    return made


def traced_so_far() -> list[fx.Node]:
    """While a model is traced: the nodes of the graph in the making, latest first."""
    mode = get_proxy_mode()
    return [] if mode is None else list(reversed(mode.tracer.graph.nodes))


def transforming() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp) is under way, in this thread, or a level of forward_ad."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def tracing() -> bool:
    """Whether ops become nodes of a graph, in this thread."""
    return get_proxy_mode() is not None


def watched() -> bool:
    """Whether a mode sees the ops that run in this thread, or torch's profiler looks at them."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._autograd._profiler_enabled()


@contextmanager
def module_calls() -> Iterator[list[torch.nn.Module]]:
    """While open, the modules whose calls are in progress, innermost last: what `self` is in their forward, which is a
    stand-in of the module while torch exports a model.
    """
    original: Any = torch.nn.Module._call_impl
    calls: list[torch.nn.Module] = []

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            calls.pop()

    with mock.patch.object(torch.nn.Module, "_call_impl", call):
        yield calls


def call_modes() -> tuple[Any, ...]:
    """What a call depends on beside its arguments: modes of gradients, autocast and defaults, functions that intercept
    calls, transforms of torch.func.
    """
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype()),
        *(torch._C._len_torch_function_stack(), torch._C._functorch.peek_interpreter_stack() is None),
    )


def traced_constant(name: str) -> Tensor | None:
    """While a model is traced: the value of a constant that the graph in the making holds under this name, if it has
    one.
    """
    mode = get_proxy_mode()
    value = getattr(getattr(mode.tracer, "root", None), name, None) if mode is not None else None
    return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else None


def traced_functional(
    function: Callable[..., Any],
    types: Sequence[tuple[tuple[int, ...], torch.dtype, bool]],
    apart: Mapping[OpOverload, Callable[..., Any]] | None = None,
) -> fx.GraphModule | None:
    """The graph of a function on tensors of such shapes, dtypes and need of a gradient, in functional aten ops without
    composed ones; None where it cannot be traced. apart: ops that are taken apart, and by what."""
    with FakeTensorMode():
        fakes = [torch.empty(shape, dtype=dtype, requires_grad=grad) for shape, dtype, grad in types]
    try:
        with torch.enable_grad():
            return make_fx(dispatch_functionalize(function), dict(apart or {}), tracing_mode="fake")(*fakes)
    except (
        Exception
    ):  # torch's own Python, which raises anything on calls that it was not written for: then it is of no use
        return None


def traced_on(function: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """The graph of a function on fake tensors, in functional aten ops; its results may be nested. What it raises comes
    through.
    """
    return make_fx(dispatch_functionalize(function), tracing_mode="real")(*tensors)


def functionalized(exported: ExportedProgram) -> ExportedProgram:
    """`exported.run_decompositions({})`: traced once more, in functional ops below torch.func's transforms; composed
    ops stay.

    torch marks every composed op that it knows as one to stay, in all, which takes longer than tracing a small graph:
    here only those of this graph.
    """
    present = {
        n.target for n in exported.graph.nodes if isinstance(n.target, OpOverload) and _is_preservable_cia_op(n.target)
    }
    with mock.patch("torch.export.exported_program._collect_all_valid_cia_ops", return_value=present):
        decomposed: ExportedProgram = exported.run_decompositions({})
    return decomposed


@contextmanager
def traced_with(stack_trace: Callable[[], str | None]) -> Iterator[None]:
    """While open, nodes that tracers create get their `stack_trace` from this function, called as the op is.

    torch's own keeps frames of functions named `forward` only, which loses helper and loss functions, and is slow.
    """
    original = fx.proxy.TracerBase.create_node

    def create_node(self: Any, *args: Any, **kwargs: Any) -> fx.Node:
        self.record_stack_traces = False
        node = original(self, *args, **kwargs)
        if not node.stack_trace and (trace := stack_trace()):
            node.stack_trace = trace
        return node

    with mock.patch.object(fx.proxy.TracerBase, "create_node", create_node):
        yield


@contextmanager
def without_code() -> Iterator[None]:
    """While open, graphs that torch traces and exports become Python code when somebody runs them or reads it. Export
    makes it of the same graph six times, and runs none.
    """
    maker = "torch.export.exported_program._create_graph_module_for_export"
    with _use_lazy_graph_module(True), mock.patch(maker, _LazyGraphModule, create=True):
        yield


@contextmanager
def silent() -> Iterator[None]:
    """While open, torch logs no warnings and errors, and export prints no part of a graph: whoever opens it says itself
    what was wrong.

    What TORCH_LOGS asks for, which is of lower levels, is still shown.
    """

    def wanted(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or record.name.partition(".")[0] != "torch"

    with mock.patch("torch.export._trace.print", create=True):  # imports it, with its loggers
        named = (x for name, x in logging.root.manager.loggerDict.items() if name.partition(".")[0] == "torch")
        handlers = {h for x in (logging.root, *named) if isinstance(x, logging.Logger) for h in x.handlers}
        for h in handlers:
            h.addFilter(wanted)
        try:
            yield
        finally:
            for h in handlers:
                h.removeFilter(wanted)


def is_transform(target: Any) -> bool:
    """Is this what torch.export puts into a graph for torch.func's transforms: calls that open and close a level of
    vmap or jvp?
    """
    return getattr(target, "__module__", "") == "torch._functorch.predispatch"
