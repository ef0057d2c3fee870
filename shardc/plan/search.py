"""The search: which choices there are, their first prices, and exact prices of the best.

1  rehearse a microbatch for every (tp, ep) that compile takes, recomputed where something does not fit without        library
2  estimate every mesh × ZeRO × schedule × microbatches                              estimate
3  price the best from dry_runs at their own mesh; rank by that                    price
"""  # noqa: E501 (a table)

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from shardc.errors import ShardcError
from shardc.plan.dry_runs import Library
from shardc.plan.estimate import Estimates
from shardc.plan.exact import Priced, price
from shardc.plan.space import CHECKPOINTS, Choice, Keep, choices, divisors, spec
from shardc.runtime.schedule import SCHEDULES
from shardc.spec import Spec

#: How many dry_runs of whole choices are made, and how many choices are priced from them.
REHEARSED, PRICED = 6, 24
#: Of choices alike but in ZeRO and schedule, so many are priced: estimates are wrong in like ways, so the others are
#: not left out.
ALIKE = 4
#: What seems to take so many times a device's memory will not turn out to fit.
FAR = 2
#: What takes so many times a device's memory is not tried with more rows.
HOPELESS = 4
Core = tuple[int, int, bool, Keep]
OnProgress = Callable[[str, int, int], None]


@dataclass
class Search:
    """One model on one kind of device. memory: bytes of a device that a step may take. cuts: how many stages a pipeline
    may have. on: told what is being priced: (what, done, of).

    refused: why compile did not take a split, by its name.
    """

    library: Library
    memory: float
    cuts: int = 1
    experts: int = 0
    on: OnProgress = lambda what, done, of: None
    refused: dict[str, ShardcError] = field(default_factory=dict)
    considered: int = 0
    _exact: dict[Choice, Priced] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.estimates = Estimates(self.library)

    def cores(self, devices: int, *, wide: bool = False) -> list[Core]:
        """The splits that compile takes for so many devices, nothing recomputed. wide: tensor parallel over several
        nodes as well.
        """
        node = self.library.device.node
        self.on("one microbatch", 0, 0)
        self.library.takes_microbatches()
        widths = [t for t in divisors(devices) if t <= node or (wide and t <= 4 * node)]
        some = {1, 2, node, self.experts}
        experts = [e for e in divisors(devices) if e in some and self.experts % e == 0] if self.experts else [1]
        asked = [(t, e) for t in widths for e in experts if devices % (t * e) == 0]
        found = (
            self._core(tp, ep, (True, False) if tp > 1 and self.library.template.sequences else (False,), "none")
            for tp, ep in asked
        )
        return [core for core in found if core is not None]

    def recomputing(self, core: Core) -> list[Core]:
        """A split with every way to recompute that compile takes."""
        tp, ep, sp, _ = core
        keeps = [k for k in CHECKPOINTS if k != "none"] if self.library.template.regions else []
        found = (self._core(tp, ep, dict.fromkeys((sp, False)), keep) for keep in keeps)
        return [core for core in found if core is not None]

    def _core(self, tp: int, ep: int, sequence_parallel: Iterable[bool], keep: Keep) -> Core | None:
        """With sequence parallel or without: the first that compile takes; None if it takes neither."""
        mesh = f"tp={tp}" + (f", ep={ep}" if ep > 1 else "")
        name = mesh if keep == "none" else f"{mesh}, recompute {keep}"
        if name in self.refused:
            return None
        for sp in sequence_parallel:
            choice = Choice(tp=tp, ep=ep, sequence_parallel=sp, checkpoint=keep)
            if not self.library.knows(choice):
                self.on(f"one microbatch at {mesh}, recompute {keep}", 0, 0)
            try:
                self.library.core(choice)
            except ShardcError as e:
                self.refused[name] = e
            else:
                self.refused.pop(name, None)
                return choice.core
        return None

    def choices(self, cores: Iterable[Core], devices: int, batch: int) -> Iterator[Choice]:
        """All that there are."""
        most = batch if self.library.microbatches > 1 else 1
        return choices(list(cores), devices, batch, self.cuts, most)

    def estimate(self, devices: int, batch: int, cores: Iterable[Core]) -> list[tuple[Choice, Priced]]:
        """Every choice, in no order. Recomputation, which only ever takes time, is looked at where something does not
        fit without.
        """
        found: list[tuple[Choice, Priced]] = []
        for core in cores:
            mine = self._estimate(devices, batch, [core])
            found += mine
            if any(p.peak > self.memory for _, p in mine):
                found += self._estimate(devices, batch, self.recomputing(core))
        self.considered += len(found)
        return found

    def _estimate(self, devices: int, batch: int, cores: Iterable[Core]) -> list[tuple[Choice, Priced]]:
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
                self.on(f"{self.considered + len(found)} choices", 0, 0)
        return found

    def ranked(self, found: Iterable[tuple[Choice, Priced]]) -> list[tuple[Choice, Priced]]:
        """The best first: those that seem to fit by time, then the others by memory."""
        return sorted(
            found, key=lambda x: (x[1].peak > self.memory, x[1].seconds if x[1].peak <= self.memory else x[1].peak)
        )

    def exact(self, c: Choice) -> Priced:
        if c not in self._exact:
            first = Spec.load(spec(c, self.library.template))
            self._exact[c] = price(self.library, first, c.batch)
        return self._exact[c]

    def refine(self, found: list[tuple[Choice, Priced]]) -> dict[Choice, Priced]:
        """Exact prices of the best of them (`ranked`); where they turn out not to fit, of more."""
        made: dict[Choice, Priced] = {}
        dry_runs: set[object] = set()
        families: Counter[object] = Counter()
        alike = ALIKE if self.library.subject.layers else ALIKE // 2  # each of which has a rehearsal of its own
        for c, rough in found:
            if made and rough.peak > FAR * self.memory:
                break
            family, rehearsal = (c.core, c.pp, c.dp, c.rows), self._rehearsal(c)
            fits = any(p.peak <= self.memory for p in made.values())
            if rehearsal not in dry_runs and len(dry_runs) >= (REHEARSED if fits else 2 * REHEARSED):
                break
            if families[family] >= alike:
                continue
            self.on(str(c), len(dry_runs), REHEARSED)
            families[family] += 1
            dry_runs.add(rehearsal)
            try:
                made[c] = self.exact(c)
            except ShardcError as e:
                self.refused[str(c)] = e
            if families.total() >= PRICED:
                break
        for c in [c for c in list(made)[:1] if c.sequence_parallel]:
            made[replace(c, sequence_parallel=False)] = self.exact(replace(c, sequence_parallel=False))
        return made

    def _rehearsal(self, c: Choice) -> object:
        """What choices have in common that are priced from one rehearsal: of a model of layers, whatever the schedule
        and the stages.
        """
        whole = (
            (c.pp, c.schedule, c.per_rank)
            if self.library.subject.layers is None
            else (SCHEDULES[c.schedule].splits_backward, c.pp == 1)
        )
        return c.core, c.dp, c.zero, c.rows, min(c.microbatches, 3), whole
