"""Refuse functions of torch that would take a rank's part of a parameter or a gradient for the whole.

`torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)` takes the norm of `.grad`. If that is this rank's slice,
every rank would clip by another number, and replicated weights would drift apart. So a part is a `TensorPart`. It only
supports functions with the same result on a part as on the whole:

    p.square(), p.mul_(0.9)     element by element: the result is a part
    p.view(-1), p.T, p.data     views and copies: the result is a part
    p.norm(dim=1), p[:, 0]      along dims of which this rank has all: the result is a part
    p.ndim                      that of the whole, also of a flat stretch at ZeRO 1
    p.norm(), p @ p.T, p.item() all else: an error with what to call instead

DTensor would communicate: in a loop in which only one rank prints, that waits for ever.

The checks are for the user's code. shardc's own code and torch's optimizers (which are tried before they step:
shardc.runtime.zero.optimizer_check) use parts as plain tensors. Like DTensor, `ParameterPart` is one of the classes for
which torch's optimizers use their foreach and fused forms (shardc.torch_private).
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.torch_private import foreach_for


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Pointwise functions that torch does not tag as such: aliases, Python's operators, and others.
_POINTWISE = _names(
    """absolute and copy divide fill fma floordiv floor_divide greater greater_equal iadd iand idiv imul invert ior ipow
    isub itruediv isclose less less_equal multiply negative not_equal or polar pos radd rand rdiv rfloordiv ror rmul
    rpow rtruediv setitem subtract truediv xor zero conj real imag resolve_conj resolve_neg view_as_real
    view_as_complex"""
)
_VIEWS_AND_COPIES = _names(
    """get iter alias bfloat16 bool chunk clone contiguous cpu cuda data detach diagonal double empty_like expand
    expand_as flatten float getitem half index_add index_copy index_fill index_select int long movedim moveaxis mT
    narrow pad permute pin_memory ravel requires_grad reshape reshape_as select share_memory split split_with_sizes
    squeeze swapaxes swapdims t tensor_split to transpose type type_as unbind unflatten unsqueeze view view_as"""
)
#: Those of them whose result has the dims of the operand.
_SAME_DIMS = _names(
    "alias bfloat16 bool clone contiguous cpu cuda detach double empty_like float get half int long to type type_as"
)
#: Functions that mix elements along dims: {name: position of the argument that names them; default: all}.
_ALONG = {
    **dict.fromkeys(("vector_norm", "matrix_norm", "norm", "quantile", "nanquantile"), 2),
    **dict.fromkeys(_names("sum nansum mean nanmean var std prod logsumexp cumsum cumprod count_nonzero softmax"), 1),
    **dict.fromkeys(_names("amax amin max min argmax argmin median nanmedian all any"), 1),
}
#: Functions that select entries of a dim by index: {name: position of the argument that names it; default: 0}.
_SELECTING = {
    **dict.fromkeys(_names("select narrow index_select unbind index_fill index_copy index_add iter"), 1),
    **dict.fromkeys(_names("chunk split split_with_sizes tensor_split"), 2),
}
_LIKE = _names("full_like ones_like zeros_like new_empty new_full new_ones new_zeros as_subclass")
_DRAWS = _names(
    """alpha_dropout bernoulli cauchy dropout exponential feature_dropout geometric log_normal normal random uniform
    rand_like randn_like randint_like"""
)
_READS = _names("array complex contains float index int item numpy tolist bool is_nonzero")
#: Functions of torch.nn.init that fill a part as they would fill the whole.
_SAME_FILL = ("constant_", "ones_", "zeros_")
#: Functions of torch.distributed that replace this rank's tensor by one of other ranks.
_MIXING = ("all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "reduce_scatter", "scatter")
_PLAIN = ".as_subclass(torch.Tensor) returns this rank's part as a plain tensor"
#: {kind of misuse: (place, what would happen, fix)}. {x}: the part in the user's code.
_ERRORS: dict[str, tuple[str, str, str]] = {
    "mixes a gradient": (
        "{name} of {origin}",
        "this would use this rank's part of the gradient as the whole: each rank would get a different result",
        "clip with module.clip_grad_norm_(max_norm), which returns the norm of the whole model's gradient, or by an"
        " engine's clip_norm=max_norm, which has it in engine.grad_norm; norms(grad=True) of either has that of each"
        f" parameter; clip_grad_value_ and all that works element by element is as it is; {{x}}{_PLAIN}",
    ),
    "mixes": (
        "{origin}",
        "{shown} would be that of the part which this rank has, another on every rank; a penalty of it has another"
        " gradient than on one device",
        "compute it in the model's forward or in the loss function (shardc.compile(..., loss=...)), where the"
        " parameter is whole; norms of the whole: module.norms(), engine.norms(); all else of full_state_dict();"
        f" {{x}}{_PLAIN}",
    ),
    "selects": (
        "{origin}",
        "{shown} selects entries by index in a dim of which this rank has only a part: each rank would select "
        "different ones",
        "choose entries in the model's forward or in the loss function, where the parameter is whole: to train some"
        " rows alone, w * mask + (w * (1 - mask)).detach() there; to set values, do it in the plain model before"
        f" program.module or program.engine takes it; {{x}}{_PLAIN}",
    ),
    "draws": (
        "{origin}",
        "{name} would draw only for this rank's part: other ranks draw the same numbers, or numbers that differ from "
        "one device",
        "fill it where the model is built (given the function that builds it, each rank computes its part);"
        " or p.copy_() this rank's part of what you draw, under torch.no_grad()",
    ),
    "scaler": (
        "torch.amp.GradScaler",
        "each rank would look for overflows only in its part: some would skip an update that others make",
        "use program.engine(...) with `precision: {{loss_scale: dynamic}}`, which skips on all ranks",
    ),
    "sums a gradient": (
        "torch.distributed.{name} of {origin}",
        "ranks have different parts of it: this would mix the parts",
        "remove it: backward already sums gradients over all ranks that compute some of them; all_gather takes parts,"
        f" and {{x}}{_PLAIN}",
    ),
    "sums": (
        "torch.distributed.{name} of {origin}",
        "ranks have different parts of it: this would mix the parts",
        "remove it: weights are already equal where they must be; broadcast=True of program.module and engine sends"
        f" those of rank 0; all_gather takes parts, and {{x}}{_PLAIN}",
    ),
    "whole operand": (
        "{origin}",
        "this is a rank's part {part} of {whole}, with a tensor of the whole's shape",
        "an average of weights: of copy.deepcopy(module), or AveragedModel(module), which have the same parts; or of"
        " the whole weights, module.full_state_dict() on all ranks",
    ),
    "checkpoint": (
        "{origin}",
        "this rank has a part of it, which torch.distributed.checkpoint would treat as the whole, the same on all "
        "ranks",
        "save with module.save(folder, optimizer) or engine.save(folder), which any mesh loads; or pass the whole"
        " weights, full_state_dict()",
    ),
    # the beginning of a function's name that the user calls
    "safetensors.torch.": (
        "{name}: {origin}",
        "this rank has only a part of it: the file would contain the part instead of the weight",
        "write the whole weights: engine.export(folder), or save_file of module.full_state_dict(), which all ranks"
        " call",
    ),
    "torch.nn.utils.convert_parameters.": (
        "{name}: {origin}",
        "this rank has only a part of it: the vector would differ on every rank, and never be the whole model's",
        "take the whole weights, model.load_state_dict(module.full_state_dict()) on all ranks, and the plain model's"
        " parameters for the vector; program.module(model) makes a module of them again. A norm of gradients is"
        " module.clip_grad_norm_(max_norm)",
    ),
    "torch.nn.modules.module._load_from_state_dict": (
        "{name}: {origin}",
        "this is a rank's part of the weight that is loaded",
        "load the whole weights: module.full_state_dict(), which all ranks call, or the folder that"
        " engine.export(folder) wrote",
    ),
}
#: Of a flat stretch of a parameter, the user's code gets the whole's: groups by `p.ndim >= 2` are those of one device.
_DIMS = {Tensor.ndim.__get__, Tensor.dim, Tensor.ndimension}  # type: ignore[attr-defined]
#: How an error writes a call of these functions.
_SHOWN = {"matmul": "p @ ...", "getitem": "x[...]", "setitem": "x[...] = ...", "iter": "a loop over x"}


def refuse(kind: str, origin: Origin, name: str = "", **names: Any) -> NoReturn:
    """Raise the error of a row of `_ERRORS`. name: of the function that was called."""
    place, fault, fix = _ERRORS[kind]
    x = ".grad" if origin.grad else "p"
    shown = _SHOWN.get(name, f"x.{name}(...)" if kind == "selects" else f"p.{name}()")
    names |= {"name": name, "origin": origin, "x": x, "shown": shown}
    raise ShardcError(fault.format(**names), where=place.format(**names), fix=fix.format(**names))


@dataclass(frozen=True, eq=False)
class Origin:
    """The source of a part: a parameter, with its whole shape, or its gradient."""

    fqn: str = ""
    shape: tuple[int, ...] = ()
    grad: bool = True

    def __str__(self) -> str:
        return f"{self.fqn or 'a parameter'}{'.grad' if self.grad and self.fqn else 's .grad' * self.grad}"


class TensorPart(Tensor):
    """A part of a tensor. A write to it, or from it into another tensor, returns the written tensor.

    .split_dims: the dims of which this rank has only a part; None: unknown; empty: this rank has all of a parameter,
    and must not draw random numbers for it alone.
    """

    split_dims: frozenset[int] | None = None
    origin: Origin = Origin()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        callers = None if torch.compiler.is_dynamo_compiling() else _library_callers(sys._getframe(1))
        if callers == [] and func in _DIMS and isinstance(args[0], ParameterPart):
            return len(args[0].origin.shape)
        with plain():
            return func(*args, **kwargs) if callers is None else _call(func, args, kwargs, callers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return part(copy.deepcopy(self.as_subclass(Tensor), memo), self.split_dims, self.origin)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)  # files have plain tensors
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __create_write_items__(self, *_: Any) -> NoReturn:
        refuse("checkpoint", Origin(self.origin.fqn, grad=False))

    __create_chunk_list__ = __create_write_items__


class ParameterPart(TensorPart, nn.Parameter):
    """A parameter of which this rank has a part. `make_part` makes it from a plain one, in place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        plain = self.detach().as_subclass(Tensor).clone(memory_format=torch.preserve_format)
        copied = memo[id(self)] = make_part(nn.Parameter(plain, self.requires_grad), self.split_dims, self.origin)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = nn.Parameter(self.detach().as_subclass(Tensor), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


foreach_for(ParameterPart)


def part(x: Tensor, dims: Collection[int] | None = None, origin: Origin = Origin()) -> Tensor:
    """Return a tensor as a part that shares its memory."""
    result = x.as_subclass(TensorPart)
    result.split_dims, result.origin = frozenset(dims) if dims is not None else None, origin
    return result


def make_part(p: nn.Parameter, dims: Collection[int] | None, origin: Origin) -> nn.Parameter:
    """Make a parameter a part in place: modules, optimizers and autograd hold this object."""
    p.__class__ = ParameterPart
    assert isinstance(p, ParameterPart)
    p.split_dims, p.origin = frozenset(dims) if dims is not None else None, origin
    return p


def plain() -> AbstractContextManager[None]:
    """Return a context in which parts are plain tensors, in this thread: for shardc's own code."""
    return torch._C.DisableTorchFunctionSubclass()


_begun = threading.local()


def begin_plain() -> None:
    """Make parts plain until `end_plain`, or, if a step fails, until the next forward or step."""
    end_plain()
    _begun.within = plain()
    _begun.within.__enter__()


def end_plain() -> None:
    if (within := getattr(_begun, "within", None)) is not None:
        _begun.within = None
        within.__exit__(None, None, None)


def _library_callers(frame: FrameType | None) -> list[str] | None:
    """Return the functions of torch and safetensors between the user's code and a call, the outermost first.

    None: user code does not call, but shardc, torch's optimizers, or a test's comparison.
    """
    callers: list[str] = []
    while frame is not None:
        name = frame.f_globals.get("__name__", "")  # code generated by fx has none
        if name.startswith(("shardc.", "torch.optim.", "torch.testing.")):
            return None
        if name.startswith(("torch.", "safetensors.")) or name == "torch":
            callers.insert(0, f"{name}.{frame.f_code.co_name}")
        elif name:
            return callers
        frame = frame.f_back
    return None


def _base_name(name: str) -> str:
    """Return a function's `__name__` without prefixes and suffixes: "add" for "add_", "_foreach_add", "__add__"."""
    bare = name.partition(".")[0].removeprefix("linalg_").removeprefix("_foreach_")
    if bare.startswith("__") and bare.endswith("__"):
        return bare.strip("_")
    return bare if bare.startswith("_") else bare.rstrip("_")


@functools.cache
def _kind(name: str) -> str:
    """Classify a function by its `__name__`: "add_", "__radd__", "_foreach_add", "fma.default"."""
    dunder, bare = name.startswith("__") and name.endswith("__"), _base_name(name)
    if (dunder and bare in _READS) or bare in ("item", "numpy", "tolist", "is_nonzero"):
        return "reads"
    if bare in _ALONG:
        return "along"
    if bare in _DRAWS:
        return "draws"
    packet = getattr(torch.ops.aten, bare, None)
    if bare in _POINTWISE or (
        packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
    ):
        return "pointwise"
    if bare in _VIEWS_AND_COPIES:
        return "copies"
    return "harmless" if bare in _LIKE or bare.startswith("_fused_") else "mixes"


def _call(func: Any, args: Any, kwargs: Mapping[str, Any], callers: list[str]) -> Any:
    """Run a torch function that user code calls on parts, directly or by these library functions."""
    name, module = getattr(func, "__name__", ""), getattr(func, "__module__", "")
    bare, kind = _base_name(name), _kind(name)
    # prefer tensors of which ranks have different parts, and parameters over gradients
    parts = (x for x in tensors_in((args, kwargs)) if isinstance(x, TensorPart))
    first = max(parts, key=lambda x: (x.split_dims != frozenset(), not x.origin.grad))
    origin, of_gradient = first.origin, " a gradient" if first.origin.grad else ""
    for filled in (f.removeprefix("torch.nn.init.") for f in callers if f.startswith("torch.nn.init.")):
        if filled not in _SAME_FILL and not filled.startswith("_"):
            refuse("draws", origin, f"nn.init.{filled}")
    if kind == "draws":
        refuse("draws", origin, name)
    if name.startswith("_amp"):
        refuse("scaler", origin)
    if first.split_dims == frozenset():
        return func(*args, **kwargs)
    if name in _MIXING and module.startswith("torch.distributed"):
        refuse(f"sums{of_gradient}", origin, name)
    for function in callers:
        for helper in (k for k in _ERRORS if "." in k and function.startswith(k)):
            refuse(helper, origin, function.rpartition(".")[2])
    # Python functions that call torch's ops, which are then checked. transformers temporarily replaces those of
    # torch.nn.init by its own
    if module in ("torch.nn.init", "torch.autograd") or getattr(torch.nn.init, name, None) is func:
        return func(*args, **kwargs)
    x = args[0] if args else kwargs.get("input", kwargs.get("x", kwargs.get("condition")))
    dims = _dims_of_call(bare, x, args, kwargs) if isinstance(x, TensorPart) else set[int]()
    mixes = isinstance(x, TensorPart) and dims and (x.split_dims is None or not dims.isdisjoint(x.split_dims))
    if kind == "reads" or (kind == "along" and (mixes or not isinstance(x, Tensor))):
        refuse(f"mixes{of_gradient}", origin, bare)
    if mixes:
        refuse("selects", origin, bare)
    if kind == "pointwise" and name != "__setitem__":  # __setitem__ writes into a place in the whole
        _refuse_whole_operands((*args, *kwargs.values()))
    result = func(*args, **kwargs)
    if kind == "mixes" and next(tensors_in(result), None) is not None:
        refuse(f"mixes{of_gradient}", origin, bare.strip("_"))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
    # a view's base stays plain, because torch.compile walks from base to base
    if kind in ("mixes", "harmless") or attribute in ("grad", "_base"):
        return result
    keeps_dims = kind != "copies" or attribute == "data" or (bare in _SAME_DIMS and not attribute)
    return _as_parts(result, args, origin, keeps_dims=keeps_dims)


def _dims_of_call(bare: str, x: TensorPart, args: Any, kwargs: Mapping[str, Any]) -> set[int]:
    """Return the dims of x along which a call mixes elements or selects them by index."""
    every = set(range(max(x.ndim, 1)))
    if bare in ("getitem", "setitem"):
        return _indexed(x, args[1])
    if bare == "pad":
        return set(range(x.ndim - len(kwargs.get("pad", args[1] if len(args) > 1 else ())) // 2, x.ndim))
    if bare == "diagonal" or (bare == "where" and len(args) + len(kwargs) == 1):  # it returns the numbers of entries
        return every
    place = _ALONG.get(bare, _SELECTING.get(bare))
    if place is None:
        return set()
    default = 0 if bare in _SELECTING else None
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
    if isinstance(dims, Tensor) or isinstance(kwargs.get("other"), Tensor):  # the maximum of two tensors
        return set()
    dims = (dims,) if type(dims) is int else dims
    named = x.ndim and isinstance(dims, (tuple, list)) and dims and all(isinstance(d, int) for d in dims)
    return {d % x.ndim for d in dims} if named else every


def _indexed(x: TensorPart, index: Any) -> set[int]:
    """Return the dims that an index selects from; none for a mask that is a part of x's shape."""
    items = index if isinstance(index, tuple) else (index,)
    masks = [isinstance(i, Tensor) and i.dtype == torch.bool for i in items]
    sizes = [0 if i is None or i is Ellipsis else i.ndim if mask else 1 for i, mask in zip(items, masks, strict=True)]
    dims, d = set[int](), 0
    for i, mask, size in zip(items, masks, sizes, strict=True):
        all_of_it = isinstance(i, slice) and i in (slice(None), slice(None, None, 1))
        if not (all_of_it or (mask and isinstance(i, TensorPart) and i.shape == x.shape)):
            dims |= set(range(d, d + size))
        d += x.ndim - sum(sizes) if i is Ellipsis else size
    return dims


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for x in values:
            yield from tensors_in(x)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def _as_parts(result: Any, args: Any, origin: Origin, *, keeps_dims: bool) -> Any:
    """Return new tensors in a result as parts. keeps_dims: a result with as many dims has the same ones."""
    if isinstance(result, (tuple, list)):
        parts = [_as_parts(x, args, origin, keeps_dims=keeps_dims) for x in result]
        return type(result)(parts)  # also for torch.return_types
    if type(result) is not Tensor or any(result is x for x in args):
        return result
    split = [(x.ndim, x.split_dims) for x in args if isinstance(x, TensorPart)]
    dims = frozenset[int]().union(*(d or () for _, d in split))
    known = keeps_dims and all(n == result.ndim and d is not None for n, d in split)
    return part(result, dims if known and dims else None, origin)


def _refuse_whole_operands(operands: Sequence[Any]) -> None:
    """Refuse a tensor of the whole parameter's shape beside a part, as when averaging with a plain model.

    torch would report different sizes, or broadcast one of them.
    """
    lists = [x for x in operands if isinstance(x, (tuple, list))]  # arguments of _foreach functions
    for row in zip(*lists, strict=False) if lists else [operands]:
        wholes = {tuple(x.shape) for x in row if isinstance(x, Tensor) and not isinstance(x, TensorPart)}
        for x in (x for x in row if isinstance(x, TensorPart)):
            if (whole := x.origin.shape) and whole in wholes and tuple(x.shape) != whole:
                refuse("whole operand", x.origin, part=list(x.shape), whole=list(whole))
