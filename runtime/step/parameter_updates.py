"""When the parameters of a module have to be gathered again: the loop is the user's, who updates them when he likes."""

from __future__ import annotations

import weakref
from typing import Any

from shardc.runtime.matrices.whole import WholeMatrices
from shardc.runtime.zero.buckets import Buckets


class Updates:
    """Whether parameters may have changed since they were last gathered: by a backward and what follows it, by weights
    that were loaded, or by anybody who writes to them, as what keeps an average of them does.

    Use: `carry_out()` begins to gather, and `settle()` ends it, before anybody else may write: a gather in the
    background writes to the memory of parameters too (ZeRO 1 and 2), whenever its bytes come.
    """

    def __init__(self, buckets: Buckets) -> None:
        self.buckets, self._noted, self._settled = buckets, False, True
        self._versions = self._now()
        #: What owners keep of these parameters: a gather writes them, too, and changes nothing for them.
        self.owners: weakref.WeakSet[WholeMatrices] = weakref.WeakSet()
        self._same: list[WholeMatrices] = []

    @property
    def due(self) -> bool:
        return self._noted or self.written

    @property
    def written(self) -> bool:
        """Has somebody written to parameters? Waits for a gather that is under way, which writes to them too."""
        self.settle()
        return self._versions != self._now()

    def note(self, *_: Any) -> None:
        self._noted = True

    def carry_out(self) -> None:
        if self.due:
            self._same = [m for m in self.owners if not m.written]
            self.buckets.publish()
            self._noted = self._settled = False

    def settle(self) -> None:
        if not self._settled:
            self.buckets.wait_for_gathers()
            self._settled, self._versions = True, self._now()
            for m in self._same:
                m.note()
            self._same = []

    def _now(self) -> int:
        return sum(p._version for p in self.buckets.owned.values())
