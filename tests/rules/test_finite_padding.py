"""Padding is finite, forward and backward, whatever it holds: every elementwise op of torch, composites and reductions,
masks and places that a padded value makes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardc
from shardc.ir.placement import Shard
from shardc.rules.core.finite_padding import Padded, fills, finite
from shardc.torch_private import OpOverload
from shardc.verify.rules.case import Case, NoCallError, UnfitError
from shardc.verify.rules.prove import strategies
from tests import equality
from tests.rules.samples import Sample, Tensors, call, made

aten = torch.ops.aten
KINDS: dict[str, Callable[[Tensors], Tensor]] = {
    "between 0 and 1": lambda t: t.real(4, 5).sigmoid(),
    "above 1": lambda t: t.real(4, 5).exp() + 1,
    "whole numbers": lambda t: t.index(4, 4, 5) + 1,
    "truth values": lambda t: t.real(4, 5) > 0,
}


def elementwise() -> Iterator[OpOverload]:
    """Every overload that torch tags so and that writes to nothing, of ops with a name in torch's own modules."""
    names = {*dir(torch), *dir(Tensor), *dir(F), *dir(aten), *(f"special_{n}" for n in dir(torch.special))}
    for name in sorted(names):
        packet = getattr(aten, name, None)
        for op in (getattr(packet, o) for o in packet.overloads()) if hasattr(packet, "overloads") else ():
            if torch.Tag.pointwise in op.tags and not op._schema.is_mutable:
                yield op


def sample_of(op: OpOverload, kind: str, number: float) -> Sample:
    """A call made from the op's schema: tensors of a kind, and a number for each number. Raises KeyError for others."""

    def arguments(t: Tensors) -> Any:
        args: list[Any] = []
        named: dict[str, Any] = {}
        for a in op._schema.arguments:
            if a.has_default_value() and a.name not in {"min", "reduction"}:
                continue
            make = {
                "Tensor": lambda: KINDS[kind](t),
                "Optional[Tensor]": lambda: KINDS[kind](t),
                "Optional[number]": lambda: number,
                "Optional[str]": lambda: "floor",
                "number": lambda: number,
                "float": lambda: number,
                "int": lambda: max(int(number), 1),
            }
            value = 0 if a.name == "reduction" else make[str(a.type)]()
            if a.kwarg_only:
                named[a.name] = value
            else:
                args.append(value)
        return call(*args, **named)

    return made(arguments)


def cases_of(op: OpOverload) -> Iterator[tuple[str, Case]]:
    numbers = (0.5, 2) if any(str(a.type) in {"number", "float"} for a in op._schema.arguments) else (2,)
    for kind in KINDS:
        for number in numbers:
            try:
                case = Case.of(op, sample_of(op, kind, number))
            except (NoCallError, UnfitError):
                continue
            whole = [x for x in (*case.outputs, *case.grads) if x is not None]
            if all(bool(x.isfinite().all()) for x in whole):
                yield f"{kind}, {number}", case


#: They compare whole tensors, or need more than their schema says.
NO_CALL = {aten.equal.default}


def test_every_elementwise_op_of_torch_is_finite_in_padding() -> None:
    """Padded on 3 ranks, with copies, 0, 1 and -1 in the padding: results, and gradients of all operands."""
    wrong, tried = [], 0
    for op in elementwise():
        if op in NO_CALL:
            continue
        each = list(cases_of(op))
        assert each, f"no call of {op}"
        for text, case in each:
            for s in strategies(case.choices, 3):
                if s.factor == "d0" and any(isinstance(p, Shard) and p.padding for p in s.inputs):
                    tried += 1
                    if what := case.on_axis(3, s):
                        wrong.append(f"{op} of {text}: {what}")
    assert wrong == []
    assert tried > 400


# --- models -----------------------------------------------------------------------------------------------------------


def rows(t: Tensor) -> Tensor:
    return torch.stack((t, 2 * t, t * t), -1)


def hides(t: Tensor) -> Tensor:
    """What a mask hides: nothing of what is real, all of what is padding."""
    return t[..., None] < 1e-9


def places(t: Tensor) -> Tensor:
    """Places in a table of two: 0 where t is real, -1 in padding."""
    return (t.detach() > 0).long() - 1


def zeros(t: Tensor) -> Tensor:
    return (t.detach() * 0).long()


MODELS: dict[str, Callable[[Tensor], Tensor]] = {
    "true_divide": lambda t: torch.true_divide(t, t),
    "1 / t": lambda t: 1 / t,
    "acos": lambda t: torch.acos(1 - t / 2),
    "asin": lambda t: torch.asin(1 - t / 2),
    "atanh": lambda t: torch.atanh(1 - t / 2),
    "acosh": lambda t: torch.acosh(1 + t),
    "erfinv": lambda t: torch.erfinv(1 - t / 2),
    "log1p": lambda t: torch.log1p(t - 1),
    "log of log": lambda t: (t + 1).log().log(),
    "entr": torch.special.entr,
    "xlogy": lambda t: torch.xlogy(t, t),
    "xlog1py": lambda t: torch.special.xlog1py(t, t - 1),
    "logit": lambda t: torch.logit(t / 3),
    "ndtri": lambda t: torch.special.ndtri(t / 3),
    "root": lambda t: t**0.5,
    "t ** t": lambda t: t**t,
    "polygamma": lambda t: torch.polygamma(1, t),
    "lgamma": lambda t: torch.lgamma(t - 1),
    "mvlgamma": lambda t: torch.mvlgamma(t, 1),
    "igamma": lambda t: torch.igamma(torch.ones_like(t).detach(), t),
    "zeta": lambda t: torch.special.zeta(1 + t.detach(), t) + t,
    "exponentials of exponentials": lambda t: t.exp().exp().exp().exp(),
    "an exponential that overflows at 0": lambda t: torch.exp(800 - 700 * (t > 0).to(t.dtype)) * 1e-43 * t,
    "complex": lambda t: torch.complex(t, t).abs() + torch.complex(t, t).angle() + torch.complex(t, t).sqrt().real,
    "a complex quotient": lambda t: (torch.complex(t, t) / torch.complex(t, 2 * t)).real,
    "rms_norm": lambda t: F.rms_norm(rows(t), (3,), eps=0.0),
    "layer_norm": lambda t: F.layer_norm(rows(t), (3,), eps=0.0),
    "group_norm": lambda t: F.group_norm(rows(t).transpose(1, 2).reshape(len(t), -1), 3, eps=1e-9),
    "groups of a padded dim": lambda t: F.group_norm(rows(t).reshape(len(t), -1), 4, eps=0.0),
    "instance_norm": lambda t: F.instance_norm(rows(t), eps=0.0),
    "normalize": lambda t: F.normalize(rows(t), dim=-1, eps=0.0),
    "cosine_similarity": lambda t: F.cosine_similarity(rows(t), rows(t.sin()), dim=-1, eps=0.0),
    "cdist": lambda t: torch.cdist(t[:, :, None], 2 * t[:, :, None]),
    "pairwise_distance": lambda t: F.pairwise_distance(rows(t), rows(t.sin()), eps=0.0),
    "std": lambda t: rows(t).std(-1),
    "root of a sum": lambda t: rows(t).square().sum(-1).sqrt(),
    "norm": lambda t: rows(t).norm(dim=-1) + rows(t).norm(p=0.5, dim=-1),
    "harmonic norm": lambda t: torch.linalg.vector_norm(rows(t), ord=-1, dim=-1),
    "matrix_norm": lambda t: torch.linalg.matrix_norm(rows(t)[..., None, :], ord="nuc"),
    "inverse": lambda t: torch.linalg.inv(t[..., None, None]),
    "prod": lambda t: rows(t).prod(-1) + rows(t).cumprod(-1).sum(-1),
    "logcumsumexp": lambda t: torch.logcumsumexp(rows(t), -1),
    "weight_norm": lambda t: torch._weight_norm(t.t().contiguous(), t.sum(0)[:, None], 0),
    "kl_div": lambda t: F.kl_div(t, t, reduction="none"),
    "binary_cross_entropy": lambda t: F.binary_cross_entropy(t / 3, t.detach() / 2, reduction="none"),
    "gaussian_nll_loss": lambda t: F.gaussian_nll_loss(t, t.detach(), t, eps=1e-12, reduction="none"),
    "gumbel noise": lambda t: -torch.log(-torch.log(t / 3)),
    "a mask in softmax": lambda t: rows(t).masked_fill(hides(t), -math.inf).softmax(-1),
    "a mask by where": lambda t: torch.where(hides(t), -math.inf, rows(t)).softmax(-1),
    "a mask that is added": lambda t: (rows(t) + torch.where(hides(t), -math.inf, 0.0)).log_softmax(-1),
    "a mask of attention": lambda t: F.scaled_dot_product_attention(
        t[:, :, None, None].expand(-1, -1, 3, 2),
        rows(t)[..., None].expand(-1, -1, -1, 2),
        t[:, :, None, None].expand(-1, -1, 3, 2),
        attn_mask=~hides(t)[..., None].expand(-1, -1, 3, 3),
    ),
    "whole quotients": lambda t: t * (zeros(t) // (t.detach() > 0).long() + 1),
    "whole remainders": lambda t: t * ((zeros(t) + 5) % ((t.detach() > 0).long() * 3)),
    "embedding": lambda t: F.embedding(places(t), torch.ones(2, 2, dtype=t.dtype)).sum(-1) * t,
    "gather": lambda t: rows(t).gather(-1, places(t)[..., None]),
    "one_hot": lambda t: F.one_hot(places(t), 3) * t[..., None],
}
#: Where no one number will do: a row of equal entries has no variance, a matrix of them no inverse.
GATHERED = {"layer_norm", "group_norm", "groups of a padded dim", "inverse"}


class Model(nn.Module):
    """`up` is not split; `down` is, by columns, 4 on 3 ranks. What follows takes values between 0 and 1, and zeros in
    padding.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.up, self.down, self.name = nn.Linear(4, 4), nn.Linear(4, 4), name

    def forward(self, x: Tensor) -> Tensor:
        y = MODELS[self.name](self.down(self.up(x)).sigmoid() * self.down.bias.abs())
        return (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype).view(y.shape)).sum()


@pytest.mark.every_case
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_in_front_of_padding_has_its_gradient(name: str) -> None:
    torch.manual_seed(0)
    batch = {"x": torch.linspace(0.2, 0.9, 16, dtype=torch.float64).view(4, 4)}
    one = equality.reference(lambda: (Model(name).double(), batch))
    assert all(bool(g.isfinite().all()) for g in one.grads.values())
    spec = {"shardc": 1, "mesh": {"tp": 3}, "shard": {"down": "column"}, "uneven": "pad"}
    program = shardc.compile(one.model, batch, spec)
    gathered = any("gathered" in note for note in program.notes)
    assert gathered == (name in GATHERED), program.notes
    equality.assert_equal(shardc.simulate(program, one.model, batch), one.loss, one.grads)
    assert program.prove().ok


# --- what is looked for --------------------------------------------------------------------------------------------


def looked_for(op: Any, *arguments: Any, copies: frozenset[int] = frozenset()) -> Any:
    """What the padding of each operand of a call has to hold, where dim 0 of all that have it is padded."""
    case = Case.of(op, lambda _: call(*arguments))
    (s,) = (s for s in strategies(case.choices, 3) if s.factor == "d0" and any(isinstance(p, Shard) for p in s.inputs))
    return fills(case.choices, Padded.of(case.node, [s], case.choices.signature, copies))


def test_an_op_that_is_finite_everywhere_is_left_alone() -> None:
    x = torch.rand(4, 6)
    for op in (aten.silu.default, aten.tanh.default, aten.square.default, aten.softplus.default, aten.cos.default):
        assert looked_for(op, x) == (None,)
    assert looked_for(aten.rms_norm.default, x, [6], None, 1e-6) == (None,)
    assert looked_for(aten.mul.Tensor, x, x) == (None, None)


def test_of_operands_only_those_are_filled_that_have_to_be() -> None:
    x = torch.rand(4, 6)
    assert looked_for(aten.div.Tensor, x, x) == (None, 3.0), "the number with the smallest result and derivatives"
    assert looked_for(aten.div.Tensor, x, torch.rand(6)) == (None, None), "a divisor that is not padded is the model's"
    assert looked_for(aten.binary_cross_entropy.default, x, x, None, 0) == (0.5, 0.5)
    assert looked_for(aten.masked_fill.Scalar, x, x > 0.5, -math.inf) == (None, 0.0)
    assert looked_for(aten.gather.default, x, 1, torch.zeros(4, 2, dtype=torch.int64)) == (None, 0.0)


def test_padding_that_is_copied_from_an_input_is_left_alone() -> None:
    x = torch.rand(4, 6)
    assert looked_for(aten.log.default, x) == (2.0,)
    assert looked_for(aten.log.default, x, copies=frozenset({0})) == (None,)


def test_where_no_number_will_do_nothing_is_padded() -> None:
    case = Case.of(aten.layer_norm.default, made(lambda t: call(t.real(4, 6), [6], None, None, 0.0)))
    assert case.choices.split("d0", 1, 3, (), 2) is None
    fine = Case.of(aten.layer_norm.default, made(lambda t: call(t.real(4, 6), [6], None, None, 1e-5)))
    assert fine.choices.split("d0", 1, 3, (), 2) is not None


def test_in_16_bits_exponentials_and_powers_overflow_earlier() -> None:
    x = torch.rand(4, 6)
    assert looked_for(aten.pow.Tensor_Scalar, x, 8) == (None,)
    assert looked_for(aten.pow.Tensor_Scalar, x.half(), 8) == (0.0,)


def test_a_number_in_the_padding_is_judged_by_itself() -> None:
    case = Case.of(aten.acos.default, made(lambda t: call(t.real(4, 6).tanh())))
    (s,) = (s for s in strategies(case.choices, 3) if s.factor == "d0" and any(isinstance(p, Shard) for p in s.inputs))
    padded = Padded.of(case.node, [s], case.choices.signature, frozenset())
    assert [finite(case.choices, padded, (x,)) for x in (0.5, 1.0, 2.0, None)] == [True, False, False, False]
