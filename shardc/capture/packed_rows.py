"""Note packed rows whose sequences reach one another: positions restart inside of a row, and nothing heeds that.

    position_ids  0 1 2 0 1 2 3      scaled_dot_product_attention(q, k, v, is_causal=True): the second sees the first

transformers makes a mask of such positions, for most models, if the batch has no attention_mask of two dims.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor, fx

from shardc.ir.graph import calls, placeholders, source_of, value_of
from shardc.ir.program import Program
from shardc.ir.types import op_name
from shardc.torch_private import FakeTensor
from shardc.verify.reference import reach

#: Names of inputs with the positions of tokens.
_POSITIONS = re.compile(r"(^|_)pos(ition)?s?(_ids?)?$")
#: Ops that put a mask on scores where attention is written out.
_MASKING = ("add", "where", "masked_fill")


def notes(program: Program, batch: Any) -> tuple[str, ...]:
    """Return a note on the first attention, and one on the first convolution, across sequences of the example batch."""
    given = {i.name: reach(batch, i.path) for i in program.inputs}
    if any(x.is_meta or isinstance(x, FakeTensor) for x in given.values()):
        return ()
    padding = {n: x for n, x in given.items() if "mask" in n and (x.dim() < 3 or x.shape[-2] != x.shape[-1])}
    restarts = [n for n, x in given.items() if _POSITIONS.search(n) and _restarts(x, [*padding.values()])]
    if not restarts:
        return ()
    size, result = given[restarts[0]].shape[-1], []
    begins = f"positions restart inside of rows ({restarts[0]}), as in packed rows, but"
    if (attends := _attention(program, size, {*padding})) is not None:
        fix = "pass an attention_mask [rows, 1, tokens, tokens] that is True where a token sees another"
        if padding:
            fix = f"leave {next(iter(padding))} out of the batch: transformers then makes a mask of positions; or {fix}"
        text = "the mask of this attention does not depend on them: tokens see the sequences before theirs"
        result.append(f"{source_of(attends).line}: {begins} {text}. To part them, {fix}")
    if (convolves := next((n for n in calls(program.graph) if _convolves(n, size)), None)) is not None:
        text = "this convolution, and a scan after it, run from one sequence into the next: give each a row of its own"
        result.append(f"{source_of(convolves).line}: {begins} {text}")
    if not result and not placeholders(program.graph)[restarts[0]].users:
        result.append(f"{begins} nothing reads them: give each sequence a row of its own")
    return tuple(result)


def _restarts(x: Tensor, masks: list[Tensor]) -> bool:
    """Return whether a position is less than the one before it, where neither is padding."""
    if x.is_floating_point() or not x.dim():
        return False
    x = x[0] if x.dim() == 3 else x  # of a text in images: time comes first
    less = x[..., 1:] < x[..., :-1]
    for mask in masks:
        if mask.dim() == 2 and mask.shape[1] == x.shape[-1]:
            less = less & (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
    return bool(less.any())


def _attention(program: Program, size: int, padding: set[str]) -> fx.Node | None:
    """Return the first attention over `size` tokens whose mask depends on no input but padding; None: there is none."""
    nodes = placeholders(program.graph)
    inputs = {nodes[i.name]: frozenset({i.name}) for i in program.inputs}
    weights = {nodes[p.name] for p in program.params}
    of: dict[fx.Node, frozenset[str]] = {}  # the inputs that a value depends on
    masks: set[str] = set()  # the inputs of masks in attention that is written out
    softmax = None
    for node in program.graph.nodes:
        of[node] = inputs.get(node, frozenset()).union(*(of[n] for n in node.all_input_nodes))
        if any(n in weights for n in node.all_input_nodes):
            weights.add(node)
        name, square = op_name(node.target), (size, size)
        if name == "scaled_dot_product_attention":
            mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
            lengths = value_of(node.args[0]).shape[-2], value_of(node.args[1]).shape[-2]
            if lengths == square and (mask is None or of[mask] <= padding):
                return node  # type: ignore[no-any-return]
        elif name in _MASKING and node in weights and value_of(node).shape[-2:] == square:
            masks.update(*(of[n] for n in node.all_input_nodes if n not in weights))
        elif "softmax" in name and value_of(node).shape[-2:] == square:
            softmax = softmax or node
    return softmax if masks <= padding else None


def _convolves(node: fx.Node, size: int) -> bool:
    """Return whether a convolution of several taps runs over `size` tokens."""
    if "conv" not in op_name(node.target) or len(node.all_input_nodes) < 2:
        return False
    x, weight = (value_of(n).shape for n in node.all_input_nodes[:2])
    return len(x) == len(weight) == 3 and weight[-1] > 1 and size <= x[-1] < size + weight[-1]
