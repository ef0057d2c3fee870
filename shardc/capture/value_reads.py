"""Handle reads of values during capture: Python sees numbers of constants, checks, harmless branches.

A traced tensor has no value. If the model's Python reads one nevertheless, capture continues like this:

    if (mask == causal).all():                 the tensor is made of constants alone: its value is known
    torch.rand(1).item() <= 0.0                no random number is: a layer that is never dropped
    if mask.any(): x[mask] = 0                 a branch that may always be taken (masked_rows.branches)

Anything else becomes a symbol of torch's, and export fails where the program depends on it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx, nn

from shardc.capture.constants import constant_ends, constant_value, given_numbers
from shardc.capture.data_dependent_sizes import KnownSizes
from shardc.capture.masked_rows.branches import harmless
from shardc.capture.masked_rows.trace import SelectedRows
from shardc.capture.refusals import BRANCH
from shardc.ir import source
from shardc.ir.source import Source
from shardc.runtime.ops import torch_library  # noqa: F401 (it registers shardc::ctc_loss)
from shardc.torch_modes import untraced
from shardc.torch_private import FakeTensor, OpOverload, traced_node


@dataclass(frozen=True)
class ValueReads:
    """Where Python read the values of tensors while a model was captured.

    sources: the lines that read an unknown value. inputs: integer placeholders (sizes of images, not images) that these
    values are made of. buffers: name -> the line that read its known value.
    """

    sources: list[Source] = field(default_factory=list)
    inputs: set[fx.Node] = field(default_factory=set)
    buffers: dict[str, Source] = field(default_factory=dict)

    def refuse_changed(self, buffers: Iterable[str]) -> None:
        """Raise ShardcError for a buffer whose value was read and that forward changes: it would be outdated."""
        for name in sorted(self.buffers.keys() & set(buffers)):
            fault = f"the program depends on the value of the buffer {name!r}, which it changes"
            raise self.buffers[name].error(fault, BRANCH)


@contextmanager
def known_values(model: nn.Module, *, sizes: bool = False, rows: bool = False) -> Iterator[ValueReads]:
    """Let Python, in the block, read traced tensors that depend on no input, parameter or saved buffer.

    A buffer that is not saved (persistent=False) is as the constructor left it, like a number among the attributes.
    The truth of any other tensor can be read in a check or a branch that changes nothing (see the module's docstring).
    Every other read is recorded in the result. sizes: also resolve sizes that torch itself reads from tensors
    (shardc.capture.data_dependent_sizes), which intercepts every call of torch. rows: also rows selected by unknown
    values (shardc.capture.masked_rows).
    """
    reads = ValueReads()
    kept = [
        (f"{path}.{name}".lstrip("."), m._buffers, name, b)
        for path, m in model.named_modules()
        for name, b in m._buffers.items()
        if name in m._non_persistent_buffers_set and b is not None and not isinstance(b, FakeTensor) and not b.is_meta
    ]

    def known(x: Tensor) -> Tensor | None:
        now = ((n, table[name], b) for n, table, name, b in kept if table.get(name) is not None)
        stored = {node: (n, b) for n, fake, b in now if (node := traced_node(fake)) is not None}
        value, used = constant_value(x, {node: b for node, (_, b) in stored.items()})
        if used:
            reads.buffers.update(dict.fromkeys((stored[node][0] for node in used), source.of_call()))
        return value

    with ExitStack() as stack:
        chosen = SelectedRows(known) if rows else None
        if sizes or chosen:
            stack.enter_context(chosen or KnownSizes(known))
        for name in ("__bool__", "__int__", "__float__", "__index__", "item", "tolist", *["numpy"] * rows):
            for kind in (Tensor, FakeTensor) if name in vars(FakeTensor) else (Tensor,):
                method = _reading(getattr(kind, name), known, reads, chosen, check=name in ("__bool__", "item"))
                stack.enter_context(mock.patch.object(kind, name, method))
        if chosen is not None:
            compared: Any = partial(chosen.compared, torch.SymBool.__bool__)
            stack.enter_context(mock.patch.object(torch.SymBool, "__bool__", lambda comparison: compared(comparison)))
        stack.enter_context(mock.patch.object(torch, "ctc_loss", ctc_loss))
        yield reads
        if chosen is not None:
            chosen.check()


def _reading(
    original: Callable[..., Any],
    known: Callable[[Tensor], Tensor | None],
    reads: ValueReads,
    chosen: SelectedRows | None,
    check: bool,
) -> Callable[..., Any]:
    """Make a method of Tensor that reads a value, and returns the constant's if there is one."""

    def method(self: Tensor, *args: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return original(self, *args)
        if (value := known(self)) is not None:
            return untraced(getattr(Tensor, original.__name__), value)
        truth = check and (self.dtype == torch.bool or original.__name__ != "item")
        if truth and (fine := harmless()) is not None:
            return fine
        if chosen is not None and (number := chosen.number(self, original.__name__)) is not None:
            return number
        models = original.__name__ == "item" and source.is_models(sys._getframe(1).f_code.co_filename)
        compared = models and not {"<", ">"}.isdisjoint(source.of_call().code)
        if compared and (ends := constant_ends(self, {})[0]) is not None:
            return Drawn(untraced(ends[0].item), untraced(ends[1].item), partial(unknown, self))
        some = chosen.truth(self) if chosen is not None and original.__name__ == "__bool__" else None
        return unknown(self, *args) if some is None else some

    def unknown(self: Tensor, *args: Any) -> Any:
        reads.sources.append(source.of_call())
        reads.inputs.update(given_numbers(self))
        return original(self, *args)

    return method


class Drawn:
    """A random number between two ends, as Python reads it.

    A comparison with equal answers at both ends has that answer. Other uses go to torch's symbol, made by `symbol()`.
    """

    def __init__(self, low: float, high: float, symbol: Callable[[], Any]) -> None:
        self.ends, self.symbol = (low, high), symbol


def _operator(name: str) -> Callable[..., Any]:
    def method(self: Drawn, *args: Any) -> Any:
        compares = name in ("lt", "le", "gt", "ge") and isinstance(args[0], (int, float))
        answers = {getattr(end, f"__{name}__")(*args) for end in self.ends} if compares else ()
        return answers.pop() if len(answers) == 1 else getattr(self.symbol(), f"__{name}__")(*args)

    return method


_OPERATORS = "lt le gt ge add radd sub rsub mul rmul truediv rtruediv neg float int bool format"
for _name in _OPERATORS.split():
    setattr(Drawn, f"__{_name}__", _operator(_name))


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Tensor:
    """Compute `torch.ctc_loss` as torch's C++ does, but keep lengths as tensors: torch reads their values."""
    batched = log_probs.dim() == 3
    x = log_probs if batched else log_probs.unsqueeze(1)
    ins, outs = (torch.as_tensor(ls, dtype=torch.int64).reshape(-1) for ls in (input_lengths, target_lengths))
    losses: Tensor = torch.ops.shardc.ctc_loss.default(
        x, targets if batched else targets.reshape(1, -1), ins, outs, blank, zero_infinity
    )
    if zero_infinity:
        losses = torch.where(losses == torch.inf, 0.0, losses)
    if reduction == 1:
        return (losses / outs.clamp(min=1).to(losses.dtype)).mean()
    return losses.sum() if reduction == 2 else losses if batched else losses.squeeze(0)


#: Ops that only check values.
_CHECKS = (
    "_assert_async",
    "_assert_scalar",
    "_assert_tensor_metadata",
    "sym_constrain_range",
    "sym_constrain_range_for_size",
)
#: Types of numbers in the graph; torch 2.11 has int or float for those that its checks assumed true.
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


def drop_checks(graph: fx.Graph) -> None:
    """Erase value checks (`assert lengths.max().item() <= n`) and numbers only they use, in place.

    A compiled program does not look at values; the model itself checks them wherever it runs.
    """
    for node in reversed(graph.nodes):
        if node.op != "call_function" or node.users:
            continue
        checks = isinstance(node.target, OpOverload) and node.target._schema.name.removeprefix("aten::") in _CHECKS
        if checks or isinstance(node.meta.get("val"), _NUMBERS):
            graph.erase_node(node)
