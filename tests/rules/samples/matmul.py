"""Sample calls: matrix products."""

from __future__ import annotations

import torch

from tests.rules.making import call, sample

aten = torch.ops.aten

sample(
    aten.linear.default,
    lambda t: call(t.real(4, 12), t.real(24, 12), t.real(24)),
    lambda t: call(t.real(2, 6, 12), t.real(8, 12)),
    lambda t: call(t.real(12), t.real(12, 12), t.real(12)),
    lambda t: call(t.real(3, 12), t.real(4, 12), None),
)
sample(aten.mm.default, lambda t: call(t.real(4, 12), t.real(12, 6)))
sample(aten.bmm.default, lambda t: call(t.real(12, 2, 6), t.real(12, 6, 4)))
sample(aten.mv.default, lambda t: call(t.real(4, 12), t.real(12)))
sample(aten.dot.default, lambda t: call(t.real(12), t.real(12)))
sample(aten.outer.default, lambda t: call(t.real(12), t.real(4)))
sample(
    aten.addmm.default,
    lambda t: call(t.real(8), t.real(4, 12), t.real(12, 8)),
    lambda t: call(t.real(4, 8), t.real(4, 12), t.real(12, 8), beta=0.5, alpha=2.0),
    lambda t: call(t.real(4, 1), t.real(4, 12), t.real(12, 8)),
    lambda t: call(t.real(1), t.real(4, 12), t.real(12, 8)),
)
sample(
    aten.baddbmm.default,
    lambda t: call(t.real(12, 2, 4), t.real(12, 2, 6), t.real(12, 6, 4), beta=0.5, alpha=2.0),
    lambda t: call(t.real(1, 2, 4), t.real(12, 2, 6), t.real(12, 6, 4)),
    lambda t: call(t.real(4), t.real(12, 2, 6), t.real(12, 6, 4)),
)
sample(
    aten.matmul.default,
    lambda t: call(t.real(4, 12), t.real(12, 6)),
    lambda t: call(t.real(12, 3, 6), t.real(12, 6, 4)),
    lambda t: call(t.real(2, 12, 3, 6), t.real(12, 6, 4)),
    lambda t: call(t.real(2, 1, 3, 6), t.real(1, 12, 6, 4)),
    lambda t: call(t.real(12, 3, 6), t.real(6, 4)),
    lambda t: call(t.real(6), t.real(12, 6, 4)),
    lambda t: call(t.real(12, 3, 6), t.real(6)),
    lambda t: call(t.real(12), t.real(12)),
    lambda t: call(t.real(4, 12), t.real(12)),
)
sample(
    aten.einsum.default,
    lambda t: call("bqhd,bkhd->bhqk", [t.real(2, 3, 12, 4), t.real(2, 6, 12, 4)]),
    lambda t: call("tk,tkd,d->td", [t.real(12, 4), t.real(12, 4, 6), t.real(6)]),
    lambda t: call("ij,jk", [t.real(4, 12), t.real(12, 6)]),
    lambda t: call("ij->", [t.real(4, 12)]),
    lambda t: call("ij,k->k", [t.real(4, 12), t.real(6)]),
    lambda t: call("ii->i", [t.real(12, 12)]),
    lambda t: call("ii,j->j", [t.real(12, 12), t.real(4)]),
    lambda t: call("...i,ij->...j", [t.real(2, 4, 12), t.real(12, 6)]),
    lambda t: call("...ij,...jk->...ik", [t.real(12, 2, 4), t.real(12, 4, 6)]),
    lambda t: call("...ij,...jk->...ik", [t.real(4, 12, 2, 4), t.real(12, 4, 6)]),
    lambda t: call("...i,...i->...", [t.real(1, 12, 4), t.real(12, 1, 4)]),
    lambda t: call("b i, b i -> b", [t.real(12, 1), t.real(12, 4)]),
)
