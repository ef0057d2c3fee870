"""Define kinds of ops, for `checkpoint: {save: [linear, attention]}` or `{recompute: [elementwise]}`.

    linear       products with weights; matmul: products of two activations; attention; conv; norm
    collective   all that communicates; gather: only those that put the parts of a value together (all_gather)
    elementwise  (wider than its name) all that takes no more work than reading its operands and writing its results:
                 functions of elements, casts, views, and sums, softmax, cat, variances

Which kinds `recompute: cheap` names: CHEAP in shardc/spec/step_sections.py. What plans try: shardc/plan/space.py.
An op may be of several kinds (a gather is a collective), or of none: sorting, routing of experts, ops of users.
"""

from __future__ import annotations

import torch
from torch import fx

from shardc.ir.conversions import CONVERSIONS
from shardc.ir.graph import operands_of
from shardc.ir.metadata import Collective
from shardc.ir.types import op_name
from shardc.rules.core import registry
from shardc.runtime import ops
from shardc.torch_private import OpOverload

#: Words in the names of convolutions: conv_transpose2d, _convolution.
_CONVOLUTIONS = {"conv", "conv1d", "conv2d", "conv3d", "convolution"}
_NORMS = {
    "layer_norm",
    "native_layer_norm",
    "rms_norm",
    "_fused_rms_norm",
    "group_norm",
    "instance_norm",
    "batch_norm",
    "native_batch_norm",
}
#: Elementwise in the sense above, but not marked so by torch.
_ELEMENTWISE = {
    "_to_copy",
    "_softmax",
    "_log_softmax",
    "softmax",
    "log_softmax",
    "logsumexp",
    "cat",
    "stack",
    "clone",
    "glu",
    "type_as",
    "roll",
    "constant_pad_nd",
    "repeat",
    "repeat_interleave",
    "slice_scatter",
    "select_scatter",
    "tril",
    "triu",
    "flip",
    "var",
    "var_mean",
    "std",
    "linalg_vector_norm",
}
#: Elementwise ops of shardc: conversions that send nothing, and ops on elements.
_OURS = {
    *(getattr(ops, row.op) for row in CONVERSIONS if row.collectives(gradient=False)[0] == "none"),
    ops.dropout,
    ops.fill_padding,
}


def kinds(node: fx.Node, weights: set[fx.Node]) -> set[str]:
    """Return the kinds of an op. weights: the values that depend on parameters and buffers alone."""
    names: set[str] = set()
    collective: Collective | None = node.meta.get("collective")
    if collective is not None and collective.kind != "none":
        names.add("collective")
        if collective.kind == "all_gather":
            names.add("gather")
        return names
    name = op_name(node.target)
    rule = registry.find(node.target)
    words = set(name.split("_"))  # whole words: convert_element_type is no convolution
    if "attention" in words:
        names.add("attention")
    elif words & _CONVOLUTIONS:
        names.add("conv")
    elif rule is not None and rule.flops is not None:
        names.add("linear" if any(x in weights for x in operands_of(node)) else "matmul")
    elif name in _NORMS:
        names.add("norm")
    elif _elementwise(node, name):
        names.add("elementwise")
    return names


def _elementwise(node: fx.Node, name: str) -> bool:
    target = node.target
    if target in _OURS:
        return True
    if not isinstance(target, OpOverload):
        return False
    marked = {torch.Tag.pointwise, torch.Tag.reduction} & set(target.tags)
    return bool(marked) or target.is_view or name in _ELEMENTWISE
