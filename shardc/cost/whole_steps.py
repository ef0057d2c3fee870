"""Whole steps of small models on several processes: what a step takes beside its ops and collectives one by one.

An op that is timed by itself takes a little longer, or less, than among others; between ops Python and autograd work;
ranks that wait for each other come late. Six numbers say all that, found so that steps of the engine itself, which
nothing slowed down by looking, take as long as `cost` says:

    rates       of all ops, together: some steps are of one rank alone, and send nothing
    host        seconds beside each op: models have several sizes, batches have one part or several
    host_collective
                seconds beside each collective: weights are gathered by many and by few
    links       all of a message's seconds: in a step nobody waits at the other end
    skew        ranks meet at every layer, or seldom
    reaches.computing
                gradients are summed, and weights gathered, beside the ops
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional

from shardc.cost.dry_run import dry_run
from shardc.cost.known_ops import KnownOps
from shardc.cost.machine_speed import timer, usual
from shardc.cost.recorded import DryRun, parts
from shardc.ir.program import Program
from shardc.machine.clock import Clock
from shardc.machine.device import Device, Reference
from shardc.runtime import schedule as schedules
from shardc.runtime.mesh.loopback import loopback
from shardc.runtime.step.engine import Engine
from shardc.runtime.step.engine_optimizer import assumed

#: (hidden size, layers) of the models; rows and tokens of the batch.
SIZES, ROWS, TOKENS = ((64, 3), (192, 2), (384, 2)), 8, 32
#: Steps that are timed in each of so many turns; and steps before the first one.
STEPS, TURNS, WARM = 3, 5, 2
HEADS, CLASSES, MICROBATCHES = 4, 500, 4
#: Seconds of the host for a collective, where the search begins.
COLLECTIVE = 5e-5
#: How much the numbers are drawn to those measured apart; the most rounds of finding them, and the gain of one that
#: another one follows; the difference that shows a slope, across the kinks where something else is waited for.
DRAWN, ROUNDS, GAIN, SMALL = 0.001, 15, 0.002, 0.05
#: A step is far off by more than this, as a logarithm of a ratio.
LARGE = 0.1
#: Of its rate, a rank computes so much beside a collective: where it seems to be less, other work had the cores.
LEAST = 0.05


#: `shardc.compile`.
Compile = Callable[..., Program]
#: Seconds of a program's step on a device.
Price = Callable[[Device], float]


@dataclass(frozen=True)
class Turn:
    """A few steps of a program: the median of their seconds, on the rank that took longest, and how fast the machine
    was meanwhile, which is not the same within a minute.
    """

    seconds: float
    reference: Reference

    @staticmethod
    def together(ranks: Iterable[Turn]) -> Turn:
        """One turn, as several ranks measured it."""
        each = list(ranks)
        return Turn(max(x.seconds for x in each), usual(x.reference for x in each))


def usual_turn(turns: Iterable[Turn], price: Price, device: Device) -> Turn:
    """The one that took longer than half of the others, each compared with what a step takes on a machine as fast as it
    was then. (The quickest turn is not it: it may have been quick beside a reference that was slow.)
    """
    each = sorted(turns, key=lambda x: x.seconds / price(device.as_fast(x.reference)))
    return each[len(each) // 2]


class _Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.after, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, tokens, hidden = x.shape
        q, k, v = (t.view(rows, tokens, self.heads, -1).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        a = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(rows, tokens, hidden))
        found: Tensor = x + self.down(functional.gelu(self.up(self.after(x))))
        return found


class _Decoder(nn.Module):
    def __init__(self, hidden: int, layers: int, heads: int, classes: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(classes, hidden), nn.Linear(hidden, classes, bias=False)
        self.layers = nn.ModuleList(_Layer(hidden, heads) for _ in range(layers))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def cases(compiled: Compile, ranks: int, sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[Program, nn.Module, Any]]:
    """(a program, its model, its batch). compiled: shardc.compile, which stands above this."""
    specs = (
        {"mesh": {"dp": 1}},
        {"mesh": {"dp": 1}, "batch": {"microbatches": MICROBATCHES}},
        {"mesh": {"dp": ranks}, "data": {"zero": 0, "bucket_mb": 25.0}},
        {"mesh": {"dp": ranks}, "data": {"zero": 0, "bucket_mb": 0.03}},
        {"mesh": {"dp": ranks}, "data": {"zero": 2, "bucket_mb": 0.03}},
        {"mesh": {"dp": ranks}, "data": {"zero": 3, "bucket_mb": 2.0}},
        {"mesh": {"dp": ranks}, "data": {"zero": 3, "bucket_mb": 0.03}},
        {"mesh": {"tp": ranks}, "shard": {"use": "structure"}},
    )
    heads, rows, classes = _up(HEADS, ranks), _up(ROWS, math.lcm(ranks, MICROBATCHES)), _up(CLASSES, ranks)
    for hidden, layers in sizes:
        for spec in specs:
            torch.manual_seed(0)
            model = _Decoder(_up(hidden, 2 * heads), layers, heads, classes)
            ids = torch.randint(0, classes, (rows, TOKENS))
            batch = {"ids": ids, "targets": ids.roll(-1, 1)}
            yield compiled(model, batch, {"shardc": 1, **spec}, prove=False), model, batch


def _up(n: int, ranks: int) -> int:
    """The next number that ranks can split equally."""
    return -(-n // ranks) * ranks


def run(compiled: Compile, ranks: int, sizes: Sequence[tuple[int, int]], steps: int) -> list[list[Turn]]:
    """The turns of each of `cases`, on one of the ranks, which all do this."""
    engines = [(_engine(program, model), batch) for program, model, batch in cases(compiled, ranks, sizes)]
    turns = in_turns([partial(engine.step, batch) for engine, batch in engines], steps)
    for engine, _ in engines:
        engine.close()
    return turns


def _engine(program: Program, model: nn.Module) -> Engine:
    """Of a program for one rank, every process has one of its own, which waits for nobody."""
    if program.mesh.world > 1:
        return Engine(program, model)
    (found,) = loopback(program.mesh, lambda mesh: Engine(program, model, mesh=mesh))
    return found


def in_turns(each: Sequence[Callable[[], object]], steps: int, turns: int = TURNS) -> list[list[Turn]]:
    """So many steps of each of several programs, which ranks begin together. They take turns: what slows the machine
    down for a few seconds meets a turn of each, not all of one. The reference is that of all programs' turns at once.
    """
    once = timer()
    found: list[list[Turn]] = [[] for _ in each]
    for turn in range(turns):
        warm, medians, beside = WARM if turn == 0 else 1, [], []
        for step in each:
            took = []
            for _ in range(warm + steps):
                beside.append(once())  # of one step it would say little
                dist.barrier()
                begin = time.perf_counter()
                step()
                took.append(time.perf_counter() - begin)
            slowest = torch.tensor(took[warm:], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            medians.append(float(slowest.median()))
        reference = usual(beside)
        for mine, seconds in zip(found, medians, strict=True):
            mine.append(Turn(seconds, reference))
    return found


def fitted(device: Device, found: Sequence[Sequence[Sequence[Turn]]], prices: Sequence[Price]) -> Device:
    """The device by whose numbers these steps take as long as they took. found: of each rank, the turns of each case;
    prices: of each case.
    """
    turns = [[Turn.together(turn) for turn in zip(*ranks, strict=True)] for ranks in zip(*found, strict=True)]
    reference = device.reference or usual(turn.reference for each in turns for turn in each)
    start = device.model_copy(update={"skew": device.skew or device.within.latency, "reference": reference})
    steps = [(price, usual_turn(each, price, start)) for each, price in zip(turns, prices, strict=True)]
    each = start.host or start.launch
    beside = min(start.reaches.computing, 0.7)  # at 1, nothing says what less would do

    def with_factors(at: np.ndarray) -> Device:
        slower, host, collective, links, skew, computing = map(float, np.exp(at))
        reaches = start.reaches.model_copy(update={"computing": min(max(computing * beside, LEAST), 1.0)})
        update = {"host": host * each, "host_collective": collective * COLLECTIVE, "skew": skew * start.skew}
        return start.slower(slower, slower, slower, links).model_copy(update=update | {"reaches": reaches})

    def off(at: np.ndarray) -> np.ndarray:
        device = with_factors(at)
        priced = [math.log(price(device.as_fast(turn.reference)) / turn.seconds) for price, turn in steps]
        return np.array([*map(_softened, priced), *(DRAWN * at)])

    return with_factors(_least_squares(off, np.zeros(6)))


def _softened(off: float) -> float:
    """Where it is large, its square grows as its logarithm (Cauchy's loss): a step that something slowed down decides
    nothing.
    """
    return math.copysign(LARGE * math.sqrt(math.log1p((off / LARGE) ** 2)), off)


def _least_squares(off: Callable[[np.ndarray], np.ndarray], at: np.ndarray) -> np.ndarray:
    """Where the sum of squares of what `off` returns is least, by steps of Levenberg and Marquardt from here on."""
    now, damping = off(at), 0.1
    for _ in range(ROUNDS):
        slopes = np.stack([(off(at + d) - now) / SMALL for d in SMALL * np.eye(len(at))], axis=1)
        square = slopes.T @ slopes
        while damping < 1e4:
            step = np.linalg.solve(square + damping * np.diag(np.diag(square)), -slopes.T @ now)
            then = off(at + step)
            if then @ then < now @ now:
                break
            damping *= 4
        else:
            return at
        gain = 1 - then @ then / (now @ now)
        at, now, damping = at + step, then, damping / 5
        if gain < GAIN:
            return at
    return at


def price(program: Program, device: Device) -> Price:
    """By one dry run on a device of this kind."""
    one = dry_run(program, 0, assumed(program), cpu=device.kind == "cpu", known=KnownOps())  # all ranks do the same
    return partial(_seconds, program, one)


def _seconds(program: Program, one: DryRun, device: Device) -> float:
    clock = Clock(device, program.mesh, one.rank)
    for _, part in parts(one, schedules.of(program).actions[one.at]):
        clock.run(part)
    return clock.now
