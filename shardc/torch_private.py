"""The one place that imports torch's private modules. tests/capture/test_capture.py says what breaks when they move.

Add a name here with the reason why nothing public will do; tests/test_layers.py refuses such an import elsewhere. Other
files only read private attributes of public objects, for what torch offers no other way to: an op's declaration
(`OpOverload._schema`, `._overloadname`) and a module's own tables (`nn.Module._parameters`, `._buffers`,
`._backward_hooks`, ...); and they call two ops that have no public name (`torch._grouped_mm`, `torch._ctc_loss`).
"""

from __future__ import annotations

import logging
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._C import _distributed_c10d as _c10d  # the flight recorder, which has no public name
from torch._decomp import decomposition_table  # torch's own decompositions, by op
from torch._export.utils import _is_preservable_cia_op  # which composed ops export keeps
from torch._library.custom_ops import CustomOpDef  # what torch.library.custom_op returns
from torch._ops import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
)  # types of export's wrappers around regions of code, and of ops
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    in_kernel_invocation_manager,
)
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.autograd import forward_ad  # whose level is private
from torch.cuda.memory import _dump_snapshot, _record_memory_history  # documented under these names
from torch.distributed.distributed_c10d import (
    _get_default_store,  # outlives process groups
    _world,  # how many process groups there are: part of the next one's name
)
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks  # of all optimizers
from torch.utils import _pytree as pytree  # nested batches; torch.utils has no public name for it
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)  # what sees every op; tensors of tensors, such as a DTensor

__all__ = [
    "DATA_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "after_backward",
    "backward_decompositions",
    "busy_gpu",
    "call_modes",
    "current_backward",
    "decompositions",
    "engine_executes",
    "fake_device",
    "fake_mode",
    "fake_result",
    "fake_tensor",
    "functionalized",
    "inductor_compiled",
    "is_traceable_wrapper_subclass",
    "is_transform",
    "keeps_graph",
    "kernels_of",
    "module_calls",
    "no_compiler",
    "no_modes",
    "norms",
    "outer_hooks",
    "overload_of",
    "plain_checkpoints",
    "pytree",
    "replaced_engine",
    "replaced_flex_attention",
    "replaced_packing",
    "replaced_trunc_normal",
    "sequence_number",
    "silent",
    "step_hooks",
    "traced_constant",
    "traced_functional",
    "traced_node",
    "traced_on",
    "traced_so_far",
    "traced_with",
    "tracing",
    "transforming",
]

#: What tracing raises where Python asks for a tensor's value (`if x.sum() > 0`) or a shape hangs on one (`nonzero`).
DATA_DEPENDENT: tuple[type[Exception], ...] = (
    GuardOnDataDependentSymNode,
    DataDependentOutputException,
    DynamicOutputShapeException,
)


class _FakeMode(FakeTensorMode):  # type: ignore[no-untyped-call]
    """of_gpu: its tensors stand for those of a GPU with torch's kernels, wherever they say they are."""

    of_gpu = False


def fake_mode(*, of_gpu: bool = False) -> FakeTensorMode:
    """A mode whose tensors have shapes and dtypes but no storage. Real tensors that the model made for itself may mix
    in. of_gpu: they stand for those of a GPU.
    """
    mode = _FakeMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    mode.of_gpu = of_gpu
    return mode


def stands_for_gpu(x: Tensor) -> bool:
    """Whether a tensor without data stands for one on a GPU."""
    return isinstance(x, FakeTensor) and getattr(x.fake_mode, "of_gpu", False)


def no_modes() -> AbstractContextManager[Any]:
    """Tensors that are made in here have data, whatever modes are on."""
    found: AbstractContextManager[Any] = _disable_current_modes()
    return found


def fake_tensor(mode: FakeTensorMode, like: Tensor) -> Tensor:
    """A contiguous fake tensor of the shape and dtype of `like`, or a fake parameter; on the CPU where `like` is on the
    meta device.

    The CPU, because models make constants without naming a device, which would not mix with meta tensors.
    """
    device = torch.device("cpu") if like.device.type == "meta" else like.device
    param = isinstance(like, torch.nn.Parameter)
    empty = torch.empty(tuple(like.shape), dtype=like.dtype, device="meta", requires_grad=param and like.requires_grad)
    fake = FakeTensor(mode, empty, device)  # `with mode: torch.empty(...)` and nn.Parameter take ten times as long
    if param:
        fake._is_param = True  # what nn.Parameter does to tensors of other classes
    return fake


def fake_device(x: Tensor) -> torch.device:
    """The device that a fake tensor says it is on. `x.device` says the same, but is dispatched like an op."""
    assert isinstance(x, FakeTensor)
    return x.fake_device


def fake_result(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    like: Tensor,
    view: tuple[Tensor, int] | None = None,
) -> Tensor:
    """A new fake tensor of the mode that `like` is of, made inside of a mode's dispatch. view: (the tensor that it is a
    view of, its place in that one's storage).
    """
    assert isinstance(like, FakeTensor)
    with in_kernel_invocation_manager(like.fake_mode):
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if view is not None:
            made.set_(view[0].untyped_storage(), view[1], shape, strides)
    return FakeTensor(like.fake_mode, made, device)


def traced_node(x: Tensor) -> fx.Node | None:
    """While a model is traced: the graph node that made `x`, if it is known."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    slot: Any = get_proxy_slot(x, mode.tracer, None)
    return slot.proxy.node if slot is not None else None


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


def overload_of(op: Any) -> OpOverload | None:
    """The overload that an op in any form means: itself; `torch.ops.lib.op`'s default, or only one; a custom
    op's; else None.
    """
    if isinstance(op, CustomOpDef):
        return op._opoverload
    if isinstance(op, OpOverloadPacket):
        names = op.overloads()  # type: ignore[no-untyped-call]
        return (
            getattr(op, "default" if "default" in names else names[0])
            if "default" in names or len(names) == 1
            else None
        )
    return op if isinstance(op, OpOverload) else None


def decompositions(op: OpOverload) -> list[Callable[..., Any]]:
    """How torch takes an op apart: by its own code, if it is composed of other ops by definition; by its entry in
    torch's table.
    """
    own = [op.decompose] if op._can_decompose() else []
    return own + ([decomposition_table[op]] if op in decomposition_table else [])


def backward_decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """torch's decompositions of the ops that backward passes consist of, and of the normalisations whose statistics
    these take.
    """
    names = re.compile(r"_backward(_data)?$|_forward$|^native_\w+_norm$|^_native_batch_norm_legit|^_fused_rms_norm$")
    return {
        op: f
        for op, f in decomposition_table.items()
        if isinstance(op, OpOverload) and names.search(op._schema.name.partition("::")[2])
    }


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
        node = original(self, *args, **kwargs)
        if not node.stack_trace and (trace := stack_trace()):
            node.stack_trace = trace
        return node

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(fx.proxy.TracerBase, "create_node", create_node))
        if hasattr(fx.config, "do_not_emit_stack_traces"):
            stack.enter_context(mock.patch.object(fx.config, "do_not_emit_stack_traces", True))
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


def replaced_trunc_normal(function: Callable[..., Tensor]) -> AbstractContextManager[Any]:
    """While open, `torch.nn.init.trunc_normal_` calls `function(tensor, mean, std, a, b, generator=None)`, in every
    thread.

    It is the one initialiser that looks at its numbers, and no mode of torch's sees it as a whole.
    """
    return mock.patch("torch.nn.init._no_grad_trunc_normal_", function)


def replaced_engine(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """While open, torch.autograd's `grad` and `backward` call `function(original, outputs, weights, retain, create,
    inputs, allow_unused, ...)` in the place of autograd's engine, by whatever name a model imported them."""
    original = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    return mock.patch.object(torch.autograd, "_engine_run_backward", partial(function, original))


def plain_checkpoints() -> AbstractContextManager[Any]:
    """While open, checkpoints that are not reentrant only run their function. Traced inside one another, they leave
    gradients turned off.
    """

    def nothing(*_: Any, **__: Any) -> Iterator[None]:
        yield

    return mock.patch.object(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", nothing)


def replaced_packing(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """While open, torch.nn.utils.rnn packs padded sequences by `function(original, input, lengths, batch_first)`."""
    original = torch._VF._pack_padded_sequence
    return mock.patch.object(torch._VF, "_pack_padded_sequence", partial(function, original), create=True)


@contextmanager
def replaced_flex_attention(function: Callable[..., Any] | None, *, blocks: bool) -> Iterator[None]:
    """While open, FlexAttention, compiled or not, comes to `function(query, key, value, score_mod, block_mask, scale,
    options)`, a mask_mod being the last of `block_mask`; None: to torch's own definition of it, on any device, which
    autograd differentiates. blocks: whether `create_block_mask` looks at values; else its blocks are all there.

    A model may have imported `flex_attention` itself, so that the names which it looks up are replaced.
    """
    from torch.nn.attention import flex_attention as flex  # imports torch._dynamo, as export does: a second

    eager = function is None
    if eager:
        from torch._higher_order_ops.flex_attention import math_attention as function

    def whole(blocks: Any, mask_mod: Any, sizes: tuple[int, int], q_block: int, kv_block: int) -> Any:
        (batch, heads, device), _ = blocks
        rows, columns = (-(-n // size) for n, size in zip(sizes, (q_block, kv_block), strict=True))
        many = torch.full((batch, heads, rows), columns, dtype=torch.int32, device=device)
        which = torch.arange(columns, dtype=torch.int32, device=device).expand(batch, heads, rows, columns)
        return flex.BlockMask.from_kv_blocks(
            many, which, BLOCK_SIZE=(q_block, kv_block), mask_mod=mask_mod, seq_lengths=sizes, compute_q_blocks=False
        )

    with ExitStack() as stack:
        if eager:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        replaced: dict[str, Any] = {
            "flex_attention_hop": function,
            "_validate_device": lambda *_: None,  # refuses gradients on a CPU
            "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG": True,  # calls the op itself, and not what torch.compile makes
        }
        if not blocks:
            replaced |= {
                "create_mask": lambda _, batch, heads, *sizes_and_device: (batch, heads, sizes_and_device[-1]),
                "_convert_mask_to_block_mask": lambda sizes, **_: (sizes, None),
                "_create_sparse_block_from_block_mask": whole,
            }
        for name, replacement in replaced.items():
            stack.enter_context(mock.patch.object(flex, name, replacement))
        yield


def is_transform(target: Any) -> bool:
    """Is this what torch.export puts into a graph for torch.func's transforms: calls that open and close a level of
    vmap or jvp?
    """
    return getattr(target, "__module__", "") == "torch._functorch.predispatch"


def norms(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """The 2-norm of each, 0-dim, computed in a real dtype. torch.nn.utils' are in the tensors' own: of bfloat16, right
    to 0.4 %.
    """
    real = [torch.view_as_real(x) if x.is_complex() else x for x in tensors]
    return list(torch._foreach_norm(real, 2, dtype=dtype))


def process_groups() -> int:
    """How many process groups this process is in: torch makes the name of a group that only its own ranks make from
    it, so that ranks which count differently would wait for each other under different names.
    """
    return len(_world.pg_names)


def assert_on_device(condition: Tensor, message: str) -> None:
    """An assertion that the device checks in its own time: the host does not wait."""
    torch.ops.aten._assert_async.msg(condition, message)


def default_store() -> Any:
    """The key-value store over which the processes of torch.distributed's world met: it outlives their groups."""
    return _get_default_store()


def inductor_compiled(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Callable[[list[Tensor]], Any]:
    """A function of tensors, compiled by Inductor for inputs of these sizes, strides and dtypes. The result is called
    with a list, which it empties, and gives a sequence. Compiled code is kept on disk (TORCHINDUCTOR_CACHE_DIR).

    `torch.compile` would trace Python, guard, and build a graph for autograd; `torch._inductor.standalone_compile`
    calls this too, through autograd's wrappers, which hold on to inputs. Importing Inductor takes seconds.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    mode = FakeTensorMode(shape_env=ShapeEnv())  # without one nothing is kept on disk
    with mode, torch.no_grad():
        fake = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in inputs]
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fake)
    with tracing(TracingContext(mode)), config.patch(fx_graph_cache=True), torch.no_grad():
        return compile_fx_inner(graph, fake)


def no_compiler(device: torch.device) -> str:
    """Why Inductor cannot compile for a device on this machine; "" if it can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton is not installed, or does not know this GPU"
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception:  # an error of Inductor's own, which has moved between versions
        return "there is no C++ compiler (g++ or clang++; CXX names another one)"
    return ""


def kernels_of(compiled: Any) -> int:
    """How many kernels a call of what `inductor_compiled` gives runs."""
    calls = r"^\s+(?:\w+_fused\w*(?:\.run)?|extern_kernels\.\w+)\("
    return len(re.findall(calls, compiled.source_code, re.MULTILINE))


def flight_record() -> bytes:
    """What torch's flight recorder keeps of this process's last 2,000 collectives (TORCH_FR_BUFFER_SIZE), as JSON: when
    each was begun, and with NCCL also when it ended; of NCCL's groups and of gloo's.
    """
    return bytes(_c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=False))  # type: ignore[attr-defined]


@contextmanager
def memory_recorded(file: Path) -> Iterator[None]:
    """Write what CUDA's allocator did meanwhile, with the lines that asked for it, for https://pytorch.org/memory_viz."""
    _record_memory_history(max_entries=1_000_000)
    try:
        yield
    finally:
        file.parent.mkdir(parents=True, exist_ok=True)
        _dump_snapshot(str(file))  # type: ignore[no-untyped-call]
        _record_memory_history(enabled=None)


def busy_gpu(cycles: int = 200_000) -> None:
    """Give the current GPU's stream something to do that touches no memory, a tenth of a millisecond: kernels that are
    queued meanwhile begin one right behind the other. (torch's own tests of streams use it.)
    """
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def let_workers_end() -> None:
    """A DataLoader whose worker ends raises an error in the main thread, wherever it is: in the middle of what ranks do
    together, and over the error that counts, as launchers end workers with the ranks. It also looks by itself, whenever
    a batch is late for 5 s; so its handler of SIGCHLD gives way to the one that was there before.
    """
    handler: Any = signal.getsignal(signal.SIGCHLD)
    if (
        getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling"
        and threading.current_thread() is threading.main_thread()
    ):
        kept = dict(zip(handler.__code__.co_freevars, handler.__closure__ or (), strict=True))
        before = kept["previous_handler"].cell_contents if "previous_handler" in kept else None
        signal.signal(signal.SIGCHLD, before or signal.SIG_DFL)


def step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Has anybody registered a hook of the optimizer's steps? shardc's own, which look and change nothing, do not
    count: they are marked so (`looks_only`).
    """
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    each = (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return any(not getattr(hook, "looks_only", False) for hooks in each for hook in hooks.values())


def outer_hooks() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """(pack, unpack) of the `torch.autograd.graph.saved_tensors_hooks` that are open now. Only the innermost ones are
    ever called by autograd: hooks that work within others have to pass on themselves what they do not take.
    """
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


def set_sequence_number(node: Any, number: int) -> None:
    """Give a node of autograd's that is a Function another number: of those that are ready, backward runs that of the
    greatest first.
    """
    node.first_number = node._sequence_nr()
    node._set_sequence_nr(number)


def sequence_number() -> int:
    """Number that the next node of autograd's graph gets on this thread: nodes that an op makes lie between two calls
    around it.
    """
    return int(torch._C._autograd._get_sequence_nr())


def current_backward() -> int | None:
    """Inside of a backward pass: the number of the node that runs; else None. Anomaly mode knows it too, but keeps
    stacks of all ops.
    """
    node = torch._C._current_autograd_node()
    return int(getattr(node, "first_number", None) or node._sequence_nr()) if node is not None else None


def engine_executes(node: Any) -> bool | None:
    """Inside of a backward pass: does it run this node? None: it is a leaf whose gradient torch.autograd.grad was asked
    for. torch.autograd.graph.register_multi_grad_hook asks so; there is no public name.
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return None


def keeps_graph() -> bool:
    """Inside of a backward pass: may it be run again (`retain_graph=True`)? Then nothing that was saved for it may be
    written over. Checkpoints of torch.utils ask so; there is no public name.
    """
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def after_backward(callback: Callable[[], None]) -> None:
    """Inside of a backward pass: have `callback` called when all of it is done, before `.backward()` returns.

    DDP and FSDP end their reductions so; a public hook that runs at this point does not exist.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
