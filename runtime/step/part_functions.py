"""What a function of torch does with the elements of a tensor, of which a rank has some only: by its name.

    element by element     what torch tags as pointwise, and its foreach and fused forms, in place or not
    views and copies       the result has the elements of a part again
    along dims             sums, norms, maxima: right along dims of which the rank has all
    reading                numbers for Python or numpy, which may decide something
    drawing                random numbers: every rank would draw the same ones for its part

All else (a product, a QR) mixes elements that a rank does not have.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Element by element, though torch does not tag them so: aliases, Python's operators, and others.
_POINTWISE = _names(
    """absolute add and copy clip div divide eq fill fma floordiv floor_divide ge greater greater_equal gt iadd iand
    idiv imul invert ior ipow isub itruediv isclose le less less_equal lt masked_fill mul multiply ne negative not_equal
    or polar pos pow radd rand rdiv rfloordiv ror rmul rpow rsub rtruediv setitem sub subtract truediv true_divide where
    xor zero dropout conj conj_physical real imag resolve_conj resolve_neg view_as_real view_as_complex"""
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
    **dict.fromkeys(_names("amax amin max min argmax argmin median nanmedian all any"), 1),
    **dict.fromkeys(_names("quantile nanquantile"), 2),
}
_SUMS = _names("sum nansum")
#: New tensors of the same shape, with nothing of it.
_LIKE = _names("empty_like full_like ones_like zeros_like new_empty new_full new_ones new_zeros")
_DRAWS = _names(
    "bernoulli cauchy exponential geometric log_normal normal random uniform rand_like randn_like randint_like"
)
#: Numbers for Python or numpy.
_READ = _names("__array__ __complex__ __contains__ __float__ __index__ __int__ __format__ item numpy tolist")
_DECIDES = _names("__bool__ is_nonzero")
#: Where one summand is a rank's part of a sum, so is the result.
_LINEAR = _COPIES | _names(
    "add radd iadd sub rsub isub subtract neg negative pos mul rmul imul multiply div truediv itruediv divide"
    " true_divide sum stack cat mean copy"
)
_PRODUCTS = _names("mul rmul imul multiply")
_QUOTIENTS = _names("div truediv itruediv divide true_divide")
_FINITE = _names("isfinite isinf isnan")


class Kind(NamedTuple):
    """What a function does. along: which of its arguments names dims; adds: it adds up; reads, decides, draws: see
    above; part: its result is a part; linear: in each of its tensors; product, quotient: of these; finite: it tells
    whether numbers are; known: it gives no tensor that is made of several elements.
    """

    name: str
    pointwise: bool = False
    part: bool = False
    along: int | None = None
    adds: bool = False
    reads: bool = False
    decides: bool = False
    draws: bool = False
    linear: bool = False
    product: bool = False
    quotient: bool = False
    finite: bool = False
    known: bool = True


@functools.cache
def kind(function: str) -> Kind:
    """function: its `__name__`: "add_", "__radd__", "_foreach_add", "linalg_vector_norm", "fma.default"."""
    name = function.partition(".")[0].removeprefix("linalg_").removeprefix("_foreach_")
    if name in _READ:
        return Kind(function, reads=True)
    if name in _DECIDES or name.startswith("_amp"):
        return Kind(function, decides=True)
    dunder = name.startswith("__") and name.endswith("__")
    bare = name.strip("_") if dunder else name.rstrip("_")
    linear, finite, product, quotient = (bare in x for x in (_LINEAR, _FINITE, _PRODUCTS, _QUOTIENTS))
    if name in ("__get__", "__iter__"):  # an attribute: .data, .T
        return Kind(function, part=True, linear=True)
    if bare in _ALONG:
        return Kind(function, along=_ALONG[bare], adds=bare in _SUMS, linear=linear)
    if bare in _DRAWS:
        return Kind(function, draws=True, pointwise=True, part=not bare.endswith("_like"))
    if bare in _POINTWISE or _tagged(bare):
        return Kind(
            function, pointwise=True, part=True, linear=linear, finite=finite, product=product, quotient=quotient
        )
    if bare in _COPIES:
        return Kind(function, part=True, linear=True)
    harmless = bare in _LIKE or name == "as_subclass" or name.startswith("_fused_")
    return Kind(function, linear=linear, known=harmless)


def _tagged(name: str) -> bool:
    packet = getattr(torch.ops.aten, name, None)
    return packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())
