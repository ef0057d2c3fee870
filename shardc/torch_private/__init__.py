"""Import torch's private modules. No other folder may import them (tests/test_layers.py).

Add a name here with the reason why no public one works. tests/capture/test_capture.py says what breaks when a module
moves. Other files only read private attributes of public objects where torch has no other way: an op's declaration
(`OpOverload._schema`, `._overloadname`) and a module's own tables (`nn.Module._parameters`, `._buffers`,
`._backward_hooks`, ...); and they call two ops without a public name (`torch._grouped_mm`, `torch._ctc_loss`).

pyproject.toml has the oldest torch; "torch 2.11" in a comment marks code for it.

traced_graphs    while a model is traced to a graph        autograd       within a backward pass; optimizers' hooks
replacements     of torch functions, for a while           inductor       the compiler
fake_tensors     tensors without data                      processes      groups, their store, workers
ops              overloads and decompositions              gpu            CUDA's allocator and streams
module_walks     walks over a model's modules              graph_nodes    fast creation of graph nodes
"""

from __future__ import annotations

from torch._ops import HigherOrderOperator, OpOverload  # types of wrappers around regions of code, and of ops
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree  # nested batches; torch.utils has no public name for it
from torch.utils._python_dispatch import (  # a mode that sees every op; a test for wrappers such as DTensor
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
)

from shardc.torch_private.autograd import (
    after_backward,
    current_backward,
    engine_executes,
    foreach_for,
    keeps_graph,
    step_hooks,
)
from shardc.torch_private.fake_tensors import (
    SIZE_DEPENDENT,
    NotCompiledMode,
    data_dependent,
    fake_device,
    fake_mode,
    fake_mode_of,
    fake_mode_on,
    fake_result,
    fake_tensor,
    no_modes,
    stands_for_gpu,
)
from shardc.torch_private.gpu import busy_gpu, memory_recorded
from shardc.torch_private.graph_nodes import add_node
from shardc.torch_private.inductor import inductor_compiled, kernels_of, no_compiler
from shardc.torch_private.module_walks import quick_walks
from shardc.torch_private.ops import (
    assert_on_device,
    backward_decompositions,
    body_of,
    decompositions,
    multiplies_float8_on_cpu,
    norms,
    overload_of,
    unintercepted,
)
from shardc.torch_private.processes import (
    count_groups_from,
    default_store,
    flight_record,
    let_workers_end,
    no_worker,
    process_groups,
)
from shardc.torch_private.replacements import (
    plain_checkpoints,
    plain_indexing,
    replaced_engine,
    replaced_flex_attention,
    replaced_packing,
    replaced_trunc_normal,
)
from shardc.torch_private.traced_graphs import (
    call_modes,
    expression,
    functionalized,
    generic,
    is_transform,
    module_calls,
    silent,
    traced_call,
    traced_constant,
    traced_functional,
    traced_node,
    traced_on,
    traced_so_far,
    traced_with,
    tracing,
    transforming,
    unseen,
    watched,
    without_code,
)

__all__ = [
    "SIZE_DEPENDENT",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "NotCompiledMode",
    "OpOverload",
    "TorchDispatchMode",
    "add_node",
    "after_backward",
    "assert_on_device",
    "backward_decompositions",
    "body_of",
    "busy_gpu",
    "call_modes",
    "count_groups_from",
    "current_backward",
    "data_dependent",
    "decompositions",
    "default_store",
    "engine_executes",
    "expression",
    "fake_device",
    "fake_mode",
    "fake_mode_of",
    "fake_mode_on",
    "fake_result",
    "fake_tensor",
    "flight_record",
    "foreach_for",
    "functionalized",
    "generic",
    "inductor_compiled",
    "is_traceable_wrapper_subclass",
    "is_transform",
    "keeps_graph",
    "kernels_of",
    "let_workers_end",
    "memory_recorded",
    "module_calls",
    "multiplies_float8_on_cpu",
    "no_compiler",
    "no_modes",
    "no_worker",
    "norms",
    "overload_of",
    "plain_checkpoints",
    "plain_indexing",
    "process_groups",
    "pytree",
    "quick_walks",
    "replaced_engine",
    "replaced_flex_attention",
    "replaced_packing",
    "replaced_trunc_normal",
    "silent",
    "stands_for_gpu",
    "step_hooks",
    "traced_call",
    "traced_constant",
    "traced_functional",
    "traced_node",
    "traced_on",
    "traced_so_far",
    "traced_with",
    "tracing",
    "transforming",
    "unintercepted",
    "unseen",
    "watched",
    "without_code",
]
