"""Explain an op that fails at run time: its module and line, the wrong value, and a fix.

Torch says "index out of range in self", from generated code. The op's operands are still in the frame that failed, so
this costs nothing, and waits for no device, until an op fails.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from shardc.errors import ShardcError
from shardc.ir import source
from shardc.ir.graph import source_of
from shardc.ir.types import op_name
from shardc.runtime import ops
from shardc.runtime.launch import LESS_MEMORY
from shardc.runtime.ops.opaque import op_of

aten = torch.ops.aten

_GENERATED = "<eval_with_key>"
_NO_MEMORY = re.compile(
    r"out of memory|can't allocate memory|not enough memory|cannot allocate memory|bad_alloc", re.IGNORECASE
)
_TRIED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(\w+)")


class OutOfMemoryError(ShardcError, RuntimeError):
    """A tensor did not fit into memory."""


class OutOfRangeError(ShardcError, IndexError):
    """An id, a label or another index is out of the range of its tensor."""


@contextmanager
def named(graph: fx.Graph) -> Iterator[None]:
    """Convert index and memory errors of the graph's function to ShardcErrors at the op that failed.

    Other errors get a note with the place.
    """
    try:
        yield
    except ShardcError:
        raise
    except Exception as e:
        node, values = _failed(e, graph)
        where = _place(node) if node is not None else ""
        if no_memory(e):
            raise out_of_memory(e, where) from e
        if isinstance(e, IndexError):
            raise _index_error(e, node, values, where) from e
        if node is not None and hasattr(e, "add_note"):  # Python 3.11
            code = source_of(node).shown
            e.add_note(f"in {where}" + (f": {code}" if code else ""))
        raise


def no_memory(error: BaseException) -> bool:
    """Return whether an error reports that memory does not suffice."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(str(error))))


def out_of_memory(error: BaseException, where: str, fix: str = LESS_MEMORY) -> OutOfMemoryError:
    """Build the error for the user. where: what was running."""
    tried = _TRIED.search(str(error))
    size = f": {tried[1]} {tried[2]} more were requested" if tried else ""
    return OutOfMemoryError(f"out of memory{size}", where=where, fix=fix)


def outside(ids: Any, rows: int, ignore: int | None = None) -> str:
    """Return "120 is not in 0 ... 99" for the first id that is not in a table of `rows`; "" if unknown.

    ignore: an id that is also valid. Reads ids on the CPU only: a device cannot be read after its op failed.
    """
    if not isinstance(ids, Tensor) or ids.device.type != "cpu" or type(ids) is not Tensor:
        return ""
    wrong = ids[((ids < 0) | (ids >= rows)) & (ids != ignore)]
    return f"{int(wrong[0])} is not in 0 ... {rows - 1}" if wrong.numel() else ""


def lookup_error(what: str, key: str, where: str) -> OutOfRangeError:
    """Build the error for ids outside of a table. what: from `outside`; key: the batch input with the ids."""
    if key:
        fix = f"correct {key!r} in the batch (is it from another tokenizer?), or make the table larger"
    else:
        fix = "make the table larger, or the sequences shorter (--seq of an hf: model): these numbers are made in"
        fix += " forward, as positions are, or from the batch's"
    ids = f"the id in {key!r}" if key else "the id"
    return OutOfRangeError(f"{ids} is outside of the table: {what}", where=where, fix=fix)


def _failed(error: BaseException, graph: fx.Graph) -> tuple[fx.Node | None, dict[str, Any]]:
    """Return the op that failed and its operands by name; None if it failed outside of the graph's code."""
    frame: FrameType | None = None
    line, tb = 0, error.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code.co_filename.startswith(_GENERATED):
            frame, line = tb.tb_frame, tb.tb_lineno
        tb = tb.tb_next
    if frame is None:
        return None, {}
    name = re.match(r"\s*(\w+)", linecache.getline(frame.f_code.co_filename, line))
    node = next((n for n in graph.nodes if name and n.name == name[1]), None)
    if node is None:
        return None, {}
    return node, {n.name: frame.f_locals.get(n.name) for n in node.all_input_nodes}


def failed_in(error: BaseException, graph: fx.Graph) -> fx.Node | None:
    """Return the op that failed, or the first that the error names, as backward does; None if unknown."""
    node, _ = _failed(error, graph)
    names = set(re.findall(r"aten::(\w+)", str(error)))
    return node or next((n for n in graph.nodes if n.op == "call_function" and op_name(n.target) in names), None)


def _place(node: fx.Node) -> str:
    """Return the module and line of a node: "model.embed (llama.py:31)"."""
    at = source_of(node)
    return f"{at.module} ({at.line})" if at.module and at.line else at.module or at.line or node.name


def eager_lookup_error(error: IndexError, model: nn.Module, inputs: Mapping[str, Tensor]) -> OutOfRangeError | None:
    """Explain a failed look-up or loss of the plain, uncompiled model; None if neither failed."""
    module, tb, line = "", error.__traceback__, source.of_exception(error).line
    names = {id(m): name for name, m in model.named_modules()}
    while tb is not None:
        values, code = tb.tb_frame.f_locals, tb.tb_frame.f_code
        module = names.get(id(values.get("self")), module)
        if code.co_filename == F.__file__ and code.co_name in ("embedding", "cross_entropy", "nll_loss"):
            where = f"{module} ({line})" if module and line else module or line
            if code.co_name == "embedding":
                fault = outside(values["input"], values["weight"].shape[0])
                ids = next((name for name, x in inputs.items() if _are(values["input"], x)), "")
                return lookup_error(fault, ids, where) if fault else None
            fault = outside(values["target"], values["input"].shape[1], values["ignore_index"])
            return label_error(fault, where) if fault else None
        tb = tb.tb_next
    return None


def _are(ids: Tensor, given: Tensor) -> bool:
    """Return whether these ids are a batch input, as given or in another shape or dtype."""
    same = ids.numel() == given.numel() and ids.device == given.device and not given.is_meta
    return ids is given or (same and not given.is_floating_point() and torch.equal(ids.flatten(), given.flatten()))


def label_error(what: str, where: str) -> OutOfRangeError:
    """Build the error for labels that are no classes. what: from `outside`."""
    fix = "labels are classes, counted from 0; an ignored one is -100, the ignore_index"
    return OutOfRangeError(f"a label is not a class: {what}", where=where, fix=fix)


def _index_error(error: IndexError, node: fx.Node | None, values: dict[str, Any], where: str) -> OutOfRangeError:
    message = (str(error).strip() or "no details are known").splitlines()[0]
    target: Any = node.target if node is not None else None
    operands = node.all_input_nodes if node is not None else []
    args: Any = node.args if node is not None else ()
    if target is ops.opaque:  # (op, needs, again, its own arguments)
        target, args = op_of(args[0]), args[3:]
    if node is not None and target in (aten.embedding.default, ops.embedding_partial):
        table, ids = operands[:2]
        rows = args[4] if target is ops.embedding_partial else values[table.name].shape[0]
        fault = outside(values[ids.name], int(str(rows)))
        return lookup_error(fault or message, _input_of(ids), where)
    if node is not None and target in _OF_LABELS:
        logits, labels = (values[n.name] for n in operands[:2])
        classes = args[4] if target is ops.nll_stats else logits.shape[1 if logits.dim() > 1 else 0]
        return label_error(outside(labels, int(str(classes)), -100) or message, where)
    if target is ops.in_chunks and message.startswith("target "):  # of `check_range`
        return label_error(message, where)
    fix = "compare the ids in the batch with the sizes of the tables that they index"
    return OutOfRangeError(f"an index is out of range: {message}", where=where, fix=fix)


#: Ops whose second operand is labels.
_OF_LABELS = {ops.nll, ops.nll_stats, aten.nll_loss_forward.default, aten.nll_loss2d_forward.default}


def _input_of(node: fx.Node) -> str:
    """Return the input that ids come from through views; "" if forward computes them."""
    while node.op == "call_function":
        takes = [n for n in node.all_input_nodes if n.name not in ("mesh", "rng")]
        if len(takes) != 1:
            return ""
        node = takes[0]
    return node.name if node.op == "placeholder" else ""
