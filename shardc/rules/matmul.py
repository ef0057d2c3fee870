"""Rules of matrix products. Row parallelism splits the summed factor, column parallelism the output's."""

from __future__ import annotations

import math

import torch

from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import rule
from shardc.rules.core.shared_signatures import bias_or_not, each_operand

aten = torch.ops.aten


def _flops(call: Call) -> int:
    """Count operations. The last dim of the last operand but one is summed: x of `x, w`, `b, x, w`; w of `x, w, b`."""
    return 2 * math.prod(call.results[0].shape) * call.operands[-2].shape[-1]


rule(aten.linear.default, "... k+, n k+, n -> ... n", linear=bias_or_not, added=(2,), flops=_flops)
rule(aten.mm.default, "m k+, k+ n -> m n", linear="0 | 1", flops=_flops)
rule(aten.bmm.default, "b m k+, b k+ n -> b m n", linear="0 | 1", flops=_flops)
rule(aten.mv.default, "m k+, k+ -> m", linear="0 | 1", flops=_flops)
rule(aten.dot.default, "k+, k+ -> ", linear="0 | 1")
rule(aten.outer.default, "m, n -> m n", linear="0 | 1")


def addmm(call: Call) -> Signature:
    """Split bias + a @ b, with or without a batch dim. The bias broadcasts."""
    names = ["b", "m", "n"][3 - len(call.results[0].shape) :]
    bias = names[len(names) - len(call.operands[0].shape) :]
    return call.fit([bias, [*names[:-1], "k+"], [*names[:-2], "k+", "n"]], [names])


rule(aten.addmm.default, addmm, linear="0 1 | 0 2", added=(0,), flops=_flops)
rule(aten.baddbmm.default, addmm, linear="0 1 | 0 2", added=(0,), flops=_flops)


def matmul(call: Call) -> Signature:
    """Split torch.matmul, whose leading dims broadcast; 1-d operands are vectors."""
    left, right = (len(v.shape) > 1 for v in call.operands)
    a, b = "... m k+" if left else "k+", "... k+ n" if right else "k+"
    return call.fit(f"{a}, {b} -> {'...' * (left or right)} {'m' * left} {'n' * right}")


rule(aten.matmul.default, matmul, linear="0 | 1", flops=_flops)


def _einsum_dims(call: Call) -> tuple[list[list[str]], list[str]]:
    """Return the letter of each dim of the operands and of the result."""
    equation = call.args[0].replace(" ", "")
    left, arrow, right = equation.partition("->")
    terms = left.split(",")
    if not arrow:
        letters = [c for c in left if c.isalpha()]
        right = "..." * ("..." in left) + "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    unnamed = [len(v.shape) - len(t.replace("...", "")) for t, v in zip(terms, call.operands, strict=True)]

    def dims(term: str, shape: tuple[int, ...]) -> list[str]:
        head, dots, tail = term.partition("...")
        count = len(shape) - len(head) - len(tail) if dots else 0
        # the dims of an ellipsis broadcast: they are counted from the right
        return [*head, *(f"e{i}" for i in range(max(unnamed) - count, max(unnamed))), *tail]

    return [dims(t, v.shape) for t, v in zip(terms, call.operands, strict=True)], dims(right, call.results[0].shape)


def einsum(call: Call) -> Signature:
    """Split as the equation says: letters not in the result are summed, repeated letters stay whole."""
    ins, out = _einsum_dims(call)
    marks = {f: "+" for o in ins for f in o if f not in out} | {f: "!" for o in ins for f in o if o.count(f) > 1}
    return call.fit([[f + marks.get(f, "") for f in o] for o in ins], [out])


def _einsum_flops(call: Call) -> int:
    ins, out = _einsum_dims(call)
    summed: dict[str, int] = {}
    for letters, v in zip(ins, call.operands, strict=True):
        summed |= {f: max(n, summed.get(f, 1)) for f, n in zip(letters, v.shape, strict=True) if f not in out}
    return 2 * math.prod((*call.results[0].shape, *summed.values()))


rule(aten.einsum.default, einsum, linear=each_operand, flops=_einsum_flops)
