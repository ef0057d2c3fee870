"""Call Inductor, the compiler behind torch.compile, without torch.compile around it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx


def inductor_compiled(
    function: Callable[..., Any], inputs: Sequence[Tensor], *, any_rows: bool = False
) -> Callable[[list[Tensor]], Any]:
    """Compile a function of tensors with Inductor, for inputs of these sizes, strides and dtypes.

    any_rows: their first dims may later have another size, which all share (here 2 at least). The result takes a list,
    which it empties, and returns a sequence. Code is cached on disk (TORCHINDUCTOR_CACHE_DIR). `torch.compile` would
    trace Python, guard, and build a graph for autograd; `torch._inductor.standalone_compile` calls this through
    autograd's wrappers, which keep inputs alive. Importing Inductor takes seconds.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    shapes = ShapeEnv()  # without one nothing is cached on disk
    mode = FakeTensorMode(shape_env=shapes)
    fake = [_fake(mode, x, any_rows) for x in inputs]
    with mode, torch.no_grad():
        graph = make_fx(function, decomposition_table=select_decomp_table())(*fake)
    if any(size.is_number for size in shapes.replacements.values()):
        raise NotImplementedError("the code would be for one number of rows only")
    with tracing(TracingContext(mode)), config.patch(fx_graph_cache=True), torch.no_grad():
        return compile_fx_inner(graph, fake)


def _fake(mode: FakeTensorMode, x: Tensor, any_rows: bool) -> Tensor:
    if not any_rows:
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    from torch.fx.experimental import symbolic_shapes as shapes

    sizes = [shapes.DimDynamic.DYNAMIC, *[shapes.DimDynamic.STATIC] * (x.dim() - 1)]
    return mode.from_tensor(x, symbolic_context=shapes.StatelessSymbolicContext(dynamic_sizes=sizes))


def no_compiler(device: torch.device) -> str:
    """Return why Inductor cannot compile for a device on this machine; "" if it can."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "Triton is not installed, or does not know this GPU"
    from torch._inductor import cpp_builder

    try:
        cpp_builder.get_cpp_compiler()
    except Exception:  # an error class of Inductor that moved between versions
        return "there is no C++ compiler (g++ or clang++; CXX names another one)"
    return ""


def kernels_of(compiled: Any) -> int:
    """Count the kernels that one call of a result of `inductor_compiled` runs."""
    calls = r"^\s+(?:\w+_fused\w*(?:\.run)?|extern_kernels\.\w+)\("
    return len(re.findall(calls, compiled.source_code, re.MULTILINE))
