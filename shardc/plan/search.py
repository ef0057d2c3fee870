"""The search: which choices there are, their first prices, and exact prices of the best.

    1  rehearse a microbatch for every (tp, ep, recomputation) that compile takes        library
    2  estimate every mesh × ZeRO × schedule × microbatches                              estimate
    3  price the best from rehearsals at their own mesh; rank by that                    price
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from shardc.errors import ShardcError
from shardc.plan.estimate import Estimates
from shardc.plan.library import Library
from shardc.plan.price import Priced, price
from shardc.plan.space import CHECKPOINTS, Choice, Keep, choices, divisors, spec
from shardc.spec import Spec

#: How many rehearsals of whole choices are made, and how many choices are priced from them.
REHEARSED, PRICED = 6, 24
#: Of choices alike but in ZeRO and schedule, so many are priced.
ALIKE = 4
#: What takes so many times a device's memory is not tried with more rows.
HOPELESS = 4
Core = tuple[int, int, bool, Keep]
Told = Callable[[str, int, int], None]


@dataclass
class Search:
    """One model on one kind of device. memory: bytes of a device that a step may take. cuts: how many stages a pipeline may have.
    on: told what is being priced: (what, done, of).

    refused: why compile did not take a split, by its name.
    """

    library: Library
    memory: float
    cuts: int = 1
    experts: int = 0
    on: Told = lambda what, done, of: None
    refused: dict[str, ShardcError] = field(default_factory=dict)
    considered: int = 0
    _exact: dict[Choice, Priced] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.estimates = Estimates(self.library)

    def cores(self, devices: int, *, wide: bool = False) -> list[Core]:
        """What compile takes for so many devices. wide: tensor parallel over several nodes as well."""
        node = self.library.device.node
        self.on("one microbatch", 0, 0)
        self.library.takes_microbatches()
        widths = [t for t in divisors(devices) if t <= node or (wide and t <= 4 * node)]
        some = {1, 2, node, self.experts}
        experts = [e for e in divisors(devices) if e in some and self.experts % e == 0] if self.experts else [1]
        keeps: list[Keep] = list(CHECKPOINTS) if self.library.words.regions else ["none"]
        asked = [(t, e, k) for t in widths for e in experts for k in keeps if devices % (t * e) == 0]
        found = []
        for i, (tp, ep, keep) in enumerate(asked):
            mesh = f"tp={tp}" + (f", ep={ep}" if ep > 1 else "")
            if mesh in self.refused:
                continue
            self.on(f"one microbatch at {mesh}, recompute {keep}", i, len(asked))
            last: ShardcError | None = None
            for sp in (True, False) if tp > 1 and self.library.words.sequences else (False,):
                try:
                    self.library.core(Choice(tp=tp, ep=ep, sequence_parallel=sp, checkpoint=keep))
                    found.append((tp, ep, sp, keep))
                    break
                except ShardcError as e:
                    last = e
            else:
                assert last is not None
                self.refused[mesh if keep == "none" else f"{mesh}, recompute {keep}"] = last
        return found

    def choices(self, cores: Iterable[Core], devices: int, batch: int) -> Iterator[Choice]:
        """All that there are."""
        most = batch if self.library.microbatches > 1 else 1
        return choices(list(cores), devices, batch, self.cuts, most)

    def estimate(self, devices: int, batch: int, cores: Iterable[Core]) -> list[tuple[Choice, Priced]]:
        """Every choice, the best first: those that seem to fit by time, then the others by memory."""
        found: list[tuple[Choice, Priced]] = []
        hopeless: set[object] = set()
        for c in self.choices(cores, devices, batch):
            alike = c.core, c.pp, c.dp, c.zero, c.schedule, c.per_rank
            if alike in hopeless:
                continue
            found.append((c, self.estimates(c)))
            if found[-1][1].peak > HOPELESS * self.memory:  # more rows take more
                hopeless.add(alike)
            if len(found) % 500 == 0:
                self.on(f"{len(found)} choices", 0, 0)
        self.considered += len(found)
        return sorted(found, key=lambda x: (x[1].peak > self.memory, x[1].seconds if x[1].peak <= self.memory else x[1].peak))

    def exact(self, c: Choice) -> Priced:
        if c not in self._exact:
            first = Spec.load(spec(c, self.library.words))
            self._exact[c] = price(self.library, first, c.batch)
        return self._exact[c]

    def refine(self, found: list[tuple[Choice, Priced]]) -> dict[Choice, Priced]:
        """Exact prices of the best of them; where they turn out not to fit, of more."""
        made: dict[Choice, Priced] = {}
        keys: dict[object, int] = {}
        asked = 0
        for c, _ in found:
            key = c.core, c.dp, c.zero, c.rows, min(c.microbatches, 3), c.schedule.startswith("zb"), c.pp == 1
            fits = sum(p.peak <= self.memory for p in made.values())
            if key not in keys and len(keys) >= (REHEARSED if fits else 2 * REHEARSED):
                break
            if keys.get(key, 0) >= ALIKE:
                continue
            self.on(str(c), min(asked, PRICED), PRICED)
            asked += 1
            keys[key] = keys.get(key, 0) + 1
            try:
                made[c] = self.exact(c)
            except ShardcError as e:
                self.refused[str(c)] = e
            if asked >= PRICED:
                break
        for c in [c for c in list(made)[:1] if c.sequence_parallel]:
            made[replace(c, sequence_parallel=False)] = self.exact(replace(c, sequence_parallel=False))
        return made
