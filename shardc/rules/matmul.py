"""Rules of matrix products. Row parallelism splits the summed factor, column parallelism the output's."""

from __future__ import annotations

import math

import torch

from shardc.rules.core.notation import Dim, Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rule
from shardc.rules.core.shared_signatures import bias_or_not

aten = torch.ops.aten


def _flops(call: Call) -> int:
    return 2 * math.prod(call.results[0].shape) * call.operands[0].shape[-1]


def _flops_bias_first(call: Call) -> int:
    return 2 * math.prod(call.results[0].shape) * call.operands[1].shape[-1]


rule(aten.linear.default, "... k+, n k+, n -> ... n", linear=bias_or_not, added=(2,), flops=_flops)
rule(aten.mm.default, "m k+, k+ n -> m n", linear="0 | 1", flops=_flops)
rule(aten.bmm.default, "b m k+, b k+ n -> b m n", linear="0 | 1", flops=_flops)
rule(aten.mv.default, "m k+, k+ -> m", linear="0 | 1", flops=_flops)
rule(aten.dot.default, "k+, k+ -> ", linear="0 | 1")
rule(aten.outer.default, "m, n -> m n", linear="0 | 1")


def addmm(call: Call) -> Signature:
    """Split bias + a @ b, with or without a batch dim. The bias broadcasts."""
    bias, out, k = call.operands[0].shape, call.results[0].shape, call.operands[1].shape[-1]
    all_names: list[Dim] = [("b",), ("m",), ("n",)]
    names = all_names[3 - len(out) :]
    skip = len(out) - len(bias)
    of_bias = tuple(name if s == size else () for name, s, size in zip(names[skip:], bias, out[skip:], strict=True))
    *batch, m, n = names
    sizes = {f: s for (f,), s in zip(names, out, strict=True)} | {"k": k}
    return Signature(
        (of_bias, (*batch, m, ("k",)), (*batch, ("k",), n)), (tuple(names),), sizes, frozenset({"k"}), frozenset()
    )


rule(aten.addmm.default, addmm, linear="0 1 | 0 2", added=(0,), flops=_flops_bias_first)
rule(aten.baddbmm.default, addmm, linear="0 1 | 0 2", added=(0,), flops=_flops_bias_first)


def matmul(call: Call) -> Signature:
    """Split torch.matmul, whose leading dims broadcast; 1-d operands are vectors."""
    a, b = (v.shape for v in call.operands)
    out = call.results[0].shape
    lead = max(len(a), len(b)) - 2
    names = [f"e{i}" for i in range(lead)]
    sizes = {"k": a[-1]}

    def leading(shape: tuple[int, ...]) -> list[Dim]:
        own = shape[:-2]
        skip = lead - len(own)
        return [(names[skip + i],) if s == out[skip + i] and s != 1 else () for i, s in enumerate(own)]

    sizes.update(dict(zip(names, out, strict=False)))
    left: list[Dim] = [("k",)] if len(a) == 1 else [*leading(a), ("m",), ("k",)]
    right: list[Dim] = [("k",)] if len(b) == 1 else [*leading(b), ("k",), ("n",)]
    result: list[Dim] = [(n,) if sizes[n] != 1 else () for n in names[:lead]] if lead > 0 else []
    if len(a) > 1:
        sizes["m"] = a[-2]
        result.append(("m",))
    if len(b) > 1:
        sizes["n"] = b[-1]
        result.append(("n",))
    return Signature((tuple(left), tuple(right)), (tuple(result),), sizes, frozenset({"k"}), frozenset())


rule(aten.matmul.default, matmul, linear="0 | 1", flops=_flops)


def einsum(call: Call) -> Signature:
    """Split as the equation says: letters not in the result are summed, repeated letters stay whole."""
    equation = call.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = [c for c in left if c.isalpha()]
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    sizes: dict[str, int] = {}
    unnamed = [len(v.shape) - len(t.replace("...", "")) for t, v in zip(terms, call.operands, strict=True)]

    def dims(term: str, shape: tuple[int, ...]) -> tuple[Dim, ...]:
        head, _, tail = term.partition("...")
        count = len(shape) - len(head) - len(tail)
        # the dims of an ellipsis broadcast: they are counted from the right
        names = [*head, *(f"e{i}" for i in range(max(unnamed) - count, max(unnamed))), *tail]
        sizes.update({n: s for n, s in zip(names, shape, strict=True) if s != 1 or n not in sizes})
        return tuple((n,) if s != 1 else () for n, s in zip(names, shape, strict=True))

    ins = tuple(dims(t, v.shape) for t, v in zip(terms, call.operands, strict=True))
    out = dims(right, call.results[0].shape)
    kept = {f for d in out for f in d}
    factors = {f for o in ins for d in o for f in d}
    double = {f for o in ins for d in o for f in d if sum(f in e for e in o) > 1}
    return Signature(ins, (out,), sizes, frozenset(factors - kept), frozenset(double))


def _einsum_linear(call: Call) -> str:
    return " | ".join(str(i) for i in range(len(call.operands)))


def _einsum_flops(call: Call) -> int:
    return 2 * math.prod(einsum(call).sizes.values())


rule(aten.einsum.default, einsum, linear=_einsum_linear, flops=_einsum_flops)
