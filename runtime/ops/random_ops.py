"""Draw a part of a random tensor: each element depends on the random state and its *global* index.

    noise = ops.random('normal', (0.0, 1.0), [8, 64], torch.float32, rng, 3, mesh, ((0, 'dp', 1, ()),))

draws a rank's rows of the very numbers that one device draws by  ops.random('normal', (0.0, 1.0), [8, 64],
torch.float32, rng, 3). (rng.py)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardc.runtime import distributions
from shardc.runtime.rng import Digits, Paddings, Rng, bits, indices

#: kind -> a function from its options to a sampler.
KINDS: dict[str, Callable[..., distributions.Sampler]] = {
    kind: getattr(distributions, kind)
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
    """Draw independent random numbers, without a gradient, also when not training, as torch does.

    kind, options: one of KINDS and its parameters; "integers" are in [from, to), "permutation" is one of
    range(shape[0]).
    shape: global. index: ordinal of this op in the graph. digits, paddings: which part this rank holds (`ops.dropout`).
    """
    assert rng is not None, "random numbers need a random state"
    key = rng.key(index)
    where = indices(shape, digits, mesh, device, paddings)
    if kind == "permutation":
        assert not digits, "a permutation is drawn whole"
        return torch.argsort(bits(key, where), stable=True).to(dtype)
    sample = KINDS[kind](*options)
    flat = torch.cat(
        [sample(key, part, dtype).to(dtype) for part in torch.split(where.reshape(-1), distributions.CHUNK)]
    )
    if kind == "uniform" and dtype.itemsize < 4:  # rounding must not reach the upper end
        flat = flat.clamp_(max=_below(options[1], dtype))
    return flat.view(where.shape)


def _below(x: float, dtype: torch.dtype) -> float:
    """Return the largest number of a dtype below x."""
    limit = torch.tensor(x, dtype=dtype)
    return float(limit if float(limit) < x else torch.nextafter(limit, torch.tensor(-torch.inf, dtype=dtype)))
