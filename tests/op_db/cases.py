"""An op of PyTorch's operator database as a model whose loss and gradients say all that the op computes.

    p0 = ones like the first floating tensor     loss = sum(p0) + sum over results y of sum(y * fixed random numbers)
    op(x0 * p0, x1 * p1, ...)                     x0: an input of the batch, p0: a parameter

Further floating tensors of x0's shape are batch inputs times parameters, too; those of another shape are parameters.
Other tensors are batch inputs where their first dim is x0's, or else buffers.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

#: Samples of more numbers are left out.
LARGEST = 6000
#: torch itself is wrong in these (its own gradcheck fails), or they return memory that nobody has written.
LEFT_OUT = {"as_strided_scatter", "_segment_reduce", "empty_like", "new_empty", "new_empty_strided", "empty_strided"}
#: Sizes of the database's samples: even ones, as PyTorch's own tests of DTensor set them, else the database's own.
EVEN, OWN = {"S": 4, "M": 6, "L": 12, "XS": 2}, {"S": 5, "M": 10, "L": 20, "XS": 3}


@cache
def database() -> dict[str, Any]:
    """The ops of float64 by name and variant, in the database's order. The import takes seconds."""
    from torch.testing._internal.common_methods_invocations import op_db

    every = [op for op in op_db if torch.float64 in op.dtypes and op.name not in LEFT_OUT]
    return {f"{op.name} [{op.variant_test_name}]" if op.variant_test_name else op.name: op for op in every}


@dataclass(frozen=True)
class Skip:
    """Why there is no case: of no interest, or eager cannot run it."""

    why: str


@dataclass
class Reference:
    """A case and what eager makes of it. sample: its number among the database's."""

    model: Case
    loss: Tensor
    grads: dict[str, Tensor]
    sample: int


class Case(nn.Module):
    """`function` on the tensors of a sample. parameters: are tensors beside the first parameters, or buffers?"""

    def __init__(self, function: Callable[..., Any], sample: Any, *, parameters: bool) -> None:
        super().__init__()
        self.function = function
        leaves, self.form = pytree.tree_flatten(((sample.input, *sample.args), dict(sample.kwargs)))
        first = next(i for i, x in enumerate(leaves) if isinstance(x, Tensor) and _floats(x) and _evens(x))
        self.batch: dict[str, Tensor] = {}
        self.places: list[tuple[str, ...]] = []  # names of the batch's and the module's tensor, whose product it is
        self.constants: list[Any] = []
        for i, x in enumerate(leaves):
            self.constants.append(None if isinstance(x, Tensor) else x)
            self.places.append(self._place(x, leaves[first], 0 if i == first else i + 1, parameters))
        self.results = 0

    def _place(self, x: Any, first: Tensor, number: int, parameters: bool) -> tuple[str, ...]:
        if not isinstance(x, Tensor):
            return ()
        x = x.detach().clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()
        if not _floats(x) and x.ndim and x.shape[0] == first.shape[0]:
            self.batch[f"x{number}"] = x
            return (f"x{number}",)
        if not _floats(x) or (number and not parameters):
            self.register_buffer(f"b{number}", x)
            return (f"b{number}",)
        if number and x.shape != first.shape:
            self.register_parameter(f"p{number}", nn.Parameter(x))
            return (f"p{number}",)
        self.batch[f"x{number}"] = x
        self.register_parameter(f"p{number}", nn.Parameter(torch.ones_like(x)))
        return (f"x{number}", f"p{number}")

    def call(self, batch: dict[str, Tensor]) -> list[Tensor]:
        """The op's tensors."""
        leaves: list[Any] = []
        for constant, names in zip(self.constants, self.places, strict=True):
            tensors = [batch[n] if n in batch else getattr(self, n) for n in names]
            factors = [*tensors, 1.0] if names and names[0].startswith("p") else tensors  # an op may write to it
            leaves.append(constant if not names else factors[0] if len(factors) == 1 else factors[0] * factors[1])
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        return [y for y in pytree.tree_leaves(self.function(*args, **kwargs)) if isinstance(y, Tensor)]

    def forward(self, **batch: Tensor) -> Tensor:
        return self.weighed(self.call(batch), self.p0, [getattr(self, f"k{i}") for i in range(self.results)])

    @staticmethod
    def weighed(results: list[Tensor], p0: Tensor, weights: list[Tensor]) -> Tensor:
        total = p0.real.sum() if p0.is_complex() else p0.sum()
        for y, k in zip(results, weights, strict=True):
            total = total + (_real(y).double() * k).sum()
        return total

    def set_weights(self) -> None:
        """Registers the random numbers that results are multiplied by."""
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            results = self.call({name: x.clone() for name, x in self.batch.items()})
        for i, y in enumerate(results):
            weights = torch.randn(_real(y).shape, generator=generator, dtype=torch.float64)
            self.register_buffer(f"k{i}", weights)
        self.results = len(results)

    def eager(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and gradients on one device."""
        loss = self(**{name: x.clone() for name, x in self.batch.items()})
        loss.backward()
        grads = {name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None}
        self.zero_grad()
        return loss.detach().clone(), grads

    def other_batch(self) -> dict[str, Tensor]:
        """Other values of the batch, which a program is compiled on; the same where the op does not take others."""
        other = {name: x.flip(0).contiguous() if x.ndim else x for name, x in self.batch.items()}
        try:
            self(**{name: x.clone() for name, x in other.items()})
        except Exception:  # an op's own domain: whatever it raises
            return self.batch
        return other


def _floats(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _real(y: Tensor) -> Tensor:
    return torch.view_as_real(y.resolve_conj()) if y.is_complex() else y


def _evens(x: Tensor) -> list[int]:
    """The dims that two ranks can split."""
    return [d for d, size in enumerate(x.shape) if size > 1 and size % 2 == 0] if x.numel() else []


def splits(x: Tensor) -> list[int]:
    """The first and the last dim that two ranks can split."""
    return list(dict.fromkeys([*_evens(x)[:1], *_evens(x)[-1:]]))


def samples(op: Any, count: int = 2) -> list[tuple[int, Any]]:
    """Up to so many samples, and their numbers, with a dim that can be split, spread over the database's."""
    good: list[tuple[int, Any, int]] = []
    for number, sample in enumerate(_all_samples(op)):
        leaves = pytree.tree_leaves(((sample.input, *sample.args), dict(sample.kwargs)))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        if any(x.layout != torch.strided for x in tensors) or sum(x.numel() for x in tensors) > LARGEST:
            continue
        first = next((x for x in tensors if _floats(x) and x.ndim and x.numel()), None)
        if first is not None and (evens := _evens(first)):
            good.append((number, sample, min(len(evens), 2) + (0 in evens)))
    best = [(n, s) for n, s, score in good if score >= max(g[2] for g in good) - 1]
    order = [*best[len(best) // 2 :][:1], *best[:: max(1, (len(best) - 1) // max(1, count - 1))]]
    return list({n: (n, s) for n, s in order}.values())[:count]


def _all_samples(op: Any) -> list[Any]:
    for sizes in (EVEN, OWN):
        for name, module in list(sys.modules.items()):
            if name.startswith("torch.testing._internal.") and ("opinfo" in name or "common_methods" in name):
                for size, value in sizes.items():
                    if isinstance(getattr(module, size, None), int):
                        setattr(module, size, value)
        torch.manual_seed(0)
        random.seed(0)
        try:
            return list(op.sample_inputs("cpu", torch.float64, requires_grad=False))
        except Exception:  # the database's own code, which some sizes break
            if sizes is OWN:
                raise
    raise AssertionError("unreachable")


def references(op: Any, mode: str) -> Iterator[Reference | Skip]:
    """The cases of a mode: "first" and "second" sample, or "inplace", the first one by the op in place."""
    function = op.inplace_variant if mode == "inplace" else op.op
    found = samples(op) if function is not None else []
    found = found[1:2] if mode == "second" else found[:1]
    if not found:
        yield Skip("no such op" if function is None else "no sample with a dim that two ranks can split")
    for number, sample in found:
        yield _reference(function, sample, number)


def _reference(function: Any, sample: Any, number: int) -> Reference | Skip:
    why = ""
    for parameters in (True, False):  # torch has no gradients of some operands
        try:
            model = Case(function, sample, parameters=parameters)
            torch.manual_seed(1)
            model.set_weights()
            if not model.results:
                return Skip("no tensor comes out")
            torch.manual_seed(1)
            loss, grads = model.eager()
            torch.manual_seed(2)
            again = model.eager()
        except Exception as e:  # ops raise anything where they do not run
            why = f"eager does not run: {type(e).__name__}: {(str(e).splitlines() or [''])[0][:100]}"
            continue
        if difference(*again, loss, grads)[0] > 1e-13:
            return Skip("random")
        return Reference(model, loss, grads, number)
    return Skip(why)


def difference(
    loss: Tensor, grads: dict[str, Tensor], wanted_loss: Tensor, wanted: dict[str, Tensor]
) -> tuple[float, str]:
    """The largest relative difference, and of what: nan equals nan, and infinity infinity."""
    worst = (_difference(loss, wanted_loss), "loss")
    for name, g in wanted.items():
        if name in grads:
            worst = max(worst, (_difference(grads[name], g), f"gradient of {name}"))
        elif bool((g != 0).any()):
            worst = (float("inf"), f"no gradient of {name}")
    return worst


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = _real(a).double(), _real(b).double()
    finite = torch.isfinite(a) & torch.isfinite(b)
    if not bool((finite | (a == b) | (a.isnan() & b.isnan())).all()):
        return float("inf")
    if not bool(finite.any()):
        return 0.0
    return float((a[finite] - b[finite]).abs().max() / max(1e-6, float(b[finite].abs().max())))
