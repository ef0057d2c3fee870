"""Choose the rank that steps each whole matrix, so that the work of a step is divided evenly."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def work(shape: Sequence[int], *, products: bool = True) -> float:
    """Estimate the cost of an optimizer's step of a matrix, in multiplications.

    products: it multiplies matrices, as the five Newton-Schulz iterations of Muon do (Jordan et al. 2024), each of
    2 k² n + k³ for a matrix k × n, k <= n; roots and eigenvectors (Shampoo, SOAP) cost the same powers of the sides.
    The rest passes over the elements a few times, limited by the memory: on an H100, 300 multiplications a byte.
    """
    numel = float(math.prod(shape))
    if not products or len(shape) < 2:
        return 1e3 * numel
    k, n = sorted((float(shape[0]), float(math.prod(shape[1:]))))
    return 1e3 * numel + 5 * (2 * k * k * n + k**3)


def owners(works: Sequence[float], ranks: int) -> list[int]:
    """Assign matrices, the largest first, to the rank with the least work so far; return their ranks.

    (Graham 1969; at most 4/3 of the best.) Of equal ranks the last one comes first.
    """
    load = [(0.0, -rank) for rank in range(ranks)]
    assigned = [0] * len(works)
    for i in sorted(range(len(works)), key=lambda i: -works[i]):
        sofar, rank = load[0]
        assigned[i] = -rank
        heapq.heapreplace(load, (sofar + works[i], rank))
    return assigned
