"""Decide which ops of torch a program may call: a text may come from anybody, and its ops are run.

An op is allowed if a rule knows it and it is functional: it reads tensors and numbers, changes none of them, and
returns new ones. Halves of stages also call backward ops, which have no rule: there any functional op of aten is
allowed. With `unknown_ops: replicate` in the spec, ops without a rule are allowed: of aten, or registered by the user.
"""

from __future__ import annotations

import re

from shardc.rules.core import registry
from shardc.torch_private import OpOverload

#: Namespaces of ops that come with torch, besides aten: none is a user's. Some ops send, print or start things.
OF_TORCH = {
    *("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_inductor_test", "_quantized"),
    *("_test", "bundled_inputs", "c10d", "c10d_functional", "cuda", "debugprims", "dist", "export"),
    *("fsdp", "higher_order", "inductor", "metal", "mkl", "mkldnn", "mkldnn_prepacked", "mtia"),
    *("onednn", "prepacked", "prim", "prims", "profiler", "quantized", "quantized_decomposed"),
    *("rngprims", "sparse", "static_runtime", "streams", "symm_mem", "test", "vulkan_prepack"),
    "xnnpack",
}
#: Types of arguments that are values: tensors, numbers and options.
_VALUE = re.compile(r"(?:(?:Optional|List)\[)*(?:Tensor|int|float|number|bool|complex|str|Device|SymInt)\]*")


def refusal(op: OpOverload, *, joint: bool, unknown: bool) -> str:
    """Return why a program may not call an op, or "". joint: in half of a stage; unknown: needs no rule."""
    if why := _effect(op):
        return f"{why}: programs call ops that only compute"
    known, namespace = registry.find(op) is not None, op.namespace
    if known or (namespace == "aten" and (joint or unknown)) or (unknown and namespace not in OF_TORCH):
        return ""
    return "has no rule: programs call ops that shardc knows how to split"


def _effect(op: OpOverload) -> str:
    """Return what an op does besides computing its result; "" for a functional op."""
    schema = op._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "changes its arguments"
    types = [str(a.type) for a in schema.arguments]
    if any("str" in t for t in types) and not any("Tensor" in t for t in types):
        return "opens a file"
    if not all(map(_VALUE.fullmatch, types)):
        return "takes something else than tensors and numbers"
    if not schema.returns:
        return "returns nothing"
    if any("Tensor" not in str(r.type) for r in schema.returns):
        return "gives something else than tensors"
    return ""
