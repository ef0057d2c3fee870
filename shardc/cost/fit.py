"""A device's numbers from measured ops and collectives: of `shardc device --measure`, or of steps of a run (`--fit`).

Only the numbers are found here; what they mean is Device's business, whose own `op_seconds` is compared with what was
measured. One after the other:

    launch      of ops that move next to nothing
    bandwidth   of ops that multiply nothing, large ones
    products    the share that a product's shape reaches: the tile and ramp, of a few, that leave the least spread
    flops       by dtype: what is then left
    ops         an op that all of this describes badly has numbers of its own: seconds, and bytes per second or a share;
                and again in each dtype that these describe badly
    links       latency and rate, for collectives that were waited for from begin to end; a kind that is far from the
                fastest has a share of its rate

A quarter of the shapes is held back from a first fit, which is then asked for them: that is the error which is said.
The numbers that are kept come from all of them. Errors are ratios, so a small op counts as a large one does, and
medians are taken, as a machine with other work has outliers, always above.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from shardc.machine.collectives import collective_seconds, reach
from shardc.machine.device import Device, Link, OpRates, Products, format_of, own_rates
from shardc.machine.work import Op

#: One of so many shapes is held back.
HELD = 4
#: Tiles and ramps that are tried for a device whose file has none: (rows, columns).
TILES = ((1, 1), (4, 16), (8, 32), (16, 64), (32, 64), (64, 64), (64, 128), (128, 128), (128, 256))
RAMPS = (0, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512)
#: Bytes of an op that takes as long as any small one, and flops: neither says what a device does in a second.
SMALL, SMALL_PRODUCT = 2**16, 2**18
#: An op has numbers of its own where the others are off by more than this.
OWN = 0.1
#: A collective is large that takes so many times as long as an empty one.
LARGE = 3.0
#: Bytes of a message that tells nothing about a link's rate, but its delay.
MESSAGE = 2**14
#: How much an op's own numbers are drawn to the device's: with one size only, both could be anything.
DRAWN = 0.003
#: Seconds for each of an op's products, where the search for them begins.
EACH = 1e-6

T = TypeVar("T")


@dataclass(frozen=True)
class OpSample:
    """Seconds of one op, as measured. count: how often a step has it."""

    op: Op
    seconds: float
    count: int = 1


@dataclass(frozen=True)
class LinkSample:
    """Seconds of one collective among ranks, as measured. bytes: as of collective_seconds."""

    kind: str
    bytes: float
    ranks: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class FitError:
    """Of what was held back: how many of how many; the error that half and nine in ten of them stay below; and that of
    their sum. Shares: 0.1 is 10 %.
    """

    held: int
    of: int
    half: float
    most: float
    sum: float

    def __str__(self) -> str:
        within = f"half within {self.half:.0%}, nine in ten within {self.most:.0%}, their sum {self.sum:+.0%}"
        return f"{self.held} of {self.of} held back: {within}"


@dataclass(frozen=True)
class Fitted:
    """A device, and how well it foretells what was held back; None where there was too little to hold back."""

    device: Device
    ops: FitError | None
    links: FitError | None

    def __str__(self) -> str:
        said = [f"{name}: {e}" for name, e in (("ops", self.ops), ("collectives", self.links)) if e is not None]
        return "; ".join(said) or "too few shapes to hold any back"


def fit(base: Device, ops: Iterable[OpSample], links: Iterable[LinkSample] = ()) -> Fitted:
    """`base` with numbers that are those of the samples, where there are any. What the file calls a datasheet's peak
    stays: of a device whose `reaches` are below 1, it is these that change.
    """
    ops, links = [x for x in ops if x.seconds > 0], [x for x in links if x.seconds > 0]
    kept, held = _split(ops, lambda x: x.op, lambda x: x.op.name)
    error = _error(_with_ops(base, kept).op_seconds, held, len(ops), lambda x: x.op)
    kept_links, held_links = _split(links, lambda x: x, lambda x: x.kind)
    of_links = _with_links(base, kept_links)
    link_error = _error(lambda x: _seconds(of_links, x), held_links, len(links), lambda x: x)
    return Fitted(_with_links(_with_ops(base, ops), links), error, link_error)


# --- what is held back


def _split(samples: Sequence[T], key: Callable[[T], Hashable], group: Callable[[T], str]) -> tuple[list[T], list[T]]:
    """(to fit by, held back): of each group that has others, some; always the same ones."""
    by: defaultdict[str, list[T]] = defaultdict(list)
    for x in samples:
        by[group(x)].append(x)
    kept, held = [], []
    for some in by.values():
        some.sort(key=lambda x: zlib.crc32(repr(key(x)).encode()))
        out = len(some) // HELD
        held += some[:out]
        kept += some[out:]
    return kept, held


def _error(seconds: Callable[[Any], float], held: Sequence[Any], of: int, key: Callable[[Any], Any]) -> FitError | None:
    if not held:
        return None
    predicted, measured = [seconds(key(x)) for x in held], [x.seconds for x in held]
    off = sorted(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True))
    half, most = (off[min(int(share * len(off)), len(off) - 1)] for share in (0.5, 0.9))
    return FitError(len(held), of, half, most, sum(predicted) / sum(measured) - 1)


# --- ops


def _with_ops(base: Device, samples: Sequence[OpSample]) -> Device:
    if not samples:
        return base
    usual = [x for x in samples if own_rates(x.op) == x.op.name] or samples
    plain = [x for x in usual if not x.op.flops]
    d = base.model_copy(update={"ops": {}})
    d = _bandwidth(_launch(d, usual), plain)
    d = _attention(_flops(d, [x for x in samples if x.op.flops and not x.op.attention]), samples)
    by: defaultdict[str, list[OpSample]] = defaultdict(list)
    for x in samples:
        by[own_rates(x.op)].append(x)
    found = {name: rates for name, rates in base.ops.items() if name not in by}
    for name, some in sorted(by.items()):  # "mul" before "mul bfloat16"
        known = d.model_copy(update={"ops": found})
        if (own := _own(d, known, some, base.ops.get(name, OpRates()))) is not None:
            found = {**found, name: own}
    return d.model_copy(update={"ops": found})


def _launch(d: Device, samples: Sequence[OpSample]) -> Device:
    """Of small ops, the smallest tenth of all or a few: half take longer, half take less."""
    small = [x for x in samples if _small(x.op)]
    small = sorted(small, key=lambda x: x.op.traffic + x.op.flops)[: max(len(samples) // 10, 5)]
    work = [max(d.product_seconds(x.op), d.traffic_seconds(x.op)) for x in small]
    quick = [x.seconds for x, w in zip(small, work, strict=True) if w < 0.5 * x.seconds]
    return d.model_copy(update={"launch": float(np.median(quick))}) if quick else d


def _bandwidth(d: Device, plain: Sequence[OpSample]) -> Device:
    """Of large ops, which take several times as long as to be launched: what half of them reach, by name, so that one
    that computes much for each number does not decide.
    """
    rates: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for x in plain:
        if not _small(x.op) and x.seconds > 3 * d.launch:
            rates[x.op.name].append((x.op.traffic / _work(d, x), x.seconds))
    if not rates:
        return d
    rate = float(np.median([*map(_weighted_median, rates.values())]))
    if d.reaches.bandwidth < 1:
        share = min(rate / d.bandwidth, 1.0)
        return d.model_copy(update={"reaches": d.reaches.model_copy(update={"bandwidth": share})})
    return d.model_copy(update={"bandwidth": rate})


def _flops(d: Device, samples: Sequence[OpSample]) -> Device:
    """The tile and the ramp with which products of all shapes come to the same rate, and that rate, by dtype."""
    shaped = [x for x in samples if x.op.matrices]
    least = [max(d.launch_seconds(x.op), d.traffic_seconds(x.op)) for x in shaped]
    bound = [x for x, other in zip(shaped, least, strict=True) if not _small(x.op) and x.seconds > 2 * other]
    if not bound:
        return d
    tried: list[Products | None] = [d.products]
    if d.products is not None and len(d.products.tiles) > 1:
        tried += [d.products.model_copy(update={"ramp": float(ramp)}) for ramp in RAMPS]
    else:
        units = d.products.units if d.products is not None else 1
        tried += [Products(tiles=((*tile, 1.0),), units=units, ramp=float(r)) for tile in TILES for r in RAMPS]
    # of several products at once, each may take a time of its own
    alone = [x for x in shaped if x.op.matrices[:1] == (1,)] or shaped
    found = [_of_dtypes(d.model_copy(update={"products": p}), bound) for p in tried]
    return min(found, key=lambda d: sum(x.seconds**0.5 * abs(math.log(d.op_seconds(x.op) / x.seconds)) for x in alone))


def _of_dtypes(d: Device, samples: Sequence[OpSample]) -> Device:
    """With the rates by dtype that fit best."""
    by: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for x in samples:
        by[x.op.dtype].append((d.product_seconds(x.op) / _work(d, x), x.seconds))
    faster = {dtype: _weighted_median(some) for dtype, some in by.items()}
    if d.reaches.flops < 1:
        factor = float(np.median(list(faster.values())))
        share = min(d.reaches.flops * factor, 1.0)
        return d.model_copy(update={"reaches": d.reaches.model_copy(update={"flops": share})})
    flops = {**d.flops, **{format_of(dtype): d.flops_per_second(dtype) * f for dtype, f in faster.items()}}
    return d.model_copy(update={"flops": flops})


def _attention(d: Device, samples: Sequence[OpSample]) -> Device:
    """What kernels of attention reach of the flops."""
    rates = [
        ((x.op.flops - x.op.masked) / (d.flops_per_second(x.op.dtype) * _work(d, x)), x.seconds)
        for x in samples
        if x.op.attention and not _small(x.op) and x.seconds > 2 * d.launch
    ]
    if not rates:
        return d
    share = min(_weighted_median(rates), 1.0)
    return d.model_copy(update={"reaches": d.reaches.model_copy(update={"attention": share})})


def _own(d: Device, known: Device, some: Sequence[OpSample], before: OpRates) -> OpRates | None:
    """Of one op: seconds to start it, and what its work takes times over; None where the numbers do that are `known`.
    Where all are small, only the first can be found, and the others stay as they were `before`. d: no op's own numbers.
    """
    if np.median([abs(known.op_seconds(x.op) / x.seconds - 1) for x in some]) < OWN:
        return None
    if all(_small(x.op) for x in some):
        return before.model_copy(update={"launch": float(np.median([_starting(d, x) for x in some]))})
    parts = {"launch": [d.launch for _ in some], "bandwidth": [d.traffic_seconds(x.op) for x in some]}
    if any(x.op.flops for x in some):
        parts["flops"] = [d.product_seconds(x.op) for x in some]
    if d.kind == "cpu" and any(x.op.matrices and x.op.matrices[0] > 1 for x in some):
        parts["each"] = [EACH * (x.op.matrices or (1,))[0] for x in some]
    took, seconds = np.array([x.seconds for x in some]), np.array(list(parts.values()))

    def off(*times: float) -> float:
        each = np.array(times)[:, None] * seconds
        drawn = DRAWN * sum(abs(math.log(x)) for x in times)
        return float(np.abs(np.log((each.sum(0) if d.kind == "cpu" else each.max(0)) / took)).mean()) + drawn

    times = dict(zip(parts, _descended(off, len(parts)), strict=True))
    return OpRates(
        launch=times["launch"] * d.launch,
        bandwidth=d.bandwidth * d.reaches.bandwidth / times["bandwidth"],
        flops=1 / times["flops"] if "flops" in times else None,
        each=times["each"] * EACH if "each" in times else None,
    )


def _small(op: Op) -> bool:
    return op.traffic <= SMALL and op.flops <= SMALL_PRODUCT


def _starting(d: Device, x: OpSample) -> float:
    """Of its seconds, those of starting it."""
    work = max(d.product_seconds(x.op), d.traffic_seconds(x.op))
    return max(x.seconds - work, 0.1 * x.seconds) if d.kind == "cpu" else x.seconds


def _work(d: Device, x: OpSample) -> float:
    """Of its seconds, those of its products, or of its bytes where it has none."""
    if d.kind == "gpu":
        return x.seconds
    return max(x.seconds - d.launch - (d.traffic_seconds(x.op) if x.op.flops else 0.0), 0.1 * x.seconds)


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight)."""
    ordered = sorted(values)
    half, so_far = sum(w for _, w in ordered) / 2, 0.0
    for value, weight in ordered:
        so_far += weight
        if so_far >= half:
            return value
    return ordered[-1][0]


# --- links


def _seconds(d: Device, x: LinkSample) -> float:
    return collective_seconds(d, x.kind, x.bytes, x.ranks)


def _with_links(base: Device, samples: Sequence[LinkSample]) -> Device:
    """Links inside of a node, then those between nodes, ..."""
    d = base
    same = base.within == base.between
    for level, name in enumerate(("within", "between", "beyond")):
        mine = [x for x in samples if len(x.ranks) > 1 and reach(base, x.ranks) == level]
        if not mine:
            continue
        link = getattr(d, name)
        if not link.latency:
            link = link.model_copy(update={"latency": 1e-6})
        d = _with_link(d, name, link, mine)
        if name == "within" and same:  # nobody has measured any other
            d = d.model_copy(update={"between": d.within})
    return d


def _with_link(d: Device, name: str, link: Link, samples: Sequence[LinkSample]) -> Device:
    """The delay and the rate, each times a factor, that leave the least error; then what large ones of each kind reach
    of the rate of the fastest. Small messages alone say what the delay is, and leave the rest as it was.
    """
    unseen = {kind: share for kind, share in link.kinds.items() if kind not in {x.kind for x in samples}}

    def with_factors(delay: float, rate: float, kinds: Mapping[str, float]) -> Device:
        update: dict[str, Any] = {"latency": link.latency * delay, "start": link.start * delay, "kinds": kinds}
        if link.reaches is not None or d.reaches.link < 1:
            update["reaches"] = min((link.reaches or d.reaches.link) * rate, 1.0)
        else:
            update["bandwidth"] = link.bandwidth * rate
        return d.model_copy(update={name: link.model_copy(update=update)})

    def off(delay: float, rate: float, kinds: Mapping[str, float]) -> float:
        other = with_factors(delay, rate, kinds)
        return float(np.mean([abs(math.log(_seconds(other, x) / x.seconds)) for x in samples]))

    if all(x.bytes < MESSAGE for x in samples):
        (delay,) = _descended(lambda delay: off(delay, 1.0, link.kinds), 1)
        return with_factors(delay, 1.0, link.kinds)
    delay, rate = _descended(partial(off, kinds=unseen))
    found = with_factors(delay, rate, unseen)
    by: defaultdict[str, list[float]] = defaultdict(list)
    for x in samples:
        took = _seconds(found, x)
        if took > LARGE * _seconds(found, replace(x, bytes=0)):
            by[x.kind].append(took / x.seconds)
    reached = {kind: float(np.median(each)) for kind, each in by.items()}
    most = max(reached.values(), default=1.0)
    kinds = {kind: share / most for kind, share in sorted(reached.items()) if share < (1 - OWN) * most}
    if not kinds:
        return found
    kinds |= unseen
    delay, rate = _descended(partial(off, kinds=kinds))
    return with_factors(delay, rate, kinds)


def _descended(off: Callable[..., float], count: int = 2) -> tuple[float, ...]:
    """So many factors with the least error, from 1 on: times 4 or a fourth of it, any of them; where none of that
    helps, by smaller steps.
    """
    at, step = (1.0,) * count, 4.0
    least = off(*at)
    while step > 1.005:
        ways = itertools.product((1 / step, 1.0, step), repeat=count)
        near = [tuple(a * x for a, x in zip(at, way, strict=True)) for way in ways]
        found = min((off(*x), x) for x in near)
        if found[0] < least * (1 - 1e-9):
            least, at = found
        else:
            step = step**0.5
    return at


def merged(samples: Iterable[OpSample], of_several: Callable[[Sequence[float]], float] = min) -> list[OpSample]:
    """One sample for each op. of_several: which of its seconds count: the least, as other load adds to it."""
    found: dict[Op, list[OpSample]] = {}
    for x in samples:
        op = x.op._replace(of="", again=False)
        found.setdefault(op, []).append(replace(x, op=op))
    return [replace(some[0], seconds=of_several([x.seconds for x in some])) for some in found.values()]
