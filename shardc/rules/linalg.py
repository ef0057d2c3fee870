"""Rules of linear algebra on stacks of matrices: matrices stay whole, dims before them may be split."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from shardc.ir.metadata import Value
from shardc.rules.core.notation import Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import SignatureOf, rule, rules
from shardc.rules.core.shared_signatures import all_whole, whole_names

aten = torch.ops.aten


def stacked(call: Call) -> Signature:
    """Split the leading dims of f[..., m, n] operands and of the results; `...` broadcasts."""
    return _batched(call, [2] * len(call.operands))


def solve(call: Call) -> Signature:
    """Split leading dims and the columns of B: A[..., n, n], B[..., n, k], or vectors B[..., n].

    As in torch, B is a stack of vectors if it is 1-d or has the shape of A without the last dim.
    """
    a, b = (v.shape for v in call.operands[:2])
    vectors = len(b) == 1 or b == a[:-1]
    return _batched(call, [2, 1]) if vectors else _batched(call, [2, 2], columns=1)


def own_dims(*own: int, columns: int | None = None) -> SignatureOf:
    """Return the rule of stacks whose operands have so many last dims: 2 matrix, 1 vector, 0 number.

    columns: the operand of which the op handles each column separately, if it is the left one.
    """

    def stacked_each(call: Call) -> Signature:
        """Split leading dims, which broadcast; keep a matrix, its pivots and a tolerance whole."""
        return _batched(call, list(own[: len(call.operands)]), columns if call.arg("left", True) else None)

    return stacked_each


def _batched(call: Call, own: list[int], columns: int | None = None) -> Signature:
    lead = [v.shape[: len(v.shape) - k] for v, k in zip(call.operands, own, strict=True)]
    batch: tuple[int, ...] = torch.broadcast_shapes(*lead)  # type: ignore[no-untyped-call]
    names = [f"e{i}" for i in range(len(batch))]

    def dims(v: Value, leading: int, mark: str) -> list[str]:
        return [*names[len(names) - leading :], *whole_names(v, mark)[leading:]]

    ins = [dims(v, len(e), f"x{j}_") for j, (v, e) in enumerate(zip(call.operands, lead, strict=True))]
    # vectors that were not requested are empty
    outs = [dims(v, len(batch) * (v.shape[: len(batch)] == batch), f"y{j}_") for j, v in enumerate(call.results)]
    if columns is not None:
        ins[columns][-1] = outs[0][-1] = "column"
    return replace(call.fit(ins, outs), unpadded=frozenset(names))


def _flops(call: Call) -> int:
    return 2 * math.prod(call.operands[0].shape) * call.operands[0].shape[-1]


rules(
    "linalg_inv linalg_inv_ex linalg_cholesky linalg_cholesky_ex cholesky_inverse linalg_det logdet linalg_slogdet "
    "linalg_eigh linalg_eigvalsh linalg_svd linalg_svdvals linalg_qr linalg_pinv.atol_rtol_float pinverse matrix_exp "
    "linalg_matrix_power linalg_cond linalg_lu_factor linalg_lu_factor_ex linalg_lu _lu_with_info linalg_eig "
    "linalg_eigvals svd _linalg_svd _linalg_eigh _linalg_det _linalg_slogdet geqrf linalg_ldl_factor "
    "linalg_ldl_factor_ex triangular_solve",
    stacked,
    flops=_flops,
)
if hasattr(aten, "cholesky"):  # torch 2.15 removed it
    rule(aten.cholesky.default, stacked, flops=_flops)
rule(aten.linalg_solve.default, solve, linear="1", flops=_flops)
rules("linalg_solve_ex _linalg_solve_ex", solve, flops=_flops)
rules("linalg_pinv.atol_rtol_tensor linalg_matrix_rank.atol_rtol_tensor", own_dims(2, 0, 0), flops=_flops)
rules("linalg_lu_solve linalg_ldl_solve ormqr", own_dims(2, 1, 2, columns=2), linear="2", flops=_flops)
rule(aten.lu_solve.default, own_dims(2, 2, 1, columns=0), linear="0", flops=_flops)
rules("lu_unpack linalg_householder_product", own_dims(2, 1))
rule(aten.linalg_tensorinv.default, all_whole)
rule(aten.linalg_tensorsolve.default, all_whole, linear="1")
rule(aten.linalg_solve_triangular.default, own_dims(2, 2, columns=1), linear="1", flops=_flops)
rule(aten.cholesky_solve.default, own_dims(2, 2, columns=0), linear="0", flops=_flops)


def cdist(call: Call) -> Signature:
    """Split rows: a[..., p, m], b[..., r, m] -> [..., p, r], distances. Only the 1-norm is a sum over m."""
    m = "m+" if call.arg("p") == 1 else "m!"
    return call.fit(f"... p {m}, ... r {m} -> ... p r")


rule(aten.cdist.default, cdist, flops=lambda c: 2 * math.prod(c.results[0].shape) * c.operands[0].shape[-1])
rule(aten.pdist.default, all_whole)
rule(aten.trace.default, all_whole, linear="0")
