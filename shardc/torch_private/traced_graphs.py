"""Read and change what torch does while it traces a model to a graph."""

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
from torch._ops import OpOverload  # the type of ops
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.autograd import forward_ad  # whose level is private
from torch.autograd.function import _SingleLevelFunction  # capture does not replace its `apply`
from torch.export import ExportedProgram
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import _ProxyTensor, get_proxy_mode, get_proxy_slot, make_fx, set_proxy_slot

from shardc.torch_private.fake_tensors import fake_device, fake_mode_of, fake_result


def traced_node(x: Tensor) -> fx.Node | None:
    """Return the graph node that made `x`, while a model is traced; None if unknown."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(x, mode.tracer, None)
    return slot.proxy.node if slot is not None else None


def generic(number: torch.SymInt) -> None:
    """Let torch assume that a symbol is neither 0 nor 1, wherever it has to know."""
    torch._check(number >= 2)  # type: ignore[no-untyped-call]


def expression(number: Any) -> Any:
    """Return sympy's expression of a number or comparison that is not known, while a model is traced."""
    return number.node.expr if isinstance(number, torch.SymInt | torch.SymBool) else number


class _Made(_SingleLevelFunction):
    """Makes tensors that require gradients, like results of an op: none of them is a leaf."""

    apply: ClassVar[Callable[..., Any]]

    @staticmethod
    def forward(ctx: Any, made: list[Tensor], *operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(made)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("what is only traced is never run")


#: A context in which no torch function mode intercepts reads of tensors, not even `x.shape`.
unseen = torch._C.DisableTorchFunction


def traced_call(op: OpOverload, args: Sequence[Any], like: Sequence[Tensor]) -> list[Tensor]:
    """Add an op to the graph while a model is traced; return its results, fake tensors as in `like`.

    args: its arguments, tensors in lists. It does the work of the dispatcher, autograd, the tracer and the fake mode,
    in a tenth of the time.
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
    """Return the nodes of the graph that is being traced, latest first; [] if none is."""
    mode = get_proxy_mode()
    return [] if mode is None else list(reversed(mode.tracer.graph.nodes))


def transforming() -> bool:
    """Return whether a torch.func transform (grad, vmap, jvp) or forward_ad is active in this thread."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def tracing() -> bool:
    """Return whether ops become nodes of a graph in this thread."""
    return get_proxy_mode() is not None


def watched() -> bool:
    """Return whether a mode sees the ops that run in this thread, or torch's profiler records them."""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._autograd._profiler_enabled()


@contextmanager
def module_calls() -> Iterator[list[torch.nn.Module]]:
    """Yield a list of the modules whose calls are in progress, innermost last.

    Each is the `self` of its forward; while torch exports a model, that is a substitute for the module.
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
    """Return what a call depends on beside its arguments.

    That is: modes of gradients, autocast and defaults, functions that intercept calls, transforms of torch.func.
    """
    kinds = ("cpu", "cuda")
    autocast = [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, torch.get_default_dtype()),
        *(torch._C._len_torch_function_stack(), torch._C._functorch.peek_interpreter_stack() is None),
    )


def traced_constant(name: str) -> Tensor | None:
    """Return the value of a constant of the graph that is being traced, by name; None if it has none."""
    mode = get_proxy_mode()
    value = getattr(getattr(mode.tracer, "root", None), name, None) if mode is not None else None
    return value if isinstance(value, Tensor) and not isinstance(value, FakeTensor) else None


def traced_functional(
    function: Callable[..., Any],
    types: Sequence[tuple[tuple[int, ...], torch.dtype, bool]],
    apart: Mapping[OpOverload, Callable[..., Any]] | None = None,
) -> fx.GraphModule | None:
    """Trace a function to functional aten ops, without composed ones; return None if that fails.

    types: shape, dtype and requires_grad of each input. apart: decompositions to use, by op.
    """
    with FakeTensorMode():
        fakes = [torch.empty(shape, dtype=dtype, requires_grad=grad) for shape, dtype, grad in types]
    try:
        with torch.enable_grad():
            return make_fx(dispatch_functionalize(function), dict(apart or {}), tracing_mode="fake")(*fakes)
    except Exception:  # torch's Python code may raise any exception on calls that it was not written for
        return None


def traced_on(function: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function on fake tensors to functional aten ops; results may be nested, errors are raised."""
    return make_fx(dispatch_functionalize(function), tracing_mode="real")(*tensors)


def functionalized(exported: ExportedProgram) -> ExportedProgram:
    """Return `exported.run_decompositions({})`: ops are functional, below torch.func; composed ops stay.

    torch marks all composed ops that it knows as ones that stay, which takes longer than tracing a small graph. This
    marks only those of this graph.
    """
    present = {
        n.target for n in exported.graph.nodes if isinstance(n.target, OpOverload) and _is_preservable_cia_op(n.target)
    }
    with mock.patch("torch.export.exported_program._collect_all_valid_cia_ops", return_value=present):
        decomposed: ExportedProgram = exported.run_decompositions({})
    return decomposed


@contextmanager
def traced_with(stack_trace: Callable[[], str | None]) -> Iterator[None]:
    """Set the `stack_trace` of nodes that tracers create, while open, to the result of `stack_trace()`.

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
    """Generate Python code of traced and exported graphs only when it is run or read, while open.

    Export generates the code of the same graph six times, and runs none.
    """
    maker = "torch.export.exported_program._create_graph_module_for_export"
    with _use_lazy_graph_module(True), mock.patch(maker, _LazyGraphModule, create=True):
        yield


@contextmanager
def silent() -> Iterator[None]:
    """Silence torch's warnings and errors, and graphs that export prints, while open.

    The caller reports what went wrong. Logs of lower levels, which TORCH_LOGS turns on, are still shown.
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
    """Return whether torch.export put this call into a graph to open or close a level of vmap or jvp."""
    return getattr(target, "__module__", "") == "torch._functorch.predispatch"
