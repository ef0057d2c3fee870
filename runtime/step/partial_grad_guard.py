"""The gradient of a parameter that a rank has a part of only: what mixes its elements is not what it would be of the
whole.

`torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)` takes the norm of what lies in `.grad`. Where that is this
rank's slice, every rank would clip by another number, and replicated weights would drift apart. So the `.grad` of such
parameters is a tensor for which only that works which is the same for a part as for the whole:

    element by element     what torch tags as pointwise, and its foreach and fused forms, in place or not
    views and copies       of which the result is a part again
    along whole dims       sums, norms, maxima along dims of which the rank has all

All else (a norm, a product, a QR, reading the numbers) is an error with the method to call instead. Parameters stay
plain, so optimizers choose their fused and foreach forms as always.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shardc.errors import ShardcError
from shardc.ir.program import Program
from shardc.runtime.step.clip_grad_norm import norm_axes


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Element by element, though torch does not tag them so: aliases, Python's operators, and others.
_POINTWISE = _names(
    """absolute add and copy clip div divide eq fill fma floordiv floor_divide ge greater greater_equal gt iadd iand
    idiv imul invert ior ipow isub itruediv isclose le less less_equal lt masked_fill mul multiply ne negative not_equal
    or polar pos pow radd rand rdiv rfloordiv ror rmul rpow rsub rtruediv setitem sub subtract truediv true_divide where
    xor zero bernoulli dropout exponential log_normal normal random uniform conj conj_physical real imag
    resolve_conj resolve_neg view_as_real view_as_complex"""
)
#: Views and copies: the result has the elements of a part.
_COPIES = _names(
    """alias bfloat16 bool chunk clone contiguous cpu cuda data detach diagonal double expand expand_as flatten float
    getitem half index_select int long movedim moveaxis mT narrow pad permute pin_memory ravel requires_grad reshape
    reshape_as select share_memory split squeeze swapaxes swapdims t tensor_split to transpose type type_as unbind
    unflatten unsqueeze view view_as"""
)
#: What adds elements up or compares them, and which of its positional arguments names dims.
_ALONG = {
    **dict.fromkeys(("vector_norm", "matrix_norm", "norm"), 2),
    **dict.fromkeys(_names("sum nansum mean nanmean var std prod logsumexp cumsum cumprod count_nonzero softmax"), 1),
    **dict.fromkeys(_names("amax amin max min argmax argmin all any"), 1),
}
#: New tensors of the same shape, with nothing of it.
_LIKE = _names("empty_like full_like ones_like rand_like randn_like zeros_like new_empty new_full new_ones new_zeros")
#: Numbers for Python or numpy, which may decide something.
_READ = _names("__array__ __bool__ __complex__ __contains__ __float__ __index__ __int__ is_nonzero item numpy tolist")


class _Kind(NamedTuple):
    """What a function does. refuse: always; along: its number in _ALONG; part: its result is a part; known: it gives no
    tensor that is made of several elements.
    """

    refuse: bool = False
    pointwise: bool = False
    part: bool = False
    along: int | None = None
    known: bool = True


@functools.cache
def _kind(function: str) -> _Kind:
    name = function.partition(".")[0].removeprefix("linalg_").removeprefix("_foreach_")  # fma.default: torch.compile's
    if name in _READ or name.startswith("_amp"):
        return _Kind(refuse=True)
    dunder = name.startswith("__") and name.endswith("__")
    bare = name.strip("_") if dunder else name.rstrip("_")
    if name in ("__get__", "__iter__"):  # an attribute: .data, .T
        return _Kind(part=True)
    if bare in _ALONG:
        return _Kind(along=_ALONG[bare])
    if bare in _POINTWISE or _tagged(bare):
        return _Kind(pointwise=True, part=True)
    if bare in _COPIES:
        return _Kind(part=True)
    return _Kind(known=bare in _LIKE or name == "as_subclass" or name.startswith("_fused_"))


def _tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


class GradientPart(Tensor):
    """A part of a gradient. What torch makes of it element by element, and views and copies, are parts too. What writes
    to it, or from it into another tensor, gives back what was written to.

    .split_dims: the dims of which this rank has some only; None: nobody knows which.
    """

    split_dims: frozenset[int] | None = None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        kind = _kind(name)
        if kind.refuse:
            _refuse(name)
        if kind.along is not None and not _along_whole(kind.along, args, kwargs):
            _refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if not kind.known and next(_tensors(result), None) is not None:
            _refuse(name)
        if name == "__get__" and getattr(func, "__self__", None) is Tensor._base:
            return result  # plain: a part would be a view of it, and torch.compile goes from base to base
        kept_by_torch = name == "clone" and sys._getframe(1).f_globals.get("__name__", "").startswith("torch.optim")
        if kept_by_torch or not (kind.part or kind.along is not None):  # a momentum: plain, as every other state
            return result
        return _parts(result, args, kept=kind.pointwise or kind.along is not None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return part(copy.deepcopy(self.as_subclass(Tensor), memo), self.split_dims)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.as_subclass(Tensor)  # what a file has
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def part(x: Tensor, dims: Collection[int] | None = None) -> Tensor:
    """A tensor as a part. Its memory stays its own."""
    made = x.as_subclass(GradientPart)
    made.split_dims = frozenset(dims) if dims is not None else None
    return made


def _refuse(name: str) -> None:
    if name.startswith("_amp"):
        raise ShardcError(
            "each rank would look for overflows in its part alone: some would skip an update that others make",
            where="torch.amp.GradScaler",
            fix="use program.engine(...) with `precision: {loss_scale: dynamic}`, which skips on all ranks",
        )
    raise ShardcError(
        "this would take the part of the gradient which this rank has for the whole: another result on every rank",
        where=f"{name.strip('_').removeprefix('linalg_')} of a parameter's .grad",
        fix="clip with module.clip_grad_norm_(max_norm), which returns the norm of the whole model's gradient,"
        " or by an engine's clip_norm=max_norm, which has it in engine.grad_norm; clip_grad_value_ and all that works"
        " element by element is as it is; .grad.as_subclass(torch.Tensor) is this rank's part as a plain tensor",
    )


def along_whole(method: str, x: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Is `x.method(*args, **kwargs)` of a part (see `part`) what it is of the whole, along whole dims?"""
    return method in _ALONG and _along_whole(_ALONG[method], (x, *args), kwargs)


def _along_whole(place: int, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Does this call work along dims only of which this rank has all? Or is it the maximum of two tensors?"""
    x = args[0] if args else kwargs.get("input", kwargs.get("x"))
    dims = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else None))
    if isinstance(dims, Tensor) or isinstance(kwargs.get("other"), Tensor):
        return True
    if not isinstance(x, GradientPart):
        return isinstance(x, Tensor)  # another tensor's, which this one is an argument of
    if isinstance(dims, int) and not isinstance(dims, bool):
        dims = (dims,)
    if not isinstance(dims, (tuple, list)) or not dims or x.split_dims is None:
        return False
    return all(isinstance(d, int) and d % x.ndim not in x.split_dims for d in dims)


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for x in result:
            yield from _tensors(x)


def _parts(result: Any, args: Any, *, kept: bool) -> Any:
    """What is new in a result as parts. kept: its dims are those of the arguments, if it has as many."""
    if isinstance(result, (tuple, list)):
        found = [_parts(x, args, kept=kept) for x in result]
        return type(result)(found)  # of torch.return_types as well
    if type(result) is not Tensor or any(result is x for x in args):
        return result
    dims: frozenset[int] | None = frozenset()
    for x in args:
        if isinstance(x, GradientPart):
            alike = kept and x.ndim == result.ndim and x.split_dims is not None and dims is not None
            dims = dims | x.split_dims if alike and dims is not None and x.split_dims is not None else None
    return part(result, dims or None)


def split(
    program: Program, params: Mapping[str, nn.Parameter], runs: Collection[str]
) -> Iterator[tuple[nn.Parameter, frozenset[int] | None]]:
    """Those of which ranks hold different parts, as `mark` takes them. runs: those that are stretches (ZeRO)."""
    for p in program.params:
        if p.name in params and norm_axes(program, p.name):
            yield params[p.name], None if p.name in runs else frozenset(s.dim for _, s in p.layout.shards())


def mark(params: Iterable[tuple[nn.Parameter, Collection[int] | None]]) -> None:
    """Let gradients of parameters that are split be known as parts; each with the dims that are split, None: it is a
    stretch of the flattened parameter.
    """
    for p, dims in params:
        if p.grad is not None and type(p.grad) is Tensor:
            p.grad = part(p.grad, dims)
