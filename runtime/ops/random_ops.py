"""Random numbers in a program: a part of a tensor, every element a function of the random state and its *global* index
(rng.py).

    noise = ops.random('normal', (0.0, 1.0), [8, 64], torch.float32, rng, 3, mesh, ((0, 'dp', 1, ()),))

draws a rank's rows of the very numbers that one device draws by  ops.random('normal', (0.0, 1.0), [8, 64],
torch.float32, rng, 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime import random_draws
from shardc.runtime.rng import Digits, Paddings, Rng, bits, indices

#: kind -> what samples it, given its options.
KINDS: dict[str, Callable[..., random_draws.Sampler]] = {
    kind: getattr(random_draws, kind)
    for kind in ("uniform", "normal", "log_normal", "exponential", "geometric", "cauchy", "integers")
}


def random(
    kind: str,
    options: Sequence[float],
    shape: Sequence[int],
    dtype: torch.dtype,
    rng: Rng | None,
    index: int,
    mesh: Any = None,
    digits: Digits = (),
    paddings: Paddings = (),
    device: torch.device | str | None = None,
) -> Tensor:
    """Independent random numbers, without a gradient; drawn also where `rng` is not training, as torch draws them.

    kind, options: one of KINDS and its parameters; "integers" are in [from, to), "permutation" is one of
    range(shape[0]).
    shape: global. index: ordinal of this op in the graph. digits, paddings: which part this rank holds, as in
    `ops.dropout`."""
    assert rng is not None, "random numbers need a random state"
    key = rng.key(index)
    where = indices(shape, digits, mesh, device, paddings)
    if kind == "permutation":
        assert not digits, "a permutation is drawn whole"
        return torch.argsort(bits(key, where), stable=True).to(dtype)
    sample = KINDS[kind](*options)
    flat = torch.cat(
        [sample(key, part, dtype).to(dtype) for part in torch.split(where.reshape(-1), random_draws.CHUNK)]
    )
    if kind == "uniform" and dtype.itemsize < 4:  # rounding must not reach the upper end
        flat = flat.clamp_(max=_below(options[1], dtype))
    return flat.view(where.shape)


def _below(x: float, dtype: torch.dtype) -> float:
    """The largest number of a dtype below x."""
    limit = torch.tensor(x, dtype=dtype)
    return float(limit if float(limit) < x else torch.nextafter(limit, torch.tensor(-torch.inf, dtype=dtype)))
