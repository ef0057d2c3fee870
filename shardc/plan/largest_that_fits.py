"""The largest number that fits: solved on the curve through the points that were priced, and confirmed by pricing it
and the next one.

A step's live memory is a polynomial of low degree in rows and in sequence length (piecewise: the op at the peak may
change), so two or three points lead near the answer. What is reserved for it goes up in steps, so close to the answer
the curve says little: where a guess does not halve what is left, the next one does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Largest:
    """The largest n >= 1 with peak(n) <= limit, at most `most`; 0 if there is none. peaks: what was priced. peak
    returns inf where n is not possible.
    """

    peak: Callable[[int], float]
    limit: float
    most: int = 1 << 30
    peaks: dict[int, float] = field(default_factory=dict)

    def at(self, n: int) -> float:
        if n not in self.peaks:
            self.peaks[n] = self.peak(n)
        return self.peaks[n]

    def solve(self, start: int = 1) -> int:
        low, high = 0, self.most + 1  # low fits, high does not
        n = max(min(start, self.most), 1)
        while high - low > 1:
            left = high - low
            if self.at(n) <= self.limit:
                low = max(low, n)
            else:
                high = min(high, n)
            slow = 2 * (high - low) > left and low > 0 and high <= self.most
            n = min(max((low + high) // 2 if slow else self._guess(low, high), low + 1), high - 1)
        return low

    def _guess(self, low: int, high: int) -> int:
        """Where the curve through the known points crosses the limit."""
        known = sorted((n, p) for n, p in self.peaks.items() if np.isfinite(p))
        if len(known) < 2:
            return 2 * low if high > self.most else (low + high) // 2
        near = sorted(known, key=lambda x: abs(x[1] - self.limit))[:3]
        curve = np.polynomial.Polynomial.fit([n for n, _ in near], [p - self.limit for _, p in near], len(near) - 1)
        complex_roots = [complex(r) for r in curve.roots()]
        roots = [r.real for r in complex_roots if abs(r.imag) < 1e-6 and low - 1 < r.real < high + 1]
        if not roots:
            return 4 * max(low, 1) if high > self.most else (low + high) // 2
        guess = int(np.floor(max(roots) + 1e-9))
        tried = guess in self.peaks
        return guess + 1 if tried and guess == low else guess
