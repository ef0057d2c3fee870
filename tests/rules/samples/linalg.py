"""Sample calls: linear algebra."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample, samples

aten = torch.ops.aten

samples(
    "linalg_inv linalg_inv_ex linalg_det linalg_slogdet linalg_svdvals linalg_qr linalg_pinv.atol_rtol_float pinverse "
    "matrix_exp linalg_cond linalg_lu_factor linalg_lu_factor_ex linalg_lu _lu_with_info",
)(lambda t: call(t.real(4, 6, 6)), lambda t: call(t.real(2, 6, 3, 3)), lambda t: call(t.real(6, 6)))
samples(
    "linalg_cholesky linalg_cholesky_ex",
    *([aten.cholesky.default] if hasattr(aten, "cholesky") else []),  # torch 2.15 has it no more
    aten.cholesky_inverse.default,
    aten.logdet.default,
    aten.linalg_eigvalsh.default,
)(lambda t: call(t.definite(12, 3)), lambda t: call(t.definite(2, 6, 2)))
samples(aten.linalg_eigvals.default, aten.linalg_matrix_rank.atol_rtol_tensor)(
    lambda t: call(t.index(9, 12, 3, 3).double())
)
samples(aten.linalg_eig.default, aten.geqrf.default)(
    lambda t: call(t.constant(t.real(12, 3, 3)))
)  # gradients: of some functions; none
samples(aten.linalg_ldl_factor.default, aten.linalg_ldl_factor_ex.default)(
    lambda t: call(t.constant(t.definite(12, 3)))
)
sample(
    aten.linalg_pinv.atol_rtol_tensor,
    lambda t: call(t.real(12, 4, 3), rtol=t.constant(torch.full((12,), 0.01).double())),
)
sample(
    aten.linalg_matrix_rank.atol_rtol_tensor,
    lambda t: call(t.real(12, 4, 3), atol=t.positive(12), rtol=t.positive(4, 1)),
)
samples(aten._linalg_det.default, aten._linalg_slogdet.default)(lambda t: call(t.real(12, 3, 3)))
sample(aten._linalg_eigh.default, lambda t: call(t.definite(12, 3)))
sample(
    aten._linalg_svd.default,
    lambda t: call(t.index(9, 12, 4, 3).double()),
    lambda t: call(t.constant(t.real(12, 4, 3)), False, False),
)
sample(
    aten._linalg_solve_ex.default,
    lambda t: call(t.real(12, 3, 3), t.real(12, 3, 4)),
    lambda t: call(t.real(12, 3, 3), t.real(12, 3)),
)
sample(aten.svd.default, lambda t: call(t.index(9, 12, 4, 3).double()))
sample(aten.linalg_matrix_power.default, lambda t: call(t.real(12, 3, 3), 3))
sample(aten.linalg_eigh.default, lambda t: call(t.definite(12, 3)))
sample(aten.linalg_svd.default, lambda t: call(t.index(9, 12, 4, 3).double(), False))
sample(
    aten.linalg_solve.default,
    lambda t: call(t.real(12, 3, 3), t.real(12, 3, 4)),
    lambda t: call(t.real(12, 3, 3), t.real(12, 3)),
    lambda t: call(t.real(4, 1, 3, 3), t.real(6, 3, 2)),
    lambda t: call(t.real(3, 3), t.real(3)),
)
sample(
    aten.linalg_solve_ex.default,
    lambda t: call(t.real(12, 3, 3), t.real(12, 3, 4)),
    lambda t: call(t.real(12, 3, 3), t.real(12, 3)),
)
sample(aten.triangular_solve.default, lambda t: call(t.real(12, 3, 4), t.definite(12, 3)))
sample(aten.linalg_lu_solve.default, lambda t: call(*torch.linalg.lu_factor(t.definite(12, 3)), t.real(12, 3, 4)))
sample(aten.lu_solve.default, lambda t: call(t.real(12, 3, 4), *torch.linalg.lu_factor(t.definite(12, 3))))
sample(
    aten.linalg_ldl_solve.default,
    lambda t: call(*map(t.constant, torch.linalg.ldl_factor(t.definite(12, 3))), t.constant(t.real(12, 3, 4))),
)
sample(aten.lu_unpack.default, lambda t: call(*torch.linalg.lu_factor(t.definite(12, 3))))
sample(aten.linalg_householder_product.default, lambda t: call(t.real(12, 4, 3), t.real(12, 3)))
sample(aten.ormqr.default, lambda t: call(t.real(12, 3, 3), t.real(12, 3), t.real(12, 3, 4)))
sample(aten.linalg_tensorinv.default, lambda t: call(t.real(12, 3, 4), 1))
sample(aten.linalg_tensorsolve.default, lambda t: call(t.real(2, 3, 6), t.real(2, 3)))
sample(aten.linalg_solve_triangular.default, lambda t: call(t.definite(12, 3), t.real(12, 3, 4), upper=False))
sample(aten.cholesky_solve.default, lambda t: call(t.real(12, 3, 4), t.definite(12, 3)))
sample(
    aten.linalg_matrix_norm.default,
    lambda t: call(t.real(12, 3, 4), 2),
    lambda t: call(t.real(3, 12, 4), 1, [0, -1], True),
)
sample(
    aten.linalg_matrix_norm.str_ord,
    lambda t: call(t.real(12, 3, 4)),
    lambda t: call(t.real(3, 12, 4), "nuc", [0, -1], True),
)
sample(
    aten.cdist.default,
    lambda t: call(t.real(12, 3), t.real(6, 3)),
    lambda t: call(t.real(2, 6, 3), t.real(2, 4, 3), 1.0),
    lambda t: call(t.real(4, 1, 6, 3), t.real(12, 4, 3)),
)
sample(aten.pdist.default, lambda t: call(t.real(12, 3)))
sample(aten.trace.default, lambda t: call(t.real(6, 6)))
