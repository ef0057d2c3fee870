"""Refuse functions of torch that would take a rank's part of a parameter or a gradient for the whole.

`torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)` takes the norm of `.grad`. If that is this rank's slice,
every rank would clip by another number, and replicated weights would drift apart. So a part is a `TensorPart`. It only
supports functions with the same result on a part as on the whole:

    p.square(), p.mul_(0.9)     element by element: the result is a part
    p.view(-1), p.T, p.data     views and copies: the result is a part
    p.norm(dim=1), p[:, 0]      along dims of which this rank has all: the result is a part
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
from collections.abc import Collection, Iterator, Mapping
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
    """absolute add and copy clip div divide eq fill fma floordiv floor_divide ge greater greater_equal gt iadd iand
    idiv imul invert ior ipow isub itruediv isclose le less less_equal lt masked_fill mul multiply ne negative not_equal
    or polar pos pow radd rand rdiv rfloordiv ror rmul rpow rsub rtruediv setitem sub subtract truediv true_divide where
    xor zero conj conj_physical real imag resolve_conj resolve_neg view_as_real view_as_complex"""
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
#: Functions that select entries of a dim, and the position of the argument that names it.
_SELECTING = {
    **dict.fromkeys(_names("select narrow index_select unbind index_fill index_copy index_add iter"), 1),
    **dict.fromkeys(_names("chunk split split_with_sizes tensor_split"), 2),
}
#: Functions along dims, and the position of the argument that names them.
_ALONG = {
    **dict.fromkeys(("vector_norm", "matrix_norm", "norm", "quantile", "nanquantile"), 2),
    **dict.fromkeys(_names("sum nansum mean nanmean var std prod logsumexp cumsum cumprod count_nonzero softmax"), 1),
    **dict.fromkeys(_names("amax amin max min argmax argmin median nanmedian all any"), 1),
}
_LIKE = _names("full_like ones_like zeros_like new_empty new_full new_ones new_zeros as_subclass")
_DRAWS = _names(
    """alpha_dropout bernoulli cauchy dropout exponential feature_dropout geometric log_normal normal random uniform
    rand_like randn_like randint_like"""
)
_READS = _names("array complex contains float index int item numpy tolist bool is_nonzero")
#: Functions of torch.nn.init that fill a part as they would fill the whole.
_SAME_FILL = frozenset(("constant_", "ones_", "zeros_"))
#: Functions of torch.distributed that replace this rank's tensor by one of other ranks.
_MIXING = frozenset(("all_reduce", "broadcast", "reduce", "all_reduce_coalesced", "reduce_scatter", "scatter"))
_PLAIN = ".as_subclass(torch.Tensor) returns this rank's part as a plain tensor"
#: (functions called by the user, what would happen, fix). A module's name means all of its functions.
_OF_WHOLES: tuple[tuple[str, str, str], ...] = (
    (
        "safetensors.torch.",
        "this rank has only a part of it: the file would contain the part instead of the weight",
        "write the whole weights: engine.export(folder), or save_file of module.full_state_dict(), which all ranks"
        " call",
    ),
    (
        "torch.nn.utils.convert_parameters.",
        "this rank has only a part of it: the vector would differ on every rank, and never be the whole model's",
        "take the whole weights, model.load_state_dict(module.full_state_dict()) on all ranks, and the plain model's"
        " parameters for the vector; program.module(model) makes a module of them again. A norm of gradients is"
        " module.clip_grad_norm_(max_norm)",
    ),
    (
        "torch.nn.modules.module._load_from_state_dict",
        "this is a rank's part of the weight that is loaded",
        "load the whole weights: module.full_state_dict(), which all ranks call, or the folder that"
        " engine.export(folder) wrote",
    ),
)


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
        with plain():
            return func(*args, **kwargs) if callers is None else _call(func, args, kwargs, callers)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return part(copy.deepcopy(self.as_subclass(Tensor), memo), self.split_dims, self.origin)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)  # files have plain tensors
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __create_write_items__(self, *_: Any) -> NoReturn:
        refuse_checkpoint_of(self.origin.fqn)

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
    name, kind = getattr(func, "__name__", ""), _kind(getattr(func, "__name__", ""))
    # prefer tensors of which ranks have different parts, and parameters over gradients
    first = max(_parts_in((args, kwargs)), key=lambda x: (x.split_dims != frozenset(), not x.origin.grad))
    module = getattr(func, "__module__", "")
    for function in callers:
        filled = function.removeprefix("torch.nn.init.")
        if filled != function and filled not in _SAME_FILL and not filled.startswith("_"):
            _refuse_draw(f"nn.init.{filled}", first.origin)
    if kind == "draws":
        _refuse_draw(name, first.origin)
    if name.startswith("_amp"):
        _refuse_scaler()
    if first.split_dims == frozenset():
        return func(*args, **kwargs)
    if name in _MIXING and module.startswith("torch.distributed"):
        _refuse_sum_over_ranks(name, first.origin)
    _refuse_for_wholes(callers, first)
    # Python functions that call torch's ops, which are then checked. transformers temporarily replaces those of
    # torch.nn.init by its own
    if module in ("torch.nn.init", "torch.autograd") or getattr(torch.nn.init, name, None) is func:
        return func(*args, **kwargs)
    if kind == "reads" or (kind == "along" and not _along_whole(name, args, kwargs)):
        _refuse(name, first.origin)
    if _selects_of_part(_base_name(name), args, kwargs):
        _refuse_selection(_base_name(name), first.origin)
    if kind == "pointwise" and name != "__setitem__":  # __setitem__ writes into a place in the whole
        _refuse_whole_operands(args, kwargs)
    result = func(*args, **kwargs)
    if kind == "mixes" and next(tensors_in(result), None) is not None:
        _refuse(name, first.origin)
    attribute = getattr(getattr(func, "__self__", None), "__name__", "") if name == "__get__" else ""
    # a view's base stays plain, because torch.compile walks from base to base
    if kind in ("mixes", "harmless") or attribute in ("grad", "_base"):
        return result
    keeps_dims = kind != "copies" or attribute == "data" or (_base_name(name) in _SAME_DIMS and not attribute)
    return _as_parts(result, args, first.origin, keeps_dims=keeps_dims)


def _selects_of_part(bare: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call selects entries by number in a dim of which this rank has a part."""
    x = args[0] if args else kwargs.get("input", kwargs.get("condition"))
    if not isinstance(x, TensorPart):
        return False
    if bare in ("getitem", "setitem"):
        dims = _indexed(x, args[1])
    elif bare == "pad":
        dims = set(range(x.ndim - len(kwargs.get("pad", args[1] if len(args) > 1 else ())) // 2, x.ndim))
    elif bare == "where":  # with a condition only, it returns the numbers of entries
        dims = set(range(x.ndim)) if len(args) + len(kwargs) == 1 else set()
    elif bare == "diagonal":
        dims = set(range(x.ndim))
    elif bare in _SELECTING:
        place = _SELECTING[bare]
        dim = kwargs.get("dim", args[place] if len(args) > place else 0)
        dims = {dim % x.ndim} if isinstance(dim, int) and x.ndim else set(range(x.ndim))
    else:
        return False
    return bool(dims) and (x.split_dims is None or not dims.isdisjoint(x.split_dims))


def _indexed(x: TensorPart, index: Any) -> set[int]:
    """Return the dims that an index selects from; none for a mask that is a part of x's shape."""
    items = index if isinstance(index, tuple) else (index,)
    sizes = [
        0 if i is None else i.ndim if isinstance(i, Tensor) and i.dtype == torch.bool else 1
        for i in items
        if i is not Ellipsis
    ]
    dims, d = set[int](), 0
    for i in items:
        if i is Ellipsis:
            d += x.ndim - sum(sizes)
        elif isinstance(i, Tensor) and i.dtype == torch.bool:
            if not (isinstance(i, TensorPart) and i.shape == x.shape):
                dims |= set(range(d, d + i.ndim))
            d += i.ndim
        elif i is not None:
            dims |= {d} if not (isinstance(i, slice) and i in (slice(None), slice(None, None, 1))) else set()
            d += 1
    return dims


def _along_whole(name: str, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call works along whole dims only, or is the maximum of two tensors."""
    place = _ALONG[_base_name(name)]
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if isinstance(dims, Tensor) or isinstance(kwargs.get("other"), Tensor):
        return True
    if not isinstance(x, TensorPart):
        return isinstance(x, Tensor)  # a method of another tensor, with this one as an argument
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not dims or x.split_dims is None:
        return False
    return all(isinstance(d, int) and d % x.ndim not in x.split_dims for d in dims)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in nested tuples, lists and dicts."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (tuple, list)):
        for x in values:
            yield from tensors_in(x)
    elif isinstance(values, dict):
        yield from tensors_in(list(values.values()))


def _parts_in(args: Any) -> Iterator[TensorPart]:
    return (x for x in tensors_in(args) if isinstance(x, TensorPart))


def _as_parts(result: Any, args: Any, origin: Origin, *, keeps_dims: bool) -> Any:
    """Return new tensors in a result as parts. keeps_dims: a result with as many dims has the same ones."""
    if isinstance(result, (tuple, list)):
        parts = [_as_parts(x, args, origin, keeps_dims=keeps_dims) for x in result]
        return type(result)(parts)  # also for torch.return_types
    if type(result) is not Tensor or any(result is x for x in args):
        return result
    dims: frozenset[int] | None = frozenset()
    for x in args:
        if isinstance(x, TensorPart):
            known = keeps_dims and x.ndim == result.ndim and x.split_dims is not None and dims is not None
            dims = dims | x.split_dims if known and dims is not None and x.split_dims is not None else None
    return part(result, dims or None, origin)


# --- errors


def _refuse(name: str, origin: Origin) -> NoReturn:
    bare = name.strip("_").removeprefix("linalg_")
    if origin.grad:
        raise ShardcError(
            "this would use this rank's part of the gradient as the whole: each rank would get a different result",
            where=f"{bare} of {origin}",
            fix="clip with module.clip_grad_norm_(max_norm), which returns the norm of the whole model's gradient,"
            " or by an engine's clip_norm=max_norm, which has it in engine.grad_norm; norms(grad=True) of either has"
            " that of each parameter; clip_grad_value_ and all that"
            f" works element by element is as it is; .grad{_PLAIN}",
        )
    shown = {"matmul": "p @ ..."}.get(bare, f"p.{bare}()")
    raise ShardcError(
        f"{shown} would be that of the part which this rank has, another on every rank; a penalty of it has"
        " another gradient than on one device",
        where=origin.fqn,
        fix="compute it in the model's forward or in the loss function (shardc.compile(..., loss=...)), where the"
        " parameter is whole; norms of the whole: module.norms(), engine.norms(); all else of full_state_dict();"
        f" p{_PLAIN}",
    )


def _refuse_selection(bare: str, origin: Origin) -> NoReturn:
    shown = {"getitem": "x[...]", "setitem": "x[...] = ...", "iter": "a loop over x"}.get(bare, f"x.{bare}(...)")
    raise ShardcError(
        f"{shown} selects entries by index in a dim of which this rank has only a part: each rank would select "
        "different ones",
        where=str(origin),
        fix="choose entries in the model's forward or in the loss function, where the parameter is whole: to train some"
        " rows alone, w * mask + (w * (1 - mask)).detach() there; to set values, do it in the plain model before"
        f" program.module or program.engine takes it; {'.grad' if origin.grad else 'p'}{_PLAIN}",
    )


def _refuse_scaler() -> NoReturn:
    raise ShardcError(
        "each rank would look for overflows only in its part: some would skip an update that others make",
        where="torch.amp.GradScaler",
        fix="use program.engine(...) with `precision: {loss_scale: dynamic}`, which skips on all ranks",
    )


def _refuse_draw(name: str, origin: Origin) -> NoReturn:
    raise ShardcError(
        f"{name} would draw only for this rank's part: other ranks draw the same numbers, or numbers that differ from "
        "one device",
        where=str(origin),
        fix="fill it where the model is built (given the function that builds it, each rank computes its part);"
        " or p.copy_() this rank's part of what you draw, under torch.no_grad()",
    )


def _refuse_sum_over_ranks(name: str, origin: Origin) -> NoReturn:
    """Refuse sums over ranks, as in loops that are written for torch.distributed alone."""
    fix = "remove it: backward already sums gradients over all ranks that compute some of them"
    if not origin.grad:
        fix = (
            "remove it: weights are already equal where they must be; broadcast=True of program.module and engine sends"
        )
        fix += " those of rank 0"
    raise ShardcError(
        "ranks have different parts of it: this would mix the parts",
        where=f"torch.distributed.{name} of {origin}",
        fix=f"{fix}; all_gather takes parts, and {'.grad' if origin.grad else 'p'}{_PLAIN}",
    )


def _refuse_for_wholes(callers: list[str], x: TensorPart) -> None:
    """Refuse helpers for whole tensors that would not fail on parts."""
    for function in callers:
        for prefix, happens, fix in _OF_WHOLES:
            if function.startswith(prefix):
                raise ShardcError(happens, where=f"{function.rpartition('.')[2]}: {x.origin}", fix=fix)


def _refuse_whole_operands(args: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a tensor of the whole parameter's shape beside a part, as when averaging with a plain model.

    torch would report different sizes, or broadcast one of them.
    """
    operands = (*args, *kwargs.values())
    lists = [x for x in operands if isinstance(x, (tuple, list))]  # arguments of _foreach functions
    for row in zip(*lists, strict=False) if lists else [operands]:
        wholes = {tuple(x.shape) for x in row if isinstance(x, Tensor) and not isinstance(x, TensorPart)}
        for x in (x for x in row if isinstance(x, TensorPart)):
            whole = tuple(x.origin.shape)
            if whole and whole in wholes and tuple(x.shape) != whole:
                raise ShardcError(
                    f"this is a rank's part {list(x.shape)} of {list(whole)}, with a tensor of the whole's shape",
                    where=x.origin.fqn,
                    fix="an average of weights: of copy.deepcopy(module), or AveragedModel(module), which have the same"
                    " parts; or of the whole weights, module.full_state_dict() on all ranks",
                )


def refuse_checkpoint_of(fqn: str) -> NoReturn:
    raise ShardcError(
        "this rank has a part of it, which torch.distributed.checkpoint would treat as the whole, the same on all "
        "ranks",
        where=fqn,
        fix="save with module.save(folder, optimizer) or engine.save(folder), which any mesh loads; or pass the whole "
        "weights, full_state_dict()",
    )
