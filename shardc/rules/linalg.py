"""Rules of linear algebra on stacks of matrices: matrices stay whole, dims before them may be split."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from shardc.rules.core.notation import Dim, Operand, Signature
from shardc.rules.core.op_call import Call
from shardc.rules.core.registry import SignatureOf, rule
from shardc.rules.core.shared_signatures import all_whole

aten = torch.ops.aten


def stacked(call: Call) -> Signature:
    """Split the leading dims of f[..., m, n] operands and of the results; `...` broadcasts."""
    return _stacked(call, [2] * len(call.operands))


def solve(call: Call) -> Signature:
    """Split leading dims and the columns of B: A[..., n, n], B[..., n, k], or vectors B[..., n].

    As in torch, B is a stack of vectors if it is 1-d or has the shape of A without the last dim.
    """
    a, b = (v.shape for v in call.operands[:2])
    if len(b) == 1 or b == a[:-1]:
        return _stacked(call, [2, 1])
    return _columns(stacked(call), 1)


def solve_triangular(call: Call) -> Signature:
    """Split leading dims and columns of A[..., n, n], B[..., n, k]; left=False: only leading dims."""
    return _columns(stacked(call), 1) if call.arg(3, "left", True) else stacked(call)


def cholesky_solve(call: Call) -> Signature:
    """Split leading dims and columns of B[..., n, k], L[..., n, n]."""
    return _columns(stacked(call), 0)


def own_dims(*own: int) -> SignatureOf:
    """Return the rule of stacks whose operands have so many last dims: 2 matrix, 1 vector, 0 number."""

    def stacked_each(call: Call) -> Signature:
        """Split leading dims, which broadcast; keep a matrix, its pivots and a tolerance whole."""
        return _stacked(call, list(own[: len(call.operands)]))

    return stacked_each


def columns(own: SignatureOf, operand: int) -> SignatureOf:
    """Return the rule of a solver that handles each column of the right-hand operand separately."""

    def solved(call: Call) -> Signature:
        """Split leading dims as stacked matrices do, and the columns of the right-hand side."""
        position = 3 if call.target is aten.ormqr.default else len(call.args)  # elsewhere `left` is a keyword
        return _columns(own(call), operand) if call.arg(position, "left", True) else own(call)

    return solved


def _columns(sig: Signature, operand: int) -> Signature:
    """Use an operand's last dim as the result's last dim, so that columns may be split."""
    (old,), result = sig.inputs[operand][-1], sig.outputs[0]
    out: Operand = (*result[:-1], (old,))
    sizes = {f: s for f, s in sig.sizes.items() if (f,) != result[-1]}
    return replace(sig, outputs=(out, *sig.outputs[1:]), sizes=sizes, whole=(sig.whole & set(sizes)) - {old})


def _stacked(call: Call, own: list[int]) -> Signature:
    lead = [v.shape[: len(v.shape) - k] for v, k in zip(call.operands, own, strict=True)]
    batch: tuple[int, ...] = torch.broadcast_shapes(*lead)  # type: ignore[no-untyped-call]
    sizes = {f"e{i}": s for i, s in enumerate(batch)}

    def dims(shape: tuple[int, ...], leading: int, mark: str) -> tuple[Dim, ...]:
        skip = len(batch) - leading
        first: list[Dim] = [
            (f"e{skip + i}",) if s == batch[skip + i] and s != 1 else () for i, s in enumerate(shape[:leading])
        ]
        sizes.update({f"{mark}{i}": s for i, s in enumerate(shape) if i >= leading})
        return (*first, *((f"{mark}{i}",) for i in range(leading, len(shape))))

    ins = tuple(dims(v.shape, len(e), f"x{j}_") for j, (v, e) in enumerate(zip(call.operands, lead, strict=True)))
    asked = [v.shape[: len(batch)] == batch for v in call.results]  # vectors that were not requested are empty
    outs = tuple(
        dims(v.shape, len(batch) * full, f"y{j}_") for j, (v, full) in enumerate(zip(call.results, asked, strict=True))
    )
    whole = frozenset(f for f in sizes if not f.startswith("e"))
    return Signature(ins, outs, sizes, frozenset(), whole, frozenset(sizes) - whole)


def _flops(call: Call) -> int:
    return 2 * math.prod(call.operands[0].shape) * call.operands[0].shape[-1]


for _op in (
    aten.linalg_inv.default,
    aten.linalg_inv_ex.default,
    aten.linalg_cholesky.default,
    aten.linalg_cholesky_ex.default,
    *([aten.cholesky.default] if hasattr(aten, "cholesky") else []),  # torch 2.15 removed it
    aten.cholesky_inverse.default,
    aten.linalg_det.default,
    aten.logdet.default,
    aten.linalg_slogdet.default,
    aten.linalg_eigh.default,
    aten.linalg_eigvalsh.default,
    aten.linalg_svd.default,
    aten.linalg_svdvals.default,
    aten.linalg_qr.default,
    aten.linalg_pinv.atol_rtol_float,
    aten.pinverse.default,
    aten.matrix_exp.default,
    aten.linalg_matrix_power.default,
    aten.linalg_cond.default,
    aten.linalg_lu_factor.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_lu.default,
    aten._lu_with_info.default,
    aten.linalg_eig.default,
    aten.linalg_eigvals.default,
    aten.svd.default,
    aten._linalg_svd.default,
    aten._linalg_eigh.default,
    aten._linalg_det.default,
    aten._linalg_slogdet.default,
    aten.geqrf.default,
    aten.linalg_ldl_factor.default,
    aten.linalg_ldl_factor_ex.default,
    aten.triangular_solve.default,
):
    rule(_op, stacked, flops=_flops)
rule(aten.linalg_solve.default, solve, linear="1", flops=_flops)
rule(aten.linalg_solve_ex.default, solve, flops=_flops)
rule(aten._linalg_solve_ex.default, solve, flops=_flops)
for _op in (aten.linalg_pinv.atol_rtol_tensor, aten.linalg_matrix_rank.atol_rtol_tensor):
    rule(_op, own_dims(2, 0, 0), flops=_flops)
for _op in (aten.linalg_lu_solve.default, aten.linalg_ldl_solve.default, aten.ormqr.default):
    rule(_op, columns(own_dims(2, 1, 2), 2), linear="2", flops=_flops)
rule(aten.lu_solve.default, columns(own_dims(2, 2, 1), 0), linear="0", flops=_flops)
for _op in (aten.lu_unpack.default, aten.linalg_householder_product.default):
    rule(_op, own_dims(2, 1))
rule(aten.linalg_tensorinv.default, all_whole)
rule(aten.linalg_tensorsolve.default, all_whole, linear="1")
rule(aten.linalg_solve_triangular.default, solve_triangular, linear="1", flops=_flops)
rule(aten.cholesky_solve.default, cholesky_solve, linear="0", flops=_flops)


def matrix_norm(call: Call) -> Signature:
    """Reduce the two dims of the matrices, which stay whole."""
    x = call.operands[0].shape
    gone = {call.dim(d) for d in call.arg(2, "dim", [-2, -1])}
    names: list[Dim] = [(f"d{i}",) for i in range(len(x))]
    kept = (
        [() if i in gone else n for i, n in enumerate(names)]
        if call.arg(3, "keepdim", False)
        else [n for i, n in enumerate(names) if i not in gone]
    )
    sizes = {f"d{i}": s for i, s in enumerate(x)}
    return Signature((tuple(names),), (tuple(kept),), sizes, frozenset(), frozenset(f"d{i}" for i in gone))


rule(aten.linalg_matrix_norm.default, matrix_norm)
rule(aten.linalg_matrix_norm.str_ord, matrix_norm)


def cdist(call: Call) -> Signature:
    """Split rows: a[..., p, m], b[..., r, m] -> [..., p, r], distances. Only the 1-norm is a sum over m."""
    a, b = (v.shape for v in call.operands)
    out = call.results[0].shape
    batch = out[:-2]
    sizes = {f"e{i}": s for i, s in enumerate(batch)} | {"p": out[-2], "r": out[-1], "m": a[-1]}

    def leading(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        own = shape[:-2]
        skip = len(batch) - len(own)
        return tuple((f"e{skip + i}",) if s == batch[skip + i] and s != 1 else () for i, s in enumerate(own))

    batch_dims = tuple((f"e{i}",) for i in range(len(batch)))
    ins, out_dims = ((*leading(a), ("p",), ("m",)), (*leading(b), ("r",), ("m",))), (*batch_dims, ("p",), ("r",))
    summed = frozenset({"m"} if call.arg(2, "p", 2) == 1 else ())
    return Signature(ins, (out_dims,), sizes, summed, frozenset({"m"}) - summed)


rule(aten.cdist.default, cdist, flops=lambda c: 2 * math.prod(c.results[0].shape) * c.operands[0].shape[-1])
rule(aten.pdist.default, all_whole)
rule(aten.trace.default, all_whole, linear="0")
